//! A part of a mapping: the reference to a lease, and its release in the right order.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use super::link::GoneCallback;
use super::mapping_source::{MappingSource, Suspended};
use super::table::{KnownLease, LeaseRef};
use crate::backend::stream::BorrowedStream;
use crate::backend::{Access, DeviceBound, DeviceEvent, DeviceIpc, check_stream_of, timelines_of};
use crate::model::address::DeviceRange;
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Result};
use crate::model::tensor::NamedTensor;
use crate::os::process::Owner;
use crate::sharing::Runtime;
use crate::sharing::claims::Claims;
use crate::sharing::timeline::{Termination, Timeline};
use crate::transport::Deadline;
use crate::wire::Token;
use crate::wire::descriptor::Descriptor;

/// An opened export; a [`Mapping`](crate::Mapping) has one for each home device. The lease ends when device work with the
/// memory has completed: [`end_at`](Self::end_at) waits for an event, and after a plain drop the library waits for all work of
/// the device before it ends the lease. Neither blocks the caller.
#[derive(Debug)]
pub(crate) struct OpenPart {
    /// Taken at the end.
    source: Option<MappingSource>,
    settings: PartSettings,
    owner: Owner,
    /// Whether the host has seen that the bytes are ready.
    seen_ready: AtomicBool,
    /// Whether device work may use the memory or its words at the end of the mapping: an address was returned, or a stream waits.
    /// Without, the lease is idle at once when the mapping is dropped.
    is_used: AtomicBool,
    extras: OnceLock<Box<MappingExtras>>,
}

/// The parameters of the open.
#[derive(Clone, Copy, Debug)]
pub(super) struct PartSettings {
    /// The device of the address space.
    pub(super) device: DeviceOrdinal,
    pub(super) access: Access,
    pub(super) at_home: bool,
    /// The timeout for an exporter's answer.
    pub(super) timeout: Duration,
}

/// State that few mappings have.
#[derive(Debug, Default)]
struct MappingExtras {
    /// The descriptor with the address at which the exporter was reached, if it differs from the stated one.
    descriptor: OnceLock<Descriptor>,
    callbacks: Mutex<Vec<u64>>,
    /// The numbers of the callbacks for the drop of the export.
    drop_callbacks: Mutex<Vec<u64>>,
    /// The timeline within the exporting process; otherwise the lease has it.
    local_timeline: Mutex<Option<Timeline>>,
}

impl OpenPart {
    /// Creates a part that belongs to the process of the runtime.
    #[inline]
    pub(super) fn new(runtime: &Runtime, source: MappingSource, settings: PartSettings) -> Self {
        let seen_ready = AtomicBool::new(source.is_ready_by_itself());
        let (is_used, extras) = (AtomicBool::new(false), OnceLock::new());
        Self { source: Some(source), settings, owner: runtime.owner, seen_ready, is_used, extras }
    }

