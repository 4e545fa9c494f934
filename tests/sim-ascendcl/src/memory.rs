//! Device memory: allocation, free, and attributes of addresses.

use std::ffi::c_void;

use device_ipc_mock_engine::Address;

use crate::abi::{Handle, MemLocation, Pointer, PtrAttributes};
use crate::block::{Block, Origin};
use crate::call::calls;
use crate::simulator::Simulator;
use crate::soc::Feature;
use crate::status::{Outcome, Status, refuse};

const NORMAL_PAGE: u64 = 4 << 10;
const HUGE_PAGE: u64 = 2 << 20;
const GIANT_PAGE: u64 = 1 << 30;

/// Up to this size "huge pages first" selects normal pages.
const HUGE_FROM: u64 = 1 << 20;

/// The unit to which `aclrtMalloc` rounds, and the padding on most chips.
const GRAIN: u64 = 32;

/// The lowest bits of a policy; the others concern bandwidth and protection.
const POLICY_MASK: i32 = 0xff;

/// The requirements of a policy.
#[derive(Debug, PartialEq, Eq)]
struct Policy {
    page: u64,
    for_peers: bool,
}

impl Policy {
    fn of(policy: i32, size: u64) -> Self {
        let first = if size > HUGE_FROM { HUGE_PAGE } else { NORMAL_PAGE };
        let (page, for_peers) = match policy & POLICY_MASK {
            1 => (HUGE_PAGE, false),
            2 => (NORMAL_PAGE, false),
            3 => (first, true),
            4 => (HUGE_PAGE, true),
            5 => (NORMAL_PAGE, true),
            6 => (GIANT_PAGE, false),
            7 => (GIANT_PAGE, true),
            _ => (first, false),
        };
        Self { page, for_peers }
    }
}

/// Offset of small memory in its page on a machine that is `unaligned`: the manual does not say that memory begins
/// at a page.
const OFFSET: u64 = 512;

/// Returns the first address of the pages that contain memory, by which the engine knows it.
fn in_pages(base: u64) -> u64 {
    base - base % NORMAL_PAGE
}

impl Simulator {
    fn allocate(&self, pointer: Pointer<Handle>, size: usize, policy: i32, pad: bool) -> Outcome {
        pointer.check("devPtr")?;
        if size == 0 {
            return refuse(Status::INVALID_PARAM, "size is 0");
        }
        let current = self.current()?;
        let giant = matches!(policy & POLICY_MASK, 6 | 7);
        if giant {
            self.require(Feature::HugePagesOf1GiB)?;
        }
        let padding = if pad && !giant && self.config.soc.pads() { GRAIN } else { 0 };
        let size = (size as u64).checked_next_multiple_of(GRAIN).and_then(|size| size.checked_add(padding));
        let Some(size) = size else { return refuse(Status::INVALID_PARAM, "size is too large") };
        let Policy { page, for_peers } = Policy::of(policy, size);
        let offset = if pad && page == NORMAL_PAGE && self.config.unaligned { OFFSET } else { 0 };
        let Some(whole) = size.checked_add(offset).and_then(|size| size.checked_next_multiple_of(page))
        else {
            return refuse(Status::INVALID_PARAM, "size is too large");
        };
        let base = self.machine.allocate_aligned(current.device, whole, page)?.get() + offset;
        let home = self.physical(current.device);
        let (device, origin, registered) = (current.device, Origin::Own, false);
        let block =
            Block { base, size, page, device, home, for_peers, origin, registered, imported_by: None };
        self.state().blocks.insert(base, block);
        pointer.put(Handle::new(base), "devPtr")
    }

    fn free(&self, pointer: Handle, wait: bool) -> Outcome {
        let base = pointer.required("devPtr")?;
        self.current()?;
        let mut state = self.state();
        match state.blocks.get(&base) {
            Some(block) if block.origin == Origin::Own => {}
            _ => {
                let text = format!("{base:#x} is not the base of memory of aclrtMalloc");
                return refuse(Status::RT_PARAM_INVALID, text);
            }
        }
        // The exports are destroyed with the memory.
        state.driver_keys.free(base)?;
        state.exports.retain(|_, export| export.base != base);
        state.blocks.remove(&base);
        drop(state);
        let address = Address::new(in_pages(base));
        let freed =
            if wait { self.machine.free(address) } else { self.machine.free_without_waiting(address) };
        Ok(freed?)
    }

