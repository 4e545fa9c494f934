//! The builder of a mapping.

use std::cell::OnceCell;
use std::fmt;
use std::slice;
use std::time::Duration;

use rustix::io::Errno;

use super::grant::UnusedGrant;
use super::mapping::{Mapping, region_of};
use super::open_part::{Copied, LocalLease, MappingSource, OpenPart, Terms};
use super::staged::{Incoming, copy_in};
use super::table::{LeaseRef, OpenTarget};
use crate::backend::Access;
use crate::backend::stream::{AsStream, BorrowedStream};
use crate::model::device::{DeviceIdentity, DeviceOrdinal};
use crate::model::error::{Error, Result};
use crate::model::one_or_many::OneOrMany;
use crate::model::placement::DeviceMap;
use crate::os::kill::kill_point;
use crate::sharing::Runtime;
use crate::sharing::Session;
use crate::sharing::export::{BorrowedMemory, LocalGrant, OpenRequest, check_backend};
use crate::sharing::staging::{CopyLayout, copy_within};
use crate::sharing::timeline::Termination;
use crate::transport::{Deadline, socket};
use crate::wire::descriptor::{Contents, DescribedRegion, Descriptor, Memory, NamedExport, Regions};
use crate::wire::{BrokerAddress, Refusal};

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
    session: &'a Session,
    descriptor: &'a Descriptor,
    access: Option<Access>,
    timeout: Duration,
    /// One for each part, or none.
    grants: &'a [UnusedGrant],
    alone: bool,
    staging: Staging,
    delivery: Option<&'a dyn Delivery>,
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
    fn open(&self, open: &mut dyn FnMut() -> Result<Mapping>) -> Result<Mapping>;
}

/// When the bytes are copied instead of opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Staging {
    Never,
    /// Where they cannot be opened.
    IfNeeded,
    Always,
}

impl<'a> OpenBuilder<'a> {
    pub(crate) const fn new(session: &'a Session, descriptor: &'a Descriptor, timeout: Duration) -> Self {
        let (access, grants, alone, staging) = (None, [].as_slice(), false, Staging::Never);
        Self { session, descriptor, access, timeout, grants, alone, staging, delivery: None }
    }

    /// Opens by grants, one for each part, as long as they have not been used.
    pub(crate) const fn by_grants(mut self, grants: &'a [UnusedGrant]) -> Self {
        self.grants = grants;
        self
    }

    /// Opens an export of a message.
    pub(crate) fn delivered_by(mut self, delivery: &'a dyn Delivery) -> Self {
        self.delivery = Some(delivery);
        self
    }

    /// With a lease that no other mapping shares, and so a timeline of its own.
    pub(crate) const fn alone(mut self) -> Self {
        self.alone = true;
        self
    }

    /// Sets the access of this process, by default the access that the exporter permits.
    pub const fn access(mut self, access: Access) -> Self {
        self.access = Some(access);
        self
    }

    /// Sets the timeout for the exporter's answer, and for the bytes to be ready if no stream waits for them; by default the
    /// timeout of the [`Ipc`](crate::Ipc).
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Copies the memory if the device cannot reach it: there is no peer access, the home device is hidden from this process, or
    /// the vendor cannot open the memory there. Of named tensors on several devices, only those are copied that the device cannot
    /// reach. [`Mapping::is_copy`] returns whether anything was copied.
    ///
    /// The bytes pass through page-locked host memory that both processes map, chunk by chunk. The call waits on the host until
    /// they are complete in private memory of this process on the named device, so a stream has nothing to wait for. Neither
    /// process sees later writes of the other, a [`timeline`](Mapping::timeline) is refused, and the lease has ended when the call
    /// returns. [`timeout`](Self::timeout) limits each answer of the exporter, not the whole copy. For a received export the host
    /// first waits until the bytes are ready, also if a stream was given.
    pub const fn or_staged(mut self) -> Self {
        self.staging = Staging::IfNeeded;
        self
    }

    /// Copies the memory in any case; see [`or_staged`](Self::or_staged). The copy is writable also if the export is read-only,
    /// provided that [`access`](Self::access) requests it.
    pub const fn staged(mut self) -> Self {
        self.staging = Staging::Always;
        self
    }

