//! The importer's guard.

use std::fmt;
use std::time::Duration;

use super::open_part::OpenPart;
use super::reserved_open::ReservedOpen;
use crate::backend::stream::{AsStream, BorrowedStream};
use crate::backend::{Access, DeviceEvent};
use crate::model::address::{DevicePtr, DeviceRange};
use crate::model::device::{DeviceIdentity, DeviceOrdinal};
use crate::model::error::{Error, Result};
use crate::model::one_or_many::OneOrMany;
use crate::model::tensor::TensorLayout;
use crate::sharing::RecoverableError;
use crate::sharing::claims::Claims;
use crate::sharing::timeline::Timeline;
use crate::wire::Grant;
use crate::wire::descriptor::Descriptor;

/// Opened memory of another process: one region, or any number of named tensors.
///
/// The lease ends when device work with the memory has completed: [`release`](Self::release) waits for a stream; after a plain
/// drop, the library waits for all work of the device before it ends the lease or uses it again. Neither blocks the caller. A
/// mapping that device work cannot have used (no view or address of it was taken, and no stream waits for it) is released at once,
/// also by a plain drop: for example after [`to_host`](Self::to_host).
///
/// # Examples
///
/// ```
/// # fn main() -> device_ipc_core::Result<()> {
/// # let backend = device_ipc_mock::MockBackend::from_spec("devices=1").expect("a valid specification");
/// # let ipc = device_ipc_core::Ipc::with_backend(backend);
/// let stream = ipc.create_stream(0)?;
/// let export = ipc.share(ipc.allocate(0, 16)?).start()?;
/// let mapping = ipc.open(export.descriptor()).on(&stream)?;
/// mapping.view_mut(&stream)?.copy_from(&[1.0_f32, 2.0, 3.0, 4.0])?;
/// assert_eq!(mapping.view::<f32, _>(&stream)?.to_vec()?, [1.0, 2.0, 3.0, 4.0]);
/// mapping.release(&stream)?; // the lease ends when the stream reaches this point
/// # Ok(())
/// # }
/// ```
pub struct Mapping {
    pub(super) descriptor: Descriptor,
    /// One part for each home device.
    pub(super) parts: OneOrMany<OpenPart>,
    /// The unnamed region; empty for named tensors.
    pub(super) range: DeviceRange,
    /// Present if the addresses are reserved.
    pub(super) reserved: Option<Box<ReservedOpen>>,
}

/// Without the lease and the vendor's objects, whose handles are not for logs.
impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapping")
            .field("descriptor", &self.descriptor)
            .field("range", &self.range)
            .finish_non_exhaustive()
    }
}

impl Mapping {
    /// Creates the mapping of an unnamed region.
    #[inline]
    pub(super) fn of_region(part: OpenPart, descriptor: &Descriptor, range: DeviceRange) -> Self {
        Self { descriptor: descriptor.clone(), parts: OneOrMany::One(part), range, reserved: None }
    }

    /// Creates the mapping of named tensors.
    pub(super) fn of_tensors(parts: OneOrMany<OpenPart>, descriptor: &Descriptor) -> Self {
        let range = DeviceRange::new(parts[0].device(), DevicePtr::NULL, 0);
        Self { descriptor: descriptor.clone(), parts, range, reserved: None }
    }

    pub(crate) fn first_part(&self) -> &OpenPart {
        &self.parts[0]
    }

    /// Returns the range of the region in the address space of [`device`](Self::device).
    ///
    /// # Panics
    ///
    /// For named tensors, which may lie in several regions: use [`get`](Self::get) or [`tensors`](Self::tensors).
    pub fn range(&self) -> DeviceRange {
        assert!(
            self.range.len > 0,
            "a mapping of named tensors has no single range; take Mapping::get or Mapping::tensors"
        );
        self.first_part().note_use();
        self.range
    }

    /// Returns the regions that the memory lies in, each once: the range of an unnamed region; for named tensors the allocations
    /// as the driver mapped them, those side by side as one. The bytes of each tensor lie in exactly one of the regions.
    ///
    /// A framework needs one import of each region to make views of all tensors, however many there are.
    ///
    /// # Examples
    ///
    /// ```
    /// # fn main() -> device_ipc_core::Result<()> {
    /// # let backend = device_ipc_mock::MockBackend::from_spec("devices=1").expect("a valid specification");
    /// # let ipc = device_ipc_core::Ipc::with_backend(backend);
    /// # use device_ipc_core::{Dtype, TensorLayout};
    /// let block = std::sync::Arc::new(ipc.allocate(0, 1 << 20)?);
    /// let mut set = ipc.tensors();
    /// for layer in 0..100 {
    ///     let layout = TensorLayout::contiguous(Dtype::F32, [16, 16])?;
    ///     set.owned(format!("layer.{layer}"), block.slice(layer * 1024, 1024)?, Some(layout))?;
    /// }
    /// let export = ipc.share_all(set).start()?;
    /// let mapping = ipc.open(export.descriptor()).at_home()?;
    /// assert_eq!((mapping.tensors().len(), mapping.regions().count()), (100, 1));
    /// # Ok(())
    /// # }
    /// ```
    pub fn regions(&self) -> impl Iterator<Item = DeviceRange> {
        self.parts.iter().for_each(OpenPart::note_use);
        let unnamed = Some(self.range).filter(|range| range.len > 0);
        let parts = if unnamed.is_some() { &[] } else { &self.parts[..] };
        let mapped = parts.iter().flat_map(|part| part.regions().iter().copied());
        unnamed.into_iter().chain(mapped.filter(|range| range.len > 0))
    }

