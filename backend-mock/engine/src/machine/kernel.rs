//! Kernels that are not the engine's own.
//!
//! Why: a simulator runs programs that bring their kernels along. A kernel meets memory an address at a time,
//! when it runs: it sees whole pages, not blocks, and what it may not touch is an error of the stream.

use std::sync::{Arc, Weak};

use super::state::Machine;
use crate::memory::Mapping;
use crate::model::{Address, EngineError, Operation, StreamId};
use crate::system::lock;

/// All memory, as a kernel on one device may access it.
#[derive(Debug)]
pub struct KernelMemory {
    machine: Arc<Machine>,
    device: usize,
    /// Where the last access was: most kernels stay in one or two blocks.
    recent: [Option<Arc<Mapping>>; 2],
    turn: usize,
}

impl KernelMemory {
    /// Ordinal of the device that runs the kernel.
    pub fn device(&self) -> usize {
        self.device
    }

    /// Reads up to 8 bytes, of which the first is the lowest.
    ///
    /// # Errors
    /// `IllegalAddress`, `Misaligned`, `Revoked`.
    pub fn load(&mut self, address: Address, len: u64) -> Result<u64, EngineError> {
        let mapping = self.find(address, len)?;
        let mut bytes = [0; 8];
        mapping.load_bytes(address, &mut bytes[..len as usize], self.device)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Writes the lowest bytes of `value`, up to 8.
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
        let recent = self.recent.iter().flatten().find(|mapping| mapping.shows(address));
        if let Some(mapping) = recent {
            return Ok(mapping.clone());
        }
        let illegal = EngineError::IllegalAddress { address, device: self.device };
        let mapping =
            lock(&self.machine.memory).ranges.page_at(address).cloned().ok_or_else(|| illegal.clone())?;
        if !self.machine.mapping_in_reach(&mapping, self.device)? {
            return Err(illegal);
        }
        self.turn = 1 - self.turn;
        self.recent[self.turn] = Some(mapping.clone());
        Ok(mapping)
    }
}

impl Machine {
    /// Runs a kernel on a stream. What it may access is found out when it runs; an error that it
    /// returns fails the stream. It is dropped unrun if the stream fails before.
    ///
    /// # Errors
    /// `InvalidStream`.
    pub fn run_kernel(
        self: &Arc<Self>,
        kernel: impl FnOnce(&mut KernelMemory) -> Result<(), EngineError> + Send + 'static,
        stream: StreamId,
    ) -> Result<(), EngineError> {
        self.enter(Operation::Kernel)?;
        // Not an `Arc`: work that waits in a queue must not keep the machine that would cancel it.
        let machine: Weak<Self> = Arc::downgrade(self);
        self.stream(stream)?.enqueue(|| {
            Box::new(move |stream| {
                let machine = machine.upgrade().ok_or(EngineError::Cancelled)?;
                let mut memory =
                    KernelMemory { machine, device: stream.device, recent: [None, None], turn: 0 };
                kernel(&mut memory)
            })
        })
    }
}
