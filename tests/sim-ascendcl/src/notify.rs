//! Notifies: a stream waits for a notify, and another stream, also of another process, sets it.
//!
//! A notify is a word in device memory: 1 after a record, 0 after a wait.

use std::time::Duration;

use device_ipc_mock_engine::{Access, Address};

use crate::abi::{Handle, Pointer, ServerPid, Text};
use crate::call::calls;
use crate::ipc_event::publish;
use crate::ipc_memory::{check_count, list, listable, put_key};
use crate::key::{KEY_BYTES, Key};
use crate::node::{Kind, Node, Record};
use crate::simulator::Simulator;
use crate::soc::Feature;
use crate::status::{Outcome, Status, refuse};

/// `ACL_RT_NOTIFY_EXPORT_FLAG_DISABLE_PID_VALIDATION`: 2; for memory it is 1.
const DISABLE_PID_VALIDATION: u64 = 2;

/// `ACL_RT_NOTIFY_IMPORT_FLAG_ENABLE_PEER_ACCESS`: 2; for memory it is 1.
const ENABLE_PEER_ACCESS: u64 = 2;

/// The flags of an import: this one and "for use by the device".
const IMPORT_FLAGS: u64 = 3;

const WORD_BYTES: u64 = 8;

/// A notify, created or opened.
#[derive(Debug)]
pub(crate) struct Notify {
    word: Address,
    device: usize,
    /// Physical id of the home device of the word.
    home: usize,
    is_own: bool,
    export: Option<(Node, bool)>,
}

impl Simulator {
    fn with_notify<T>(&self, notify: Handle, look: impl FnOnce(&mut Notify) -> Outcome<T>) -> Outcome<T> {
        let handle = notify.required("notify")?;
        match self.state().notifies.get_mut(&handle) {
            Some(found) => look(found),
            None => refuse(Status::RT_INVALID_HANDLE, "notify not found"),
        }
    }

    fn create_notify(&self) -> Outcome<u64> {
        let device = self.current()?.device;
        self.require(Feature::Notify)?;
        let own = |notify: &&Notify| notify.is_own && notify.device == device;
        if self.state().notifies.values().filter(own).count() >= self.config.soc.notifies() {
            return refuse(Status::RT_NO_NOTIFY_RESOURCE, "the device has no free notify");
        }
        let word = self.machine.allocate(device, WORD_BYTES)?;
        let home = self.physical(device);
        let mut state = self.state();
        let handle = state.new_handle();
        state.notifies.insert(handle, Notify { word, device, home, is_own: true, export: None });
        Ok(handle)
    }

    fn export_notify(&self, notify: Handle, len: usize, flags: u64) -> Outcome<Vec<u8>> {
        self.require(Feature::IpcNotify)?;
        if flags != 0 && flags != DISABLE_PID_VALIDATION {
            return refuse(Status::RT_PARAM_INVALID, "flags are 0 or 2");
        }
        self.current()?;
        if len < KEY_BYTES {
            return refuse(Status::RT_PARAM_INVALID, format!("a key needs a buffer of {KEY_BYTES} bytes"));
        }
        let binary = self.config.soc.keys_are_binary();
        let machine = &self.machine;
        self.with_notify(notify, |found| {
            if !found.is_own || found.export.is_some() {
                return refuse(Status::RT_DRV_INTERNAL_ERROR, "a notify is exported once, by its creator");
            }
            let listed_only = flags == 0;
            let record = Record {
                kind: Kind::Notify,
                physical: found.home as u32,
                size: WORD_BYTES,
                page: 0,
                for_peers: true,
                listed_only,
                handle: machine.export_bytes(found.word)?,
            };
            let node = publish(&record)?;
            let key = Key { pid: std::process::id(), reference: node.reference, device: found.home as u8 };
            found.export = Some((node, listed_only));
            Ok(key.encode(binary))
        })
    }

    fn list_for_notify(&self, notify: Handle, pids: &[i32]) -> Outcome {
        self.require(Feature::IpcNotify)?;
        self.with_notify(notify, |found| match &mut found.export {
            None => refuse(Status::RT_DRV_INTERNAL_ERROR, "this process has not exported the notify"),
            Some((_, false)) => {
                refuse(Status::RT_NO_PERMISSION, "the notify was exported without a list of processes")
            }
            Some((node, true)) => list(node, &listable(pids)?),
        })
    }

    fn import_notify(&self, key: &[u8], flags: u64) -> Outcome<u64> {
        if flags > IMPORT_FLAGS {
            return refuse(Status::RT_PARAM_INVALID, "flags are 0 to 3");
        }
        let device = self.current()?.device;
        self.require(Feature::IpcNotify)?;
        let (name, found) = self.look_up(key, Kind::Notify)?;
        let home = found.record.physical as usize;
        if name.pid == std::process::id() {
            return refuse(Status::RT_DRV_INTERNAL_ERROR, "the creator of a notify cannot open it");
        }
        if !found.permits_this_process() {
            let text = "this process is not on the list, or started after its pid was listed";
            return refuse(Status::RT_DRV_INTERNAL_ERROR, text);
        }
        if flags & ENABLE_PEER_ACCESS != 0 {
            self.enable_for_import(device, home)?;
        }
        if !self.has_access(device, home) {
            let text =
                "the two devices have no peer access: call aclrtDeviceEnablePeerAccess, or pass flag 2";
            return refuse(Status::RT_DRV_INTERNAL_ERROR, text);
        }
        let word = self.machine.open(&found.record.handle, None, device, Access::ReadWrite)?;
        let mut state = self.state();
        let handle = state.new_handle();
        state.notifies.insert(handle, Notify { word, device, home, is_own: false, export: None });
        Ok(handle)
    }
}