    /// Opens each tensor on its home device. Waits on the host until all tensors are ready.
    ///
    /// # Errors
    ///
    /// [`Error::HomeNotVisible`] if this process does not see a home device; as for [`on_device`](Self::on_device).
    pub fn at_home(self) -> Result<Mapping> {
        let variable = self.session.backend().visible_devices_variable();
        self.open(None, |home, visible| visible.ok_or(Error::HomeNotVisible { home, variable }))
    }

    /// Opens all tensors on the device with this ordinal, by peer access if it is not their home device. Waits on the host until
    /// they are ready.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchDevice`], [`Error::NoPeerAccess`]; a stale or refused descriptor ([`Error::ExporterGone`],
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

    /// Opens each part on the device that `place` returns for its home, which has the given ordinal if it is visible.
    #[inline]
    fn open(
        self,
        stream: Option<BorrowedStream<'_>>,
        place: impl Fn(DeviceIdentity, Option<DeviceOrdinal>) -> Result<DeviceOrdinal>,
    ) -> Result<Mapping> {
        let patience = Patience::new(self.timeout);
        let contents = self.descriptor.contents();
        match &contents.memory {
            Memory::Region(region) => {
                let part = self.part(0, &place, stream, &patience)?;
                self.deliver(slice::from_ref(&part), stream, || self.open_region(region, &part, stream))
            }
            Memory::Tensors(_) => {
                let backend = self.session.backend().info().name;
                check_backend("the descriptor", contents.backend.as_str(), backend)?;
                let part = |part| self.part(part, &place, stream, &patience);
                let parts = (0..contents.parts.len())
                    .map(|number| part(number).map_err(|error| blame(contents, number, None, error)))
                    .collect::<Result<OneOrMany<_>>>()?;
                self.deliver(&parts, stream, || self.open_tensors(contents, &parts, stream))
            }
        }
    }

