//! Memory of the host that devices may access.
//!
//! Why: drivers let a program make memory of its own known to the devices ("pinning" it), and streams then
//! read and write it, later. Without this, a simulator would have to copy it aside, and take its bytes too early.

use std::sync::Arc;

use super::state::Machine;
use crate::memory::{AddressSource, DeviceAccess, MappedObject, MappedPart, Mapping};
use crate::model::{Access, Address, EngineError, Lifetime, Operation};
use crate::shared::{Identity, Object, ObjectKind};
use crate::system::lock;

impl Machine {
    /// Makes `len` bytes of the host's memory known, at their own address; all devices may access them.
    ///
    /// # Errors
    /// `InvalidValue` for 0 bytes, or if any of them is known already; `System`.
    ///
    /// # Safety
    /// The bytes stay mapped and writable until they are unregistered and all work on them has ended. Nobody holds
    /// a Rust reference to them while work may access them.
    pub unsafe fn register_host(&self, address: Address, len: u64) -> Result<(), EngineError> {
        self.enter(Operation::RegisterHost)?;
        let end = address.get().checked_add(len).filter(|_| len > 0 && address.get() != 0);
        let end = end.ok_or_else(|| EngineError::invalid_value("no memory of the host"))?;
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
            return Err(EngineError::invalid_value("memory that is known already"));
        }
        let grants = Some(DeviceAccess::new(self.devices.len(), Some(Access::ReadWrite)));
        let slice = MappedPart { start: 0, size: len, grants };
        let content =
            MappedObject { file: &file, page, identity, device: 0, writable: true, imported: false };
        let mapping = Mapping::of_slice(AddressSource::Host(address.get()), 0, 0, slice, content)?;
        memory.ranges.insert(Arc::new(mapping));
        Ok(())
    }

    /// Ends that. Work that is queued for the bytes fails; work that is running is waited for, and all before it.
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
