//! Events ("Event Management" in `cuda.h`).

use std::ffi::c_uint;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use device_ipc_mock_engine::{EngineError, EventId};

use crate::capture::{capture_of, invalidate, node, reject_unsafe_call};
use crate::context::{Context, current};
use crate::directory::Directory;
use crate::entry::driver;
use crate::ffi::Out;
use crate::simulator::{ResetObject, Simulator, crash, lock, next_handle, simulator};
use crate::status::{Result, Status};
use crate::stream::target;

/// `CU_EVENT_BLOCKING_SYNC`, `CU_EVENT_DISABLE_TIMING`, `CU_EVENT_INTERPROCESS`.
const DISABLE_TIMING: c_uint = 2;
const INTERPROCESS: c_uint = 4;
const ALL_FLAGS: c_uint = 7;
/// `CU_EVENT_WAIT_EXTERNAL`: in a capture, a wait for a record at the execution of the graph.
const WAIT_EXTERNAL: c_uint = 1;

/// An event that this process created, or opened from another.
pub(crate) struct Event {
    pub(crate) handle: u64,
    pub(crate) context: Arc<Context>,
    pub(crate) engine: EventId,
    pub(crate) interprocess: bool,
    pub(crate) opened: bool,
    /// The slot of an exported event.
    pub(crate) slot: Mutex<Option<u32>>,
    /// The capture in which the event was recorded; 0 for none.
    captured: AtomicU64,
    recorded: AtomicBool,
}

impl Event {
    pub(crate) fn new(context: Arc<Context>, engine: EventId, interprocess: bool, opened: bool) -> Arc<Self> {
        Arc::new(Self {
            handle: next_handle(),
            context,
            engine,
            interprocess,
            opened,
            slot: Mutex::default(),
            captured: AtomicU64::new(0),
            // The creator may have recorded it.
            recorded: AtomicBool::new(opened),
        })
    }

    /// Destroys the engine's event, unless other processes can find it in the directory.
    pub(crate) fn retire(&self, simulator: &Simulator, directory: Option<&mut Directory>) {
        match (lock(&self.slot).take(), directory) {
            (Some(slot), Some(directory)) => directory.retire(slot),
            _ => drop(simulator.machine.destroy_event(self.engine)),
        }
    }

    /// Rejects a query of a record that is only captured, which invalidates the capture.
    fn refuse_captured(&self) -> Result {
        let captured = self.captured.load(Ordering::Acquire);
        if captured == 0 || !crate::capture::invalidate_by_id(captured)? {
            return Ok(());
        }
        Err(Status::CAPTURED_EVENT)
    }

    /// Converts the result of a wait or query. A failure before the record is one of the context, unless another
    /// process recorded it.
    fn settle<T>(&self, result: std::result::Result<T, EngineError>) -> Result<T> {
        match result {
            Err(EngineError::PeerLost { .. } | EngineError::RecordFailed) if self.opened => {
                Err(Status::LAUNCH_FAILED)
            }
            result => self.context.settle(result),
        }
    }
}

/// Returns the event of a handle, whose context must be usable.
pub(crate) fn event(handle: u64) -> Result<Arc<Event>> {
    let (found, reset_objects) = {
        let objects = simulator()?.objects();
        (objects.events.get(&handle).cloned(), objects.reset_objects.get(&handle).copied())
    };
    match (found, reset_objects) {
        (Some(event), _) => event.context.check_usable().map(|()| event),
        (None, Some(ResetObject::Event)) => {
            // As measured: while the reset context is current, every use of the event is rejected. Later one of an ordinary event
            // is rejected by one driver and crashes another.
            current()?;
            crash("use of an event whose context was reset");
        }
        _ => Err(Status::INVALID_HANDLE),
    }
}

/// Adds an event to the table, and writes its handle.
pub(crate) fn add(event: Arc<Event>, out: Out<u64>) -> Result {
    let handle = event.handle;
    simulator()?.objects().events.insert(handle, event);
    out.put(handle)
}

driver! {
    /// Creates an event.
    fn cuEventCreate(out: Out<u64>, flags: c_uint) {
        let context = current()?;
        let interprocess = flags & INTERPROCESS != 0;
        let wrong = flags & !ALL_FLAGS != 0 || (interprocess && flags & DISABLE_TIMING == 0);
        if wrong || out.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        let engine = simulator()?.machine.create_event(context.device, interprocess)?;
        add(Event::new(context, engine, interprocess, false), out)
    }

    /// Destroys an event, or closes an opened one. Pending waits continue.
    fn cuEventDestroy_v2(handle: u64) {
        let simulator = simulator()?;
        event(handle)?;
        let mut objects = simulator.objects();
        let event = objects.events.remove(&handle).ok_or(Status::INVALID_HANDLE)?;
        event.retire(simulator, objects.directory.as_mut());
        Ok(())
    }

    /// Records an event behind all work of a stream of its context.
    fn cuEventRecord(handle: u64, stream: u64) {
        let event = event(handle)?;
        let target = target(stream)?;
        if event.context.handle != target.context.handle {
            return Err(Status::INVALID_HANDLE);
        }
        if let Some(capture) = capture_of(&target) {
            if event.interprocess {
                // Rejected; the capture continues.
                return Err(Status::STREAM_CAPTURE_UNSUPPORTED);
            }
            // The record orders captured work and is not a node.
            event.captured.store(capture, Ordering::Release);
            return Ok(());
        }
        event.captured.store(0, Ordering::Release);
        event.recorded.store(true, Ordering::Release);
        target.submit(|machine| machine.record(event.engine, target.engine))
    }

    /// Makes a stream of any device wait for the last record at the time of the call.
    fn cuStreamWaitEvent(stream: u64, handle: u64, flags: c_uint) {
        let event = event(handle)?;
        let target = target(stream)?;
        if flags & !WAIT_EXTERNAL != 0 {
            return Err(Status::INVALID_VALUE);
        }
        if event.interprocess && !event.opened && event.context.handle != target.context.handle {
            crash(&format!(
                "cuStreamWaitEvent on a stream of another context (of device {}) for an event of device {} that was \
                 made with CU_EVENT_INTERPROCESS",
                target.context.device, event.context.device
            ));
        }
        let captured = Some(event.captured.load(Ordering::Acquire)).filter(|capture| *capture != 0);
        match (capture_of(&target), captured) {
            (None, None) => {}
            (here, there) if here == there => return Ok(()),
            // Never recorded: no wait.
            (Some(_), None) if !event.recorded.load(Ordering::Acquire) => return Ok(()),
            (Some(_), None) if flags & WAIT_EXTERNAL != 0 => return node(&target).map(drop),
            (here, _) => {
                if let (Some(stream), Some(_)) = (&target.stream, here) {
                    invalidate(stream);
                }
                return Err(Status::STREAM_CAPTURE_ISOLATION);
            }
        }
        target.submit(|machine| machine.wait(target.engine, event.engine))
    }

    /// Returns whether the last record is complete.
    fn cuEventQuery(handle: u64) {
        let event = event(handle)?;
        event.refuse_captured()?;
        reject_unsafe_call()?;
        let done = event.settle(simulator()?.machine.query_event(event.engine))?;
        if done { Ok(()) } else { Err(Status::NOT_READY) }
    }

    /// Waits for the last record.
    fn cuEventSynchronize(handle: u64) {
        let event = event(handle)?;
        event.refuse_captured()?;
        reject_unsafe_call()?;
        event.settle(simulator()?.machine.synchronize_event(event.engine, None)).map(drop)
    }
}
