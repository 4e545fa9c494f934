//! A backend with the settings that every export and every open shares.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::export::RemoteMemory;
use super::remote::Remote;
use crate::backend::DeviceIpc;
use crate::model::device::{DeviceIdentity, DeviceInfo, DeviceOrdinal};
use crate::model::error::{Error, Result};
use crate::model::placement::{DeviceMap, DeviceName};
use crate::transport::AllowList;

/// A backend with its settings: it shares memory ([`share`](Self::share)) and opens memory of other processes
/// ([`open`](Self::open)).
///
/// Creating and cloning it is cheap: it creates no context on a device and starts no thread.
#[derive(Clone)]
pub struct Ipc {
    backend: Arc<dyn DeviceIpc>,
    settings: Arc<Settings>,
}

struct Settings {
    /// Listed once: the visible devices do not change while a process runs.
    devices: OnceLock<Vec<DeviceInfo>>,
    socket_directory: Option<PathBuf>,
    allow: AllowList,
    timeout: Duration,
    remote: Option<Remote>,
}

impl fmt::Debug for Ipc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ipc").field("backend", &self.backend.info().name).finish_non_exhaustive()
    }
}

impl Ipc {
    pub(crate) fn new(
        backend: Arc<dyn DeviceIpc>,
        socket_directory: Option<PathBuf>,
        allow: AllowList,
        timeout: Duration,
        remote: Option<Remote>,
    ) -> Self {
        let settings = Settings { devices: OnceLock::new(), socket_directory, allow, timeout, remote };
        Self { backend, settings: Arc::new(settings) }
    }

    /// Returns the backend.
    pub fn backend(&self) -> &Arc<dyn DeviceIpc> {
        &self.backend
    }

    /// Returns the visible devices of this process. Creates no context.
    ///
    /// # Errors
    ///
    /// The vendor's error.
    pub fn devices(&self) -> Result<&[DeviceInfo]> {
        if let Some(devices) = self.settings.devices.get() {
            return Ok(devices);
        }
        let devices = self.backend.devices()?;
        Ok(self.settings.devices.get_or_init(|| devices))
    }

    /// Returns the identity of the device with this ordinal.
    pub(crate) fn identity_of(&self, ordinal: DeviceOrdinal) -> Result<DeviceIdentity> {
        let devices = self.devices()?;
        devices.get(ordinal.index()).map(|device| device.identity).ok_or_else(|| Error::NoSuchDevice {
            backend: self.backend.info().name,
            ordinal,
            count: devices.len(),
        })
    }

    /// Returns the device that a map names for memory of this home device.
    pub(crate) fn mapped_device(&self, map: &DeviceMap, home: DeviceIdentity) -> Result<DeviceOrdinal> {
        match map.device_for(home)? {
            DeviceName::Ordinal(ordinal) => Ok(ordinal),
            DeviceName::Identity(identity) => self.ordinal_of(identity),
        }
    }

    /// Returns the ordinal of a device.
    fn ordinal_of(&self, identity: DeviceIdentity) -> Result<DeviceOrdinal> {
        let found = self.devices()?.iter().find(|device| device.identity == identity);
        found.map(|device| device.ordinal).ok_or_else(|| {
            Error::InvalidDeviceMap(format!(
                "it names device {identity}, which this process does not see; add it to {}",
                self.backend.visible_devices_variable()
            ))
        })
    }

    pub(crate) fn timeout(&self) -> Duration {
        self.settings.timeout
    }

    pub(crate) fn socket_directory(&self) -> Option<PathBuf> {
        self.settings.socket_directory.clone()
    }

    /// Returns the settings of copies between hosts.
    pub(crate) fn remote(&self) -> Option<&Remote> {
        self.settings.remote.as_ref()
    }

    /// Returns the addresses for the descriptors of exports.
    pub(crate) fn network_addresses(&self) -> Box<[SocketAddr]> {
        self.remote().and_then(Remote::address).into_iter().collect()
    }

    /// Returns the registration of a new export.
    pub(crate) fn remote_memory(&self) -> Option<RemoteMemory> {
        self.remote().and_then(Remote::memory)
    }

    pub(crate) fn allow_list(&self) -> &AllowList {
        &self.settings.allow
    }
}
