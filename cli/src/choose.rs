//! Which backend to run on.

use device_ipc::{Error, Ipc};

/// A backend, and whether it stands in for hardware that is not there.
pub(crate) struct Choice {
    pub(crate) ipc: Ipc,
    /// Why no other backend can be used, a line each, where nobody asked for a backend without any.
    pub(crate) fallback: Option<String>,
}

/// The backend of this name; or the first with a device; or the mock, and then it is said why.
pub(crate) fn choose(name: Option<&str>) -> Result<Choice, Error> {
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
        Err(error) => Err(error),
    }
}