    /// Calls `open`. Waits before that until the bytes of a received export are ready.
    #[inline]
    fn deliver(
        &self,
        parts: &[OpenExport<'_>],
        stream: Option<BorrowedStream<'_>>,
        mut open: impl FnMut() -> Result<Mapping>,
    ) -> Result<Mapping> {
        match self.delivery {
            None => open(),
            Some(delivery) => {
                // Before the grants are used: after an error here the export can be opened again.
                let waiting = if self.will_copy(parts)? { None } else { stream };
                delivery.wait_ready(waiting, parts[0].patience.deadline())?;
                delivery.open(&mut open)
            }
        }
    }

    /// Returns whether a part is known to be copied before its open is tried.
    fn will_copy(&self, parts: &[OpenExport<'_>]) -> Result<bool> {
        match self.staging {
            Staging::Never => Ok(false),
            Staging::Always => Ok(true),
            Staging::IfNeeded => {
                for part in parts {
                    if !part.has_peer_access()? {
                        return Ok(true);
                    }
                }
                Ok(false)
            }
        }
    }

    #[inline]
    fn open_region(
        &self,
        region: &DescribedRegion,
        part: &OpenExport<'_>,
        stream: Option<BorrowedStream<'_>>,
    ) -> Result<Mapping> {
        let held = self.held(part, || Ok(CopyLayout::of_region(region.len)), &|_, error| error)?;
        let range = region_of(&held, region)?;
        part.wait_ready(&held, stream)?;
        Ok(Mapping::of_region(held, self.descriptor, range))
    }

    fn open_tensors(
        &self,
        contents: &Contents,
        parts: &[OpenExport<'_>],
        stream: Option<BorrowedStream<'_>>,
    ) -> Result<Mapping> {
        let mut opened = AllOrNothing { parts: OneOrMany::NONE };
        for (number, part) in parts.iter().enumerate() {
            opened.parts.push(self.open_part(contents, number, part)?);
        }
        for (number, (part, held)) in parts.iter().zip(opened.parts.iter()).enumerate() {
            part.wait_ready(held, stream).map_err(|error| blame(contents, number, None, error))?;
        }
        Ok(Mapping::of_tensors(opened.into_parts(), self.descriptor))
    }

    fn open_part(&self, contents: &Contents, part: usize, opening: &OpenExport<'_>) -> Result<OpenPart> {
        let blamed = |error| blame(contents, part, None, error);
        let blame_region = |region, error| blame(contents, part, Some(region), error);
        let held = self.held(opening, || CopyLayout::of_tensors(contents, part), &blame_region);
        let held = held.map_err(blamed)?;
        if held.is_copy() {
            return Ok(held);
        }
        match check_mapped(&held, opening.named.regions) {
            Ok(()) => Ok(held),
            Err((region, error)) => {
                held.abandon();
                Err(blame(contents, part, Some(region), error))
            }
        }
    }

    /// Selects the device of a part.
    #[inline]
    fn part<'b>(
        &'b self,
        part: usize,
        place: impl Fn(DeviceIdentity, Option<DeviceOrdinal>) -> Result<DeviceOrdinal>,
        stream: Option<BorrowedStream<'_>>,
        patience: &'b Patience,
    ) -> Result<OpenExport<'b>> {
        let named = self.descriptor.contents().named(part);
        let devices = self.session.devices()?;
        let home = devices.iter().find(|device| device.identity == named.home).map(|device| device.ordinal);
        let device = place(named.home, home)?;
        if let Some(delivery) = self.delivery {
            delivery.check_device(named.home, device, stream)?;
        }
        let access = self.access.unwrap_or(named.access);
        let (session, grant, alone) = (self.session, self.grants.get(part), self.alone);
        Ok(OpenExport { session, named, device, home, access, patience, grant, alone })
    }

    /// Opens a part, ready or not, or copies it as `layout` states. `blame` adds to an error the region that it concerns.
    #[inline]
    fn held(
        &self,
        opening: &OpenExport<'_>,
        layout: impl FnOnce() -> Result<CopyLayout>,
        blame: &dyn Fn(usize, Error) -> Error,
    ) -> Result<OpenPart> {
        let runtime = Runtime::get()?;
        let known = if self.staging == Staging::Always { None } else { opening.open_already(runtime) };
        match known {
            Some(lease) => Ok(opening.guard(runtime, opening.device, MappingSource::Remote(lease))),
            None => self.open_or_copy(opening, runtime, layout, blame),
        }
    }

    /// Opens a part that is not open yet, or copies it.
    #[cold]
    fn open_or_copy(
        &self,
        opening: &OpenExport<'_>,
        runtime: &'static Runtime,
        layout: impl FnOnce() -> Result<CopyLayout>,
        blame: &dyn Fn(usize, Error) -> Error,
    ) -> Result<OpenPart> {
        if self.staging == Staging::Always {
            return self.copy(opening, runtime, layout);
        }
        match opening.opened(runtime, blame) {
            Err(error) if self.staging == Staging::IfNeeded && is_out_of_reach(error.innermost()) => {
                tracing::debug!(target: crate::os::log::IMPORT, %error, "the memory is copied, as it cannot be opened");
                self.copy(opening, runtime, layout)
            }
            opened => opened,
        }
    }

    fn copy(
        &self,
        opening: &OpenExport<'_>,
        runtime: &'static Runtime,
        layout: impl FnOnce() -> Result<CopyLayout>,
    ) -> Result<OpenPart> {
        if let Some(delivery) = self.delivery {
            // The exporter's device copies at once: it does not wait for the streams that write the bytes.
            delivery.wait_ready(None, opening.patience.deadline())?;
        }
        opening.copied(runtime, layout()?)
    }
}

/// Checks that the driver mapped, or the exporter shares, what the descriptor states; the position of a region where not.
fn check_mapped(held: &OpenPart, regions: Regions<'_>) -> Result<(), (usize, Error)> {
    let mapped = held.regions();
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

/// The same error, about the first tensor of that region or part.
fn blame(contents: &Contents, part: usize, region: Option<usize>, error: Error) -> Error {
    match contents.first_tensor(part, region) {
        Some(tensor) => error.of_tensor(tensor.name),
        None => error,
    }
}

/// The parts that are open so far. Where the rest fails, nothing of them stays open that no other mapping uses.
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

/// How long an exporter may take, from the first time on that it is waited for: what is open already costs no look at the
/// clock.
#[derive(Debug)]
pub(crate) struct Patience {
    timeout: Duration,
    deadline: OnceCell<Deadline>,
}

impl Patience {
    pub(crate) const fn new(timeout: Duration) -> Self {
        Self { timeout, deadline: OnceCell::new() }
    }

    fn deadline(&self) -> Deadline {
        *self.deadline.get_or_init(|| Deadline::after(self.timeout))
    }

    pub(crate) fn left(&self) -> Duration {
        self.deadline().left()
    }
}

/// An export to be opened on a device: what a mapping has one of, and a bundle one for each home device.
pub(crate) struct OpenExport<'a> {
    pub(crate) session: &'a Session,
    pub(crate) named: NamedExport<'a>,
    pub(crate) device: DeviceOrdinal,
    /// The home among this process's devices.
    pub(crate) home: Option<DeviceOrdinal>,
    pub(crate) access: Access,
    pub(crate) patience: &'a Patience,
    pub(crate) grant: Option<&'a UnusedGrant>,
    pub(crate) alone: bool,
}

impl OpenExport<'_> {
    /// A hold on what is open here and can be used at once.
    fn open_already(&self, runtime: &'static Runtime) -> Option<LeaseRef> {
        if self.alone || !self.is_permitted() {
            return None;
        }
        let (backend, on) = (self.session.backend(), (self.device, self.access));
        let lease =
            runtime.imports.acquire_open(&self.named, backend, on, self.grant, self.session.allow_list())?;
        kill_point!("importer:mapped");
        Some(lease)
    }

