//! Streams ("Stream Management" and "Stream Memory Operations" in `cuda.h`).

use std::ffi::{c_int, c_uint, c_void};
use std::sync::{Arc, Mutex};

use device_ipc_mock_engine::{Address, EngineError, Machine, StreamId};

use crate::capture::{Capture, node, reject_unsafe_call};
use crate::context::{Context, current};
use crate::entry::driver;
use crate::ffi::{HostFn, Out};
use crate::simulator::{crash, lock, next_handle, simulator};
use crate::status::{Result, Status};

/// `CU_STREAM_NON_BLOCKING`.
pub(crate) const NON_BLOCKING: c_uint = 1;
/// `CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD`; null is the former.
const LEGACY: u64 = 1;
const PER_THREAD: u64 = 2;

/// A stream that a program created.
pub(crate) struct Stream {
    handle: u64,
    pub(crate) context: Arc<Context>,
    pub(crate) engine: StreamId,
    pub(crate) flags: c_uint,
    priority: c_int,
    pub(crate) capture: Mutex<Option<Capture>>,
}

/// The stream of a call.
pub(crate) struct Target {
    pub(crate) context: Arc<Context>,
    pub(crate) engine: StreamId,
    /// `None` for a default stream.
    pub(crate) stream: Option<Arc<Stream>>,
    pub(crate) legacy: bool,
}

/// Returns the stream of a handle: null, 1 and 2 are default streams of the current context.
///
/// # Errors
/// `INVALID_HANDLE`, and the status of an unusable context.
pub(crate) fn target(handle: u64) -> Result<Target> {
    let simulator = simulator()?;
    if handle <= PER_THREAD {
        let context = current()?;
        let legacy = handle <= LEGACY;
        let slot = usize::from(!legacy);
        let mut defaults = lock(&context.defaults);
        let engine = match defaults[slot] {
            Some(engine) => engine,
            None => *defaults[slot].insert(simulator.machine.create_stream(context.device)?),
        };
        drop(defaults);
        return Ok(Target { context, engine, stream: None, legacy });
    }
    let (stream, reset_objects) = {
        let objects = simulator.objects();
        (objects.streams.get(&handle).cloned(), objects.reset_objects.get(&handle).copied())
    };
    let Some(stream) = stream else {
        if reset_objects.is_some() {
            current()?;
            crash("use of a stream whose context was reset");
        }
        return Err(Status::INVALID_HANDLE);
    };
    stream.context.check_usable()?;
    Ok(Target { context: stream.context.clone(), engine: stream.engine, stream: Some(stream), legacy: false })
}

impl Target {
    /// Submits work in the order between default and blocking streams. On a stream that is being captured it
    /// records a node instead.
    pub(crate) fn submit(
        &self,
        work: impl FnOnce(&Arc<Machine>) -> std::result::Result<(), EngineError>,
    ) -> Result {
        if node(self)? {
            return Ok(());
        }
        self.order()?;
        work(&simulator()?.machine).map_err(Status::from)
    }

    /// Orders the legacy default stream behind all blocking streams of the context, and each of them behind it.
    pub(crate) fn order(&self) -> Result {
        let simulator = simulator()?;
        let machine = &simulator.machine;
        let follow = |before: StreamId| -> Result {
            let event = machine.create_event(self.context.device, false)?;
            let ordered = machine.record(event, before).and_then(|()| machine.wait(self.engine, event));
            machine.destroy_event(event)?;
            ordered.map_err(Status::from)
        };
        if self.legacy {
            let blocking: Vec<Arc<Stream>> = {
                let objects = simulator.objects();
                let own = |stream: &&Arc<Stream>| {
                    stream.context.handle == self.context.handle && stream.flags & NON_BLOCKING == 0
                };
                objects.streams.values().filter(own).cloned().collect()
            };
            for stream in blocking {
                if lock(&stream.capture).is_some() {
                    crate::capture::invalidate(&stream);
                    return Err(Status::STREAM_CAPTURE_IMPLICIT);
                }
                follow(stream.engine)?;
            }
        } else if self.stream.as_ref().is_some_and(|stream| stream.flags & NON_BLOCKING == 0) {
            let legacy = lock(&self.context.defaults)[0];
            if let Some(legacy) = legacy {
                follow(legacy)?;
            }
        }
        Ok(())
    }

    /// Waits for all work of the stream.
    pub(crate) fn synchronize(&self) -> Result {
        self.order()?;
        self.context.settle(simulator()?.machine.synchronize(self.engine))
    }
}

fn create(out: Out<u64>, flags: c_uint, priority: c_int) -> Result {
    let context = current()?;
    if flags & !NON_BLOCKING != 0 || out.is_null() {
        return Err(Status::INVALID_VALUE);
    }
    let simulator = simulator()?;
    let engine = simulator.machine.create_stream(context.device)?;
    let handle = next_handle();
    let stream = Stream { handle, context, engine, flags, priority, capture: Mutex::default() };
    simulator.objects().streams.insert(handle, Arc::new(stream));
    out.put(handle)
}

fn is_known_word(target: &Target, address: u64, writes: bool) -> Result {
    if !address.is_multiple_of(8) {
        return Err(Status::INVALID_VALUE);
    }
    crate::copy::known(target, address, 8, writes)
}

