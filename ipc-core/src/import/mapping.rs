//! The receiver's guard.

#![allow(unsafe_code, reason = "views are made of the range that this guard keeps mapped")]

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::table::{Lease, LeaseKey};
use crate::address::DeviceRange;
use crate::backend::{Access, DeviceEvent, DeviceIpc};
use crate::broker::{Deadline, GoneCallback};
use crate::descriptor::Descriptor;
use crate::device::{DeviceIdentity, DeviceOrdinal};
use crate::error::{Error, Result};
use crate::export::{Shared, check_backend};
use crate::interop::{ViewStream, ViewTypes};
use crate::kill::kill_point;
use crate::lease::LeaseId;
use crate::memory::Buffer;
use crate::process::Owner;
use crate::runtime::Runtime;
use crate::stream::{AsStream, BorrowedStream};
use crate::tensor::{Element, LayoutError, TensorLayout};
use crate::timeline::{End, Side, Timeline, WordPage, timelines_of};

/// Memory of another process, opened on a device of this one.
///
/// The lease ends when device work with the memory has finished: [`release`](Self::release) waits for a stream, and a
/// plain drop waits for everything that had been submitted to the device before it. Neither makes the caller wait.
#[derive(Debug)]
pub struct Mapping {
    parts: Option<MappingParts>,
    owner: Owner,
    /// Has the host seen that the bytes are ready, so that nobody needs to wait any longer?
    seen_ready: AtomicBool,
    callbacks: Mutex<Vec<u64>>,
    /// The timeline where the exporter is this very process; else it is the lease's.
    local_timeline: Mutex<Option<Timeline>>,
}

#[derive(Debug)]
pub(super) struct MappingParts {
    pub(super) backend: Arc<dyn DeviceIpc>,
    pub(super) descriptor: Descriptor,
    pub(super) range: DeviceRange,
    pub(super) access: Access,
    pub(super) at_home: bool,
    /// How long an exporter may take to answer.
    pub(super) timeout: Duration,
    pub(super) hold: Hold,
}

/// What keeps the memory mapped.
#[derive(Debug)]
pub(super) enum Hold {
    /// A lease of another process's broker.
    Remote(LeaseKey, Arc<Lease>),
    /// The exporter is this very process.
    Local(LeaseId, Arc<Shared>),
    /// A copy in a buffer of this process's own.
    Copy(Buffer),
}

impl Hold {
    fn is_ready_by_itself(&self) -> bool {
        match self {
            Self::Remote(_, lease) => lease.ready.is_none(),
            Self::Local(_, shared) => shared.ready.is_none(),
            Self::Copy(_) => true,
        }
    }

    fn wait_ready_on(&self, stream: BorrowedStream<'_>) -> Result<()> {
        match self {
            Self::Remote(_, lease) => lease.ready.as_ref().map_or(Ok(()), |ready| ready.wait_on(stream)),
            Self::Local(_, shared) => {
                shared.ready.as_ref().map_or(Ok(()), |ready| ready.event.wait_on(stream))
            }
            Self::Copy(_) => Ok(()),
        }
    }

    fn wait_ready(&self, timeout: Duration) -> Result<()> {
        match self {
            Self::Remote(_, lease) => lease.ready.as_ref().map_or(Ok(()), |ready| ready.synchronize(timeout)),
            Self::Local(_, shared) => {
                shared.ready.as_ref().map_or(Ok(()), |ready| ready.event.synchronize(timeout))
            }
            Self::Copy(_) => Ok(()),
        }
    }
}

impl Mapping {
    pub(super) fn new(parts: MappingParts) -> Self {
        Self {
            parts: Some(parts),
            owner: Owner::current(),
            seen_ready: AtomicBool::new(false),
            callbacks: Mutex::default(),
            local_timeline: Mutex::default(),
        }
    }

    /// From the allocations as the driver mapped them to the region that the descriptor names.
    pub(super) fn narrowed(mut self) -> Result<Self> {
        let parts = self.parts.as_mut().expect("taken when the mapping ends");
        let (offset, len) = (parts.descriptor.offset, parts.descriptor.len);
        parts.range = parts.range.slice(offset, len).ok_or_else(|| {
            let mapped = parts.range.len;
            Error::InvalidRegion(format!(
                "the descriptor names {len} bytes at offset {offset}, and the driver mapped {mapped} bytes"
            ))
        })?;
        Ok(self)
    }

    fn parts(&self) -> &MappingParts {
        self.parts.as_ref().expect("taken when the mapping ends")
    }

    /// The bytes: an address of this process, in the address space of [`device`](Self::device).
    pub fn range(&self) -> DeviceRange {
        self.parts().range
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.range().len
    }

