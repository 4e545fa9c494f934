//! Handles of the bare backend, for cases about one call of it.

use std::os::fd::AsRawFd;

use device_ipc_core::ProcessIdentity;
use device_ipc_core::backend::{DeviceIpc, Exported, HandleKind};

use crate::agent::{Agent, Answer, BareHandle, Command};
use crate::outcome::{Outcome, Stop, fail};
use crate::unchecked::Bare;

/// A handle of bare memory. Dropping it takes the handle back, before the memory is freed.
#[derive(Debug)]
pub struct BareExport<'a> {
    backend: &'a dyn DeviceIpc,
    exported: Option<Exported>,
}

impl<'a> BareExport<'a> {
    /// Makes a handle of the first allocation of the memory.
    pub fn of(backend: &'a dyn DeviceIpc, memory: &Bare<'_>, kind: Option<HandleKind>) -> Result<Self, Stop> {
        let extents = backend.extents_of(memory.range, None)?;
        let Some(extent) = extents.first() else { return fail("an allocation has no extents") };
        Ok(Self::new(backend, backend.export(extent, kind)?))
    }

    /// Guards a handle that the backend made.
    pub const fn new(backend: &'a dyn DeviceIpc, exported: Exported) -> Self {
        Self { backend, exported: Some(exported) }
    }

    /// The handle.
    ///
    /// # Panics
    ///
    /// Never: `end` takes it.
    pub fn handle(&self) -> &Exported {
        self.exported.as_ref().expect("it is taken back once, by the end")
    }

    /// The size of the allocation in bytes.
    pub fn size(&self) -> u64 {
        self.handle().extent.allocation.len
    }

    /// Permits an agent to open the handle, and describes the handle for it. The agent has to have inherited the
    /// descriptors ([`Context::agent_inheriting`](crate::Context::agent_inheriting)).
    ///
    /// # Errors
    ///
    /// [`Stop::Failed`] with the backend's error, or where the agent does not answer.
    pub fn for_agent(&self, agent: &mut Agent) -> Result<BareHandle, Stop> {
        let handle = self.handle();
        match agent.must(&Command::PeerId { device: handle.extent.allocation.device.get() })? {
            Answer::Bytes(peer) => self.backend.authorize(handle, &peer)?,
            other => return fail(format!("the agent answered {other:?}")),
        }
        Ok(BareHandle {
            kind: handle.kind.0,
            bytes: handle.bytes.as_slice().to_vec(),
            descriptors: handle.fds.iter().map(AsRawFd::as_raw_fd).collect(),
            size: self.size(),
            generation: handle.extent.generation.map(|generation| generation.0),
            exporter: ProcessIdentity::current()?,
        })
    }

    /// Takes the handle back.
    pub fn withdraw(mut self) -> Outcome {
        let Some(exported) = self.exported.take() else { return Ok(()) };
        Ok(self.backend.unexport(exported)?)
    }
}

impl Drop for BareExport<'_> {
    fn drop(&mut self) {
        let Some(exported) = self.exported.take() else { return };
        if let Err(error) = self.backend.unexport(exported) {
            eprintln!("a handle of a case could not be taken back: {error}");
        }
    }
}
