//! The open of a descriptor's memory: all of its parts or none.
//!
//! 1. [`OpenOptions::opening`] selects the device of each part, without a message.
//! 2. [`OpenOptions::deliver`] waits, for a received export, until its sender has written the bytes, and locks the grants.
//! 3. [`OpenOptions::acquire`] reuses an existing lease, which is the fast path and sends no message; otherwise it opens, stages or
//!    pulls, as the copy policy permits.
//! 4. The stream or the host waits until the bytes are ready. After an error, parts that are open already are closed.

use std::fmt;
use std::ops::Deref;
use std::slice;
use std::sync::Arc;
use std::time::Duration;

use super::copy_policy::{CopyPolicy, ProgressReport};
use super::grant::UnusedGrant;
use super::mapping::Mapping;
use super::mapping_source::MappingSource;
use super::open_export::{LazyDeadline, OpenExport, Replicate, is_elsewhere, is_out_of_reach};
use super::open_part::OpenPart;
use super::place::Place;
use super::reservation::Reservation;
use super::reserved_open::KeeperAddress;
use super::table::ReservedTarget;
use crate::backend::Access;
use crate::backend::stream::BorrowedStream;
use crate::model::address::DeviceRange;
use crate::model::device::{DeviceIdentity, DeviceOrdinal};
use crate::model::error::{DescriptorError, Error, Remedy, Result};
use crate::model::one_or_many::OneOrMany;
use crate::sharing::export::check_backend;
use crate::sharing::staging::CopyLayout;
use crate::sharing::{Ipc, Runtime};
use crate::transport::Deadline;
use crate::wire::descriptor::{Contents, DescribedRegion, Descriptor, Memory, Regions};

/// The parameters of an open.
#[derive(Debug)]
pub struct OpenOptions<'a> {
    pub(crate) ipc: &'a Ipc,
    pub(crate) descriptor: &'a Descriptor,
    /// The access of this process; the exporter's by default.
    pub(super) access: Option<Access>,
    pub(crate) timeout: Duration,
    pub(super) grants: UnusedGrants<'a>,
    /// Whether the memory is a ring's, which is opened by a lease, and so a timeline, that no other mapping shares.
    is_ring: bool,
    pub(super) addresses: MappingAddresses<'a>,
    pub(crate) copy: CopyPolicy,
    pub(super) progress: ProgressReport<'a>,
    /// The message that has brought the export.
    pub(super) delivery: Option<&'a dyn Delivery>,
    /// Opened instead of a copy over the network.
    replicate: Option<&'a dyn Replicate>,
    /// The keeper that has answered with the export.
    pub(super) keeper: Option<&'a Arc<KeeperAddress>>,
}

/// The message that an export arrived in.
pub(crate) trait Delivery: fmt::Debug {
    /// Checks that memory of this home may be opened on this device, which is the stream's if there is one.
    fn check_device(
        &self,
        home: DeviceIdentity,
        device: DeviceOrdinal,
        stream: Option<BorrowedStream<'_>>,
    ) -> Result<()>;

    /// Makes the stream wait until the sender's streams have written the bytes; the host waits if there is no stream.
    fn wait_ready(&self, stream: Option<BorrowedStream<'_>>, deadline: Deadline) -> Result<()>;

    /// Calls `open`, which presents the grants. One thread at a time.
    fn open(&self, open: &mut dyn FnMut() -> Result<()>) -> Result<()>;
}

/// One for each part, or none.
#[derive(Debug)]
pub(super) enum UnusedGrants<'a> {
    Borrowed(&'a [UnusedGrant]),
    /// On the heap: a grant is much larger than the rest of a builder.
    Owned(Vec<UnusedGrant>),
}

impl Deref for UnusedGrants<'_> {
    type Target = [UnusedGrant];

    fn deref(&self) -> &[UnusedGrant] {
        match self {
            Self::Borrowed(grants) => grants,
            Self::Owned(grants) => grants,
        }
    }
}

/// The addresses of the mapping.
#[derive(Clone, Copy, Debug)]
pub(super) enum MappingAddresses<'a> {
    /// The driver's choice, for as long as the memory is mapped.
    Chosen,
    /// A range that the mapping keeps.
    Reserved,
    /// The addresses from an offset in a reservation on, in bytes.
    In(&'a Reservation, u64),
}

impl MappingAddresses<'_> {
    const fn are_kept(self) -> bool {
        !matches!(self, Self::Chosen)
    }
}

