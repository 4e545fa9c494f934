//! Events of the old and the new kind.
//!
//! An event of `aclrtCreateEventExWithFlag` that was never recorded counts as complete, one of `aclrtCreateEvent`
//! does not (hicann/runtime, `Event::QueryEventStatus`, `isNewMode_`). A wait for either completes at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use device_ipc_mock_engine::EventId;

use crate::abi::{Handle, Pointer};
use crate::call::calls;
use crate::cann::Cann;
use crate::node::Node;
use crate::simulator::Simulator;
use crate::soc::Feature;
use crate::status::{Outcome, Status, refuse};
use crate::stream::limit_of;

const SYNC: u32 = 0x1;
const CAPTURE_STREAM_PROGRESS: u32 = 0x2;
/// `RT_EVENT_DDSYNC` of the runtime; ACL has no name for it.
const OLD_SYNC: u32 = 0x4;
const TIME_LINE: u32 = 0x8;
const DEVICE_USE_ONLY: u32 = 0x10;
const EXTERNAL: u32 = 0x20;
const IPC: u32 = 0x40;

/// The page size of the host with which old drivers can share events.
const PAGE: usize = 4096;

/// An event of this process, created or opened.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) id: EventId,
    flags: u32,
    counts_as_complete: bool,
    recorded: bool,
    /// The time of the last complete record in microseconds; 0 without one.
    stamp: Option<Arc<AtomicU64>>,
    /// The node of an exported event.
    pub(crate) node: Option<Node>,
}

impl Event {
    pub(crate) fn is_shared(&self) -> bool {
        self.flags == IPC
    }

    /// Creates the entry of an opened event.
    pub(crate) fn opened(id: EventId) -> Self {
        Self { id, flags: IPC, counts_as_complete: true, recorded: true, stamp: None, node: None }
    }
}

/// Returns the microseconds since the first call.
fn now() -> u64 {
    static BEGIN: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    BEGIN.get_or_init(Instant::now).elapsed().as_micros() as u64 + 1
}

impl Simulator {
    fn new_event(&self, event: Pointer<Handle>, flags: u32, new: bool) -> Outcome {
        event.check("event")?;
        let shared = flags == IPC;
        let current = self.current()?;
        let id = self.machine.create_event(current.device, shared)?;
        let stamp = (flags & TIME_LINE != 0).then(Arc::default);
        let made = Event { id, flags, counts_as_complete: new, recorded: false, stamp, node: None };
        self.state().events.insert(id.get(), made);
        event.put(Handle::new(id.get()), "event")
    }

    /// Checks that streams can wait for an event, which requires a synchronization flag (hicann/runtime,
    /// `event.hpp`, `IsEventWithoutWaitTask`).
    fn require_wait_task(&self, event: Handle) -> Outcome {
        let flags = self.with_event(event, |found| Ok(found.flags))?;
        if flags & (SYNC | OLD_SYNC | EXTERNAL | IPC) == 0 {
            return refuse(Status::RT_FEATURE_NOT_SUPPORT, "the event was created without ACL_EVENT_SYNC");
        }
        Ok(())
    }

    /// Calls `look` with an event.
    ///
    /// # Errors
    /// 100000 for null, 107017 for an unknown event.
    pub(crate) fn with_event<T>(
        &self,
        event: Handle,
        look: impl FnOnce(&mut Event) -> Outcome<T>,
    ) -> Outcome<T> {
        let handle = event.required("event")?;
        match self.state().events.get_mut(&handle) {
            Some(found) => look(found),
            None => refuse(Status::RT_INVALID_HANDLE, "event not found"),
        }
    }

    /// Calls `look` with an event that is not shared between processes.
    fn with_plain_event<T>(&self, event: Handle, look: impl FnOnce(&mut Event) -> Outcome<T>) -> Outcome<T> {
        self.with_event(event, |found| {
            if found.is_shared() {
                return refuse(
                    Status::RT_FEATURE_NOT_SUPPORT,
                    "the call does not support events with ACL_EVENT_IPC",
                );
            }
            look(found)
        })
    }