    /// Returns the length in bytes: of the region, or of all allocations of the named tensors.
    pub fn len(&self) -> u64 {
        if self.range.len > 0 { self.range.len } else { self.descriptor.len() }
    }

    /// Returns `false`: shared memory has at least one byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the device whose address space the mapping is in; the first of [`devices`](Self::devices).
    pub fn device(&self) -> DeviceOrdinal {
        self.first_part().device()
    }

    /// Returns the devices whose address spaces the tensors are in, each once.
    pub fn devices(&self) -> Vec<DeviceOrdinal> {
        let mut devices: Vec<_> = self.parts.iter().map(OpenPart::device).collect();
        devices.sort_unstable();
        devices.dedup();
        devices
    }

    /// Returns the home device of the memory, the first of several; for a [copy](Self::is_copy), that of the original.
    pub fn home(&self) -> DeviceIdentity {
        self.descriptor.home()
    }

    /// Returns whether the memory resides on the device of the mapping, so that no access crosses devices. This is true for a
    /// [copy](Self::is_copy).
    pub fn is_at_home(&self) -> bool {
        self.parts.iter().all(OpenPart::is_at_home)
    }

    /// Returns whether any tensor is a copy ([`OpenBuilder::copy`](crate::OpenBuilder::copy)). Later writes on either side are not visible on the other, and the
    /// end of the export or of its process does not affect the copy.
    pub fn is_copy(&self) -> bool {
        self.parts.iter().any(OpenPart::is_copy)
    }

    /// Returns the access of this process to the memory.
    pub fn access(&self) -> Access {
        self.first_part().access()
    }

    /// Returns the layout of the region, if the exporter stated one.
    pub fn layout(&self) -> Option<&TensorLayout> {
        self.descriptor.layout()
    }

    /// Returns the descriptor of the memory, with the address at which the exporter was reached. Forward it to let a third
    /// process open the memory.
    pub fn descriptor(&self) -> &Descriptor {
        let opened = self.parts.iter().find(|part| !part.is_copy());
        opened.unwrap_or(self.first_part()).reached(&self.descriptor)
    }

    /// Makes the stream wait, on the device, until the bytes are ready. [`OpenBuilder::on`](crate::OpenBuilder::on) and the
    /// views do this already.
    ///
    /// # Errors
    ///
    /// [`Error::WrongBackend`] and [`Error::WrongStream`] for a stream of another backend or of a device without any of the
    /// memory; the vendor's error.
    pub fn wait_ready<M>(&self, stream: &impl AsStream<M>) -> Result<()> {
        let stream = stream.as_stream();
        self.check_stream(stream)?;
        for part in self.on_device_of(stream) {
            part.check_process()?;
            part.wait_ready_on(stream)?;
        }
        Ok(())
    }

    /// Checks that the exporter has written the bytes, or still may.
    ///
    /// A stream that waits for an exporter that terminates continues, **also over memory that was never written**: call this method
    /// when the work behind the wait is complete, before its result is used. Bytes that were written before the termination stay
    /// valid, as does a [copy](Self::is_copy).
    ///
    /// # Errors
    ///
    /// [`Error::ExporterGone`] if the exporter terminated before its streams reached that point, or the mapping was closed by
    /// [`close_mappings_of`](crate::close_mappings_of); [`Error::Forked`].
    pub fn check(&self) -> Result<()> {
        self.parts.iter().try_for_each(OpenPart::check)
    }

    /// Checks that all of its addresses hold memory.
    pub(super) fn check_mapped(&self) -> Result<()> {
        self.parts.iter().try_for_each(OpenPart::check_mapped)
    }

    fn on_device_of(&self, stream: BorrowedStream<'_>) -> impl Iterator<Item = &OpenPart> {
        self.parts.iter().filter(move |part| part.device() == stream.device())
    }

    pub(super) fn check_stream(&self, stream: BorrowedStream<'_>) -> Result<()> {
        self.on_device_of(stream).next().unwrap_or(self.first_part()).check_stream(stream)
    }

    /// Returns the timeline between this process and the exporter, for repeated hand-overs without waits of either host.
    /// Mappings with the same lease (the same export, device and access) share it. Named tensors on several devices have one,
    /// which streams of all devices may use.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] if the device has no timelines, and for a [copy](Self::is_copy); [`Error::ExporterGone`],
    /// [`Error::ExportDropped`], and the other errors of a request to the exporter.
    pub fn timeline(&self) -> Result<Timeline> {
        let copy = self.parts.iter().find(|part| part.is_copy());
        copy.unwrap_or(self.first_part()).timeline()
    }

