//! Memory shared by key.
//!
//! The order of the checks and the statuses are those of hicann/runtime (`memory.cpp`, `api_error.cc`,
//! `api_impl_standard_soc.cc`) and hicann/driver (`devmm_svm.c`, `svm_shmem_interprocess.c`, `svm_shmem_node.c`):
//! EINVAL and EACCES of the kernel are 507899, EPERM is 207006.

use std::collections::HashSet;

use device_ipc_mock_engine::{Access, Address};

use crate::abi::{Handle, Pointer, ServerPid, Text};
use crate::block::{Block, Origin};
use crate::call::calls;
use crate::ipc_event::publish;
use crate::key::{KEY_BYTES, Key};
use crate::node::{FoundNode, Kind, Node, Record};
use crate::simulator::Simulator;
use crate::soc::Feature;
use crate::status::{Outcome, Status, refuse};

/// `ACL_RT_IPC_MEM_EXPORT_FLAG_DISABLE_PID_VALIDATION`, the only flag.
const DISABLE_PID_VALIDATION: u64 = 1;

/// `ACL_RT_IPC_MEM_IMPORT_FLAG_ENABLE_PEER_ACCESS`, the only flag.
const ENABLE_PEER_ACCESS: u64 = 1;

/// Maximum number of processes of one call.
const MAX_LISTED_PER_CALL: usize = 31;

/// Maximum number of processes on one list.
const MAX_LISTED: usize = 32_768;

/// A key that this process created.
#[derive(Debug)]
pub(crate) struct Export {
    pub(crate) base: u64,
    /// The engine's number of the export.
    number: u32,
    node: Node,
    listed_only: bool,
}

/// A key that this process has open.
#[derive(Debug)]
pub(crate) struct Import {
    pub(crate) base: u64,
    device: usize,
    /// The driver's count of opens.
    opens: u64,
    /// Whether the runtime has an entry for the key. It has one, however often the key was opened.
    is_in_map: bool,
}

/// The driver's tables of the keys of a process, which identify them by the address of their memory and not by
/// name.
///
/// Where the tables are wrong, the driver frees memory that importers have open, without an error. So a call that
/// would make them wrong is rejected here.
#[derive(Debug, Default)]
pub(crate) struct DriverKeyTable {
    /// Keys in the order of their creation (hicann/driver, `devmm_ipc_proc_node_add`).
    made: Vec<(u64, Vec<u8>)>,
    /// Memory whose first page is marked as having keys (`devmm_ipc_mem_set_ipc_create_flag`).
    flagged: HashSet<u64>,
}

impl DriverKeyTable {
    fn add(&mut self, base: u64, key: &[u8]) {
        self.made.push((base, key.to_owned()));
        self.flagged.insert(base);
    }

    /// Removes the first key at the address, whichever is meant (`devmm_ipc_proc_node_del`), and the mark of the
    /// memory (`devmm_ipc_mem_clear_ipc_create_flag`).
    ///
    /// # Errors
    /// 507899 where the driver would remove another key, whose importers would keep the memory after the
    /// termination of this process.
    fn remove(&mut self, base: u64, key: &[u8]) -> Outcome {
        let first = self.made.iter().position(|(other, _)| *other == base);
        match first.filter(|&first| self.made[first].1 == key) {
            Some(first) => {
                self.made.remove(first);
                self.flagged.remove(&base);
                Ok(())
            }
            None => driver_refuses(
                "the driver would remove an earlier key of this memory: destroy keys in the order of their creation",
            ),
        }
    }

    /// Removes the keys of memory that is freed.
    ///
    /// # Errors
    /// 507899 where the driver would not revoke them (`devmm_free_page_process`), because another key of the memory
    /// was destroyed after their creation.
    pub(crate) fn free(&mut self, base: u64) -> Outcome {
        if self.made.iter().any(|(other, _)| *other == base) && !self.flagged.contains(&base) {
            return driver_refuses(
                "the driver would free memory that importers have open: a key was destroyed while others remain",
            );
        }
        self.forget(base);
        Ok(())
    }

