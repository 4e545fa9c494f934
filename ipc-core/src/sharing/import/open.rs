//! The builder of a mapping.

use std::fmt;
use std::ops::Deref;
use std::slice;
use std::sync::Arc;
use std::time::Duration;

use super::copy_policy::{CopyPolicy, CopyProgress, ProgressReport};
use super::grant::UnusedGrant;
use super::mapping::{Mapping, region_of};
use super::open_export::{OpenExport, Patience, is_elsewhere, is_out_of_reach};
use super::open_part::{MappingSource, OpenPart};
use super::reservation::{Place, Reservation};
use super::table::ReservedTarget;
use crate::backend::Access;
use crate::backend::stream::{AsStream, BorrowedStream};
use crate::model::device::{DeviceIdentity, DeviceOrdinal};
use crate::model::error::{DescriptorError, Error, Remedy, Result};
use crate::model::one_or_many::OneOrMany;
use crate::model::placement::DeviceMap;
use crate::sharing::export::check_backend;
use crate::sharing::remote::IncomingPull;
use crate::sharing::staging::CopyLayout;
use crate::sharing::{Runtime, Session};
use crate::transport::Deadline;
use crate::wire::Grant;
use crate::wire::descriptor::{Contents, DescribedRegion, Descriptor, Memory, Regions};

/// A builder for [`Mapping`]s; see [`Ipc::open`](crate::Ipc::open) and [`ReceivedExport::open`](crate::ReceivedExport::open).
///
/// The method that selects the device opens the memory: all of it or nothing.
///
/// A received export is opened by the grants of its message, one for each home device, also after the sender has dropped it;
/// each is used up by the first answer of the sender, and later opens are those of the plain descriptor. The bytes are ready
/// when the sender's streams have written them. The device map of the channel, if there is one, must permit the device.
///
/// # Examples
///
/// ```
/// # fn main() -> device_ipc_core::Result<()> {
/// # let backend = device_ipc_mock::MockBackend::from_spec("devices=1").expect("a valid specification");
/// # let ipc = device_ipc_core::Ipc::with_backend(backend);
/// use std::time::Duration;
/// use device_ipc_core::Access;
/// let export = ipc.share(ipc.allocate(0, 1024)?).start()?;
/// let stream = ipc.create_stream(0)?;
/// let open = ipc.open(export.descriptor()).access(Access::ReadOnly).timeout(Duration::from_secs(5));
/// let mapping = open.on(&stream)?; // the stream waits until the bytes are ready
/// assert_eq!((mapping.len(), mapping.access()), (1024, Access::ReadOnly));
/// # Ok(())
/// # }
/// ```
#[must_use = "nothing is opened before at_home, on_device, on or on_mapped_devices"]
#[derive(Debug)]
pub struct OpenBuilder<'a> {
    pub(super) session: &'a Session,
    pub(super) descriptor: &'a Descriptor,
    pub(super) access: Option<Access>,
    pub(super) timeout: Duration,
    grants: Grants<'a>,
    /// Whether the memory is a ring's.
    is_ring: bool,
    reserved: Addresses<'a>,
    copy: CopyPolicy,
    pub(super) progress: ProgressReport<'a>,
    pub(super) delivery: Option<&'a dyn Delivery>,
    replicate: Option<&'a dyn Replicate>,
    pub(super) keeper: Option<&'a Arc<KeeperAddress>>,
}

/// The keeper that has answered with an export.
#[derive(Debug)]
pub(crate) struct KeeperAddress {
    pub(crate) name: String,
    /// The user of its process; `None` for the user of this process.
    pub(crate) user: Option<u32>,
}