    /// Frees and closes all memory of a device, as the driver does when a process closes the device.
    pub(crate) fn free_device_memory(&self, device: usize) -> Outcome {
        let found: Vec<Block> = {
            let mut state = self.state();
            let mine = |block: &Block| {
                block.device == device && matches!(block.origin, Origin::Own | Origin::Imported)
            };
            let found: Vec<Block> = state.blocks.values().copied().filter(mine).collect();
            state.blocks.retain(|_, block| !mine(block));
            for block in &found {
                state.driver_keys.forget(block.base);
            }
            state.exports.retain(|_, export| !found.iter().any(|block| block.base == export.base));
            state.imports.retain(|_, import| !found.iter().any(|block| block.base == import.base));
            found
        };
        for block in found {
            let address = Address::new(in_pages(block.base));
            if block.origin == Origin::Own {
                self.machine.free_without_waiting(address)?;
            } else {
                self.machine.close_without_waiting(address)?;
            }
        }
        Ok(())
    }
}

calls! {
    /// Allocates memory on the current device; rounds up to 32 bytes, and adds 32 on most chips.
    run fn aclrtMalloc(sim, pointer: Pointer<Handle>, size: usize, policy: i32) {
        sim.allocate(pointer, size, policy, true)
    }

    /// Allocates memory; rounds up to 32 bytes without padding.
    run fn aclrtMallocAlign32(sim, pointer: Pointer<Handle>, size: usize, policy: i32) {
        sim.allocate(pointer, size, policy, false)
    }

    /// Allocates memory as `aclrtMalloc` does: there are no caches.
    run fn aclrtMallocCached(sim, pointer: Pointer<Handle>, size: usize, policy: i32) {
        sim.allocate(pointer, size, policy, true)
    }

    /// Allocates memory as `aclrtMallocAlign32` does. The configuration is ignored.
    run fn aclrtMallocWithCfg(sim, pointer: Pointer<Handle>, size: usize, policy: i32, _config: *const c_void) {
        sim.allocate(pointer, size, policy, false)
    }

    /// Frees memory at once, also with queued work that uses it, and revokes it from importers.
    run fn aclrtFree(sim, pointer: Handle) {
        sim.free(pointer, false)
    }

    /// Frees memory after all work of the device.
    run fn aclrtFreeWithDevSync(sim, pointer: Handle) {
        sim.free(pointer, true)
    }

    /// Returns the free and the total bytes of the current device, equal for all kinds of memory.
    run fn aclrtGetMemInfo(sim, attribute: i32, free: Pointer<usize>, total: Pointer<usize>) {
        free.check("free")?;
        total.check("total")?;
        if !(0..=17).contains(&attribute) {
            return refuse(Status::INVALID_PARAM, format!("invalid kind of memory {attribute}"));
        }
        let current = sim.current()?;
        let (left, all) = sim.machine.memory_info(current.device)?;
        free.put(left as usize, "free")?;
        total.put(all as usize, "total")
    }

    /// Returns the location of an address and its page size.
    run fn aclrtPointerGetAttributes(sim, pointer: Handle, attributes: Pointer<PtrAttributes>) {
        let address = pointer.required("ptr")?;
        attributes.check("attributes")?;
        let state = sim.state();
        let Some(block) = state.block_at(address) else {
            let text = format!("{address:#x} is not memory that the driver knows");
            return refuse(Status::RT_PARAM_INVALID, text);
        };
        let location = if block.is_host() {
            MemLocation { id: 0, kind: MemLocation::HOST }
        } else {
            MemLocation { id: block.device as u32, kind: MemLocation::DEVICE }
        };
        attributes.put(PtrAttributes { location, page_size: block.page as u32, reserved: [0; 4] }, "attributes")
    }

    /// Returns the first address and the size of the memory that contains an address.
    run fn aclrtMemGetAddressRange(sim, pointer: Handle, base: Pointer<Handle>, size: Pointer<usize>) {
        let block = sim.device_operand(pointer.required("ptr")?, 1)?;
        if !base.is_null() {
            base.put(Handle::new(block.base), "pbase")?;
        }
        if !size.is_null() {
            size.put(block.size as usize, "psize")?;
        }
        Ok(())
    }

    /// Flushes caches. No effect: host and devices share their caches.
    run fn aclrtMemFlush(sim, pointer: Handle, size: usize) {
        sim.device_operand(pointer.required("devPtr")?, size as u64).map(|_| ())
    }

    /// Invalidates caches. No effect.
    run fn aclrtMemInvalidate(sim, pointer: Handle, size: usize) {
        sim.device_operand(pointer.required("devPtr")?, size as u64).map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policy_selects_page_size() {
        assert_eq!(Policy::of(0, HUGE_FROM), Policy { page: NORMAL_PAGE, for_peers: false });
        assert_eq!(Policy::of(0, HUGE_FROM + 32), Policy { page: HUGE_PAGE, for_peers: false });
        assert_eq!(Policy::of(1, 32), Policy { page: HUGE_PAGE, for_peers: false });
        assert_eq!(Policy::of(5, 8 << 20), Policy { page: NORMAL_PAGE, for_peers: true });
        assert_eq!(Policy::of(0x1000 | 7, 32), Policy { page: GIANT_PAGE, for_peers: true });
    }
}