    fn record(&self, event: Handle, stream: Handle) -> Outcome {
        let target = self.target(stream)?;
        let (id, stamp) = self.with_event(event, |found| Ok((found.id, found.stamp.clone())))?;
        if let Some(stamp) = stamp {
            stamp.store(0, Ordering::Release);
            self.machine.host_fn(Box::new(move || stamp.store(now(), Ordering::Release)), target.stream)?;
        }
        self.machine.record(id, target.stream)?;
        self.with_event(event, |found| {
            found.recorded = true;
            Ok(())
        })
    }

    fn is_complete(&self, event: Handle) -> Outcome<bool> {
        let (id, recorded, complete) =
            self.with_event(event, |found| Ok((found.id, found.recorded, found.counts_as_complete)))?;
        if !recorded && !self.is_shared_event(event) {
            return Ok(complete);
        }
        Ok(self.machine.query_event(id)?)
    }

    fn is_shared_event(&self, event: Handle) -> bool {
        self.with_event(event, |found| Ok(found.is_shared())).unwrap_or(false)
    }

    fn synchronize(&self, event: Handle, limit: Option<Duration>) -> Outcome {
        let id = self.with_event(event, |found| Ok(found.id))?;
        if self.machine.synchronize_event(id, limit)? {
            return Ok(());
        }
        refuse(Status::RT_EVENT_SYNC_TIMEOUT, "the wait for the event timed out")
    }

    fn stamp_of(&self, event: Handle) -> Outcome<u64> {
        let stamp = self.with_plain_event(event, |found| Ok(found.stamp.clone()))?;
        match stamp.map(|stamp| stamp.load(Ordering::Acquire)) {
            None => refuse(
                Status::RT_EVENT_TIMESTAMP_INVALID,
                "the event was created without ACL_EVENT_TIME_LINE",
            ),
            Some(0) => refuse(Status::RT_EVENT_TIMESTAMP_INVALID, "no record of the event is complete"),
            Some(stamp) => Ok(stamp),
        }
    }

    fn wait(&self, stream: Handle, event: Handle) -> Outcome {
        let id = self.with_event(event, |found| Ok(found.id))?;
        self.require_wait_task(event)?;
        let target = self.target(stream)?;
        Ok(self.machine.wait(target.stream, id)?)
    }
}