    /// Removes the keys of memory that is freed with its device.
    pub(crate) fn forget(&mut self, base: u64) {
        self.made.retain(|(other, _)| *other != base);
        self.flagged.remove(&base);
    }
}

/// Returns the pids that may be listed: not 0, and not this process.
///
/// # Errors
/// 507899 if none is left.
pub(crate) fn listable(pids: &[i32]) -> Outcome<Vec<i32>> {
    let own = std::process::id().cast_signed();
    let kept: Vec<i32> = pids.iter().copied().filter(|&pid| pid != 0 && pid != own).collect();
    if kept.is_empty() {
        return refuse(Status::RT_DRV_INTERNAL_ERROR, "no valid pid: 0 and the creator cannot be listed");
    }
    Ok(kept)
}

/// # Errors
/// 107000 for 0 processes, and for more than the driver's maximum.
pub(crate) fn check_count(count: usize) -> Outcome {
    if count == 0 || count > MAX_LISTED_PER_CALL {
        return refuse(
            Status::RT_PARAM_INVALID,
            format!("invalid number of pids {count}: expected 1 to {MAX_LISTED_PER_CALL}"),
        );
    }
    Ok(())
}

/// Adds processes to the list of an export.
///
/// # Errors
/// 507899 for too many processes.
pub(crate) fn list(node: &mut Node, pids: &[i32]) -> Outcome {
    if node.count_listed() + pids.len() > MAX_LISTED {
        return refuse(Status::RT_DRV_INTERNAL_ERROR, "too many processes on the list");
    }
    for &pid in pids {
        if let Err(error) = node.list(pid) {
            return refuse(Status::RT_DRV_INTERNAL_ERROR, error.to_string());
        }
    }
    Ok(())
}

fn driver_refuses<T>(why: &str) -> Outcome<T> {
    refuse(Status::RT_DRV_INTERNAL_ERROR, why)
}

impl Simulator {
    /// Checks that memory may be exported: memory of `aclrtMalloc`, from its first byte on.
    fn exportable(&self, address: u64, size: u64) -> Outcome<Block> {
        let state = self.state();
        let Some(&block) = state.block_at(address) else {
            return driver_refuses("the address is not device memory");
        };
        if block.origin != Origin::Own {
            return driver_refuses(
                "only memory of aclrtMalloc can be exported, not imported or mapped memory",
            );
        }
        if block.base != address {
            let text = format!("{address:#x} is inside an allocation: export its base {:#x}", block.base);
            return driver_refuses(&text);
        }
        if !block.base.is_multiple_of(block.page) {
            return driver_refuses("the memory is not aligned to a page");
        }
        if size > block.whole_pages() {
            return driver_refuses("the size exceeds the memory");
        }
        Ok(block)
    }

    fn export(&self, pointer: Handle, size: usize, len: usize, flags: u64) -> Outcome<Vec<u8>> {
        if size == 0 || len == 0 || flags > DISABLE_PID_VALIDATION {
            return refuse(Status::RT_PARAM_INVALID, "size and len must not be 0, and flags must be 0 or 1");
        }
        self.current()?;
        self.require(Feature::IpcMemory)?;
        if len < KEY_BYTES {
            return refuse(Status::RT_PARAM_INVALID, format!("a key needs a buffer of {KEY_BYTES} bytes"));
        }
        let block = self.exportable(pointer.value(), size as u64)?;
        let listed_only = flags & DISABLE_PID_VALIDATION == 0;
        if !listed_only && self.config.old_driver {
            return refuse(Status::RT_FEATURE_NOT_SUPPORT, "the driver requires a list of processes");
        }
        let (handle, number) = self.machine.export_separately(Address::new(block.base))?;
        let record = Record {
            kind: Kind::Memory,
            physical: block.home as u32,
            size: size as u64,
            page: block.page,
            for_peers: block.for_peers,
            listed_only,
            handle,
        };
        let node = publish(&record)?;
        let name = Key { pid: std::process::id(), reference: node.reference, device: block.home as u8 };
        let key = name.encode(self.config.soc.keys_are_binary());
        let mut state = self.state();
        state.driver_keys.add(block.base, &key);
        state.exports.insert(key.clone(), Export { base: block.base, number, node, listed_only });
        Ok(key)
    }