/// The replacement of a copy over the network: memory of this process in which the bytes of another host arrive repeatedly.
pub(crate) trait Replicate: fmt::Debug {
    /// Shares such memory on the device of `incoming`, and returns its descriptor.
    fn replicate(&self, session: &Session, incoming: &IncomingPull<'_>) -> Result<Descriptor>;
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
enum Grants<'a> {
    Borrowed(&'a [UnusedGrant]),
    /// On the heap: a grant is much larger than the rest of a builder.
    Owned(Vec<UnusedGrant>),
}

impl Deref for Grants<'_> {
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
enum Addresses<'a> {
    /// The driver's choice, for as long as the memory is mapped.
    Chosen,
    /// A range that the mapping keeps.
    Reserved,
    /// The addresses from an offset in a reservation on, in bytes.
    In(&'a Reservation, u64),
}

impl Addresses<'_> {
    const fn are_kept(self) -> bool {
        !matches!(self, Self::Chosen)
    }
}

impl<'a> OpenBuilder<'a> {
    pub(crate) const fn new(session: &'a Session, descriptor: &'a Descriptor, timeout: Duration) -> Self {
        let (access, grants, is_ring, reserved) = (None, Grants::Borrowed(&[]), false, Addresses::Chosen);
        let (copy, progress) = (CopyPolicy::Never, ProgressReport(None));
        let (delivery, replicate, keeper) = (None, None, None);
        Self {
            session,
            descriptor,
            access,
            timeout,
            grants,
            is_ring,
            reserved,
            copy,
            progress,
            delivery,
            replicate,
            keeper,
        }
    }

    /// Opens by grants, one for each part, as long as they have not been used.
    pub(crate) fn by_grants(mut self, grants: &'a [UnusedGrant]) -> Self {
        self.grants = Grants::Borrowed(grants);
        self
    }

    /// Opens an export of a message.
    pub(crate) fn delivered_by(mut self, delivery: &'a dyn Delivery) -> Self {
        self.delivery = Some(delivery);
        self
    }

    /// Opens the answer of a keeper.
    pub(crate) const fn kept_by(mut self, keeper: &'a Arc<KeeperAddress>) -> Self {
        self.keeper = Some(keeper);
        self
    }

    /// Opens by a grant of the exporter ([`Export::grant`](crate::Export::grant)), also if it has dropped the export since. The
    /// open uses the grant up, or gives it back if this process has the memory open already; if the exporter could not be asked,
    /// the grant remains for another try. A grant that has ended is ignored: then the export opens as long as it has not been
    /// dropped, and fails with [`Error::GrantEnded`] afterwards.
    ///
    /// # Errors
    ///
    /// [`Error::Descriptor`] for the grant of another export.
    pub fn grant(mut self, grant: &Grant) -> Result<Self> {
        self.grants = Grants::Owned(grant.of_parts(self.descriptor, self.session.allow_list())?);
        Ok(self)
    }

    /// Opens the memory of this replacement instead of making a copy over the network.
    pub(crate) fn replicated_by(mut self, replicate: &'a dyn Replicate) -> Self {
        self.replicate = Some(replicate);
        self
    }

    /// Opens the slots of a ring, by a lease, and so a timeline, that no other mapping shares.
    pub(crate) const fn of_ring(mut self) -> Self {
        self.is_ring = true;
        self
    }

    /// Maps the memory in an address range that the mapping keeps: it can be [suspended](Mapping::suspend),
    /// [resumed](Mapping::resume) and [replaced](Mapping::replace) by another export of equal layout, and all addresses stay,
    /// also those in captured graphs.
    ///
    /// The mapping has a lease and addresses of its own: it shares neither with other mappings of the export, and the import
    /// cache does not keep it. The memory must be of a kind that can be mapped at any address
    /// ([`MemoryUse::remappable`](crate::MemoryUse::remappable)): CUDA's and Ascend's virtual memory.
    ///
    /// # Errors
    ///
    /// The method that opens returns [`Error::Unsupported`] for memory of another kind, for memory of the same process, for a
    /// [copy](Self::copy), and by backends without reserved ranges.
    pub const fn reserved(mut self) -> Self {
        self.reserved = Addresses::Reserved;
        self
    }

