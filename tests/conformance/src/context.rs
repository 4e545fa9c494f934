//! The environment of a case.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use device_ipc_core::backend::{DeviceIpc, HandleKindInfo};
use device_ipc_core::{DeviceInfo, DeviceOrdinal, Error, Ipc};

use rustix::io::{FdFlags, fcntl_setfd};

use crate::agent::Agent;
use crate::case::AGENT_ROLE;
use crate::outcome::{Stop, fail, skip};
use crate::process::{Address, Lines, Peer};

/// How long a process of a case waits for another one.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Set in processes that see only some of the devices.
const VISIBLE_VARIABLE: &str = "DEVICE_IPC_CONFORMANCE_VISIBLE";

/// The positions of the devices that this process is to see, separated by commas; `None` for all of them.
///
/// For backends that take their devices from elsewhere than their
/// [`visible_devices_variable`](DeviceIpc::visible_devices_variable), which the suite sets as well.
pub fn visible_devices() -> Option<String> {
    std::env::var(VISIBLE_VARIABLE).ok()
}

/// The environment of a case: the backend of its process, and the other processes.
#[derive(Debug)]
pub struct Context {
    address: Address,
    backend: Arc<dyn DeviceIpc>,
    starter: Arc<Lines>,
}

impl Context {
    pub(crate) fn new(address: Address, backend: Arc<dyn DeviceIpc>, starter: Lines) -> Self {
        Self { address, backend, starter: Arc::new(starter) }
    }

    /// The bare backend.
    pub fn backend(&self) -> &Arc<dyn DeviceIpc> {
        &self.backend
    }

    /// The library on that backend.
    pub fn ipc(&self) -> Ipc {
        Ipc::with_backend(Arc::clone(&self.backend))
    }

    /// The devices of this process; at least one.
    ///
    /// # Errors
    ///
    /// The backend's error; a backend without a device should have been unavailable.
    pub fn devices(&self) -> Result<Vec<DeviceInfo>, Stop> {
        let devices = self.backend.devices()?;
        if devices.is_empty() {
            return fail("the backend was made and has no device; it should be Unavailable::NoDevice");
        }
        Ok(devices)
    }

    /// The first two devices, or a skip.
    ///
    /// # Errors
    ///
    /// [`Stop::Skipped`] on a machine with one.
    pub fn two_devices(&self) -> Result<[DeviceInfo; 2], Stop> {
        match self.devices()?.as_slice() {
            [first, second, ..] => Ok([first.clone(), second.clone()]),
            _ => skip("needs two devices"),
        }
    }

    /// The first two devices where the second can access the memory of the first, or a skip.
    ///
    /// # Errors
    ///
    /// [`Stop::Skipped`] on a machine without.
    pub fn two_peers(&self) -> Result<[DeviceInfo; 2], Stop> {
        let devices = self.two_devices()?;
        if self.backend.peer_access(devices[1].ordinal, devices[0].ordinal)? {
            Ok(devices)
        } else {
            skip("needs peer access from device 1 to device 0")
        }
    }

    /// Passes where the first device has events that processes share.
    ///
    /// # Errors
    ///
    /// [`Stop::Skipped`] where it has none.
    pub fn needs_events(&self) -> Result<(), Stop> {
        if self.backend.capabilities(DeviceOrdinal::new(0))?.ipc_events {
            Ok(())
        } else {
            skip("the device has no events that processes share")
        }
    }

    /// Passes if streams of the first `devices` devices write and wait on counters.
    ///
    /// # Errors
    ///
    /// [`Stop::Skipped`] where they do not.
    pub fn needs_timelines(&self, devices: u32) -> Result<(), Stop> {
        for device in (0..devices).map(DeviceOrdinal::new) {
            if !self.backend.capabilities(device)?.timelines {
                return skip("the device has no timelines");
            }
        }
        Ok(())
    }

    /// The kinds of handle that memory of the first device can be allocated for. A backend may list kinds that this
    /// device, or this process, cannot use (CUDA's fabric handles need a channel); there is at least one that it can.
    ///
    /// # Errors
    ///
    /// [`Stop::Failed`] where the backend refuses a kind that it lists in another way than as unsupported.
    pub fn usable_kinds(&self) -> Result<Vec<HandleKindInfo>, Stop> {
        let mut usable = Vec::new();
        for kind in self.backend.handle_kinds() {
            match self.ipc().allocate_for(0, 1, kind.kind) {
                Ok(_) => usable.push(kind),
                Err(Error::Unsupported { why, .. }) => {
                    eprintln!("no memory for {} handles: {why}", kind.name)
                }
                Err(error) => return fail(format!("memory for {} handles: {error}", kind.name)),
            }
        }
        if usable.is_empty() { fail("memory can be allocated for no kind of handle") } else { Ok(usable) }
    }