    fn list_importers(&self, key: &[u8], pids: &[i32]) -> Outcome {
        let mut state = self.state();
        let Some(export) = state.exports.get_mut(key) else {
            return driver_refuses("only the process that created a key can list processes");
        };
        if !export.listed_only {
            return refuse(Status::RT_NO_PERMISSION, "the key was created without a list of processes");
        }
        list(&mut export.node, &listable(pids)?)
    }

    /// Returns the export that a key names.
    ///
    /// # Errors
    /// 507899.
    pub(crate) fn look_up(&self, key: &[u8], kind: Kind) -> Outcome<(Key, FoundNode)> {
        let name = Key::decode(key);
        let found = name.and_then(|name| Some((name, FoundNode::look_up(name.pid, name.reference, kind)?)));
        match found {
            Some(found) => Ok(found),
            None => driver_refuses("the key is invalid or stale"),
        }
    }

    /// Enables peer access between the current device and the home device of an export.
    ///
    /// # Errors
    /// 507899 also where the container does not have that device.
    pub(crate) fn enable_for_import(&self, device: usize, home: usize) -> Outcome {
        if !self.config.container.contains(&home) {
            return driver_refuses("the device of the exporter is not in this container");
        }
        self.enable_peer_both_ways(device, home)
    }

    fn import(&self, key: &[u8], flags: u64) -> Outcome<u64> {
        if flags > ENABLE_PEER_ACCESS {
            return refuse(Status::RT_PARAM_INVALID, "flags are 0 or 1");
        }
        let device = self.current()?.device;
        self.require(Feature::IpcMemory)?;
        let (_, found) = self.look_up(key, Kind::Memory)?;
        let record = found.record;
        let home = record.physical as usize;
        if flags & ENABLE_PEER_ACCESS != 0 {
            self.enable_for_import(device, home)?;
        }
        if let Some(import) = self.state().imports.get_mut(key) {
            if import.device != device {
                return driver_refuses("the process has the key open on another device");
            }
            import.opens += 1;
            import.is_in_map = true;
            return Ok(import.base);
        }
        if !found.permits_this_process() {
            return driver_refuses("this process is not on the list, or started after its pid was listed");
        }
        if !self.has_access(device, home) {
            return driver_refuses(
                "the two devices have no peer access: call aclrtDeviceEnablePeerAccess, or pass flag 1",
            );
        }
        let is_remote = self.physical(device) != home;
        if is_remote && self.config.soc.needs_peer_policy() && !record.for_peers {
            return driver_refuses("access by another device requires an allocation with a peer policy");
        }
        let base = self.machine.open(&record.handle, None, device, Access::ReadWrite)?.get();
        let size = record.size.next_multiple_of(record.page.max(1));
        let (origin, registered) = (Origin::Imported, false);
        let (page, for_peers) = (record.page, record.for_peers);
        let block =
            Block { base, size, page, device, home, for_peers, origin, registered, imported_by: None };
        let mut state = self.state();
        state.blocks.insert(base, block);
        state.imports.insert(key.to_owned(), Import { base, device, opens: 1, is_in_map: true });
        Ok(base)
    }

    fn close(&self, key: &[u8]) -> Outcome {
        self.current()?;
        self.require(Feature::IpcMemory)?;
        let mut state = self.state();
        let Some(import) = state.imports.get_mut(key).filter(|import| import.is_in_map) else {
            drop(state);
            return self.destroy_export(key);
        };
        // The runtime removes the key, whatever the driver's count is.
        import.is_in_map = false;
        import.opens -= 1;
        if import.opens > 0 {
            return Ok(());
        }
        let base = import.base;
        state.imports.remove(key);
        state.blocks.remove(&base);
        drop(state);
        Ok(self.machine.close_without_waiting(Address::new(base))?)
    }

