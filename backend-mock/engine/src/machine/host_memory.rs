//! Registered ("pinned") host memory, which streams read and write when they reach the work.

use std::sync::Arc;

use super::state::Machine;
use crate::memory::{AddressSource, DeviceAccess, MappedObject, MappedPart, Mapping};
use crate::model::{Access, Address, EngineError, Lifetime, Operation};
use crate::shared::{Identity, Object, ObjectKind};
use crate::system::lock;

impl Machine {
    /// Registers `len` bytes of host memory at their own address. All devices may access them.
    ///
    /// # Errors
    /// `InvalidValue` for 0 bytes, and for bytes that are registered already; `System`.
    ///
    /// # Safety
    /// The bytes stay mapped and writable until they are unregistered and all work on them is complete. No Rust
    /// reference to them exists while work may access them.
    pub unsafe fn register_host(&self, address: Address, len: u64) -> Result<(), EngineError> {
        self.enter(Operation::RegisterHost)?;
        let end = address.get().checked_add(len).filter(|_| len > 0 && address.get() != 0);
        let end =
            end.ok_or_else(|| EngineError::invalid_value("a range of host memory that is empty or invalid"))?;
        let identity = Identity {
            kind: ObjectKind::Block,
            owner: self.process,
            id: self.next_generation(),
            size: 0,
            physical: 0,
            lifetime: Lifetime::Pinning,
        };
        let Object { file, page, .. } = Object::create(identity, 0, "")?;
        let mut memory = lock(&self.memory);
        if memory.ranges.overlaps(address.get(), end) {
            return Err(EngineError::invalid_value("memory that is registered already"));
        }
        let grants = Some(DeviceAccess::new(self.devices.len(), Some(Access::ReadWrite)));
        let slice = MappedPart { start: 0, size: len, grants };
        let content =
            MappedObject { file: &file, page, identity, device: 0, writable: true, imported: false };
        let mapping = Mapping::of_slice(AddressSource::Host(address.get()), 0, 0, slice, content)?;
        memory.ranges.insert(Arc::new(mapping));
        Ok(())
    }

    /// Unregisters host memory. Queued work that uses the bytes fails; the call waits for all submitted work.
    ///
    /// # Errors
    /// `UnknownAddress`, `NotBase`; `NotPermitted` from a host function.
    pub fn unregister_host(&self, address: Address) -> Result<(), EngineError> {
        self.enter_waiting(Operation::UnregisterHost)?;
        {
            let mut memory = lock(&self.memory);
            if !memory.ranges.at_base(address)?.is_host() {
                return Err(EngineError::UnknownAddress { address });
            }
            if let Some(mapping) = memory.ranges.remove(address.get()) {
                mapping.mark_closed();
            }
        }
        for device in 0..self.devices.len() {
            self.wait_for_device(device);
        }
        Ok(())
    }
}
