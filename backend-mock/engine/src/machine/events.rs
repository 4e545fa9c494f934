//! Events of a machine: record, wait, share.
//!
//! A record is submitted during the call: another process that is notified afterwards must not find the event complete.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::state::Machine;
use crate::model::{EngineError, EventId, Lifetime, Operation, StreamId};
use crate::shared::{
    Event, EventStorage, ExportEpoch, HANDLE_BYTES, Handle, HandleKind, Identity, Object, ObjectKind,
    PendingRecord, refuse_own,
};
use crate::system::{duplicate, lock};

/// The next number for handles, of all machines of this process.
static NEXT_NUMBER: AtomicU64 = AtomicU64::new(1);

impl Machine {
    /// Creates an event, which is complete until it is first recorded.
    ///
    /// # Errors
    /// `InvalidDevice`; `NotSupported` for an interprocess event if the machine has none; `System`.
    pub fn create_event(&self, device: usize, interprocess: bool) -> Result<EventId, EngineError> {
        self.enter(Operation::CreateEvent)?;
        let physical = self.device(device)?.physical as u32;
        let event = if interprocess {
            self.require_shared_events()?;
            let id = NEXT_NUMBER.fetch_add(1, Ordering::Relaxed);
            let (kind, lifetime) = (ObjectKind::Event, Lifetime::Pinning);
            let identity = Identity { kind, owner: self.process, id, size: 0, physical, lifetime };
            let Object { file, page, .. } = Object::create(identity, 0, "")?;
            Event { cell: Arc::new(EventStorage::Shared(page)), device, shared: Some((file, id)) }
        } else {
            Event { cell: Arc::new(EventStorage::Local(Box::default())), device, shared: None }
        };
        Ok(self.add_event(event))
    }

    /// Exports an event that was created for sharing, as bytes. Another process of the same user can open it while
    /// it exists.
    ///
    /// # Errors
    /// `InvalidEvent`; `InvalidValue` for an event that was not created for sharing, or was opened.
    pub fn export_event(&self, event: EventId) -> Result<[u8; HANDLE_BYTES], EngineError> {
        self.enter(Operation::ExportEvent)?;
        let events = lock(&self.events);
        let event = events.get(&event.get()).ok_or(EngineError::InvalidEvent { event: event.get() })?;
        let Some((file, id)) = &event.shared else {
            return Err(EngineError::invalid_value("an event that this process did not create for sharing"));
        };
        let (kind, fd) = (HandleKind::Event, Object::slot(file));
        Ok(Handle { kind, exporter: self.process, fd, id: *id, epoch: ExportEpoch::default(), size: 0 }
            .encode())
    }

    /// Opens an event of another process on a device. Both processes may record it, also after the other one has
    /// destroyed it or exited.
    ///
    /// # Errors
    /// `InvalidDevice`, `InvalidHandle`, `OwnProcess`, `ExporterGone`, `PermissionDenied`, `NotSupported`, `System`.
    pub fn open_event(&self, handle: &[u8], device: usize) -> Result<EventId, EngineError> {
        self.enter(Operation::OpenEvent)?;
        self.device(device)?;
        self.require_shared_events()?;
        let invalid = |reason| EngineError::InvalidHandle { reason };
        let handle = Handle::decode(handle)?;
        if handle.kind != HandleKind::Event {
            return Err(invalid("the handle names memory, not an event"));
        }
        refuse_own(handle.exporter, self.process)?;
        let Object { page, identity, .. } = Object::open(&handle, ObjectKind::Event, true)?;
        if identity.id != handle.id || page.revocation(handle.epoch).is_some() {
            return Err(invalid("the exporter has destroyed the event"));
        }
        Ok(self.add_event(Event { cell: Arc::new(EventStorage::Shared(page)), device, shared: None }))
    }

    /// Exports an event that was created for sharing, as a file descriptor.
    ///
    /// # Errors
    /// As [`export_event`](Self::export_event), and `System`.
    pub fn export_event_fd(&self, event: EventId) -> Result<OwnedFd, EngineError> {
        self.enter(Operation::ExportEvent)?;
        let events = lock(&self.events);
        let event = events.get(&event.get()).ok_or(EngineError::InvalidEvent { event: event.get() })?;
        match &event.shared {
            Some((file, _)) => duplicate(file),
            None => Err(EngineError::invalid_value("an event that this process did not create for sharing")),
        }
    }

