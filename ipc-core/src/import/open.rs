//! How a mapping is made.

use std::time::Duration;

use super::grant::HeldGrant;
use super::mapping::{Hold, Mapping, MappingParts};
use super::table::Wanted;
use crate::backend::Access;
use crate::broker::{BrokerAddress, Deadline, Refusal};
use crate::descriptor::Descriptor;
use crate::device::{DeviceIdentity, DeviceInfo, DeviceOrdinal};
use crate::error::{Error, Result};
use crate::export::{BorrowedMemory, LocalGrant, OpenRequest, check_backend};
use crate::ipc::Ipc;
use crate::kill::kill_point;
use crate::placement::DeviceMap;
use crate::process::ProcessIdentity;
use crate::runtime::Runtime;
use crate::stream::{AsStream, BorrowedStream};
use crate::timeline::End;

/// A mapping in the making; see [`Ipc::open`]. It is made by the method that says where.
#[must_use = "nothing is opened before at_home, on_device, on or mapped_by"]
#[derive(Debug)]
pub struct OpenBuilder<'a> {
    ipc: &'a Ipc,
    descriptor: &'a Descriptor,
    access: Option<Access>,
    timeout: Duration,
    grant: Option<&'a HeldGrant>,
    alone: bool,
}

impl<'a> OpenBuilder<'a> {
    pub(crate) const fn new(ipc: &'a Ipc, descriptor: &'a Descriptor, timeout: Duration) -> Self {
        Self { ipc, descriptor, access: None, timeout, grant: None, alone: false }
    }

    /// Opens by a grant, as long as it has not been used.
    pub(crate) const fn by_grant(mut self, grant: Option<&'a HeldGrant>) -> Self {
        self.grant = grant;
        self
    }

    /// With a lease that no other mapping shares, and so a timeline of its own.
    pub(crate) const fn alone(mut self) -> Self {
        self.alone = true;
        self
    }

    /// What this process wants to do with the memory; what the exporter permits unless said otherwise.
    pub const fn access(mut self, access: Access) -> Self {
        self.access = Some(access);
        self
    }

    /// How long the exporter may take to answer, and the bytes to be ready where no stream waits for them.
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Opens on the device where the bytes live. Waits on the host until they are ready.
    ///
    /// # Errors
    ///
    /// [`Error::HomeNotVisible`] where this process does not see that device; those of
    /// [`on_device`](Self::on_device).
    pub fn at_home(self) -> Result<Mapping> {
        let devices = self.ipc.devices()?;
        let home = self.home_among(devices).ok_or_else(|| self.home_not_visible())?;
        self.open(home, devices, None)
    }

    /// Opens on the device at this position in this process's numbering, for access across cards where it is not the
    /// bytes' home. Waits on the host until they are ready.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchDevice`], [`Error::NoPeerAccess`]; what is stale or refused ([`Error::ExporterGone`],
    /// [`Error::ExportDropped`], [`Error::OtherHost`], [`Error::NotPermitted`], …); what the vendor says.
    pub fn on_device(self, device: impl Into<DeviceOrdinal>) -> Result<Mapping> {
        let devices = self.ipc.devices()?;
        self.open(device.into(), devices, None)
    }

    /// Opens on the stream's device. The stream waits until the bytes are ready, the host does not.
    ///
    /// # Errors
    ///
    /// [`Error::WrongBackend`] for a stream of another backend; those of [`on_device`](Self::on_device).
    pub fn on<M>(self, stream: &impl AsStream<M>) -> Result<Mapping> {
        let stream = stream.as_stream();
        check_backend("the stream", stream.backend(), self.ipc.backend().info().name)?;
        let devices = self.ipc.devices()?;
        self.open(stream.device(), devices, Some(stream))
    }

    /// Opens on the device that the map names for the bytes' home. Waits on the host until they are ready.
    ///
    /// # Errors
    ///
    /// [`Error::NotInDeviceMap`]; those of [`on_device`](Self::on_device).
    pub fn mapped_by(self, map: &DeviceMap) -> Result<Mapping> {
        let home = self.descriptor.home;
        let device = map.get(&home).ok_or(Error::NotInDeviceMap { home })?;
        self.on_device(device)
    }

