//! Streams and their contexts.

use std::ffi::c_void;
use std::time::Duration;

use device_ipc_mock_engine::StreamId;

use crate::abi::{Handle, Pointer, StreamConfig, Text};
use crate::call::{calls, value_of};
use crate::simulator::{CurrentContext, Simulator, lock};
use crate::status::{Outcome, Status, refuse};

/// A stream.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stream {
    pub(crate) context: u64,
    pub(crate) device: usize,
    flags: u32,
    priority: u32,
    is_default: bool,
    has_failure_mode: bool,
}

/// A stream to which work can be submitted now.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Target {
    pub(crate) stream: StreamId,
    pub(crate) device: usize,
}

/// `void (*)(aclrtStream, aclrtStreamState, void*)`.
type StateCallback = unsafe extern "C" fn(Handle, i32, *mut c_void);

/// Stream state callbacks by name; the argument is an address.
static STATE_CALLBACKS: std::sync::Mutex<Vec<(Vec<u8>, StateCallback, u64)>> =
    std::sync::Mutex::new(Vec::new());

/// `ACL_STREAM_DEVICE_USE_ONLY`.
const FOR_USE_BY_THE_DEVICE: u32 = 0x20;

const CREATED: i32 = 1;
const IS_DESTROYED: i32 = 2;

impl Simulator {
    /// Returns the stream to which work is submitted, by its handle; null is the context's default stream.
    ///
    /// # Errors
    /// 107002 without a context, 107003 for a stream of another context, 107017 for an unknown stream.
    pub(crate) fn target(&self, handle: Handle) -> Outcome<Target> {
        let current = self.current()?;
        let stream = self.known_stream(handle, current)?;
        let found = self.state().streams[&stream.get()];
        if found.context != current.context {
            return refuse(
                Status::RT_STREAM_CONTEXT,
                "the stream belongs to another context than the current one",
            );
        }
        Ok(Target { stream, device: found.device })
    }

    /// Returns a stream of any context, to wait for it or to destroy it.
    pub(crate) fn any_stream(&self, handle: Handle) -> Outcome<StreamId> {
        let current = self.current()?;
        self.known_stream(handle, current)
    }

    fn known_stream(&self, handle: Handle, current: CurrentContext) -> Outcome<StreamId> {
        if handle.is_null() {
            return self.default_stream(current);
        }
        if !self.state().streams.contains_key(&handle.value()) {
            return refuse(Status::RT_INVALID_HANDLE, "stream not found");
        }
        Ok(StreamId::new(handle.value()))
    }

    fn default_stream(&self, current: CurrentContext) -> Outcome<StreamId> {
        if let Some(stream) =
            self.state().contexts.get(&current.context).and_then(|found| found.default_stream)
        {
            return Ok(StreamId::new(stream));
        }
        let stream = self.new_stream(current, 0, 0, true)?;
        let mut state = self.state();
        state.contexts.entry(current.context).and_modify(|found| found.default_stream = Some(stream.get()));
        Ok(stream)
    }

    fn new_stream(
        &self,
        current: CurrentContext,
        priority: u32,
        flags: u32,
        is_default: bool,
    ) -> Outcome<StreamId> {
        let stream = self.machine.create_stream(current.device)?;
        self.machine.continue_on_failure(stream, true)?;
        let CurrentContext { context, device } = current;
        let has_failure_mode = false;
        let entry = Stream { context, device, flags, priority, is_default, has_failure_mode };
        self.state().streams.insert(stream.get(), entry);
        tell_callbacks(stream.get(), CREATED);
        Ok(stream)
    }

    /// Destroys a stream, with its queued work or after it.
    pub(crate) fn destroy_stream_now(&self, stream: u64, drain: bool) {
        if self.state().streams.remove(&stream).is_none() {
            return;
        }
        tell_callbacks(stream, IS_DESTROYED);
        let stream = StreamId::new(stream);
        if drain {
            // HostDestination failures are not reported.
            let _ = self.machine.synchronize(stream);
        }
        let _ = self.machine.destroy_stream(stream);
    }

    fn destroy(&self, handle: Handle, drain: bool) -> Outcome {
        handle.required("stream")?;
        self.current()?;
        match self.state().streams.get(&handle.value()) {
            None => return refuse(Status::RT_INVALID_HANDLE, "stream not found"),
            Some(found) if found.is_default => {
                return refuse(Status::RT_PARAM_INVALID, "a default stream is destroyed with its context");
            }
            Some(_) => {}
        }
        self.destroy_stream_now(handle.value(), drain);
        Ok(())
    }

