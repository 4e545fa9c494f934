//! Host memory that devices may access.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::HashSet;

use device_ipc_mock_engine::Address;

use crate::abi::{Handle, Pointer};
use crate::block::{Block, Origin};
use crate::call::calls;
use crate::simulator::Simulator;
use crate::status::{Outcome, Status, refuse};

const PAGE: usize = 4096;

/// Flags of `aclrtHostRegisterV2`: mapped, memory of a device, read-only, pinned.
const KNOWN_FLAGS: u32 = 0x2 | 0x4 | 0x8 | 0x1000_0000;
const MAPPED: u32 = 0x2;

fn layout_of(size: usize) -> Outcome<Layout> {
    match Layout::from_size_align(size, PAGE) {
        Ok(layout) if size > 0 => Ok(layout),
        _ => refuse(Status::INVALID_PARAM, "invalid size of host memory"),
    }
}

fn host_block(base: u64, size: u64, origin: Origin) -> Block {
    let page = PAGE as u64;
    Block {
        base,
        size,
        page,
        device: 0,
        home: usize::MAX,
        for_peers: false,
        origin,
        registered: false,
        imported_by: None,
    }
}

impl Simulator {
    fn allocate_host(&self, pointer: Pointer<Handle>, size: usize) -> Outcome {
        pointer.check("hostPtr")?;
        self.current()?;
        let layout = layout_of(size)?;
        // SAFETY: the size is not 0.
        let base = unsafe { alloc_zeroed(layout) } as u64;
        if base == 0 {
            return refuse(Status::RT_MEMORY_ALLOCATION, "the host is out of memory");
        }
        // SAFETY: allocated above, and freed only after it was unregistered; the bytes belong to the program, which
        // must not access them concurrently with the devices.
        unsafe { self.machine.register_host(Address::new(base), size as u64) }?;
        self.state().blocks.insert(base, host_block(base, size as u64, Origin::Host));
        pointer.put(Handle::new(base), "hostPtr")
    }

    fn free_host(&'static self, pointer: Handle, wait: bool) -> Outcome {
        let base = pointer.required("hostPtr")?;
        self.current()?;
        let block = {
            let mut state = self.state();
            match state.blocks.get(&base) {
                Some(block) if block.origin == Origin::Host => {}
                _ => {
                    let text = format!("{base:#x} is not the base of memory of aclrtMallocHost");
                    return refuse(Status::RT_PARAM_INVALID, text);
                }
            }
            state.blocks.remove(&base)
        };
        let layout = layout_of(block.map_or(0, |block| block.size as usize))?;
        let give_back = move || {
            if self.machine.unregister_host(Address::new(base)).is_ok() {
                // SAFETY: allocated with this layout by `allocate_host`, and no work can access it any more.
                unsafe { dealloc(base as *mut u8, layout) };
            }
        };
        if wait {
            for device in 0..self.machine.devices().len() {
                self.machine.synchronize_device(device)?;
            }
            give_back();
        } else {
            // Unregistering waits for work that uses the memory; this call does not wait for it.
            std::thread::spawn(give_back);
        }
        Ok(())
    }

    fn register(&self, pointer: Handle, size: u64) -> Outcome {
        let base = pointer.required("ptr")?;
        if size == 0 {
            return refuse(Status::RT_PARAM_INVALID, "size is 0");
        }
        let device = self.current()?.device;
        let mut state = self.state();
        if self.config.host_words
            && state.blocks.get(&base).is_some_and(|block| block.is_registered() && block.size == size)
            && state.registrations.entry(base).or_default().insert(device)
        {
            return Ok(());
        }
        if let Some(block) = state.blocks.get_mut(&base)
            && block.origin == Origin::Host
            && !block.registered
            && block.size >= size
        {
            block.registered = true;
            return Ok(());
        }
        let end = base.checked_add(size);
        let last = end.and_then(|end| state.blocks.range(..end).next_back());
        if end.is_none() || last.is_some_and(|(_, block)| block.base + block.size > base) {
            return refuse(Status::HOST_MEMORY_ALREADY_REGISTERED, "the memory is registered already");
        }
        // SAFETY: the caller of an exported function guarantees that the bytes stay mapped until they are
        // unregistered.
        unsafe { self.machine.register_host(Address::new(base), size) }?;
        state.blocks.insert(base, host_block(base, size, Origin::RegisteredHost));
        state.registrations.insert(base, HashSet::from([device]));
        Ok(())
    }