    /// The first usable kind of which this is true, or a skip.
    ///
    /// # Errors
    ///
    /// [`Stop::Skipped`] with `reason` where there is none.
    pub fn kind_that(
        &self,
        is: impl Fn(&HandleKindInfo) -> bool,
        reason: &str,
    ) -> Result<HandleKindInfo, Stop> {
        match self.usable_kinds()?.into_iter().find(is) {
            Some(kind) => Ok(kind),
            None => skip(reason),
        }
    }

    /// Starts a process that runs a role of this case.
    pub fn peer(&self, role: &str) -> Result<Peer, Stop> {
        self.start(role, &[])
    }

    /// Starts an agent.
    pub fn agent(&self) -> Result<Agent, Stop> {
        Ok(Agent::new(self.peer(AGENT_ROLE)?))
    }

    /// Starts an agent that inherits file descriptors, which have the same numbers there.
    pub fn agent_inheriting(&self, descriptors: &[impl AsFd]) -> Result<Agent, Stop> {
        let set_all = |flags| descriptors.iter().try_for_each(|descriptor| fcntl_setfd(descriptor, flags));
        set_all(FdFlags::empty()).map_err(std::io::Error::from)?;
        let agent = self.agent();
        set_all(FdFlags::CLOEXEC).map_err(std::io::Error::from)?;
        agent
    }

    /// Starts an agent that sees only these devices of this process, in this order; skips where it sees others.
    ///
    /// # Errors
    ///
    /// [`Stop::Skipped`] where devices cannot be hidden; [`Stop::Failed`] where the wrong ones are.
    pub fn agent_seeing(&self, ordinals: &[u32]) -> Result<Agent, Stop> {
        let devices = self.devices()?;
        let variable = self.backend.visible_devices_variable();
        let before = std::env::var(variable).unwrap_or_default();
        let known: Vec<&str> = before.split(',').map(str::trim).filter(|entry| !entry.is_empty()).collect();
        let listed = |ordinal: &u32| match known.get(*ordinal as usize) {
            Some(entry) if known.len() == devices.len() => (*entry).to_owned(),
            _ => ordinal.to_string(),
        };
        let list = |entry: &dyn Fn(&u32) -> String| ordinals.iter().map(entry).collect::<Vec<_>>().join(",");
        let environment = [(variable, list(&listed)), (VISIBLE_VARIABLE, list(&u32::to_string))];
        let mut agent = Agent::new(self.start(AGENT_ROLE, &environment)?);
        let seen = agent.devices()?;
        let wanted: Vec<_> = ordinals.iter().map(|ordinal| devices[*ordinal as usize].identity).collect();
        if seen == wanted {
            Ok(agent)
        } else if seen.len() == devices.len()
            && seen.iter().zip(&devices).all(|(one, other)| *one == other.identity)
        {
            skip(format!("devices cannot be hidden here: {variable} changed nothing"))
        } else if !ordinals.is_sorted() && !seen.is_empty() && wanted.starts_with(&seen) {
            skip(format!("{variable} takes devices in ascending order only"))
        } else {
            fail(format!("with {variable}={} the devices are {seen:?}, not {wanted:?}", environment[0].1))
        }
    }

    fn start(&self, role: &str, environment: &[(&str, String)]) -> Result<Peer, Stop> {
        Ok(self.address.with_role(role).start(environment, None)?)
    }

    /// Sends a line to the process that started this one.
    pub fn send_line(&self, line: &str) -> Result<(), Stop> {
        Ok(self.starter.send(line)?)
    }

    /// Receives a line from the process that started this one.
    ///
    /// # Errors
    ///
    /// [`Stop::Failed`] if none arrives in time, or the process has exited.
    pub fn receive_line(&self, deadline: Duration) -> Result<String, Stop> {
        Ok(self.starter.receive(deadline)?)
    }

    pub(crate) const fn starter(&self) -> &Arc<Lines> {
        &self.starter
    }
}
