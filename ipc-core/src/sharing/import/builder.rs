//! The builder of a mapping, and of whatever else is opened by a descriptor.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use super::copy_policy::{CopyPolicy, CopyProgress, ProgressReport};
use super::grant::UnusedGrant;
use super::mapping::Mapping;
use super::open::{Delivery, MappingAddresses, OpenOptions, UnusedGrants};
use super::reservation::Reservation;
use super::reserved_open::KeeperAddress;
use crate::backend::Access;
use crate::backend::stream::AsStream;
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Result};
use crate::model::placement::DeviceMap;
use crate::sharing::Ipc;
use crate::sharing::export::check_backend;
use crate::wire::Grant;
use crate::wire::descriptor::Descriptor;

/// A builder for a [`Mapping`] ([`Ipc::open`](crate::Ipc::open), [`ReceivedExport::open`](crate::ReceivedExport::open)), or for a
/// [`RingReader`](crate::RingReader) ([`Ipc::open_ring`](crate::Ipc::open_ring)).
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
pub struct OpenBuilder<'a, T = Mapping> {
    pub(super) options: OpenOptions<'a>,
    opened: PhantomData<fn() -> T>,
}

/// The result of an [`OpenBuilder`].
pub trait Openable: Sized {
    /// Opens the memory by `open`, with options that this type may change.
    fn open(options: OpenOptions<'_>, open: impl FnOnce(&OpenOptions<'_>) -> Result<Mapping>)
    -> Result<Self>;
}

impl Openable for Mapping {
    #[inline]
    fn open(options: OpenOptions<'_>, open: impl FnOnce(&OpenOptions<'_>) -> Result<Self>) -> Result<Self> {
        open(&options)
    }
}

impl<'a, T> OpenBuilder<'a, T> {
    pub(crate) const fn new(ipc: &'a Ipc, descriptor: &'a Descriptor, timeout: Duration) -> Self {
        Self { options: OpenOptions::new(ipc, descriptor, timeout), opened: PhantomData }
    }

    /// Sets the access of this process, by default the access that the exporter permits.
    pub const fn access(mut self, access: Access) -> Self {
        self.options.access = Some(access);
        self
    }

    /// Sets the timeout for the exporter's answer, and for the bytes to be ready if no stream waits for them; by default the
    /// timeout of the [`Ipc`](crate::Ipc). A timeout of zero opens memory that this process has open or keeps open, without a request
    /// to the exporter; requests of the mapping then have the timeout of the [`Ipc`](crate::Ipc).
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.options.timeout = timeout;
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
        self.options.copy = policy;
        self
    }
}

impl<T: Openable> OpenBuilder<'_, T> {
    /// Opens each tensor on its home device. Waits on the host until all tensors are ready.
    ///
    /// # Errors
    ///
    /// [`Error::HomeNotVisible`] if this process does not see a home device; as for [`on_device`](Self::on_device).
    pub fn at_home(self) -> Result<T> {
        let backend = self.options.ipc.backend();
        let home_device = |home, visible: Option<DeviceOrdinal>| {
            let not_visible = || Error::HomeNotVisible { home, variable: backend.visible_devices_variable() };
            visible.ok_or_else(not_visible)
        };
        T::open(self.options, |options| options.open(None, home_device))
    }

    /// Opens all tensors on the device with this ordinal, by peer access if it is not their home device. Waits on the host until
    /// they are ready.
    ///
    /// # Errors
    ///
    /// [`DescriptorError::Kind`](crate::DescriptorError::Kind) for the descriptor of a ring; [`Error::NoSuchDevice`], [`Error::NoPeerAccess`]; a stale or refused descriptor ([`Error::ExporterGone`],
    /// [`Error::ExportDropped`], [`Error::OtherHost`], [`Error::NotPermitted`], …); the vendor's. Errors that concern one of
    /// several named tensors are in an [`Error::InBundle`], which names the tensor.
    ///
    /// For a received export also [`Error::InvalidDeviceMap`] if the channel's device map names another device,
    /// [`Error::PeerGone`] if the sender terminated before its streams had written the bytes, and [`Error::Timeout`], after which
    /// the export can be opened again.
    pub fn on_device(self, device: impl Into<DeviceOrdinal>) -> Result<T> {
        let device = device.into();
        T::open(self.options, |options| options.open(None, |_, _| Ok(device)))
    }

    /// Opens all tensors on the device of a stream. The stream waits until they are ready, the host does not.
    ///
    /// # Errors
    ///
    /// [`Error::WrongBackend`] for a stream of another backend; [`Error::WrongStream`] if a received export's channel has a
    /// device map that names another device than the stream's; as for [`on_device`](Self::on_device).
    pub fn on<M>(self, stream: &impl AsStream<M>) -> Result<T> {
        let stream = stream.as_stream();
        check_backend("the stream", stream.backend(), self.options.ipc.backend().info().name)?;
        T::open(self.options, |options| options.open(Some(stream), |_, _| Ok(stream.device())))
    }

    /// Opens each tensor on the device that the map names for its home device. Waits on the host until all tensors are ready.
    ///
    /// The map of a received export is [`ReceivedExport::device_map`](crate::ReceivedExport::device_map).
    ///
    /// # Errors
    ///
    /// [`Error::NotInDeviceMap`]; [`Error::InvalidDeviceMap`] for a map that names the home device by its ordinal, or a device
    /// that this process does not see; as for [`on_device`](Self::on_device).
    pub fn on_mapped_devices(self, map: &DeviceMap) -> Result<T> {
        let ipc = self.options.ipc;
        T::open(self.options, |options| options.open(None, |home, _| ipc.mapped_device(map, home)))
    }
}

impl<'a> OpenBuilder<'a> {
    /// Opens by a grant of the exporter ([`Export::grant`](crate::Export::grant)), also if it has dropped the export since. The
    /// open uses the grant up, or gives it back if this process has the memory open already; if the exporter could not be asked,
    /// the grant remains for another try. A grant that has ended is ignored: then the export opens as long as it has not been
    /// dropped, and fails with [`Error::GrantEnded`] afterwards.
    ///
    /// # Errors
    ///
    /// [`Error::Descriptor`] for the grant of another export.
    pub fn grant(mut self, grant: &Grant) -> Result<Self> {
        self.options.grants =
            UnusedGrants::Owned(grant.of_parts(self.options.descriptor, self.options.ipc.allow_list())?);
        Ok(self)
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
        self.options.addresses = MappingAddresses::Reserved;
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
        self.options.addresses = MappingAddresses::In(reservation, byte_offset);
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
        self.options.progress = ProgressReport(Some(report));
        self
    }

    /// Opens by grants, one for each part, as long as they have not been used.
    pub(crate) fn by_grants(mut self, grants: &'a [UnusedGrant]) -> Self {
        self.options.grants = UnusedGrants::Borrowed(grants);
        self
    }

    /// Opens an export of a message.
    pub(crate) fn delivered_by(mut self, delivery: &'a dyn Delivery) -> Self {
        self.options.delivery = Some(delivery);
        self
    }

    /// Opens the answer of a keeper.
    pub(crate) const fn kept_by(mut self, keeper: &'a Arc<KeeperAddress>) -> Self {
        self.options.keeper = Some(keeper);
        self
    }
}