    fn open(
        self,
        device: DeviceOrdinal,
        devices: &[DeviceInfo],
        stream: Option<BorrowedStream<'_>>,
    ) -> Result<Mapping> {
        let deadline = Deadline::after(self.timeout);
        let runtime = Runtime::get()?;
        let backend = self.ipc.backend();
        let descriptor = self.descriptor;
        let name = backend.info().name;
        check_backend("the descriptor", &descriptor.backend, name)?;
        if device.index() >= devices.len() {
            return Err(Error::NoSuchDevice { backend: name, ordinal: device, count: devices.len() });
        }
        let access = self.access.unwrap_or(descriptor.access);
        if access.is_writable() && !descriptor.access.is_writable() {
            return Err(Error::AccessDenied { wanted: access, granted: descriptor.access });
        }
        check_reachable(descriptor, &runtime.identity)?;
        let home = self.home_among(devices);
        let parts = |range, hold| MappingParts {
            backend: backend.clone(),
            descriptor: descriptor.clone(),
            range,
            access,
            at_home: home == Some(device),
            timeout: self.timeout,
            hold,
        };
        let mapping = if let Some(granted) = self.granted_locally(runtime, access)? {
            Mapping::new(parts(granted.region, Hold::Local(granted.lease, granted.shared)))
        } else {
            if let Some(home) = home
                && !backend.peer_access(device, home)?
            {
                return Err(Error::NoPeerAccess { from: device, to: descriptor.home });
            }
            let allow = self.ipc.allow_list();
            let (grant, alone) = (self.grant, self.alone);
            let wanted = Wanted { backend, descriptor, device, home, access, allow, deadline, grant, alone };
            let (key, lease) = runtime.imports.acquire(&wanted)?;
            // Checked against the driver's answer below, once the hold has its guard.
            let mapped = lease.mapped;
            let mapping = Mapping::new(parts(mapped, Hold::Remote(key, lease)));
            mapping.narrowed()?
        };
        if mapping.device() != device {
            return Err(Error::Unsupported {
                backend: name,
                what: format!("open memory of this very process on device {device}"),
                why: format!(
                    "within one process there is one address; open it at home (device {}) and enable peer access",
                    mapping.device()
                ),
            });
        }
        kill_point!("importer:mapped");
        match stream {
            Some(stream) => mapping.wait_ready_on(stream)?,
            None => mapping.wait_ready(deadline.left())?,
        }
        Ok(mapping)
    }

    /// In the exporting process itself there is nothing to open.
    fn granted_locally(&self, runtime: &Runtime, access: Access) -> Result<Option<LocalGrant>> {
        let descriptor = self.descriptor;
        if descriptor.exporter != runtime.identity {
            return Ok(None);
        }
        if !runtime.poller.listens_at(&descriptor.broker) {
            return Err(Error::Unsupported {
                backend: self.ipc.backend().info().name,
                what: "open memory that another copy of device-ipc shares in this very process".into(),
                why: "drivers do not open a process's own handles; use the address that it was shared by"
                    .into(),
            });
        }
        let token = self.grant.and_then(HeldGrant::token).unwrap_or(descriptor.token);
        let request = OpenRequest { export: descriptor.export, token, access };
        match runtime.exports.grant_locally(request) {
            Ok(granted) => {
                if let Some(grant) = self.grant {
                    grant.used_up();
                }
                if let Some(Err(detail)) = granted.borrowed.as_ref().map(BorrowedMemory::check) {
                    runtime.exports.release(descriptor.export, granted.lease, End::Released);
                    return Err(Error::StaleGeneration(detail));
                }
                Ok(Some(granted))
            }
            Err(Refusal::Dropped) => Err(Error::ExportDropped { pid: descriptor.exporter.pid }),
            Err(Refusal::Access { granted }) => Err(Error::AccessDenied { wanted: access, granted }),
            Err(_) => Err(Error::wrong_token(descriptor.exporter.pid)),
        }
    }

    fn home_among(&self, devices: &[DeviceInfo]) -> Option<DeviceOrdinal> {
        devices.iter().find(|device| device.identity == self.descriptor.home).map(|device| device.ordinal)
    }

    fn home_not_visible(&self) -> Error {
        let home: DeviceIdentity = self.descriptor.home;
        Error::HomeNotVisible { home, variable: self.ipc.backend().visible_devices_variable() }
    }
}

/// What can be told of the exporter without asking it.
fn check_reachable(descriptor: &Descriptor, local: &ProcessIdentity) -> Result<()> {
    let exporter = &descriptor.exporter;
    if exporter.boot != local.boot {
        return Err(if exporter.host == local.host {
            Error::Rebooted
        } else {
            Error::OtherHost { exporter: exporter.host.to_string(), local: local.host.to_string() }
        });
    }
    if exporter.has_ended(local) {
        return Err(Error::ExporterGone { pid: exporter.pid });
    }
    let is_abstract = matches!(descriptor.broker, BrokerAddress::Abstract(_));
    if is_abstract && exporter.net_namespace != local.net_namespace {
        return Err(Error::OtherNetworkNamespace);
    }
    Ok(())
}