    /// Destroys a key of this process. Processes that have it open lose the memory, also where it has other keys.
    fn destroy_export(&self, key: &[u8]) -> Outcome {
        let export = {
            let mut state = self.state();
            if let Some(base) = state.exports.get(key).map(|export| export.base) {
                state.driver_keys.remove(base, key)?;
            }
            state.exports.remove(key)
        };
        let Some(export) = export else {
            self.look_up(key, Kind::Memory)?;
            return driver_refuses("only the process that created a key can destroy it");
        };
        Ok(self.machine.unexport_separate(Address::new(export.base), export.number)?)
    }
}

/// Writes a key and its NUL.
pub(crate) fn put_key(place: Pointer<u8>, key: &[u8]) -> Outcome {
    let mut buffer = [0; KEY_BYTES];
    buffer[..key.len()].copy_from_slice(key);
    place.put_list(&buffer, "key")
}

calls! {
    /// Creates a key of memory of this process.
    run fn aclrtIpcMemGetExportKey(sim, pointer: Handle, size: usize, key: Pointer<u8>, len: usize, flags: u64) {
        pointer.required("devPtr")?;
        key.check("key")?;
        let made = sim.export(pointer, size, len, flags)?;
        put_key(key, &made)
    }

    /// Permits processes to open a key.
    run fn aclrtIpcMemSetImportPid(sim, key: Text, pids: Pointer<i32>, count: usize) {
        let key = key.key()?;
        pids.check("pid")?;
        sim.current()?;
        sim.require(Feature::IpcMemory)?;
        check_count(count)?;
        let pids = pids.list(count, "pid")?;
        sim.list_importers(&key, &pids)
    }

    /// Permits processes of other servers of a super pod to open a key. There is one server.
    run fn aclrtIpcMemImportPidInterServer(sim, key: Text, servers: Pointer<ServerPid>, count: usize) {
        let key = key.key()?;
        servers.check("serverPids")?;
        sim.current()?;
        sim.require(Feature::MemoryLink)?;
        for server in servers.list(count, "serverPids")? {
            check_count(server.count)?;
            sim.list_importers(&key, &server.pids.list(server.count, "pid")?)?;
        }
        Ok(())
    }

    /// Opens a key on the current device.
    run fn aclrtIpcMemImportByKey(sim, pointer: Pointer<Handle>, key: Text, flags: u64) {
        pointer.check("devPtr")?;
        let key = key.key()?;
        let base = sim.import(&key, flags)?;
        pointer.put(Handle::new(base), "devPtr")
    }

    /// Selects the link by which two dies access the memory: 0 or 1.
    run fn aclrtIpcMemSetAttr(sim, key: Text, kind: i32, value: u64) {
        // ACL checks no argument of this call, and the runtime has another status for a null pointer.
        if key.is_null() {
            return refuse(Status::RT_PARAM_INVALID, "key is a null pointer");
        }
        let key = key.key()?;
        if kind != 0 {
            return refuse(Status::RT_PARAM_INVALID, format!("no attribute {kind}"));
        }
        sim.current()?;
        sim.require(Feature::MemoryLink)?;
        if value > 1 {
            return driver_refuses("a link must be 0 or 1");
        }
        if sim.state().exports.contains_key(&key) {
            return Ok(());
        }
        sim.look_up(&key, Kind::Memory)?;
        refuse(Status::RT_NO_PERMISSION, "only the process that created a key can change it")
    }

    /// Closes a key that is open, or else destroys it.
    run fn aclrtIpcMemClose(sim, key: Text) {
        let key = key.key()?;
        sim.close(&key)
    }
}