    /// Maps the memory in a reservation, `byte_offset` bytes behind its start, as [`reserved`](Self::reserved) does in a range of the
    /// mapping alone: it can be suspended, resumed and replaced, and the other mappings in the reservation are not affected.
    ///
    /// At the offset lies the first byte of [`Mapping::regions`]; further regions follow side by side. The driver maps whole
    /// allocations, so that the allocation of a region that begins in the middle of one needs the addresses before the offset too.
    /// Allocations begin at multiples of [`Reservation::granularity`] and fill whole units.
    ///
    /// # Errors
    ///
    /// The method that opens returns, before the exporter is asked, [`Error::AddressesInUse`] for addresses of another mapping, and
    /// [`Error::InvalidRegion`] for an offset that is no such multiple, for memory that exceeds the reservation, and for a device
    /// that is not the reservation's; as for [`reserved`](Self::reserved).
    pub const fn reserved_in(mut self, reservation: &'a Reservation, byte_offset: u64) -> Self {
        self.reserved = Addresses::In(reservation, byte_offset);
        self
    }

    /// Sets the access of this process, by default the access that the exporter permits.
    pub const fn access(mut self, access: Access) -> Self {
        self.access = Some(access);
        self
    }

    /// Sets the timeout for the exporter's answer, and for the bytes to be ready if no stream waits for them; by default the
    /// timeout of the [`Ipc`](crate::Ipc). A timeout of zero opens memory that this process has open or keeps open, without a request
    /// to the exporter.
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets the condition under which the memory is copied instead of opened, and the way; by default it is never copied.
    /// [`Mapping::is_copy`] returns whether anything was copied: of named tensors on several devices, a conditional policy copies
    /// those only that cannot be opened.
    ///
    /// The call waits on the host until the copy is complete in private memory of this process on the named device, so a stream
    /// has nothing to wait for. Neither process sees later writes of the other, a [`timeline`](Mapping::timeline) is refused, and
    /// the lease has ended when the call returns. For a received export the host first waits until the bytes are ready, also if a
    /// stream was given; for a copy over the network, in any case. A copy under an unconditional policy is writable also if the
    /// export is read-only, provided that [`access`](Self::access) requests it.
    ///
    /// [`timeout`](Self::timeout) limits each answer of the exporter, and over the network the time for which it may be silent, not
    /// the whole copy. Over the network, the copy itself may take a second longer for each 16 MiB; if the time expires, the library
    /// keeps the destination until the engine has finished with it, which can be as long as the exporter's process exists.
    ///
    /// # Errors
    ///
    /// The method that opens returns [`Error::InPull`] for a copy over the network, which names the exporter's host, process and
    /// address, with the cause.
    pub const fn copy(mut self, policy: CopyPolicy) -> Self {
        self.copy = policy;
        self
    }

    /// Calls `report` with the progress of a copy, from time to time and at its end, on the thread of the call that opens. A
    /// function that takes long delays the copy.
    ///
    /// The memory of each home device is copied for itself, and reported for itself. Memory that is opened is not reported.
    ///
    /// # Examples
    ///
    /// ```
    /// # fn main() -> device_ipc_core::Result<()> {
    /// # let backend = device_ipc_mock::MockBackend::from_spec("devices=1").expect("a valid specification");
    /// # let ipc = device_ipc_core::Ipc::with_backend(backend);
    /// # let export = ipc.share(ipc.allocate(0, 1024)?).start()?;
    /// use device_ipc_core::{CopyPolicy, CopyProgress};
    /// let report = |progress: CopyProgress| println!("{} of {} B", progress.copied_bytes, progress.total_bytes);
    /// let open = ipc.open(export.descriptor()).copy(CopyPolicy::Staged);
    /// let copy = open.on_progress(&report).on_device(0)?;
    /// # Ok(())
    /// # }
    /// ```
    pub const fn on_progress(mut self, report: &'a dyn Fn(CopyProgress)) -> Self {
        self.progress = ProgressReport(Some(report));
        self
    }

    /// Opens each tensor on its home device. Waits on the host until all tensors are ready.
    ///
    /// # Errors
    ///
    /// [`Error::HomeNotVisible`] if this process does not see a home device; as for [`on_device`](Self::on_device).
    pub fn at_home(self) -> Result<Mapping> {
        let backend = self.session.backend();
        self.open(None, |home, visible| {
            let not_visible = || Error::HomeNotVisible { home, variable: backend.visible_devices_variable() };
            visible.ok_or_else(not_visible)
        })
    }