impl<'a> OpenOptions<'a> {
    pub(super) const fn new(ipc: &'a Ipc, descriptor: &'a Descriptor, timeout: Duration) -> Self {
        Self {
            ipc,
            descriptor,
            access: None,
            timeout,
            grants: UnusedGrants::Borrowed(&[]),
            is_ring: false,
            addresses: MappingAddresses::Chosen,
            copy: CopyPolicy::Never,
            progress: ProgressReport(None),
            delivery: None,
            replicate: None,
            keeper: None,
        }
    }

    /// Opens a ring: of another host, the replacement of its copies.
    pub(crate) fn of_ring<'b>(self, copy: CopyPolicy, replicate: &'b dyn Replicate) -> OpenOptions<'b>
    where
        'a: 'b,
    {
        OpenOptions { is_ring: true, copy, replicate: Some(replicate), ..self }
    }

    /// Fails for a ring that is not opened as one: a plain mapping could read and write slots out of turn.
    #[inline]
    pub(super) fn check_kind(&self) -> Result<()> {
        if self.descriptor.ring().is_none() || self.is_ring {
            return Ok(());
        }
        let remedy = Remedy::OpenRing;
        Err(DescriptorError::Kind { expected: "other memory", found: "a ring", remedy }.into())
    }

    /// Fails for a place in a reservation: the next version of a mapping takes the addresses of the mapping.
    pub(super) fn check_no_place(&self) -> Result<()> {
        if !matches!(self.addresses, MappingAddresses::In(..)) {
            return Ok(());
        }
        Err(Error::Unsupported {
            backend: self.ipc.backend().info().name,
            what: "map the next version of a mapping at other addresses".into(),
            why: "the addresses of a mapping stay; open the export as another mapping".into(),
        })
    }

    /// Fails for a copy at reserved addresses.
    #[inline]
    pub(super) fn check_reserved(&self) -> Result<()> {
        if !self.addresses.are_kept() || self.copy == CopyPolicy::Never {
            return Ok(());
        }
        Err(Error::Unsupported {
            backend: self.ipc.backend().info().name,
            what: "map a copy at addresses that the importer keeps".into(),
            why: "a copy is private memory of this process; copy the next version into it instead".into(),
        })
    }

    /// Opens each part on the device that `place` returns for its home, which has the given ordinal if it is visible.
    #[inline]
    pub(super) fn open(
        &self,
        stream: Option<BorrowedStream<'_>>,
        place: impl Fn(DeviceIdentity, Option<DeviceOrdinal>) -> Result<DeviceOrdinal>,
    ) -> Result<Mapping> {
        let mapping = self.open_placed(stream, place)?;
        Ok(if self.addresses.are_kept() { mapping.reserved_by(self) } else { mapping })
    }

    #[inline]
    fn open_placed(
        &self,
        stream: Option<BorrowedStream<'_>>,
        place: impl Fn(DeviceIdentity, Option<DeviceOrdinal>) -> Result<DeviceOrdinal>,
    ) -> Result<Mapping> {
        let time_limit = LazyDeadline::new(self.timeout);
        let contents = self.descriptor.contents();
        self.check_kind()?;
        self.check_reserved()?;
        let places = self.places(&time_limit)?;
        let opening = |index| {
            let mut opening = self.opening(index, &place, stream, &time_limit)?;
            if let (MappingAddresses::In(reservation, _), Some(places)) = (self.addresses, places.get(index))
            {
                reservation.check_place(&**self.ipc.backend(), opening.device)?;
                opening.reserved = Some(ReservedTarget::Places(places));
            }
            Ok(opening)
        };
        match &contents.memory {
            Memory::Region(region) => {
                let opening = opening(0)?;
                self.deliver(slice::from_ref(&opening), stream, || self.open_region(region, &opening, stream))
            }
            Memory::Tensors(_) => {
                let backend = self.ipc.backend().info().name;
                check_backend("the descriptor", contents.backend.as_str(), backend)?;
                let openings = (0..contents.parts.len())
                    .map(|index| {
                        opening(index).map_err(|error| with_tensor_name(contents, index, None, error))
                    })
                    .collect::<Result<OneOrMany<_>>>()?;
                self.deliver(&openings, stream, || self.open_tensors(contents, &openings, stream))
            }
        }
    }

    /// Takes the addresses for all regions of each part, if they lie in a reservation.
    fn places(&self, time_limit: &LazyDeadline) -> Result<Vec<Vec<Arc<Place>>>> {
        let MappingAddresses::In(reservation, offset) = self.addresses else { return Ok(Vec::new()) };
        let contents = self.descriptor.contents();
        match reservation.places(contents, offset) {
            Err(Error::AddressesInUse { .. }) => {
                // The addresses of a mapping that was dropped a moment ago are free when the worker has closed it.
                let runtime = Runtime::get()?;
                runtime.worker.run(|| (), time_limit.left());
                reservation.places(contents, offset)
            }
            found => found,
        }
    }

    /// Calls `open`. Waits before that until the bytes of a received export are ready.
    #[inline]
    pub(super) fn deliver<T>(
        &self,
        openings: &[OpenExport<'_>],
        stream: Option<BorrowedStream<'_>>,
        mut open: impl FnMut() -> Result<T>,
    ) -> Result<T> {
        match self.delivery {
            None => open(),
            Some(delivery) => {
                // Before the grants are used: after an error here the export can be opened again.
                let waiting = if self.will_copy(openings)? { None } else { stream };
                delivery.wait_ready(waiting, openings[0].time_limit.deadline())?;
                let mut opened = None;
                delivery.open(&mut || open().map(|value| opened = Some(value)))?;
                Ok(opened.expect("an open without an error has its result"))
            }
        }
    }

    /// Returns whether a part is known to be copied before its open is tried.
    fn will_copy(&self, openings: &[OpenExport<'_>]) -> Result<bool> {
        if self.copy.is_unconditional() {
            return Ok(true);
        }
        if self.copy == CopyPolicy::Never {
            return Ok(false);
        }
        for opening in openings {
            if !opening.has_peer_access()? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    #[inline]
    fn open_region(
        &self,
        region: &DescribedRegion,
        opening: &OpenExport<'_>,
        stream: Option<BorrowedStream<'_>>,
    ) -> Result<Mapping> {
        let source = self.acquire(opening, || Ok(CopyLayout::of_region(region.len)), &|_, error| error)?;
        let range = region_of(&source, region);
        if let (Ok(range), true) = (&range, source.is_ready_by_itself()) {
            // No reference to the part is taken before it lies in the result, so that the compiler does not move it there.
            return Ok(Mapping::of_region(opening.part(source), self.descriptor, *range));
        }
        let part = opening.part(source);
        opening.wait_ready(&part, stream)?;
        Ok(Mapping::of_region(part, self.descriptor, range?))
    }

    fn open_tensors(
        &self,
        contents: &Contents,
        openings: &[OpenExport<'_>],
        stream: Option<BorrowedStream<'_>>,
    ) -> Result<Mapping> {
        let mut opened = AllOrNothing { parts: OneOrMany::NONE };
        for (index, opening) in openings.iter().enumerate() {
            opened.parts.push(self.open_part(contents, index, opening)?);
        }
        for (index, (opening, part)) in openings.iter().zip(opened.parts.iter()).enumerate() {
            opening
                .wait_ready(part, stream)
                .map_err(|error| with_tensor_name(contents, index, None, error))?;
        }
        Ok(Mapping::of_tensors(opened.into_parts(), self.descriptor))
    }

    fn open_part(&self, contents: &Contents, index: usize, opening: &OpenExport<'_>) -> Result<OpenPart> {
        let with_region_name = |region, error| with_tensor_name(contents, index, Some(region), error);
        let source = self.acquire(opening, || CopyLayout::of_tensors(contents, index), &with_region_name);
        let part = opening.part(source.map_err(|error| with_tensor_name(contents, index, None, error))?);
        if part.is_copy() {
            return Ok(part);
        }
        match check_mapped(&part, opening.named.regions()) {
            Ok(()) => Ok(part),
            Err((region, error)) => {
                part.abandon();
                Err(with_region_name(region, error))
            }
        }
    }

    /// Selects the device of a part.
    #[inline]
    pub(super) fn opening<'b>(
        &'b self,
        index: usize,
        place: impl Fn(DeviceIdentity, Option<DeviceOrdinal>) -> Result<DeviceOrdinal>,
        stream: Option<BorrowedStream<'_>>,
        time_limit: &'b LazyDeadline,
    ) -> Result<OpenExport<'b>> {
        let named = self.descriptor.contents().named(index);
        let devices = self.ipc.devices()?;
        let home =
            devices.iter().find(|device| device.identity == named.part.home).map(|device| device.ordinal);
        let device = place(named.part.home, home)?;
        if let Some(delivery) = self.delivery {
            delivery.check_device(named.part.home, device, stream)?;
        }
        let access = self.access.unwrap_or(named.contents.access);
        let (ipc, grant, alone) =
            (self.ipc, self.grants.get(index), self.is_ring || self.addresses.are_kept());
        let reserved = self.addresses.are_kept().then_some(ReservedTarget::New);
        let replicate = self.replicate;
        Ok(OpenExport {
            runtime: Runtime::get()?,
            ipc,
            named,
            device,
            home,
            access,
            time_limit,
            grant,
            alone,
            reserved,
            replicate,
        })
    }

    /// Opens a part, without waiting until it is ready, or copies it as `layout` states. `with_region_name` adds the region concerned to
    /// an error.
    #[inline]
    pub(super) fn acquire(
        &self,
        opening: &OpenExport<'_>,
        layout: impl Fn() -> Result<CopyLayout>,
        with_region_name: &dyn Fn(usize, Error) -> Error,
    ) -> Result<MappingSource> {
        let known = if self.copy.is_unconditional() { None } else { opening.reuse_lease() };
        match known {
            Some(lease) => Ok(MappingSource::Remote(lease)),
            None => self.open_or_copy(opening, layout, with_region_name).map_err(|error| match error {
                Error::ExportDropped { pid } if opening.grant.is_some() => Error::GrantEnded { pid },
                other => other,
            }),
        }
    }

    /// Opens a part that is not open yet, or copies it.
    #[cold]
    fn open_or_copy(
        &self,
        opening: &OpenExport<'_>,
        layout: impl Fn() -> Result<CopyLayout>,
        with_region_name: &dyn Fn(usize, Error) -> Error,
    ) -> Result<MappingSource> {
        let stage = || self.wait_and(opening, || opening.copy(layout()?, self.progress));
        let pull = || self.wait_and(opening, || opening.pull(layout()?, self.progress));
        let policy = self.copy;
        let opened = match policy {
            CopyPolicy::Pulled => return pull(),
            CopyPolicy::Always | CopyPolicy::Staged => stage(),
            _ => opening.open(with_region_name),
        };
        let Err(error) = opened else { return opened };
        let reason = error.innermost();
        if policy.stages() && !policy.is_unconditional() && is_out_of_reach(reason) {
            tracing::debug!(target: crate::os::log::IMPORT, %error, "the memory is copied, as it cannot be opened");
            return stage();
        }
        let listens = !opening.named.contents.network.is_empty();
        if policy.pulls() && listens && is_elsewhere(reason) {
            tracing::debug!(target: crate::os::log::IMPORT, %error, "the memory is copied over the network, as it cannot be opened");
            return pull();
        }
        Err(error)
    }

    /// Copies, after the streams of a received export's sender have written the bytes.
    fn wait_and(
        &self,
        opening: &OpenExport<'_>,
        copy: impl FnOnce() -> Result<MappingSource>,
    ) -> Result<MappingSource> {
        if let Some(delivery) = self.delivery {
            // The exporter's device copies at once: it does not wait for these streams.
            delivery.wait_ready(None, opening.time_limit.deadline())?;
        }
        copy()
    }
}

/// Returns the region that the descriptor names in the mapped allocations. In the exporting process, and for a copy, the source
/// is the region.
#[inline]
fn region_of(source: &MappingSource, region: &DescribedRegion) -> Result<DeviceRange> {
    let mapped = source.regions()[0];
    if !source.has_allocations() {
        return Ok(mapped);
    }
    let DescribedRegion { offset, len, .. } = *region;
    mapped.slice(offset, len).ok_or_else(|| {
        let mapped = mapped.len;
        Error::InvalidRegion(format!(
            "the descriptor names {len} bytes at offset {offset}, and the driver mapped {mapped} bytes"
        ))
    })
}

/// Checks that the mapped or shared regions have the sizes that the descriptor states; the error contains the index of the
/// region.
fn check_mapped(part: &OpenPart, regions: Regions<'_>) -> Result<(), (usize, Error)> {
    let mapped = part.regions();
    for (index, region) in regions.iter().enumerate() {
        let wanted = region.iter().map(|extent| extent.size).fold(0, u64::saturating_add);
        let found = mapped.get(index).map_or(0, |range| range.len);
        if found < wanted || mapped.len() != regions.len() {
            return Err((
                index,
                Error::InvalidRegion(format!(
                    "the descriptor names {} regions, this one of {wanted} B, and there are {}, this one of {found} B",
                    regions.len(),
                    mapped.len()
                )),
            ));
        }
    }
    Ok(())
}

/// Adds the name of the first tensor of that region or part to an error.
pub(super) fn with_tensor_name(
    contents: &Contents,
    part: usize,
    region: Option<usize>,
    error: Error,
) -> Error {
    match contents.first_tensor(part, region) {
        Some(tensor) => error.of_tensor(tensor.name),
        None => error,
    }
}

/// The parts that are open so far. If a further one fails, they are closed, unless other mappings use them.
struct AllOrNothing {
    parts: OneOrMany<OpenPart>,
}

impl AllOrNothing {
    fn into_parts(mut self) -> OneOrMany<OpenPart> {
        std::mem::replace(&mut self.parts, OneOrMany::NONE)
    }
}

impl Drop for AllOrNothing {
    fn drop(&mut self) {
        std::mem::replace(&mut self.parts, OneOrMany::NONE).for_each(OpenPart::abandon);
    }
}
