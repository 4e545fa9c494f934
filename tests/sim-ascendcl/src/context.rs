//! Contexts, and the current context of a thread.
//!
//! A thread that never called `aclrtSetDevice` gets 107002 from every call, an error that libraries make which are
//! called on threads of others.

use crate::abi::{Handle, Pointer};
use crate::call::calls;
use crate::simulator::{Context, Simulator};
use crate::status::{Outcome, Status, refuse};

impl Simulator {
    /// Returns the default context of a device, and creates it at the first call.
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

    /// Destroys a context with its streams, after their work.
    fn destroy_context(&self, context: u64) {
        let streams: Vec<u64> = {
            let mut state = self.state();
            state.contexts.remove(&context);
            let own = state.streams.iter().filter(|(_, stream)| stream.context == context);
            own.map(|(&id, _)| id).collect()
        };
        for stream in streams {
            self.destroy_stream_now(stream, true);
        }
    }

    /// Releases a device that is not in use any more, with its memory.
    fn release_device_if_unused(&self, device: usize) -> Outcome {
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
                let text = format!("device {device} is not set");
                return refuse(Status::RT_INVALID_DEVICEID, text);
            }
            found.references = if force { 0 } else { found.references - 1 };
            if found.references > 0 {
                return Ok(());
            }
            found.default_context.take()
        };
        if let Some(context) = default {
            self.destroy_context(context);
        }
        self.release_device_if_unused(device)
    }
}

calls! {
    /// Makes the default context of a device current, and increments the reference count.
    run fn aclrtSetDevice(sim, device: i32) {
        let device = sim.device(device)?;
        let context = sim.default_context(device);
        sim.state().devices[device].references += 1;
        sim.make_current(Some(context));
        Ok(())
    }

    /// Decrements the reference count; the last call destroys the default context, its streams and the memory of
    /// the device.
    run fn aclrtResetDevice(sim, device: i32) {
        let device = sim.device(device)?;
        sim.reset_device(device, false)
    }

    /// Resets a device, whatever its reference count.
    run fn aclrtResetDeviceForce(sim, device: i32) {
        let device = sim.device(device)?;
        sim.reset_device(device, true)
    }

    /// Returns the device of the current context.
    run fn aclrtGetDevice(sim, device: Pointer<i32>) {
        device.check("deviceId")?;
        let current = sim.current()?;
        device.put(current.device as i32, "deviceId")
    }

    /// Creates a context on a device, and makes it current.
    run fn aclrtCreateContext(sim, context: Pointer<Handle>, device: i32) {
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
                None => return refuse(Status::RT_CONTEXT_NULL, "context not found"),
                Some(found) if state.devices[found.device].default_context == Some(handle) => {
                    return refuse(Status::RT_PARAM_INVALID, "a default context is destroyed with its device");
                }
                Some(found) => found.device,
            }
        };
        sim.destroy_context(handle);
        sim.release_device_if_unused(device)
    }

    /// Makes a context current.
    run fn aclrtSetCurrentContext(sim, context: Handle) {
        let handle = context.required("context")?;
        if !sim.state().contexts.contains_key(&handle) {
            return refuse(Status::RT_CONTEXT_NULL, "context not found");
        }
        sim.make_current(Some(handle));
        Ok(())
    }

    /// Returns the current context.
    run fn aclrtGetCurrentContext(sim, context: Pointer<Handle>) {
        context.check("context")?;
        let current = sim.current()?;
        context.put(Handle::new(current.context), "context")
    }

    /// Returns whether a device has its default context.
    run fn aclrtGetPrimaryCtxState(sim, device: i32, flags: Pointer<u32>, active: Pointer<i32>) {
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
