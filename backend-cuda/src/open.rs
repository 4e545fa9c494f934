//! Opening and closing memory of another process.
//!
//! `cuIpcOpenMemHandle` and `cuIpcCloseMemHandle` in "Memory Management" (`group__CUDA__MEM`). The handle opens in the
//! current context, so the same bytes map the memory for another device when that device's context is current; the
//! driver then sets peer access up by itself (`CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`).

use device_ipc_core::{Access, DeviceOrdinal, DevicePtr, DeviceRange, Error, Opened, ReceivedHandle, Result};

use crate::NAME;
use crate::api::{IPC_HANDLE_BYTES, IPC_MEM_LAZY_ENABLE_PEER_ACCESS, IpcHandle};
use crate::driver::Driver;
use crate::kinds::LEGACY;
use crate::status::number;

impl Driver {
    /// Opens one legacy handle for `on`.
    pub(crate) fn open(
        &self,
        handles: Vec<ReceivedHandle>,
        on: DeviceOrdinal,
        access: Access,
    ) -> Result<Opened> {
        self.device(on)?;
        let (handle, bytes) = the_legacy_handle(&handles)?;
        if !access.is_writable() {
            return Err(unsupported(
                "open a legacy IPC handle read-only",
                "CUDA maps these handles read-write only; open it read-write, or receive a copy",
            ));
        }
        if let Some(home) = handle.home
            && !self.peer_access(on, home)?
        {
            return Err(self.no_peer_access(on, home));
        }
        let _current = self.enter(on)?;
        let mut address = 0;
        // SAFETY: writes one address; the driver checks the bytes of the handle, whatever they are.
        let status = unsafe {
            (self.api.ipc_open_mem_handle)(
                &raw mut address,
                IpcHandle { reserved: bytes },
                IPC_MEM_LAZY_ENABLE_PEER_ACCESS,
            )
        };
        match (status, handle.home) {
            (number::SUCCESS, _) => {}
            (number::ERROR_PEER_ACCESS_UNSUPPORTED, Some(home)) => return Err(self.no_peer_access(on, home)),
            (number::ERROR_OUT_OF_MEMORY, _) => {
                return Err(Error::OutOfMemory {
                    device: on,
                    bytes: handle.size,
                    detail: "cuIpcOpenMemHandle could not map them; close mappings that are idle".into(),
                });
            }
            (number::ERROR_ALREADY_MAPPED, _) => {
                let error = self.error("cuIpcOpenMemHandle", status, "");
                return Err(Error::OverlapsInUse { detail: error.to_string() });
            }
            _ => return Err(self.error("cuIpcOpenMemHandle", status, open_hint(status))),
        }
        // The handle's bytes and the stated size are the peer's word; what is mapped is the driver's.
        match self.allocation_of(DeviceRange::new(on, DevicePtr::new(address), 0)) {
            Ok(range) => {
                tracing::debug!(device = %on, bytes = range.len, "opened a CUDA IPC handle");
                Ok(Opened { range, cookie: address })
            }
            Err(error) => {
                // SAFETY: opened above in this context, and known to nobody else.
                let status = unsafe { (self.api.ipc_close_mem_handle)(address) };
                tracing::debug!(status, "closed a CUDA IPC handle whose range could not be told");
                Err(error)
            }
        }
    }

    /// Closes what [`open`](Self::open) opened.
    pub(crate) fn close(&self, opened: Opened) -> Result<()> {
        let device = opened.range.device;
        let _current = self.enter(device)?;
        // SAFETY: opened in this context; the caller of `DeviceIpc::close` has finished all work on it.
        let status = unsafe { (self.api.ipc_close_mem_handle)(opened.cookie) };
        tracing::debug!(%device, bytes = opened.range.len, status, "closed a CUDA IPC handle");
        self.check("cuIpcCloseMemHandle", status)
    }