calls! {
    /// Creates a notify on the current device.
    run fn aclrtCreateNotify(sim, notify: Pointer<Handle>, flags: u64) {
        notify.check("notify")?;
        if flags > 1 {
            return refuse(Status::RT_PARAM_INVALID, "flags are 0 or 1");
        }
        let handle = sim.create_notify()?;
        notify.put(Handle::new(handle), "notify")
    }

    /// Destroys a notify, or closes an opened one.
    run fn aclrtDestroyNotify(sim, notify: Handle) {
        let handle = notify.required("notify")?;
        let Some(found) = sim.state().notifies.remove(&handle) else {
            return refuse(Status::RT_INVALID_HANDLE, "notify not found");
        };
        let ended = if found.is_own {
            sim.machine.free_without_waiting(found.word)
        } else {
            sim.machine.close_without_waiting(found.word)
        };
        Ok(ended?)
    }

    /// Sets a notify on a stream.
    run fn aclrtRecordNotify(sim, notify: Handle, stream: Handle) {
        let (word, home) = sim.with_notify(notify, |found| Ok((found.word, found.home)))?;
        let target = sim.target(stream)?;
        if !sim.has_access(target.device, home) {
            return refuse(Status::RT_DRV_INTERNAL_ERROR, "the stream's device has no access to the notify's device");
        }
        Ok(sim.machine.write_value64(target.stream, word, 1)?)
    }

    /// Makes a stream wait until a notify of this process is set, and resets it; after the limit in seconds it
    /// fails, 0 for no limit.
    run fn aclrtWaitAndResetNotify(sim, notify: Handle, stream: Handle, seconds: u32) {
        let (word, home, is_own) = sim.with_notify(notify, |found| Ok((found.word, found.home, found.is_own)))?;
        let target = sim.target(stream)?;
        if !is_own {
            return refuse(Status::RT_PARAM_INVALID, "only the creator of a notify can wait for it");
        }
        if sim.physical(target.device) != home {
            return refuse(Status::RT_PARAM_INVALID, "only streams of the notify's device can wait for it");
        }
        let limit = (seconds > 0).then(|| Duration::from_secs(u64::from(seconds)));
        Ok(sim.machine.wait_word(target.stream, word, |word| word != 0, Some(0), limit)?)
    }

    /// Resets notifies of this process at once.
    run fn aclrtNotifyBatchReset(sim, notifies: Pointer<Handle>, count: usize) {
        sim.current()?;
        for notify in notifies.list(count, "notifies")? {
            let (word, device) = sim.with_notify(notify, |found| Ok((found.word, found.device)))?;
            let stream = sim.machine.create_stream(device)?;
            sim.machine.write_value64(stream, word, 0)?;
            let written = sim.machine.synchronize(stream);
            sim.machine.destroy_stream(stream)?;
            written?;
        }
        Ok(())
    }

    /// Returns the number of a notify.
    run fn aclrtGetNotifyId(sim, notify: Handle, id: Pointer<u32>) {
        sim.with_notify(notify, |_| Ok(()))?;
        id.put((notify.value() & 0xffff_ffff) as u32, "notifyId")
    }

    /// Creates a key of a notify.
    run fn aclrtNotifyGetExportKey(sim, notify: Handle, key: Pointer<u8>, len: usize, flags: u64) {
        notify.required("notify")?;
        key.check("key")?;
        let made = sim.export_notify(notify, len, flags)?;
        put_key(key, &made)
    }

    /// Opens a key on the current device.
    run fn aclrtNotifyImportByKey(sim, notify: Pointer<Handle>, key: Text, flags: u64) {
        notify.check("notify")?;
        let key = key.key()?;
        let handle = sim.import_notify(&key, flags)?;
        notify.put(Handle::new(handle), "notify")
    }

    /// Permits processes to open the key of a notify.
    run fn aclrtNotifySetImportPid(sim, notify: Handle, pids: Pointer<i32>, count: usize) {
        notify.required("notify")?;
        pids.check("pid")?;
        check_count(count)?;
        let pids = pids.list(count, "pid")?;
        sim.list_for_notify(notify, &pids)
    }

    /// Permits processes of other servers of a super pod to open the key of a notify. There is one server.
    run fn aclrtNotifySetImportPidInterServer(sim, notify: Handle, servers: Pointer<ServerPid>, count: usize) {
        notify.required("notify")?;
        servers.check("serverPids")?;
        sim.require(Feature::MemoryLink)?;
        for server in servers.list(count, "serverPids")? {
            check_count(server.count)?;
            sim.list_for_notify(notify, &server.pids.list(server.count, "pid")?)?;
        }
        Ok(())
    }
}