    /// Never true: a region has at least one byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The device in whose address space the mapping is.
    pub fn device(&self) -> DeviceOrdinal {
        self.range().device
    }

    /// The device where the bytes live; of a [copy](Self::is_copy), where the original does.
    pub fn home(&self) -> DeviceIdentity {
        self.parts().descriptor.home
    }

    /// Do the bytes live on the device of the mapping, so that access does not cross cards? Those of a
    /// [copy](Self::is_copy) do.
    pub fn is_at_home(&self) -> bool {
        self.parts().at_home
    }

    /// Is this a copy that was made when it was opened ([`OpenBuilder::or_staged`](crate::OpenBuilder::or_staged),
    /// [`OpenBuilder::staged`](crate::OpenBuilder::staged))? What either side writes from then on is not seen by the other,
    /// and neither the end of the export nor that of its process touches it.
    pub fn is_copy(&self) -> bool {
        matches!(self.parts().hold, Hold::Copy(_))
    }

    /// What this process may do with the memory.
    pub fn access(&self) -> Access {
        self.parts().access
    }

    /// Element type, shape and strides, where the exporter stated them.
    pub fn layout(&self) -> Option<&TensorLayout> {
        self.parts().descriptor.layout.as_ref()
    }

    /// What the mapping was opened by. Forward it to let a third process open the memory.
    pub fn descriptor(&self) -> &Descriptor {
        &self.parts().descriptor
    }

    /// Makes the stream wait, on the device, until the bytes are ready. [`OpenBuilder::on`](crate::OpenBuilder::on) and
    /// the views do so by themselves.
    ///
    /// # Errors
    ///
    /// [`Error::WrongBackend`] for a stream of another backend, else what the vendor says.
    pub fn order_after_ready<M>(&self, stream: &impl AsStream<M>) -> Result<()> {
        self.owner.check()?;
        self.wait_ready_on(stream.as_stream())
    }

    pub(super) fn wait_ready_on(&self, stream: BorrowedStream<'_>) -> Result<()> {
        self.check_stream(stream)?;
        if self.seen_ready.load(Ordering::Acquire) {
            return Ok(());
        }
        self.parts().hold.wait_ready_on(stream)
    }

    /// Waits on the host until the bytes are ready.
    pub(super) fn wait_ready(&self, timeout: Duration) -> Result<()> {
        if !self.parts().hold.is_ready_by_itself() {
            self.parts().hold.wait_ready(timeout)?;
            self.seen_ready.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// The timeline between this process and the exporter, for hand-overs that repeat without either host waiting.
    /// Mappings that share a lease (the same export on the same device with the same access) share it.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] where the mapping's device has no timelines, and for a [copy](Self::is_copy);
    /// [`Error::ExporterGone`], [`Error::ExportDropped`], and what else a message to the exporter can meet.
    pub fn timeline(&self) -> Result<Timeline> {
        self.owner.check()?;
        timelines_of(&*self.parts().backend, self.device())?;
        self.words()
    }

    /// The same also where only hosts can use it.
    pub(crate) fn words(&self) -> Result<Timeline> {
        self.owner.check()?;
        let parts = self.parts();
        match &parts.hold {
            Hold::Remote(_, lease) => lease.timeline(&parts.backend, Deadline::after(parts.timeout)),
            Hold::Local(lease, _) => {
                let mut own = self.local_timeline.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(known) = &*own {
                    return Ok(known.clone());
                }
                let (export, pid) = (parts.descriptor.export, std::process::id());
                let page = || Ok((WordPage::create()?, 0));
                let far = Runtime::get()?.exports.timeline(export, *lease, true, page)?;
                let (far, _) = far.ok_or(Error::ExportDropped { pid })?;
                let place = (Arc::clone(far.ends().page()), far.ends().slot());
                let near = Timeline::new(place, Side::Importer, Arc::clone(&parts.backend), pid);
                Ok(own.insert(near).clone())
            }
            Hold::Copy(_) => Err(Error::Unsupported {
                backend: parts.backend.info().name,
                what: "order hand-overs by a copy".into(),
                why: "what the exporter writes from now on does not reach it; open the export again for what is new".into(),
            }),
        }
    }

    /// The elements, to be read by work on `stream`. The stream waits until the bytes are ready.
    ///
    /// The view's type is the stream's: [`View`](crate::View) on a [`Stream`](crate::Stream), what takes part in
    /// cudarc's kernels and copies on cudarc's `CudaStream`. Name the element type only where it cannot be inferred:
    /// `mapping.view::<f32, _>(&stream)`.
    ///
    /// # Errors
    ///
    /// [`Error::WrongStream`] for a stream of another device; [`Error::Layout`] for another element type than the
    /// tensor's, a tensor with gaps, or bytes that are not whole, aligned elements.
    pub fn view<T: Element, M: ViewTypes>(&self, stream: &impl ViewStream<M>) -> Result<M::View<'_, T>> {
        let range = self.viewable::<T>(stream.as_stream())?;
        // SAFETY: the view borrows the mapping, and `viewable` checked size and alignment.
        unsafe { stream.view(range) }
    }

    /// The elements, to be read and written by work on `stream`. The stream waits until the bytes are ready.
    ///
    /// # Errors
    ///
    /// As [`view`](Self::view), and [`Error::AccessDenied`] for a read-only mapping.
    pub fn view_mut<T: Element, M: ViewTypes>(
        &self,
        stream: &impl ViewStream<M>,
    ) -> Result<M::ViewMut<'_, T>> {
        let granted = self.access();
        if !granted.is_writable() {
            return Err(Error::AccessDenied { wanted: Access::ReadWrite, granted });
        }
        let range = self.viewable::<T>(stream.as_stream())?;
        // SAFETY: as in `view`; the mapping is read-write. Views are device addresses: what two streams or two
        // processes do with them at a time is for events to order, as with all device memory.
        unsafe { stream.view_mut(range) }
    }