    /// Opens an event by the descriptor of [`export_event_fd`](Self::export_event_fd), also between pid namespaces.
    /// A wait for its records does not detect the death of the recorder.
    ///
    /// # Errors
    /// `InvalidDevice`; `InvalidHandle` for a descriptor of something else; `NotSupported`; `System`.
    pub fn open_event_fd(&self, fd: OwnedFd, device: usize) -> Result<EventId, EngineError> {
        self.enter(Operation::OpenEvent)?;
        self.device(device)?;
        self.require_shared_events()?;
        let Object { page, .. } = Object::adopt(fd, ObjectKind::Event, true)?;
        Ok(self.add_event(Event { cell: Arc::new(EventStorage::Foreign(page)), device, shared: None }))
    }

    /// Destroys an event, or closes an opened one. Queued work that uses it continues.
    ///
    /// # Errors
    /// `InvalidEvent`.
    pub fn destroy_event(&self, event: EventId) -> Result<(), EngineError> {
        self.enter(Operation::DestroyEvent)?;
        let removed = lock(&self.events).remove(&event.get());
        let removed = removed.ok_or(EngineError::InvalidEvent { event: event.get() })?;
        if let (EventStorage::Shared(page), Some(_)) = (&*removed.cell, &removed.shared) {
            page.mark_freed();
        }
        Ok(())
    }

    /// Records an event behind all work of a stream of its device. In every process the record counts as submitted
    /// when the call returns.
    ///
    /// # Errors
    /// `InvalidEvent`, `InvalidStream`; `InvalidValue` if the two belong to different devices.
    pub fn record(&self, event: EventId, stream: StreamId) -> Result<(), EngineError> {
        self.enter(Operation::Record)?;
        let (cell, device) = self.event(event)?;
        let queue = self.stream(stream)?;
        if queue.device != device {
            let what = format!("an event of device {device} recorded on a stream of device {}", queue.device);
            return Err(EngineError::InvalidValue { what });
        }
        queue.enqueue(|| {
            let record = cell.submit(self.process);
            let pending = PendingRecord { cell, record, succeeded: false };
            Box::new(move |_| {
                pending.succeed();
                Ok(())
            })
        })
    }

    /// Makes a stream of any device wait for the record that any process submitted last before this call. Without a
    /// record the stream does not wait.
    ///
    /// # Errors
    /// `InvalidEvent`, `InvalidStream`. On the stream: `PeerLost` if the recording process exited before,
    /// `RecordFailed` if its stream failed.
    pub fn wait(&self, stream: StreamId, event: EventId) -> Result<(), EngineError> {
        self.enter(Operation::Wait)?;
        let (cell, _) = self.event(event)?;
        let queue = self.stream(stream)?;
        let record = cell.latest();
        queue.enqueue(|| {
            let visible = cell.recorder_visible();
            Box::new(move |stream| cell.wait(record, None, visible, || stream.is_cancelled()).map(|_| ()))
        })
    }

    /// Returns whether the record that was submitted last is complete.
    ///
    /// # Errors
    /// `InvalidEvent`, `RecordFailed`.
    pub fn query_event(&self, event: EventId) -> Result<bool, EngineError> {
        self.enter(Operation::QueryEvent)?;
        let (cell, _) = self.event(event)?;
        cell.is_complete(cell.latest())
    }

    /// Waits on the host, at most `limit`, for the record that was submitted last; returns `Ok(false)` if it is not
    /// complete.
    ///
    /// # Errors
    /// `InvalidEvent`, `PeerLost`, `RecordFailed`; `NotPermitted` from a host function.
    pub fn synchronize_event(&self, event: EventId, limit: Option<Duration>) -> Result<bool, EngineError> {
        self.enter_waiting(Operation::SynchronizeEvent)?;
        let (cell, _) = self.event(event)?;
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        cell.wait(cell.latest(), deadline, cell.recorder_visible(), || false)
    }

    fn event(&self, event: EventId) -> Result<(Arc<EventStorage>, usize), EngineError> {
        let events = lock(&self.events);
        let found = events.get(&event.get()).ok_or(EngineError::InvalidEvent { event: event.get() })?;
        Ok((found.cell.clone(), found.device))
    }

    fn add_event(&self, event: Event) -> EventId {
        let id = self.next_id();
        lock(&self.events).insert(id, event);
        EventId::new(id)
    }

    fn require_shared_events(&self) -> Result<(), EngineError> {
        if self.config.events {
            Ok(())
        } else {
            Err(EngineError::NotSupported { what: "events shared between processes (events=off)" })
        }
    }
}
