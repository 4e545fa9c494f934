//! Memory that is registered with an agent.

use std::ptr::{null, null_mut};
use std::sync::Arc;

use device_ipc_core::Result;
use device_ipc_core::backend::VendorError;

use super::{Agent, List, NixlMemory, type_of};
use crate::bindings::RegistrationList;
use crate::exit::Call;
use crate::library::NixlLibrary;
use crate::metadata::RegionMetadata;

/// Memories of one type that are registered with an agent until this is dropped.
#[derive(Debug)]
pub(crate) struct Registration {
    agent: Arc<Agent>,
    memories: Vec<NixlMemory>,
}

impl Registration {
    /// Registers memories of one type.
    ///
    /// # Safety
    ///
    /// The memories stay allocated until the result is dropped.
    pub(crate) unsafe fn new(agent: &Arc<Agent>, memories: Vec<NixlMemory>) -> Result<Self> {
        agent.check_process()?;
        let _call = Call::begin();
        let list = list_of(agent, &memories)?;
        // SAFETY: agent and list exist; the memory as the caller promised.
        let status = unsafe { (agent.library.api.register_mem)(agent.raw.as_ptr(), list.raw, null_mut()) };
        NixlLibrary::check("register_mem", status)?;
        Ok(Self { agent: Arc::clone(agent), memories })
    }

    /// Returns the metadata by which another process can pull from this memory, which is one range.
    pub(crate) fn metadata(&self) -> Result<RegionMetadata> {
        let _call = Call::begin();
        let NixlMemory { memory_type, device, address, len } = self.memories[0];
        let mut metadata = RegionMetadata::new(memory_type, device, address, len);
        metadata.connection = self.agent.connection.clone();
        metadata.region = self.agent.metadata_of(&list_of(&self.agent, &self.memories)?)?;
        Ok(metadata)
    }
}

fn list_of<'a>(agent: &'a Agent, memories: &[NixlMemory]) -> Result<List<'a, RegistrationList>, VendorError> {
    let list = agent.registration_list(type_of(memories))?;
    for NixlMemory { device, address, len, .. } in memories {
        let (address, len) = (*address as usize, *len as usize);
        // SAFETY: the list exists; the address is not accessed.
        let status =
            unsafe { (agent.library.api.reg_dlist_add_desc)(list.raw, address, len, *device, null(), 0) };
        NixlLibrary::check("reg_dlist_add_desc", status)?;
    }
    Ok(list)
}

impl Drop for Registration {
    fn drop(&mut self) {
        if self.agent.check_process().is_err() {
            return;
        }
        let _call = Call::begin();
        let deregistered = list_of(&self.agent, &self.memories).and_then(|list| {
            let agent = self.agent.raw.as_ptr();
            // SAFETY: agent and list exist, and the memory is registered.
            let status = unsafe { (self.agent.library.api.deregister_mem)(agent, list.raw, null_mut()) };
            NixlLibrary::check("deregister_mem", status)
        });
        if let Err(error) = deregistered {
            tracing::warn!(target: crate::LOG, %error, "memory was not deregistered");
        }
    }
}