    /// Opens all tensors on the device with this ordinal, by peer access if it is not their home device. Waits on the host until
    /// they are ready.
    ///
    /// # Errors
    ///
    /// [`DescriptorError::Kind`] for the descriptor of a ring; [`Error::NoSuchDevice`], [`Error::NoPeerAccess`]; a stale or refused descriptor ([`Error::ExporterGone`],
    /// [`Error::ExportDropped`], [`Error::OtherHost`], [`Error::NotPermitted`], …); the vendor's. Errors that concern one of
    /// several named tensors are in an [`Error::InBundle`], which names the tensor.
    ///
    /// For a received export also [`Error::InvalidDeviceMap`] if the channel's device map names another device,
    /// [`Error::PeerGone`] if the sender terminated before its streams had written the bytes, and [`Error::Timeout`], after which
    /// the export can be opened again.
    pub fn on_device(self, device: impl Into<DeviceOrdinal>) -> Result<Mapping> {
        let device = device.into();
        self.open(None, |_, _| Ok(device))
    }

    /// Opens all tensors on the device of a stream. The stream waits until they are ready, the host does not.
    ///
    /// # Errors
    ///
    /// [`Error::WrongBackend`] for a stream of another backend; [`Error::WrongStream`] if a received export's channel has a
    /// device map that names another device than the stream's; as for [`on_device`](Self::on_device).
    pub fn on<M>(self, stream: &impl AsStream<M>) -> Result<Mapping> {
        let stream = stream.as_stream();
        check_backend("the stream", stream.backend(), self.session.backend().info().name)?;
        self.open(Some(stream), |_, _| Ok(stream.device()))
    }

    /// Opens each tensor on the device that the map names for its home device. Waits on the host until all tensors are ready.
    ///
    /// The map of a received export is [`ReceivedExport::device_map`](crate::ReceivedExport::device_map).
    ///
    /// # Errors
    ///
    /// [`Error::NotInDeviceMap`]; [`Error::InvalidDeviceMap`] for a map that names the home device by its ordinal, or a device
    /// that this process does not see; as for [`on_device`](Self::on_device).
    pub fn on_mapped_devices(self, map: &DeviceMap) -> Result<Mapping> {
        let session = self.session;
        self.open(None, |home, _| session.mapped_device(map, home))
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
        if !matches!(self.reserved, Addresses::In(..)) {
            return Ok(());
        }
        Err(Error::Unsupported {
            backend: self.session.backend().info().name,
            what: "map the next version of a mapping at other addresses".into(),
            why: "the addresses of a mapping stay; open the export as another mapping".into(),
        })
    }

    /// Fails for a copy at reserved addresses.
    #[inline]
    pub(super) fn check_reserved(&self) -> Result<()> {
        if !self.reserved.are_kept() || self.copy == CopyPolicy::Never {
            return Ok(());
        }
        Err(Error::Unsupported {
            backend: self.session.backend().info().name,
            what: "map a copy at addresses that the importer keeps".into(),
            why: "a copy is private memory of this process; copy the next version into it instead".into(),
        })
    }

    /// Opens each part on the device that `place` returns for its home, which has the given ordinal if it is visible.
    #[inline]
    fn open(
        &self,
        stream: Option<BorrowedStream<'_>>,
        place: impl Fn(DeviceIdentity, Option<DeviceOrdinal>) -> Result<DeviceOrdinal>,
    ) -> Result<Mapping> {
        let mapping = self.open_placed(stream, place)?;
        Ok(if self.reserved.are_kept() { mapping.reserved_by(self) } else { mapping })
    }

    #[inline]
    fn open_placed(
        &self,
        stream: Option<BorrowedStream<'_>>,
        place: impl Fn(DeviceIdentity, Option<DeviceOrdinal>) -> Result<DeviceOrdinal>,
    ) -> Result<Mapping> {
        let patience = Patience::new(self.timeout);
        let contents = self.descriptor.contents();
        self.check_kind()?;
        self.check_reserved()?;
        let places = self.places(&patience)?;
        let opening = |index| {
            let mut opening = self.opening(index, &place, stream, &patience)?;
            if let (Addresses::In(reservation, _), Some(places)) = (self.reserved, places.get(index)) {
                reservation.check_place(&**self.session.backend(), opening.device)?;
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
                let backend = self.session.backend().info().name;
                check_backend("the descriptor", contents.backend.as_str(), backend)?;
                let openings = (0..contents.parts.len())
                    .map(|index| opening(index).map_err(|error| blame(contents, index, None, error)))
                    .collect::<Result<OneOrMany<_>>>()?;
                self.deliver(&openings, stream, || self.open_tensors(contents, &openings, stream))
            }
        }
    }