    fn is_permitted(&self) -> bool {
        self.named.access.is_writable() || !self.access.is_writable()
    }

    fn guard(&self, runtime: &Runtime, device: DeviceOrdinal, hold: MappingSource) -> OpenPart {
        let (access, timeout) = (self.access, self.patience.timeout);
        OpenPart::new(runtime, hold, Terms { device, access, at_home: self.home == Some(device), timeout })
    }

    /// Returns whether the device reaches the home device, as far as this process sees that.
    fn has_peer_access(&self) -> Result<bool> {
        self.home.map_or(Ok(true), |home| self.session.backend().peer_access(self.device, home))
    }

    /// Makes the stream wait until the bytes are ready; the host waits if there is no stream.
    #[inline]
    fn wait_ready(&self, held: &OpenPart, stream: Option<BorrowedStream<'_>>) -> Result<()> {
        match stream {
            Some(stream) => held.wait_ready_on(stream),
            None => held.wait_ready(|| self.patience.left()),
        }
    }

    /// Opens what cannot be used at once.
    fn opened(&self, runtime: &'static Runtime, blame: &dyn Fn(usize, Error) -> Error) -> Result<OpenPart> {
        let Self { session, named, device, home, access, patience, grant, alone } = *self;
        let backend = session.backend();
        if !self.is_permitted() {
            return Err(Error::AccessDenied { wanted: access, granted: named.access });
        }
        self.check(runtime)?;
        let hold = if self.is_local(runtime)? {
            // Before the grant is used.
            self.check_at_home()?;
            self.local_hold(self.granted_locally(runtime)?)
        } else {
            if !self.has_peer_access()? {
                return Err(Error::NoPeerAccess { from: device, to: named.home });
            }
            let allow = session.allow_list();
            let (descriptor, deadline) = (named, patience.deadline());
            let wanted = OpenTarget {
                backend,
                descriptor,
                device,
                home,
                access,
                allow,
                deadline,
                grant,
                alone,
                blame,
            };
            MappingSource::Remote(runtime.imports.acquire(&wanted)?)
        };
        let held = self.guard(runtime, device, hold);
        kill_point!("importer:mapped");
        Ok(held)
    }

    /// Copies the memory to the device.
    fn copied(&self, runtime: &'static Runtime, layout: CopyLayout) -> Result<OpenPart> {
        let Self { session, named, device, access, patience, grant, .. } = *self;
        let timeout = patience.timeout;
        let backend = session.backend();
        self.check(runtime)?;
        let held = |device, access, hold| {
            OpenPart::new(runtime, hold, Terms { device, access, at_home: true, timeout })
        };
        let reading = Self { access: Access::ReadOnly, ..*self };
        let buffer = if self.is_local(runtime)? {
            let granted = reading.granted_locally(runtime)?;
            let home = granted.shared.regions[0].device;
            // Ends the lease whether the copy succeeds or not.
            let kept = held(home, Access::ReadOnly, self.local_hold(granted));
            kept.wait_ready(|| timeout)?;
            copy_within(backend, kept.regions(), &layout, device)?
        } else {
            let allow = session.allow_list();
            copy_in(&Incoming { backend, named, layout: &layout, device, grant, allow, timeout })?
        };
        kill_point!("importer:mapped");
        Ok(held(device, access, MappingSource::Copy(Box::new(Copied { buffer, layout }))))
    }

