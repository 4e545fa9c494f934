//! Which backend to run on.

use anyhow::{Result, bail};
use device_ipc::{DeviceOrdinal, Error, Ipc};

/// A backend, and whether it stands in for hardware that is not there.
pub(crate) struct Choice {
    pub(crate) ipc: Ipc,
    /// Why no other backend can be used, a line each, where nobody asked for a backend without any.
    pub(crate) fallback: Option<String>,
}

/// The backend of this name; or the first with a device; or the mock, and then it is said why.
pub(crate) fn choose(name: Option<&str>) -> Result<Choice> {
    if let Some(name) = name {
        return Ok(Choice { ipc: Ipc::named(name)?, fallback: None });
    }
    match Ipc::auto() {
        Ok(ipc) => Ok(Choice { ipc, fallback: None }),
        Err(Error::NoBackend(tried)) => {
            let ipc = Ipc::builder().allow_simulated(true).auto()?;
            let taken = ipc.backend().info().name;
            let others = tried.iter().filter(|status| status.name != taken);
            let reasons = others.map(|status| format!("\n  {status}")).collect();
            Ok(Choice { ipc, fallback: Some(reasons) })
        }
        Err(error) => Err(error.into()),
    }
}

/// Refuses the ordinal of a device that is not there, by the option it was given with.
pub(crate) fn check_device(ipc: &Ipc, option: &str, ordinal: u32) -> Result<()> {
    let devices = ipc.devices()?;
    if DeviceOrdinal::new(ordinal).index() >= devices.len() {
        bail!(
            "{option} {ordinal}: the backend {} has {} device(s), numbered from 0; see 'device-ipc devices'",
            ipc.backend().info().name,
            devices.len()
        );
    }
    Ok(())
}