    /// Returns the state of this process. The part keeps less than a reference to it: a program may have thousands.
    pub(crate) fn runtime(&self) -> Result<&'static Runtime> {
        self.owner.check()?;
        Runtime::get()
    }

    /// Notes that device work may use the memory or its words from now on.
    pub(super) fn note_use(&self) {
        // Mostly set already: no write to a cache line that other threads read.
        if !self.is_used.load(Ordering::Relaxed) {
            self.is_used.store(true, Ordering::Release);
        }
    }

    fn source(&self) -> &MappingSource {
        self.source.as_ref().expect("taken when the mapping ends")
    }

    /// Returns the descriptor with the address at which the exporter was reached.
    pub(super) fn reached<'h>(&'h self, descriptor: &'h Descriptor) -> &'h Descriptor {
        let Some(broker) = self.lease().map(|lease| lease.link.broker()) else { return descriptor };
        if *broker == descriptor.contents().broker {
            return descriptor;
        }
        let reached = || descriptor.with(|contents| contents.broker = broker.clone());
        self.extras().descriptor.get_or_init(reached)
    }

    fn extras(&self) -> &MappingExtras {
        self.extras.get_or_init(Box::default)
    }

    /// Returns the range of a named tensor, from its first element to the end of its last.
    pub(super) fn elements_of(&self, region: usize, tensor: &NamedTensor<'_>) -> Result<DeviceRange> {
        match self.source() {
            MappingSource::Copy(copy) => copy.layout.elements_of(copy.buffer.range(), region, tensor),
            source => tensor.elements_in(source.regions()[region]),
        }
    }

    /// Returns the regions; of another process's memory, the whole allocations as the driver mapped them.
    pub(crate) fn regions(&self) -> &[DeviceRange] {
        self.source().regions()
    }

    /// Returns the lease on another process's memory.
    pub(super) fn lease(&self) -> Option<&LeaseRef> {
        match self.source() {
            MappingSource::Remote(lease) => Some(lease),
            MappingSource::Local(_) | MappingSource::Copy(_) | MappingSource::Suspended(_) => None,
        }
    }

    pub(crate) fn is_copy(&self) -> bool {
        matches!(self.source(), MappingSource::Copy(_))
    }

    pub(crate) fn backend(&self) -> &Arc<dyn DeviceIpc> {
        self.source().backend()
    }

    pub(crate) fn device(&self) -> DeviceOrdinal {
        self.settings.device
    }

    pub(crate) fn is_at_home(&self) -> bool {
        self.settings.at_home
    }

    pub(crate) fn access(&self) -> Access {
        self.settings.access
    }

    pub(crate) fn check_process(&self) -> Result<()> {
        self.owner.check()
    }

    pub(crate) fn wait_ready_on(&self, stream: BorrowedStream<'_>) -> Result<()> {
        self.check_stream(stream)?;
        self.check_mapped()?;
        if self.seen_ready.load(Ordering::Acquire) || self.source().is_ready_by_itself() {
            return Ok(());
        }
        self.note_use();
        self.source().wait_ready_on(stream)
    }

    /// Waits on the host until the bytes are ready, for at most the time that `left` returns.
    pub(crate) fn wait_ready(&self, left: impl FnOnce() -> Duration) -> Result<()> {
        if self.seen_ready.load(Ordering::Acquire) || self.source().is_ready_by_itself() {
            return Ok(());
        }
        self.source().wait_ready(left())?;
        self.seen_ready.store(true, Ordering::Release);
        if let Some(lease) = self.lease() {
            lease.note_ready();
        }
        Ok(())
    }

    /// Checks that the exporter has written the bytes, or still may.
    pub(crate) fn check(&self) -> Result<()> {
        self.owner.check()?;
        self.check_mapped()?;
        match self.lease() {
            Some(lease) if !self.seen_ready.load(Ordering::Acquire) => lease.check_ready(),
            Some(lease) => lease.check(),
            None => Ok(()),
        }
    }

    pub(crate) fn timeline(&self) -> Result<Timeline> {
        self.owner.check()?;
        timelines_of(&**self.backend(), self.device())?;
        self.words()
    }

    /// Returns the timeline, also if only hosts can use it.
    pub(crate) fn words(&self) -> Result<Timeline> {
        self.owner.check()?;
        self.note_use();
        match self.source() {
            MappingSource::Suspended(_) => Err(Error::Suspended),
            MappingSource::Remote(lease) => lease.timeline(Deadline::after(self.settings.timeout)),
            MappingSource::Local(local) => {
                let mut own = self.extras().local_timeline.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(known) = &*own {
                    return Ok(known.clone());
                }
                let near = self.runtime()?.exports.timeline_within(local.export, local.lease)?;
                Ok(own.insert(near).clone())
            }
            MappingSource::Copy(_) => Err(Error::Unsupported {
                backend: self.backend().info().name,
                what: "order hand-overs by a copy".into(),
                why: "what the exporter writes from now on does not reach it; open the export again for what is new".into(),
            }),
        }
    }

    /// Returns the token of a grant of the export, for another process.
    pub(crate) fn grant(&self, limit: Duration) -> Result<Token> {
        self.owner.check()?;
        match self.source() {
            MappingSource::Suspended(_) => Err(Error::Suspended),
            MappingSource::Remote(lease) => {
                lease.check()?;
                lease.link.grant(lease.id(), limit, Deadline::after(self.settings.timeout))
            }
            MappingSource::Local(local) => {
                self.runtime()?.exports.begin_timed_grant(local.export, limit, None)
            }
            MappingSource::Copy(_) => Err(Error::Unsupported {
                backend: self.backend().info().name,
                what: "grant others the memory of a copy".into(),
                why: "the lease has ended; send the descriptor, which opens the export while it lives".into(),
            }),
        }
    }

    /// Returns the table of claims of the export.
    pub(crate) fn claims(&self) -> Result<Claims> {
        self.owner.check()?;
        let Some(lease) = self.lease() else {
            return Err(Error::Unsupported {
                backend: self.backend().info().name,
                what: "claim items of an export of the same process or of a copy".into(),
                why: "claims are between two processes".into(),
            });
        };
        lease.check()?;
        lease.link.claims(lease.id(), Deadline::after(self.settings.timeout))
    }

    /// Checks that work on this stream may use the memory now.
    pub(crate) fn check_usable_on(&self, stream: BorrowedStream<'_>) -> Result<()> {
        self.owner.check()?;
        self.check_mapped()?;
        if let Some(lease) = self.lease() {
            lease.check()?;
        }
        self.check_stream(stream)
    }

    /// Checks that the addresses hold memory.
    pub(super) fn check_mapped(&self) -> Result<()> {
        if self.suspended().is_some() { Err(Error::Suspended) } else { Ok(()) }
    }

    /// Returns the reserved addresses, if they hold no memory.
    pub(super) fn suspended(&self) -> Option<&Suspended> {
        match self.source() {
            MappingSource::Suspended(suspended) => Some(suspended),
            _ => None,
        }
    }

    /// Returns whether device work may use the addresses.
    pub(super) fn is_used(&self) -> bool {
        self.is_used.load(Ordering::Acquire)
    }

    pub(crate) fn check_stream(&self, stream: BorrowedStream<'_>) -> Result<()> {
        check_stream_of(stream, &**self.backend(), self.device(), "the mapping")
    }

    /// Registers a callback that runs once when the exporter has terminated, now if it has; not for memory of the same process
    /// or a copy, and not after the drop of this guard.
    pub(crate) fn on_gone(&self, callback: impl FnOnce(&Error) + Send + 'static) {
        let callback = DeviceBound::new(self.backend(), self.device(), callback);
        if let (Some(lease), true) = (self.lease(), self.owner.is_here()) {
            let callback = move |error: &Error| {
                callback.consume(|callback| callback(error));
            };
            let id = lease.link.on_gone(Box::new(callback) as GoneCallback);
            self.extras().callbacks.lock().unwrap_or_else(PoisonError::into_inner).push(id);
        }
    }

    /// Registers a callback that runs once when the exporter drops the export, now if it has; not for memory of the same
    /// process or a copy, and not after the drop of this guard.
    pub(crate) fn on_dropped(&self, callback: impl FnOnce() + Send + 'static) {
        let callback = DeviceBound::new(self.backend(), self.device(), callback);
        if let (Some(lease), true) = (self.lease(), self.owner.is_here()) {
            let callback = move || {
                callback.consume(|callback| callback());
            };
            match lease.notices.on_dropped(Box::new(callback)) {
                Ok(id) => {
                    let known = &self.extras().drop_callbacks;
                    known.lock().unwrap_or_else(PoisonError::into_inner).push(id);
                }
                Err(callback) => {
                    if let Some(runtime) = lease.link.runtime().here() {
                        runtime.worker.submit(callback);
                    }
                }
            }
        }
    }

    /// Ends the lease when the event has been reached. Without an event, as by a plain drop, which waits for the device.
    pub(crate) fn end_at(mut self, event: Option<Box<dyn DeviceEvent>>) {
        let Some(event) = event else { return };
        let Some((runtime, source)) = self.take_for_end() else { return };
        let near = self.end_local_timeline(runtime, &source);
        runtime.imports.releasing.fetch_add(1, Ordering::AcqRel);
        let lease = match &source {
            MappingSource::Remote(lease) => {
                lease.note_releasing();
                Some(KnownLease::of(lease))
            }
            _ => None,
        };
        runtime.worker.submit_when(event, move || {
            runtime.imports.releasing.fetch_sub(1, Ordering::AcqRel);
            end(near);
            source.end(runtime);
            if let Some(lease) = lease {
                lease.note_released();
            }
        });
    }

    /// Ends the lease after the caller has waited for device work with the memory.
    pub(crate) fn end_finished(mut self) {
        let Some((runtime, source)) = self.take_for_end() else { return };
        let near = self.end_local_timeline(runtime, &source);
        let Some(source) = source.return_lease(runtime, true) else { return };
        runtime.worker.submit(move || {
            end(near);
            source.end(runtime);
        });
    }

    /// Ends the lease, and closes it unless other mappings use it.
    pub(crate) fn abandon(self) {
        let lease = self.lease().map(|lease| (KnownLease::of(lease), lease.link.runtime()));
        drop(self);
        if let Some((lease, runtime)) = lease
            && let Some(runtime) = runtime.here()
        {
            // Queued after the end that the drop has submitted.
            runtime.worker.submit(move || runtime.imports.close_known_idle(&lease));
        }
    }

    /// Records an event on the stream; `None` if the device has none.
    pub(crate) fn released_event(&self, stream: BorrowedStream<'_>) -> Result<Option<Box<dyn DeviceEvent>>> {
        self.owner.check()?;
        self.check_stream(stream)?;
        let backend = self.backend();
        if !backend.capabilities(stream.device())?.ipc_events {
            return Ok(None);
        }
        let event = backend.create_event(stream.device())?;
        event.record(stream)?;
        Ok(Some(event))
    }

    /// In the exporting process, the streams of both sides belong to this process. A stream that waits for a signal that is
    /// never submitted would wait for ever, so the waits are satisfied after all submitted signals have arrived; by the poller,
    /// because the worker may be waiting for these streams.
    fn end_local_timeline(&mut self, runtime: &Runtime, source: &MappingSource) -> Option<Timeline> {
        let near = &mut self.extras.get_mut()?.local_timeline;
        let near = near.get_mut().unwrap_or_else(PoisonError::into_inner).take()?;
        runtime.poller.end_once_arrived(near.clone(), source.far_timeline(runtime));
        Some(near)
    }

    /// Takes the resources that are released on the worker's thread after device work has completed.
    fn take_for_end(&mut self) -> Option<(&'static Runtime, MappingSource)> {
        let source = self.source.take()?;
        let Ok(runtime) = self.runtime() else {
            // A forked child: the driver's state is the parent's.
            std::mem::forget(source);
            return None;
        };
        self.forget_callbacks(&source);
        Some((runtime, source))
    }

    /// Exchanges the memory at reserved addresses, whose readiness the host has seen. Returns the source whose lease ends.
    pub(super) fn exchange(&mut self, new: MappingSource, at_home: bool) -> MappingSource {
        let old = self.source.replace(new).expect("taken when the mapping ends");
        self.forget_callbacks(&old);
        self.extras = OnceLock::new();
        self.settings.at_home = at_home;
        *self.seen_ready.get_mut() = true;
        old
    }

    /// Takes the memory from reserved addresses. Returns the source whose lease ends.
    pub(super) fn suspend(&mut self) -> MappingSource {
        let source = self.source();
        let (backend, regions) = (Arc::clone(source.backend()), source.regions().into());
        let places = self.lease().map(|lease| lease.places()).unwrap_or_default();
        let suspended = MappingSource::Suspended(Box::new(Suspended { backend, places, regions }));
        self.exchange(suspended, self.settings.at_home)
    }

    /// Forgets the callbacks for notices of the source's lease.
    fn forget_callbacks(&mut self, source: &MappingSource) {
        if let (MappingSource::Remote(lease), Some(extras)) = (source, self.extras.get_mut()) {
            for id in std::mem::take(extras.callbacks.get_mut().unwrap_or_else(PoisonError::into_inner)) {
                lease.link.forget_callback(id);
            }
            let dropped = extras.drop_callbacks.get_mut().unwrap_or_else(PoisonError::into_inner);
            std::mem::take(dropped).into_iter().for_each(|id| lease.notices.forget_callback(id));
        }
    }
}

/// Ends this side of a timeline.
fn end(near: Option<Timeline>) {
    if let Some(near) = near {
        near.endpoint().end(Termination::Released);
    }
}

impl Drop for OpenPart {
    fn drop(&mut self) {
        let (device, is_used) = (self.device(), *self.is_used.get_mut());
        let Some((runtime, source)) = self.take_for_end() else { return };
        let near = self.end_local_timeline(runtime, &source);
        let Some(source) = source.return_lease(runtime, !is_used) else { return };
        runtime.worker.submit(move || {
            if is_used && let Err(error) = source.backend().synchronize_device(device) {
                tracing::warn!(target: crate::os::log::IMPORT, %error, "the device could not be waited for before a mapping was closed");
            }
            end(near);
            source.end(runtime);
        });
    }
}