    fn local_hold(&self, granted: LocalGrant) -> MappingSource {
        let LocalGrant { lease, shared, .. } = granted;
        let (backend, export) = (self.session.backend().clone(), self.named.export);
        MappingSource::Local(Box::new(LocalLease { backend, export, lease, shared }))
    }

    /// What can be told before anybody is asked.
    fn check(&self, runtime: &Runtime) -> Result<()> {
        let name = self.session.backend().info().name;
        check_backend("the descriptor", self.named.backend, name)?;
        let count = self.session.devices()?.len();
        if self.device.index() >= count {
            return Err(Error::NoSuchDevice { backend: name, ordinal: self.device, count });
        }
        check_reachable(&self.named, runtime)
    }

    /// Returns whether this process is the exporter, so that there is nothing to open.
    fn is_local(&self, runtime: &Runtime) -> Result<bool> {
        let named = &self.named;
        if *named.exporter != runtime.identity {
            return Ok(false);
        }
        if runtime.poller.listens_at(named.broker) {
            return Ok(true);
        }
        if matches!(socket::connect_to(named.broker), Err(Errno::CONNREFUSED | Errno::NOENT)) {
            // The process has executed another program since, which has the same id and start time (execve(2)).
            return Err(Error::ExporterGone { pid: named.exporter.pid });
        }
        Err(Error::Unsupported {
            backend: self.session.backend().info().name,
            what: "open memory that another copy of device-ipc shares in this process".into(),
            why: "drivers do not open handles of the same process; use the address that was shared".into(),
        })
    }

    /// Checks that memory of this process is opened on its home device.
    fn check_at_home(&self) -> Result<()> {
        match self.home {
            Some(home) if home != self.device => Err(Error::Unsupported {
                backend: self.session.backend().info().name,
                what: format!("open memory of the same process on device {}", self.device),
                why: format!(
                    "within one process there is one address; open it at home (device {home}) and enable peer access, or take \
                     a copy (OpenBuilder::or_staged)"
                ),
            }),
            _ => Ok(()),
        }
    }

    /// Begins a lease on an export of this process.
    fn granted_locally(&self, runtime: &Runtime) -> Result<LocalGrant> {
        let (named, access) = (&self.named, self.access);
        let token = self.grant.and_then(UnusedGrant::token).unwrap_or(named.token);
        let request = OpenRequest { export: named.export, token, access };
        match runtime.exports.grant_locally(request) {
            Ok(granted) => {
                if let Some(grant) = self.grant {
                    grant.used_up();
                }
                if let Some(Err(detail)) = granted.borrowed.as_ref().map(BorrowedMemory::check) {
                    runtime.exports.release(named.export, granted.lease, Termination::Released);
                    return Err(Error::StaleGeneration(detail));
                }
                Ok(granted)
            }
            Err(Refusal::Dropped) => Err(Error::ExportDropped { pid: named.exporter.pid }),
            Err(Refusal::Access { granted }) => Err(Error::AccessDenied { wanted: access, granted }),
            Err(_) => Err(Error::wrong_token(named.exporter.pid)),
        }
    }
}

/// Is it the device that cannot reach the memory, or the vendor that cannot open it there?
const fn is_out_of_reach(error: &Error) -> bool {
    matches!(
        error,
        Error::NoPeerAccess { .. }
            | Error::HomeNotVisible { .. }
            | Error::Unsupported { .. }
            | Error::Vendor(_)
    )
}

/// What can be told of the exporter without asking it.
fn check_reachable(descriptor: &NamedExport<'_>, runtime: &Runtime) -> Result<()> {
    let (exporter, local) = (descriptor.exporter, &runtime.identity);
    if exporter.boot != local.boot {
        return Err(if exporter.host == local.host {
            Error::Rebooted
        } else {
            Error::OtherHost { exporter: exporter.host.to_string(), local: local.host.to_string() }
        });
    }
    if !runtime.imports.knows_to_live(exporter) && exporter.has_exited(local) {
        return Err(Error::ExporterGone { pid: exporter.pid });
    }
    let is_abstract = matches!(descriptor.broker, BrokerAddress::Abstract(_));
    if is_abstract && exporter.net_namespace != local.net_namespace {
        return Err(Error::OtherNetworkNamespace);
    }
    Ok(())
}