    pub(crate) fn backend(&self) -> &Arc<dyn DeviceIpc> {
        &self.parts().backend
    }

    /// May work on this stream use the memory now?
    pub(crate) fn check_usable_on(&self, stream: BorrowedStream<'_>) -> Result<()> {
        self.owner.check()?;
        if let Hold::Remote(_, lease) = &self.parts().hold {
            lease.check()?;
        }
        self.check_stream(stream)
    }

    fn viewable<T: Element>(&self, stream: BorrowedStream<'_>) -> Result<DeviceRange> {
        self.check_usable_on(stream)?;
        let range = match self.layout() {
            Some(layout) if layout.dtype() != T::DTYPE => {
                return Err(LayoutError::WrongDtype { actual: layout.dtype(), wanted: T::DTYPE }.into());
            }
            Some(layout) if !layout.is_contiguous() => {
                let (shape, strides) = (layout.shape().to_vec(), layout.strides().to_vec());
                return Err(LayoutError::NotContiguous { shape, strides }.into());
            }
            Some(layout) => elements_of(layout, self.range())?,
            None => self.range(),
        };
        let element = size_of::<T>() as u64;
        if !range.ptr.get().is_multiple_of(align_of::<T>() as u64) || !range.len.is_multiple_of(element) {
            return Err(LayoutError::Misaligned { address: range.ptr.get(), len: range.len, element }.into());
        }
        self.wait_ready_on(stream)?;
        Ok(range)
    }

    fn check_stream(&self, stream: BorrowedStream<'_>) -> Result<()> {
        check_backend("the stream", stream.backend(), self.parts().backend.info().name)?;
        if stream.device() != self.device() {
            let (stream, expected) = (stream.device(), self.device());
            return Err(Error::WrongStream { stream, what: "the mapping", expected });
        }
        Ok(())
    }

    /// Has `callback` run, once, when the exporter has ended; at once where it has already. It runs on a thread of the
    /// library, and not at all for memory of this very process, for a [copy](Self::is_copy), or once the mapping is gone.
    pub fn on_gone(&self, callback: impl FnOnce(&Error) + Send + 'static) {
        if let (Hold::Remote(_, lease), true) = (&self.parts().hold, self.owner.is_here()) {
            let id = lease.link.on_gone(Box::new(callback) as GoneCallback);
            self.callbacks.lock().unwrap_or_else(PoisonError::into_inner).push(id);
        }
    }

    /// Ends the mapping when the stream gets here: work submitted to it so far may still use the memory.
    ///
    /// Work on other streams must have been ordered before that, by an event. Does not wait.
    ///
    /// # Errors
    ///
    /// [`ReleaseError`], which gives the mapping back: [`Error::WrongStream`]; [`Error::StreamCapturing`], and the capture
    /// is intact as long as the mapping is kept (a plain drop waits for the device, which CUDA permits in no capture);
    /// else what the vendor says.
    pub fn release<M>(mut self, stream: &impl AsStream<M>) -> Result<(), ReleaseError> {
        match self.released_event(stream.as_stream()) {
            // A plain drop waits for the whole device, this stream included.
            Ok(None) => {}
            Ok(Some(event)) => {
                if let Some((runtime, parts)) = self.take_for_end() {
                    let near = self.end_local_timeline(runtime, &parts);
                    runtime.worker.submit_when(event, move || {
                        end(near);
                        parts.let_go(runtime);
                    });
                }
            }
            Err(error) => return Err(ReleaseError { error, mapping: Box::new(self) }),
        }
        Ok(())
    }