calls! {
    /// Creates an event with timing.
    run fn aclrtCreateEvent(sim, event: Pointer<Handle>) {
        sim.new_event(event, SYNC | CAPTURE_STREAM_PROGRESS | TIME_LINE, false)
    }

    /// Creates an event of the old kind.
    run fn aclrtCreateEventWithFlag(sim, event: Pointer<Handle>, flags: u32) {
        let known = SYNC | CAPTURE_STREAM_PROGRESS | TIME_LINE | DEVICE_USE_ONLY | EXTERNAL;
        let alone = [DEVICE_USE_ONLY, EXTERNAL].iter().any(|&flag| flags & flag != 0 && flags != flag);
        if flags == 0 || flags & !known != 0 || alone {
            return refuse(Status::RT_PARAM_INVALID, format!("invalid flags of an event: {flags:#x}"));
        }
        sim.new_event(event, flags, false)
    }

    /// Creates an event of the new kind; with only flag 0x40, one that is shared between processes.
    run fn aclrtCreateEventExWithFlag(sim, event: Pointer<Handle>, flags: u32) {
        // This call rejects 0x10 and 0x20 (hicann/runtime, `ApiErrorDecorator::EventCreateEx`).
        let known = SYNC | CAPTURE_STREAM_PROGRESS | OLD_SYNC | TIME_LINE | IPC;
        if flags == 0 || flags & !known != 0 || (flags & IPC != 0 && flags != IPC) {
            return refuse(Status::RT_PARAM_INVALID, format!("invalid flags of an event: {flags:#x}"));
        }
        if flags == IPC {
            // The headers before 8.5 have neither the flag nor the calls that share such events.
            if sim.config.cann < Cann::V8_5 {
                return refuse(Status::RT_PARAM_INVALID, format!("invalid flags of an event: {flags:#x}"));
            }
            sim.require(Feature::IpcEvent)?;
            if sim.config.page_size != PAGE || sim.config.old_driver {
                return refuse(Status::RT_FEATURE_NOT_SUPPORT, "the driver cannot share events with these pages");
            }
        }
        sim.new_event(event, flags, true)
    }

    /// Destroys an event. Queued work that uses it continues.
    run fn aclrtDestroyEvent(sim, event: Handle) {
        let handle = event.required("event")?;
        let Some(found) = sim.state().events.remove(&handle) else {
            return refuse(Status::RT_INVALID_HANDLE, "event not found");
        };
        Ok(sim.machine.destroy_event(found.id)?)
    }

    /// Records an event behind all work of a stream.
    run fn aclrtRecordEvent(sim, event: Handle, stream: Handle) {
        sim.record(event, stream)
    }

    /// Resets an event to the state before its first record.
    run fn aclrtResetEvent(sim, event: Handle, stream: Handle) {
        sim.target(stream)?;
        sim.with_plain_event(event, |_| Ok(()))?;
        sim.require_wait_task(event)?;
        sim.with_plain_event(event, |found| {
            found.recorded = false;
            Ok(())
        })
    }

    /// Returns 1 if the last record is complete, else 0.
    run fn aclrtQueryEventStatus(sim, event: Handle, status: Pointer<i32>) {
        status.check("status")?;
        status.put(i32::from(sim.is_complete(event)?), "status")
    }

    /// Returns 0 if the last record is complete, else 1: the reverse of `aclrtQueryEventStatus`.
    run fn aclrtQueryEvent(sim, event: Handle, status: Pointer<i32>) {
        status.check("status")?;
        sim.with_plain_event(event, |_| Ok(()))?;
        status.put(i32::from(!sim.is_complete(event)?), "status")
    }

    /// Returns 0 if the last record is complete, else 1.
    run fn aclrtQueryEventWaitStatus(sim, event: Handle, status: Pointer<i32>) {
        status.check("status")?;
        sim.with_plain_event(event, |_| Ok(()))?;
        status.put(i32::from(!sim.is_complete(event)?), "status")
    }

    /// Waits for the last record.
    run fn aclrtSynchronizeEvent(sim, event: Handle) {
        sim.synchronize(event, None)
    }

    /// Waits for the last record, with a time limit.
    run fn aclrtSynchronizeEventWithTimeout(sim, event: Handle, milliseconds: i32) {
        let limit = limit_of(milliseconds)?;
        sim.synchronize(event, limit)
    }

    /// Makes a stream wait for the record that was submitted last, if there is one.
    run fn aclrtStreamWaitEvent(sim, stream: Handle, event: Handle) {
        sim.wait(stream, event)
    }

    /// Makes a stream wait for the last record. The time limit is ignored.
    run fn aclrtStreamWaitEventWithTimeout(sim, stream: Handle, event: Handle, _milliseconds: i32) {
        sim.wait(stream, event)
    }

    /// Returns the milliseconds between the records of two events.
    run fn aclrtEventElapsedTime(sim, milliseconds: Pointer<f32>, start: Handle, end: Handle) {
        milliseconds.check("ms")?;
        let (start, end) = (sim.stamp_of(start)?, sim.stamp_of(end)?);
        milliseconds.put((end as f64 - start as f64) as f32 / 1000.0, "ms")
    }

    /// Returns the time of the last record in microseconds.
    run fn aclrtEventGetTimestamp(sim, event: Handle, stamp: Pointer<u64>) {
        stamp.check("timestamp")?;
        stamp.put(sim.stamp_of(event)?, "timestamp")
    }

    /// Returns the number of an event.
    run fn aclrtGetEventId(sim, event: Handle, id: Pointer<u32>) {
        let number = sim.with_plain_event(event, |found| Ok(found.id.get() as u32))?;
        id.put(number, "eventId")
    }
}
