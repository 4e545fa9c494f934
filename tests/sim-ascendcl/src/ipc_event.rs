//! Events shared between processes.

use device_ipc_mock_engine::HANDLE_BYTES;

use crate::abi::{Handle, IpcEventHandle, Pointer};
use crate::call::calls;
use crate::event::Event;
use crate::key::{from_number, to_number};
use crate::node::{FoundNode, Kind, Node, Record};
use crate::simulator::Simulator;
use crate::soc::Feature;
use crate::status::{Outcome, Status, refuse};

const _: () = assert!(HANDLE_BYTES == 64);

impl Simulator {
    fn number_of(&self, event: Handle) -> Outcome<u64> {
        let id = self.with_event(event, |found| {
            if !found.is_shared() {
                return refuse(Status::RT_PARAM_INVALID, "the event was created without ACL_EVENT_IPC");
            }
            Ok(found.id)
        })?;
        let device = self.current()?.device;
        let handle = self.machine.export_event(id)?;
        let physical = self.physical(device) as u32;
        self.with_event(event, |found| {
            let pid = std::process::id();
            if let Some(node) = &found.node {
                return Ok(to_number(pid, node.reference));
            }
            let (kind, listed_only) = (Kind::Event, false);
            let record = Record { kind, physical, size: 0, page: 0, for_peers: true, listed_only, handle };
            let node = publish(&record)?;
            let number = to_number(pid, node.reference);
            found.node = Some(node);
            Ok(number)
        })
    }

    fn open_event(&self, handle: IpcEventHandle) -> Outcome<Handle> {
        let current = self.current()?;
        let number = u64::from_le_bytes(std::array::from_fn(|index| handle.0[index]));
        let (pid, reference) = from_number(number);
        let Some(found) = FoundNode::look_up(pid, reference, Kind::Event) else {
            return refuse(
                Status::RT_DRV_INTERNAL_ERROR,
                "the handle is invalid, or the event was destroyed",
            );
        };
        if pid == std::process::id() {
            return refuse(Status::RT_DRV_INTERNAL_ERROR, "the creator of an event cannot open it");
        }
        self.enable_peer_both_ways(current.device, found.record.physical as usize)?;
        let id = self.machine.open_event(&found.record.handle, current.device)?;
        self.state().events.insert(id.get(), Event::opened(id));
        Ok(Handle::new(id.get()))
    }
}

/// Publishes an export.
///
/// # Errors
/// 507899 for an error of the operating system.
pub(crate) fn publish(record: &Record) -> Outcome<Node> {
    match Node::publish(record) {
        Ok(node) => Ok(node),
        Err(error) => refuse(Status::RT_DRV_INTERNAL_ERROR, error.to_string()),
    }
}

calls! {
    /// Returns the handle of an event. Only the first 8 of its 64 bytes are written.
    run fn aclrtIpcGetEventHandle(sim, event: Handle, handle: Pointer<IpcEventHandle>) {
        handle.check("handle")?;
        event.required("event")?;
        sim.require(Feature::IpcEvent)?;
        let number = sim.number_of(event)?;
        handle.cast::<u64>().put(number, "handle")
    }

    /// Opens an event of another process on the current device, and enables peer access between the two devices.
    run fn aclrtIpcOpenEventHandle(sim, handle: IpcEventHandle, event: Pointer<Handle>) {
        event.check("event")?;
        sim.require(Feature::IpcEvent)?;
        let opened = sim.open_event(handle)?;
        event.put(opened, "event")
    }
}
