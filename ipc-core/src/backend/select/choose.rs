//! Selection of a backend, and the table of loaded backends.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::backend::DeviceIpc;
use crate::backend::select::{Registered, Registration};
use crate::model::availability::{BackendStatus, Unavailable};
use crate::model::device::DeviceInfo;
use crate::model::error::{Error, Remedy, Result};
use crate::os::environment::nonempty_variable;

/// The environment variable that names the backend for [`Backends::auto`].
pub const BACKEND_VARIABLE: &str = "DEVICE_IPC_BACKEND";

/// A set of backends to select from.
#[derive(Clone, Debug)]
pub struct Backends {
    registrations: Vec<Registration>,
    simulated: bool,
}

impl Backends {
    /// Returns all registered backends.
    pub fn registered() -> Self {
        inventory::iter::<Registered>.into_iter().fold(Self::none(), |backends, one| backends.with(one.0))
    }

    /// Returns an empty set.
    pub const fn none() -> Self {
        Self { registrations: Vec::new(), simulated: false }
    }

    /// Adds a backend, unless the set has one of the same name.
    pub fn with(mut self, registration: Registration) -> Self {
        if self.registrations.iter().all(|one| one.name != registration.name) {
            self.registrations.push(registration);
            self.registrations.sort_by_key(|one| (one.rank, one.name));
        }
        self
    }

    /// Sets whether [`auto`](Self::auto) may select a simulated backend if no hardware is available.
    pub const fn allow_simulated(mut self, yes: bool) -> Self {
        self.simulated = yes;
        self
    }

    /// Returns the backends in the order in which [`auto`](Self::auto) tries them. Loads no library.
    pub fn registrations(&self) -> &[Registration] {
        &self.registrations
    }

    /// Returns each backend with its devices, or the reason why it is unavailable. Creates no context.
    pub fn available(&self) -> Vec<BackendStatus> {
        self.registrations.iter().map(|one| BackendStatus { name: one.name, state: state_of(one) }).collect()
    }

    /// Returns the backend that `DEVICE_IPC_BACKEND` names, otherwise the first backend with a device.
    ///
    /// # Errors
    ///
    /// [`Error::NoBackend`] with the reason for each backend; as for [`named`](Self::named) if the variable is set.
    pub fn auto(&self) -> Result<Arc<dyn DeviceIpc>> {
        if let Some(name) = self.requested()? {
            return self.named(name);
        }
        let mut tried = Vec::new();
        for one in &self.registrations {
            if one.is_simulated() && !self.simulated {
                let reason = format!(
                    "simulated backends are not selected by default: set {BACKEND_VARIABLE}={}, {}",
                    one.name,
                    Remedy::AllowSimulated
                );
                tried.push(BackendStatus {
                    name: one.name,
                    state: Err(Unavailable::Failed { detail: reason }),
                });
                continue;
            }
            match state_of(one) {
                Ok(_) => return self.named(one.name),
                Err(reason) => tried.push(BackendStatus { name: one.name, state: Err(reason) }),
            }
        }
        Err(Error::NoBackend(tried))
    }

    /// Returns the name in `DEVICE_IPC_BACKEND`, or `None` if the variable is not set. Loads no library.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownBackend`].
    pub fn requested(&self) -> Result<Option<&'static str>> {
        let Some(name) = nonempty_variable(BACKEND_VARIABLE) else { return Ok(None) };
        self.registration(&name.to_string_lossy()).map(|one| Some(one.name))
    }

    /// Returns the backend with a name.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownBackend`], or [`Error::BackendUnavailable`] with the reason.
    pub fn named(&self, name: &str) -> Result<Arc<dyn DeviceIpc>> {
        let one = self.registration(name)?;
        load(one).map_err(|reason| Error::BackendUnavailable { backend: Some(name.to_owned()), reason })
    }

    fn registration(&self, name: &str) -> Result<&Registration> {
        self.registrations.iter().find(|one| one.name == name).ok_or_else(|| {
            let known = self.registrations.iter().map(|one| one.name.to_owned()).collect();
            Error::UnknownBackend { name: name.to_owned(), known }
        })
    }
}

fn state_of(registration: &Registration) -> Result<Vec<DeviceInfo>, Unavailable> {
    let devices =
        load(registration)?.devices().map_err(|error| Unavailable::Failed { detail: error.to_string() })?;
    if devices.is_empty() {
        return Err(Unavailable::NoDevice { detail: "the backend reports 0 devices".into() });
    }
    Ok(devices)
}

/// Loads a backend, or returns the instance loaded earlier.
///
/// A process loads each backend once, so that all users share one table of opened handles. Failures are not cached: the driver
/// may be installed, or a variable set, before the next attempt.
fn load(registration: &Registration) -> Result<Arc<dyn DeviceIpc>, Unavailable> {
    type Loaded = HashMap<(&'static str, usize), Arc<dyn DeviceIpc>>;
    static LOADED: Mutex<Option<Loaded>> = Mutex::new(None);
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    let loaded = loaded.get_or_insert_default();
    let key = (registration.name, registration.load as usize);
    if let Some(backend) = loaded.get(&key) {
        return Ok(Arc::clone(backend));
    }
    let backend = (registration.load)()?;
    loaded.insert(key, Arc::clone(&backend));
    Ok(backend)
}

#[cfg(test)]
mod tests;