    fn unregister(&self, pointer: Handle) -> Outcome {
        let base = pointer.required("ptr")?;
        let device = self.current()?.device;
        {
            let mut state = self.state();
            if self.config.host_words
                && let Some(devices) = state.registrations.get_mut(&base)
            {
                if !devices.remove(&device) {
                    return refuse(
                        Status::HOST_MEMORY_NOT_REGISTERED,
                        "the memory is not registered for this device",
                    );
                }
                if !devices.is_empty() {
                    return Ok(());
                }
            }
            state.registrations.remove(&base);
            match state.blocks.get_mut(&base) {
                Some(block) if block.origin == Origin::Host && block.registered => {
                    block.registered = false;
                    return Ok(());
                }
                Some(block) if block.origin == Origin::RegisteredHost => {}
                _ => return refuse(Status::HOST_MEMORY_NOT_REGISTERED, "the memory is not registered"),
            }
            state.blocks.remove(&base);
        }
        Ok(self.machine.unregister_host(Address::new(base))?)
    }
}

calls! {
    /// Allocates host memory for asynchronous copies.
    run fn aclrtMallocHost(sim, pointer: Pointer<Handle>, size: usize) {
        sim.allocate_host(pointer, size)
    }

    /// Frees host memory without waiting.
    run fn aclrtFreeHost(sim, pointer: Handle) {
        sim.free_host(pointer, false)
    }

    /// Frees host memory after all work of all devices.
    run fn aclrtFreeHostWithDevSync(sim, pointer: Handle) {
        sim.free_host(pointer, true)
    }

    /// Registers host memory for the devices, at its own address.
    run fn aclrtHostRegister(sim, pointer: Handle, size: u64, kind: i32, device: Pointer<Handle>) {
        device.check("devPtr")?;
        if !matches!(kind, 0 | 4 | 8) {
            return refuse(Status::RT_PARAM_INVALID, format!("invalid kind of registration {kind}"));
        }
        sim.register(pointer, size)?;
        device.put(pointer, "devPtr")
    }

    /// Registers host memory with flags.
    run fn aclrtHostRegisterV2(sim, pointer: Handle, size: u64, flags: u32) {
        if flags & !KNOWN_FLAGS != 0 || flags & (MAPPED | 0x1000_0000) == 0 {
            return refuse(Status::RT_PARAM_INVALID, format!("invalid flags of a registration: {flags:#x}"));
        }
        sim.register(pointer, size)
    }

    /// Unregisters host memory, after the work that uses it.
    run fn aclrtHostUnregister(sim, pointer: Handle) {
        sim.unregister(pointer)
    }

    /// Returns the device address of registered memory, which is its host address.
    run fn aclrtHostGetDevicePointer(sim, pointer: Handle, device: Pointer<Handle>, flags: u32) {
        let address = pointer.required("pHost")?;
        device.check("pDevice")?;
        if flags != 0 {
            return refuse(Status::RT_PARAM_INVALID, "flag must be 0");
        }
        let is_registered = {
            let state = sim.state();
            let found = state.block_at(address);
            found.is_some_and(Block::is_registered)
        };
        if !is_registered {
            return refuse(Status::HOST_MEMORY_NOT_REGISTERED, "the memory is not registered");
        }
        device.put(pointer, "pDevice")
    }
}
