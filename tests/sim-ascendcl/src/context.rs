//! Contexts, and which of them a thread has.
//!
//! Why strictly: a thread that never called `aclrtSetDevice` gets 107002 from everything, which is the first thing
//! that a library that is called from foreign threads gets wrong.

use crate::abi::{Handle, Place};
use crate::call::calls;
use crate::simulator::{Context, Simulator};
use crate::status::{Outcome, Status, refuse};

impl Simulator {
    /// The default context of a device, made when first asked for.
    fn default_context(&self, device: usize) -> u64 {
        let mut state = self.state();
        if let Some(context) = state.devices[device].default_context {
            return context;
        }
        let handle = state.new_handle();
        state.contexts.insert(handle, Context { device, default_stream: None });
        state.devices[device].default_context = Some(handle);
        handle
    }

    /// Ends a context with its streams, after their work.
    fn end_context(&self, context: u64) {
        let streams: Vec<u64> = {
            let mut state = self.state();
            state.contexts.remove(&context);
            let own = state.streams.iter().filter(|(_, stream)| stream.context == context);
            own.map(|(&id, _)| id).collect()
        };
        for stream in streams {
            self.end_stream(stream, true);
        }
    }

    /// Lets go of a device that nobody uses any more: its memory goes with it.
    fn settle_device(&self, device: usize) -> Outcome {
        {
            let state = self.state();
            let in_use = state.contexts.values().any(|context| context.device == device);
            if state.devices[device].references > 0 || in_use {
                return Ok(());
            }
        }
        self.free_device_memory(device)?;
        let physical = self.physical(device);
        self.change_peers(|peers| peers.retain(|(own, _), _| *own != physical))
    }

    fn reset_device(&self, device: usize, force: bool) -> Outcome {
        let default = {
            let mut state = self.state();
            let found = &mut state.devices[device];
            if found.references == 0 {
                let text = format!("device {device} has not been set, or was reset as often");
                return refuse(Status::RT_INVALID_DEVICEID, text);
            }
            found.references = if force { 0 } else { found.references - 1 };
            if found.references > 0 {
                return Ok(());
            }
            found.default_context.take()
        };
        if let Some(context) = default {
            self.end_context(context);
        }
        self.settle_device(device)
    }
}

calls! {
    /// Makes the default context of a device the thread's, and counts.
    run fn aclrtSetDevice(sim, device: i32) {
        let device = sim.device(device)?;
        let context = sim.default_context(device);
        sim.state().devices[device].references += 1;
        sim.make_current(Some(context));
        Ok(())
    }

    /// Counts down; with the last call the default context, its streams and the memory of the device go.
    run fn aclrtResetDevice(sim, device: i32) {
        let device = sim.device(device)?;
        sim.reset_device(device, false)
    }

    /// As `aclrtResetDevice`, whatever the count.
    run fn aclrtResetDeviceForce(sim, device: i32) {
        let device = sim.device(device)?;
        sim.reset_device(device, true)
    }

    /// The device of the thread's context.
    run fn aclrtGetDevice(sim, device: Place<i32>) {
        device.check("deviceId")?;
        let current = sim.current()?;
        device.put(current.device as i32, "deviceId")
    }

    /// Makes a context of its own on a device, and makes it the thread's.
    run fn aclrtCreateContext(sim, context: Place<Handle>, device: i32) {
        context.check("context")?;
        let device = sim.device(device)?;
        let handle = {
            let mut state = sim.state();
            let handle = state.new_handle();
            state.contexts.insert(handle, Context { device, default_stream: None });
            handle
        };
        sim.make_current(Some(handle));
        context.put(Handle::new(handle), "context")
    }

    /// Destroys a context of `aclrtCreateContext`.
    run fn aclrtDestroyContext(sim, context: Handle) {
        let handle = context.required("context")?;
        let device = {
            let state = sim.state();
            match state.contexts.get(&handle) {
                None => return refuse(Status::RT_CONTEXT_NULL, "no such context"),
                Some(found) if state.devices[found.device].default_context == Some(handle) => {
                    return refuse(Status::RT_PARAM_INVALID, "a default context ends with its device");
                }
                Some(found) => found.device,
            }
        };
        sim.end_context(handle);
        sim.settle_device(device)
    }

    /// Makes a context the thread's.
    run fn aclrtSetCurrentContext(sim, context: Handle) {
        let handle = context.required("context")?;
        if !sim.state().contexts.contains_key(&handle) {
            return refuse(Status::RT_CONTEXT_NULL, "no such context");
        }
        sim.make_current(Some(handle));
        Ok(())
    }

    /// The thread's context.
    run fn aclrtGetCurrentContext(sim, context: Place<Handle>) {
        context.check("context")?;
        let current = sim.current()?;
        context.put(Handle::new(current.context), "context")
    }

    /// Whether a device has its default context.
    run fn aclrtGetPrimaryCtxState(sim, device: i32, flags: Place<u32>, active: Place<i32>) {
        let device = sim.device(device)?;
        let is_active = sim.state().devices[device].default_context.is_some();
        if !flags.is_null() {
            flags.put(0, "flags")?;
        }
        if !active.is_null() {
            active.put(i32::from(is_active), "active")?;
        }
        Ok(())
    }
}