    /// Ends the mapping. The caller knows that device work with the memory has finished.
    pub(crate) fn end_finished(mut self) {
        if let Some((runtime, parts)) = self.take_for_end() {
            let near = self.end_local_timeline(runtime, &parts);
            runtime.worker.submit(move || {
                end(near);
                parts.let_go(runtime);
            });
        }
    }

    /// An event that the stream reaches when it is done, where there are any.
    fn released_event(&self, stream: BorrowedStream<'_>) -> Result<Option<Box<dyn DeviceEvent>>> {
        self.owner.check()?;
        self.check_stream(stream)?;
        let backend = &self.parts().backend;
        if !backend.capabilities(stream.device())?.ipc_events {
            return Ok(None);
        }
        let event = backend.create_event(stream.device())?;
        event.record(stream)?;
        Ok(Some(event))
    }

    /// Where the exporter is this very process, its streams are this process's too. One that waits for a signal that nobody
    /// will submit any more would be waited for in vain, so they are let through once all that was submitted has arrived; by
    /// the poller, as the worker may be waiting for them already.
    fn end_local_timeline(&mut self, runtime: &Runtime, parts: &MappingParts) -> Option<Timeline> {
        let near = self.local_timeline.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(near) = &near {
            runtime.poller.end_once_arrived(near.clone(), parts.far_timeline(runtime));
        }
        near
    }

    /// Everything that has to be let go of, on the worker's thread, once device work has finished.
    fn take_for_end(&mut self) -> Option<(&'static Runtime, MappingParts)> {
        let parts = self.parts.take()?;
        let Some(runtime) = Runtime::of_guard(&self.owner) else {
            // A forked child: the driver's state is the parent's.
            std::mem::forget(parts);
            return None;
        };
        if let Hold::Remote(_, lease) = &parts.hold {
            for id in std::mem::take(self.callbacks.get_mut().unwrap_or_else(PoisonError::into_inner)) {
                lease.link.forget_callback(id);
            }
        }
        Some((runtime, parts))
    }
}

/// The bytes from a tensor's first element to the end of its last.
fn elements_of(layout: &TensorLayout, region: DeviceRange) -> Result<DeviceRange> {
    layout.check_fits(region.len)?;
    let (start, end) = if layout.is_empty() { (0, 0) } else { (layout.start_bytes()?, layout.span_bytes()?) };
    Ok(region.slice(start, end - start).ok_or(LayoutError::Overflow)?)
}

/// Nobody waits by this side of a timeline any longer.
fn end(near: Option<Timeline>) {
    if let Some(near) = near {
        near.ends().end(End::Released);
    }
}

impl MappingParts {
    /// The exporter's side of the timeline, where that is this very process.
    fn far_timeline(&self, runtime: &Runtime) -> Option<Timeline> {
        match &self.hold {
            Hold::Local(lease, _) => runtime.exports.known_timeline(self.descriptor.export, *lease),
            Hold::Remote(..) | Hold::Copy(_) => None,
        }
    }

    fn let_go(self, runtime: &'static Runtime) {
        kill_point!("importer:letting-go");
        match self.hold {
            Hold::Remote(key, lease) => runtime.imports.release(&key, lease),
            Hold::Local(lease, shared) => {
                drop(shared);
                runtime.exports.release(self.descriptor.export, lease, End::Released);
            }
            Hold::Copy(buffer) => drop(buffer),
        }
    }
}

/// Why a mapping was not released on a stream, and the mapping.
pub struct ReleaseError {
    error: Error,
    mapping: Box<Mapping>,
}

impl ReleaseError {
    /// Why.
    pub const fn error(&self) -> &Error {
        &self.error
    }

    /// Gives the mapping back.
    pub fn into_mapping(self) -> Mapping {
        *self.mapping
    }
}

impl fmt::Debug for ReleaseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl fmt::Display for ReleaseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for ReleaseError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

/// The mapping ends as by a plain drop.
impl From<ReleaseError> for Error {
    fn from(failed: ReleaseError) -> Self {
        failed.error
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let Some((runtime, parts)) = self.take_for_end() else { return };
        let near = self.end_local_timeline(runtime, &parts);
        runtime.worker.submit(move || {
            if let Err(error) = parts.backend.synchronize_device(parts.range.device) {
                tracing::warn!(%error, "the device could not be waited for before a mapping was closed");
            }
            end(near);
            parts.let_go(runtime);
        });
    }
}