    fn create(&self, stream: Pointer<Handle>, priority: u32, flags: u32) -> Outcome {
        stream.check("stream")?;
        if priority > 7 {
            return refuse(Status::RT_PARAM_INVALID, "a priority must be from 0 to 7");
        }
        let current = self.current()?;
        let made = self.new_stream(current, priority, flags, false)?;
        stream.put(Handle::new(made.get()), "stream")
    }

    fn describe(&self, handle: Handle) -> Outcome<Stream> {
        let stream = self.any_stream(handle)?;
        Ok(self.state().streams[&stream.get()])
    }
}

fn tell_callbacks(stream: u64, state: i32) {
    let callbacks = lock(&STATE_CALLBACKS).clone();
    for (_, callback, argument) in callbacks {
        // SAFETY: registered as a function of this type, with this argument.
        unsafe { callback(Handle::new(stream), state, argument as *mut c_void) };
    }
}

/// Converts a time limit in milliseconds; `None` for -1, which means no limit.
pub(crate) fn limit_of(milliseconds: i32) -> Outcome<Option<Duration>> {
    match milliseconds {
        -1 => Ok(None),
        0.. => Ok(Some(Duration::from_millis(u64::from(milliseconds.unsigned_abs())))),
        _ => refuse(Status::RT_PARAM_INVALID, "a timeout must be -1, or at least 0 ms"),
    }
}

