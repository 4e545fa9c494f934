//! Kernels of callers.
//!
//! A simulator runs programs with their own kernels. A kernel checks each address when it accesses it, by whole pages
//! instead of allocations, and an illegal access fails the stream.

use std::sync::{Arc, Weak};

use super::state::Machine;
use crate::memory::Mapping;
use crate::model::{Address, EngineError, Operation, StreamId};
use crate::system::lock;

/// The memory that a kernel on one device may access.
#[derive(Debug)]
pub struct KernelMemory {
    machine: Arc<Machine>,
    device: usize,
    /// The mappings of recent accesses. Most kernels access one or two.
    recent: [Option<Arc<Mapping>>; 2],
    next_slot: usize,
}

impl KernelMemory {
    /// Returns the ordinal of the device that runs the kernel.
    pub fn device(&self) -> usize {
        self.device
    }

    /// Loads `len` bytes (1, 2, 4 or 8) as a little-endian number.
    ///
    /// # Errors
    /// `IllegalAddress`, `Misaligned`, `Revoked`.
    pub fn load(&mut self, address: Address, len: u64) -> Result<u64, EngineError> {
        let mapping = self.find(address, len)?;
        let mut bytes = [0; 8];
        mapping.load_bytes(address, &mut bytes[..len as usize], self.device)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Stores the lowest `len` bytes (1, 2, 4 or 8) of `value` as a little-endian number.
    ///
    /// # Errors
    /// `IllegalAddress`, `Misaligned`, `ReadOnly`, `Revoked`.
    pub fn store(&mut self, address: Address, len: u64, value: u64) -> Result<(), EngineError> {
        let mapping = self.find(address, len)?;
        mapping.store_bytes(address, &value.to_le_bytes()[..len as usize], self.device)
    }

    fn find(&mut self, address: Address, len: u64) -> Result<Arc<Mapping>, EngineError> {
        assert!((1..=8).contains(&len) && len.is_power_of_two(), "the caller accesses 1, 2, 4 or 8 bytes");
        if !address.get().is_multiple_of(len) {
            return Err(EngineError::Misaligned { address, alignment: len });
        }
        let recent = self.recent.iter().flatten().find(|mapping| mapping.contains_page_of(address));
        if let Some(mapping) = recent {
            return Ok(mapping.clone());
        }
        let illegal = EngineError::IllegalAddress { address, device: self.device };
        let mapping =
            lock(&self.machine.memory).ranges.page_at(address).cloned().ok_or_else(|| illegal.clone())?;
        if !self.machine.may_access(&mapping, self.device)? {
            return Err(illegal);
        }
        self.next_slot = 1 - self.next_slot;
        self.recent[self.next_slot] = Some(mapping.clone());
        Ok(mapping)
    }
}

impl Machine {
    /// Submits a kernel to a stream. Its accesses are checked when it runs, and an error that it returns fails the
    /// stream. It is dropped without being called if the stream fails before.
    ///
    /// # Errors
    /// `InvalidStream`.
    pub fn run_kernel(
        self: &Arc<Self>,
        kernel: impl FnOnce(&mut KernelMemory) -> Result<(), EngineError> + Send + 'static,
        stream: StreamId,
    ) -> Result<(), EngineError> {
        self.enter(Operation::Kernel)?;
        // Not an `Arc`: queued work must not keep the machine alive, whose drop cancels it.
        let machine: Weak<Self> = Arc::downgrade(self);
        self.stream(stream)?.enqueue(|| {
            Box::new(move |stream| {
                let machine = machine.upgrade().ok_or(EngineError::Cancelled)?;
                let mut memory =
                    KernelMemory { machine, device: stream.device, recent: [None, None], next_slot: 0 };
                kernel(&mut memory)
            })
        })
    }
}
