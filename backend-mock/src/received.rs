//! Checks of received handles, which the engine opens as parts of a range.

use device_ipc_core::backend::ReceivedHandle;
use device_ipc_core::{Access, DeviceIdentity, DeviceOrdinal, Error, Result};
use device_ipc_mock_engine::{self as engine_crate, EngineError, Part};

use crate::errors::{engine, unknown_kind, unsupported};
use crate::profile::{HiddenHome, Kinds, MemoryKind};

impl Kinds {
    /// Checks the handles and returns them as parts.
    pub(crate) fn parts<'h>(
        &self,
        handles: &'h mut [ReceivedHandle],
        on: DeviceOrdinal,
        access: Access,
    ) -> Result<Vec<Part<'h>>> {
        let mut parts = Vec::with_capacity(handles.len());
        for handle in handles {
            let kind = self.get(handle.kind).ok_or_else(|| unknown_kind(handle.kind, self))?;
            let expected = usize::from(kind.info.carries_fds);
            if handle.fds.len() != expected {
                let found = handle.fds.len();
                return Err(Error::Protocol(format!(
                    "a handle has {found} file descriptors instead of {expected}"
                )));
            }
            if access == Access::ReadOnly && !kind.info.read_only {
                return Err(unsupported(
                    "open this memory read-only",
                    format!("memory of its kind ({}) is always mapped read-write", kind.info.name),
                ));
            }
            if handle.home.is_none() {
                check_hidden_home(kind, handle, on)?;
            }
            parts.push(Part { handle: handle.bytes.as_slice(), fd: handle.fds.pop() });
        }
        Ok(parts)
    }

    /// Returns the home device of the handles for an error, if it is not `on`. Of memory with a whitelist, as Ascend's, the
    /// driver's error does not tell this reason from others.
    pub(crate) fn other_home(&self, handles: &[ReceivedHandle], on: DeviceOrdinal) -> Option<DeviceIdentity> {
        let is_listed =
            |handle: &ReceivedHandle| self.get(handle.kind).is_some_and(|kind| kind.info.whitelist);
        let first = handles.first().filter(|handle| handle.home != Some(on) && !is_listed(handle));
        first.and_then(|handle| handle.home_identity)
    }
}

/// Converts the access.
pub(crate) const fn engine_access(access: Access) -> engine_crate::Access {
    match access {
        Access::ReadOnly => engine_crate::Access::ReadOnly,
        Access::ReadWrite => engine_crate::Access::ReadWrite,
    }
}

/// Converts the error of an open on device `on` of memory whose home is `elsewhere`.
pub(crate) fn open_error(
    call: &'static str,
    error: EngineError,
    on: DeviceOrdinal,
    elsewhere: Option<DeviceIdentity>,
) -> Error {
    match (&error, elsewhere) {
        (EngineError::NoPeerAccess { .. }, Some(to)) => Error::NoPeerAccess { from: on, to },
        _ => engine(call)(error),
    }
}

/// Checks that memory of this kind can be opened in a process that does not see its home device.
fn check_hidden_home(kind: &MemoryKind, handle: &ReceivedHandle, on: DeviceOrdinal) -> Result<()> {
    match kind.hidden_home {
        HiddenHome::Opens => Ok(()),
        HiddenHome::Unsupported => Err(unsupported(
            format!("open a {} whose home device is hidden from this process", kind.info.name),
            "make the home device visible, or receive a copy",
        )),
        HiddenHome::Fails => Err(match handle.home_identity {
            Some(to) => Error::NoPeerAccess { from: on, to },
            None => unsupported("open memory of an unknown home device", "make the home device visible"),
        }),
    }
}