    fn no_peer_access(&self, from: DeviceOrdinal, home: DeviceOrdinal) -> Error {
        match self.device(home) {
            Ok(home) => Error::NoPeerAccess { from, to: home.info.identity },
            Err(error) => error,
        }
    }
}

fn the_legacy_handle(handles: &[ReceivedHandle]) -> Result<(&ReceivedHandle, [u8; IPC_HANDLE_BYTES])> {
    let [handle] = handles else {
        return Err(unsupported(
            &format!("open {} handles as one range", handles.len()),
            "a legacy IPC handle is one whole allocation; open each by itself",
        ));
    };
    if handle.kind != LEGACY {
        return Err(unsupported(
            &format!("open a handle of kind {}", handle.kind.0),
            "this version knows kind 1 (legacy) only; update the receiver, or have the exporter make a legacy handle",
        ));
    }
    if !handle.fds.is_empty() {
        return Err(Error::Protocol(format!(
            "a legacy CUDA handle came with {} file descriptors",
            handle.fds.len()
        )));
    }
    match handle.bytes.as_slice().try_into() {
        Ok(bytes) => Ok((handle, bytes)),
        Err(_) => Err(Error::Protocol(format!(
            "a legacy CUDA handle has {IPC_HANDLE_BYTES} bytes, and {} came",
            handle.bytes.as_slice().len()
        ))),
    }
}

const fn open_hint(status: i32) -> &'static str {
    match status {
        number::ERROR_INVALID_VALUE => "The handle is corrupt, or its block was freed",
        number::ERROR_INVALID_CONTEXT => {
            "CUDA takes this process for the exporter: a process cannot open its own handle, and two processes in \
             different pid namespaces must not have the same process id (two containers that both run as pid 1; \
             start one with an init process, or share the pid namespace)"
        }
        number::ERROR_INVALID_HANDLE => "The exporting process has ended",
        number::ERROR_NOT_PERMITTED => {
            "The block was freed, and another one that is not shared is in its place"
        }
        number::ERROR_MAP_FAILED => {
            "The memory could not be mapped: see whether both processes use the same device and driver, also in \
             containers"
        }
        number::ERROR_PEER_ACCESS_UNSUPPORTED => {
            "The device cannot access the memory of the device that the block lives on"
        }
        number::ERROR_TOO_MANY_PEERS => {
            "The device has as many peers as the hardware allows; open the memory on its home device"
        }
        _ => "",
    }
}

fn unsupported(what: &str, why: &str) -> Error {
    Error::Unsupported { backend: NAME, what: what.into(), why: why.into() }
}

#[cfg(test)]
mod tests {
    use device_ipc_core::{HandleBytes, HandleKind, ProcessIdentity};

    use super::*;

    fn received(kind: HandleKind, len: usize) -> ReceivedHandle {
        let bytes = HandleBytes::new(vec![7; len]);
        let exporter = ProcessIdentity::current().unwrap();
        ReceivedHandle { kind, bytes, fds: Vec::new(), size: 4096, generation: None, home: None, exporter }
    }

    fn refusal(handles: &[ReceivedHandle]) -> String {
        the_legacy_handle(handles).map(|_| ()).unwrap_err().to_string()
    }

    #[test]
    fn what_is_not_one_legacy_handle_is_refused_before_the_driver_sees_it() {
        assert!(the_legacy_handle(&[received(LEGACY, 64)]).is_ok());
        assert!(refusal(&[]).contains("open 0 handles"));
        assert!(refusal(&[received(LEGACY, 64), received(LEGACY, 64)]).contains("open 2 handles"));
        assert!(refusal(&[received(HandleKind(9), 64)]).contains("kind 9"));
        assert!(refusal(&[received(LEGACY, 63)]).contains("has 64 bytes, and 63 came"));
        let mut with_fd = received(LEGACY, 64);
        with_fd.fds.push(std::fs::File::open("/dev/null").unwrap().into());
        assert!(refusal(&[with_fd]).contains("came with 1 file descriptors"));
    }
}