fn write_value(stream: u64, address: u64, value: u64, flags: c_uint) -> Result {
    // CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER
    if flags & !1 != 0 {
        return Err(Status::INVALID_VALUE);
    }
    let target = target(stream)?;
    is_known_word(&target, address, true)?;
    target.submit(|machine| machine.write_value64(target.engine, Address::new(address), value))
}

fn wait_value(stream: u64, address: u64, value: u64, flags: c_uint) -> Result {
    // CU_STREAM_WAIT_VALUE_FLUSH, which H200 do not support with host memory, is accepted and has no effect.
    let comparison = flags & !(1 << 30);
    if comparison > 3 {
        return Err(Status::INVALID_VALUE);
    }
    let target = target(stream)?;
    is_known_word(&target, address, false)?;
    let ready = move |word: u64| match comparison {
        // As in the header: cyclic, so that counters may wrap around.
        0 => word.wrapping_sub(value).cast_signed() >= 0,
        1 => word == value,
        2 => word & value != 0,
        _ => !(word | value) != 0,
    };
    target.submit(|machine| machine.wait_word(target.engine, Address::new(address), ready, None, None))
}

driver! {
    /// Creates a stream.
    fn cuStreamCreate(out: Out<u64>, flags: c_uint) {
        create(out, flags, 0)
    }

    /// Creates a stream with a priority, which has no effect.
    fn cuStreamCreateWithPriority(out: Out<u64>, flags: c_uint, priority: c_int) {
        create(out, flags, priority.clamp(-5, 0))
    }

    /// Returns the range of priorities.
    fn cuCtxGetStreamPriorityRange(least: Out<c_int>, greatest: Out<c_int>) {
        current()?;
        least.put_if_not_null(0);
        greatest.put_if_not_null(-5);
        Ok(())
    }

    /// Destroys a stream. Queued work still runs.
    fn cuStreamDestroy_v2(handle: u64) {
        let simulator = simulator()?;
        if handle <= PER_THREAD {
            return Err(Status::INVALID_HANDLE);
        }
        target(handle)?;
        let removed = simulator.objects().streams.remove(&handle);
        let stream = removed.ok_or(Status::INVALID_HANDLE)?;
        // Kept until a call waits for the context, so that a failure of the work is not lost.
        let oldest = {
            let mut draining = lock(&stream.context.draining);
            draining.push(stream.engine);
            (draining.len() > 64).then(|| draining.remove(0))
        };
        if let Some(oldest) = oldest {
            let _ = simulator.machine.destroy_stream(oldest);
        }
        Ok(())
    }

    /// Waits for the work of a stream.
    fn cuStreamSynchronize(handle: u64) {
        let target = target(handle)?;
        crate::capture::refuse_on(&target)?;
        reject_unsafe_call()?;
        target.synchronize()
    }

    /// Returns whether the work of a stream is complete.
    fn cuStreamQuery(handle: u64) {
        let target = target(handle)?;
        crate::capture::refuse_on(&target)?;
        let done = target.context.settle(simulator()?.machine.query(target.engine))?;
        if done { Ok(()) } else { Err(Status::NOT_READY) }
    }

    /// Returns the context of a stream.
    fn cuStreamGetCtx(handle: u64, out: Out<u64>) {
        out.put(target(handle)?.context.handle)
    }

    /// Returns the device of a stream.
    fn cuStreamGetDevice(handle: u64, out: Out<c_int>) {
        out.put(target(handle)?.context.device as c_int)
    }

    /// Returns the flags of a stream.
    fn cuStreamGetFlags(handle: u64, out: Out<c_uint>) {
        out.put(target(handle)?.stream.map_or(0, |stream| stream.flags))
    }

    /// Returns the priority of a stream.
    fn cuStreamGetPriority(handle: u64, out: Out<c_int>) {
        out.put(target(handle)?.stream.map_or(0, |stream| stream.priority))
    }

    /// Returns the unique id of a stream.
    fn cuStreamGetId(handle: u64, out: Out<u64>) {
        let target = target(handle)?;
        out.put(target.stream.map_or(target.engine.get(), |stream| stream.handle))
    }

    /// Submits a host function.
    fn cuLaunchHostFunc(handle: u64, function: Option<HostFn>, data: *mut c_void) {
        let function = function.ok_or(Status::INVALID_VALUE)?;
        let data = data as usize;
        let target = target(handle)?;
        // SAFETY: the program passed a function that may be called once with its data, on another thread.
        let call = move || unsafe { function(data as *mut c_void) };
        target.submit(|machine| machine.host_fn(Box::new(call), target.engine))
    }

    /// Submits a write of a 64-bit word.
    fn cuStreamWriteValue64(stream: u64, address: u64, value: u64, flags: c_uint) {
        write_value(stream, address, value, flags)
    }

    /// Submits a write of a 64-bit word.
    fn cuStreamWriteValue64_v2(stream: u64, address: u64, value: u64, flags: c_uint) {
        write_value(stream, address, value, flags)
    }

    /// Makes a stream wait for a 64-bit word.
    fn cuStreamWaitValue64(stream: u64, address: u64, value: u64, flags: c_uint) {
        wait_value(stream, address, value, flags)
    }

    /// Makes a stream wait for a 64-bit word.
    fn cuStreamWaitValue64_v2(stream: u64, address: u64, value: u64, flags: c_uint) {
        wait_value(stream, address, value, flags)
    }
}