    /// Takes the addresses for all regions of each part, if they lie in a reservation.
    fn places(&self, patience: &Patience) -> Result<Vec<Vec<Arc<Place>>>> {
        let Addresses::In(reservation, offset) = self.reserved else { return Ok(Vec::new()) };
        let contents = self.descriptor.contents();
        match reservation.places(contents, offset) {
            Err(Error::AddressesInUse { .. }) => {
                // The addresses of a mapping that was dropped a moment ago are free when the worker has closed it.
                let runtime = Runtime::get()?;
                runtime.worker.run(|| (), patience.left());
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
                delivery.wait_ready(waiting, openings[0].patience.deadline())?;
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
            opening.wait_ready(part, stream).map_err(|error| blame(contents, index, None, error))?;
        }
        Ok(Mapping::of_tensors(opened.into_parts(), self.descriptor))
    }

    fn open_part(&self, contents: &Contents, index: usize, opening: &OpenExport<'_>) -> Result<OpenPart> {
        let blame_region = |region, error| blame(contents, index, Some(region), error);
        let source = self.acquire(opening, || CopyLayout::of_tensors(contents, index), &blame_region);
        let part = opening.part(source.map_err(|error| blame(contents, index, None, error))?);
        if part.is_copy() {
            return Ok(part);
        }
        match check_mapped(&part, opening.named.regions()) {
            Ok(()) => Ok(part),
            Err((region, error)) => {
                part.abandon();
                Err(blame_region(region, error))
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
        patience: &'b Patience,
    ) -> Result<OpenExport<'b>> {
        let named = self.descriptor.contents().named(index);
        let devices = self.session.devices()?;
        let home =
            devices.iter().find(|device| device.identity == named.part.home).map(|device| device.ordinal);
        let device = place(named.part.home, home)?;
        if let Some(delivery) = self.delivery {
            delivery.check_device(named.part.home, device, stream)?;
        }
        let access = self.access.unwrap_or(named.contents.access);
        let (session, grant, alone) =
            (self.session, self.grants.get(index), self.is_ring || self.reserved.are_kept());
        let reserved = self.reserved.are_kept().then_some(ReservedTarget::New);
        let replicate = self.replicate;
        Ok(OpenExport {
            runtime: Runtime::get()?,
            session,
            named,
            device,
            home,
            access,
            patience,
            grant,
            alone,
            reserved,
            replicate,
        })
    }

    /// Opens a part, without waiting until it is ready, or copies it as `layout` states. `blame` adds the region concerned to
    /// an error.
    #[inline]
    pub(super) fn acquire(
        &self,
        opening: &OpenExport<'_>,
        layout: impl Fn() -> Result<CopyLayout>,
        blame: &dyn Fn(usize, Error) -> Error,
    ) -> Result<MappingSource> {
        let known = if self.copy.is_unconditional() { None } else { opening.reuse_lease() };
        match known {
            Some(lease) => Ok(MappingSource::Remote(lease)),
            None => self.open_or_copy(opening, layout, blame).map_err(|error| match error {
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
        blame: &dyn Fn(usize, Error) -> Error,
    ) -> Result<MappingSource> {
        let stage = || self.wait_and(opening, || opening.copy(layout()?, self.progress));
        let pull = || self.wait_and(opening, || opening.pull(layout()?, self.progress));
        let policy = self.copy;
        let opened = match policy {
            CopyPolicy::Pulled => return pull(),
            CopyPolicy::Always | CopyPolicy::Staged => stage(),
            _ => opening.open(blame),
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
            delivery.wait_ready(None, opening.patience.deadline())?;
        }
        copy()
    }
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
pub(super) fn blame(contents: &Contents, part: usize, region: Option<usize>, error: Error) -> Error {
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
