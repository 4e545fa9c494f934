//! Selection of the backend that a command runs on.

use anyhow::{Result, bail};
use device_ipc::backend::Backends;
use device_ipc::{AllowList, DeviceOrdinal, Error, Ipc, IpcBuilder};

/// A selected backend.
pub struct Selection {
    /// The entry point of the library on this backend.
    pub ipc: Ipc,
    /// Why each other backend is unavailable, one line each; `None` unless a simulated one was selected for lack of hardware.
    pub fallback: Option<String>,
}

impl Selection {
    /// Returns whether the backend only simulates devices.
    pub fn is_simulated(&self) -> bool {
        let name = self.ipc.backend().info().name;
        Backends::registered().registrations().iter().any(|one| one.name() == name && one.is_simulated())
    }
}

/// Selects the backend of this name; without a name the first backend that has a device, and a simulated one where no backend
/// has one. The list contains the users to share with and to open from.
///
/// # Errors
///
/// Fails if the named backend does not exist or is unavailable; as for [`builder`].
pub fn select_backend(name: Option<&str>, allow: AllowList) -> Result<Selection> {
    let builder = builder(allow)?;
    if let Some(name) = name {
        return Ok(Selection { ipc: builder.named(name)?, fallback: None });
    }
    match builder.clone().auto() {
        Ok(ipc) => Ok(Selection { ipc, fallback: None }),
        Err(Error::NoBackend(tried)) => {
            let ipc = builder.allow_simulated(true).auto()?;
            let selected = ipc.backend().info().name;
            let others = tried.iter().filter(|status| status.name != selected);
            let reasons = others.map(|status| format!("\n  {status}")).collect();
            Ok(Selection { ipc, fallback: Some(reasons) })
        }
        Err(error) => Err(error.into()),
    }
}

/// Returns a builder with the users to share with and to open from, and the settings of copies between hosts.
///
/// # Errors
///
/// Fails if `DEVICE_IPC_REMOTE` is set, and NIXL cannot be loaded or cannot listen there.
pub fn builder(allow: AllowList) -> Result<IpcBuilder> {
    let builder = Ipc::builder().allow(allow);
    #[cfg(feature = "nixl")]
    let builder = builder.remote(device_ipc::nixl::remote()?);
    Ok(builder)
}

/// Returns an error that names the command-line option if the backend has no device with this ordinal.
///
/// # Errors
///
/// Fails if the ordinal is out of range, or if the backend cannot list its devices.
pub fn check_device(ipc: &Ipc, option: &str, ordinal: u32) -> Result<()> {
    let devices = ipc.devices()?;
    if DeviceOrdinal::new(ordinal).index() >= devices.len() {
        bail!(
            "{option} {ordinal} is out of range: the backend {} has {} device(s), numbered from 0; list them with \
             'device-ipc devices'",
            ipc.backend().info().name,
            devices.len()
        );
    }
    Ok(())
}