    /// Asks the exporter for a right to open the export once, as bytes that travel beside the [descriptor](Self::descriptor): for
    /// a process that sends received memory on. As [`Export::grant`](crate::Export::grant), but `limit` is one hour at most.
    ///
    /// # Errors
    ///
    /// [`Error::ExportDropped`], [`Error::ExporterGone`]; [`Error::Unsupported`] for a [copy](Self::is_copy).
    pub fn grant(&self, limit: Duration) -> Result<Grant> {
        let mut begun = OneOrMany::NONE;
        let contents = self.descriptor.contents();
        let exporter = &contents.exporter;
        for (part, held) in self.parts.iter().enumerate() {
            match held.grant(limit) {
                Ok(token) => begun.push((contents.parts[part].export, token)),
                Err(error) => {
                    Grant::new(exporter, begun).give_back();
                    return Err(error);
                }
            }
        }
        Ok(Grant::new(exporter, begun))
    }

    /// Asks the exporter for the table of claims that it has shared the memory with.
    ///
    /// # Errors
    ///
    /// [`Error::ExportDropped`](crate::Error::ExportDropped), also for an export without a table;
    /// [`Error::ExporterGone`](crate::Error::ExporterGone); [`Error::Unsupported`](crate::Error::Unsupported) in the exporting
    /// process and for a [copy](Self::is_copy).
    #[doc(hidden)]
    pub fn claims(&self) -> Result<Claims> {
        self.first_part().claims()
    }

    /// Registers a callback that runs once when the exporting process has terminated, now if it has. It runs on a thread of the
    /// library, with the context of the mapping's device current; not for memory of the same process or a
    /// [copy](Self::is_copy), and not after the mapping has been dropped. Calls that wait fail there
    /// ([`Error::OnWorkerThread`]).
    pub fn on_gone(&self, callback: impl FnOnce(&Error) + Send + 'static) {
        let opened = self.parts.iter().find(|part| !part.is_copy());
        opened.unwrap_or(self.first_part()).on_gone(callback);
    }

    /// Registers a callback that runs once when the exporter drops or closes the export, now if it has: it shares a new
    /// version, or needs the memory. It also runs if the exporter terminates right after that.
    ///
    /// The mapping stays valid; opening the export again fails with [`Error::ExportDropped`]. [`on_gone`](Self::on_gone)
    /// reports the termination of the exporter's process. The callback runs on a thread of the library, with the context of the
    /// mapping's device current; not for memory of the same process or a [copy](Self::is_copy), and not after the mapping has
    /// been dropped. Calls that wait fail there ([`Error::OnWorkerThread`]).
    pub fn on_dropped(&self, callback: impl FnOnce() + Send + 'static) {
        self.first_part().on_dropped(callback);
    }

    /// Ends the mapping when the stream reaches this point: work submitted to it so far may still use the memory.
    ///
    /// Work on other streams must be ordered before that, by an event. Named tensors on another device than the stream's are
    /// released as by a plain drop. Does not wait.
    ///
    /// # Errors
    ///
    /// [`RecoverableError`], which contains the mapping: [`Error::WrongStream`]; [`Error::StreamCapturing`], and the capture is intact
    /// as long as the mapping is kept (a plain drop waits for the device, which CUDA does not permit during a capture); the
    /// vendor's error.
    pub fn release<M>(self, stream: &impl AsStream<M>) -> Result<(), RecoverableError<Self>> {
        match self.released_events(stream.as_stream()) {
            Ok(events) => self.end_at(events),
            Err(error) => return Err(RecoverableError::new(error, self)),
        }
        Ok(())
    }

    /// Records an event for each part on the stream's device.
    fn released_events(&self, stream: BorrowedStream<'_>) -> Result<OneOrMany<Option<Box<dyn DeviceEvent>>>> {
        if let OneOrMany::One(part) = &self.parts {
            return part.released_event(stream).map(OneOrMany::One);
        }
        self.check_stream(stream)?;
        let mut events = OneOrMany::NONE;
        for part in self.parts.iter() {
            let here = part.device() == stream.device();
            events.push(if here { part.released_event(stream)? } else { None });
        }
        Ok(events)
    }

    fn end_at(self, events: OneOrMany<Option<Box<dyn DeviceEvent>>>) {
        match (self.parts, events) {
            (OneOrMany::One(part), OneOrMany::One(event)) => part.end_at(event),
            (OneOrMany::Many(parts), OneOrMany::Many(events)) => {
                parts.into_iter().zip(events).for_each(|(part, event)| part.end_at(event));
            }
            _ => unreachable!("there is one for each part"),
        }
    }

    /// Ends the mapping after the caller has waited for device work with the memory.
    pub(crate) fn end_finished(self) {
        self.parts.for_each(OpenPart::end_finished);
    }
}