calls! {
    /// Creates a stream in the current context.
    run fn aclrtCreateStream(sim, stream: Pointer<Handle>) {
        sim.create(stream, 0, 0)
    }

    /// Creates a stream with a priority from 0, the highest, to 7.
    run fn aclrtCreateStreamWithConfig(sim, stream: Pointer<Handle>, priority: u32, flags: u32) {
        sim.create(stream, priority, flags)
    }

    /// Creates a stream with a configuration.
    run fn aclrtCreateStreamV2(sim, stream: Pointer<Handle>, config: Pointer<StreamConfig>) {
        if config.is_null() {
            return sim.create(stream, 0, 0);
        }
        let config = config.get("handle")?;
        sim.create(stream, config.priority, config.flags as u32)
    }

    /// Sets an option of a configuration: 2 flags, 3 priority; 0 and 1 are work memory of the stream.
    run fn aclrtSetStreamConfigOpt(_sim, config: Pointer<StreamConfig>, attribute: i32, value: Pointer<u64>, size: usize) {
        let mut changed = config.get("handle")?;
        value.check("attrValue")?;
        let bytes = Pointer::<u8>::list(value.cast(), size.min(8), "attrValue")?;
        let number = bytes.iter().rev().fold(0_u64, |number, &byte| number << 8 | u64::from(byte));
        match attribute {
            0 => changed.work = Handle::new(number),
            1 => changed.work_size = number as usize,
            2 => changed.flags = number as usize,
            3 => changed.priority = number as u32,
            _ => return refuse(Status::INVALID_PARAM, format!("no attribute {attribute}")),
        }
        config.put(changed, "handle")
    }

    /// Destroys a configuration.
    run fn aclrtDestroyStreamConfigHandle(_sim, config: Pointer<StreamConfig>) {
        config.check("handle")?;
        config.give_back();
        Ok(())
    }

    /// Destroys a stream after its work.
    run fn aclrtDestroyStream(sim, stream: Handle) {
        sim.destroy(stream, true)
    }

    /// Destroys a stream at once; queued work may still run.
    run fn aclrtDestroyStreamForce(sim, stream: Handle) {
        sim.destroy(stream, false)
    }

    /// Waits for all work of a stream, and returns its first failure, once.
    run fn aclrtSynchronizeStream(sim, stream: Handle) {
        let stream = sim.any_stream(stream)?;
        Ok(sim.machine.synchronize(stream)?)
    }

    /// Waits for all work of a stream, with a time limit.
    run fn aclrtSynchronizeStreamWithTimeout(sim, stream: Handle, milliseconds: i32) {
        let stream = sim.any_stream(stream)?;
        match limit_of(milliseconds)? {
            None => Ok(sim.machine.synchronize(stream)?),
            Some(limit) if sim.machine.synchronize_timeout(stream, limit)? => Ok(()),
            Some(limit) => {
                refuse(Status::RT_STREAM_SYNC_TIMEOUT, format!("the wait for the stream timed out after {limit:?}"))
            }
        }
    }

    /// Returns 0 if all work of a stream is complete, else 1.
    run fn aclrtStreamQuery(sim, stream: Handle, status: Pointer<i32>) {
        status.check("status")?;
        let stream = sim.any_stream(stream)?;
        status.put(i32::from(!sim.machine.query(stream)?), "status")
    }

    /// Returns the number of a stream.
    run fn aclrtStreamGetId(sim, stream: Handle, id: Pointer<i32>) {
        let stream = sim.any_stream(stream)?;
        id.put(stream.get() as i32, "streamId")
    }

    /// Returns the flags of a stream.
    run fn aclrtStreamGetFlags(sim, stream: Handle, flags: Pointer<u32>) {
        flags.put(sim.describe(stream)?.flags, "flags")
    }

    /// Returns the priority of a stream.
    run fn aclrtStreamGetPriority(sim, stream: Handle, priority: Pointer<u32>) {
        priority.put(sim.describe(stream)?.priority, "priority")
    }

    /// Drops the queued work of a stream.
    run fn aclrtStreamAbort(sim, stream: Handle) {
        let stream = sim.any_stream(stream)?;
        Ok(sim.machine.discard_queued(stream)?)
    }

    /// Drops the queued work of a stream that was created for use by the device (0x20).
    run fn aclrtStreamStop(sim, stream: Handle) {
        if sim.describe(stream)?.flags & FOR_USE_BY_THE_DEVICE == 0 {
            return refuse(Status::RT_PARAM_INVALID, "the stream was not created with ACL_STREAM_DEVICE_USE_ONLY");
        }
        let stream = sim.any_stream(stream)?;
        Ok(sim.machine.discard_queued(stream)?)
    }

    /// Returns the default stream of the current context.
    run fn aclrtCtxGetCurrentDefaultStream(sim, stream: Pointer<Handle>) {
        stream.check("stream")?;
        let current = sim.current()?;
        stream.put(Handle::new(sim.default_stream(current)?.get()), "stream")
    }

    /// Sets the failure mode: 0, the default, continues after a failure; 1 stops all streams of the context. It can
    /// be set once for each stream.
    run fn aclrtSetStreamFailureMode(sim, stream: Handle, mode: u64) {
        let stream = sim.any_stream(stream)?;
        if mode > 1 {
            return refuse(Status::RT_PARAM_INVALID, "the mode must be 0 or 1");
        }
        let mut state = sim.state();
        let Some(found) = state.streams.get_mut(&stream.get()) else {
            return refuse(Status::RT_INVALID_HANDLE, "stream not found");
        };
        if std::mem::replace(&mut found.has_failure_mode, true) {
            return refuse(Status::RT_PARAM_INVALID, "the mode of a stream can be set once");
        }
        let context = found.context;
        let others = state.streams.iter().filter(|(_, other)| mode == 1 && other.context == context);
        for (&id, _) in others {
            sim.machine.continue_on_failure(StreamId::new(id), false)?;
        }
        Ok(())
    }

    /// Sets a callback for stream states; null removes it.
    run fn aclrtRegStreamStateCallback(_sim, name: Text, callback: Option<StateCallback>, argument: Handle) {
        let name = name.bytes("regName")?.to_vec();
        let mut callbacks = lock(&STATE_CALLBACKS);
        let before = callbacks.len();
        callbacks.retain(|(other, ..)| *other != name);
        match callback {
            Some(callback) => callbacks.push((name, callback, argument.value())),
            None if callbacks.len() == before => {
                return refuse(Status::RT_PARAM_INVALID, "callback not found");
            }
            None => {}
        }
        Ok(())
    }
}

/// Creates an empty configuration; null in the stub.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtCreateStreamConfigHandle() -> *mut StreamConfig {
    let config = StreamConfig { work: Handle::new(0), work_size: 0, flags: 0, priority: 0 };
    value_of("aclrtCreateStreamConfigHandle", |_| Box::into_raw(Box::new(config)))
        .unwrap_or(std::ptr::null_mut())
}
