//! Checks of received handles, and errors of imports, for every kind.

use std::os::fd::OwnedFd;

use device_ipc_core::backend::{HandleKind, ReceivedHandle};
use device_ipc_core::{DeviceOrdinal, Error, Result};

use super::kind;
use crate::library::status::number;
use crate::library::{CudaLibrary, NAME};

/// Returns the kind that all handles have in common.
pub(super) fn common_kind(handles: &[ReceivedHandle]) -> Result<HandleKind> {
    let Some(first) = handles.first() else {
        return Err(unsupported("open 0 handles as one range", "a range has at least one allocation"));
    };
    match handles.iter().find(|handle| handle.kind != first.kind) {
        None => Ok(first.kind),
        Some(other) => Err(unsupported(
            &format!(
                "open handles of the kinds {} ({}) and {} ({}) as one range",
                first.kind.0,
                kind::name(first.kind),
                other.kind.0,
                kind::name(other.kind)
            ),
            "blocks of different kinds cannot be mapped side by side; have the exporter share each separately",
        )),
    }
}

/// Returns the only handle, for kinds whose allocations cannot be mapped side by side.
pub(super) fn single(handles: &[ReceivedHandle]) -> Result<&ReceivedHandle> {
    match handles {
        [handle] => Ok(handle),
        several => Err(unsupported(
            &format!("open {} handles as one range", several.len()),
            "a handle of this kind is one whole allocation; open each separately",
        )),
    }
}

/// Returns the bytes and the file descriptors of a handle that must have exactly `BYTES` and `FDS` of them.
pub(super) fn parts<const BYTES: usize, const FDS: usize>(
    handle: &ReceivedHandle,
) -> Result<(&[u8; BYTES], &[OwnedFd; FDS])> {
    let kind = kind::name(handle.kind);
    let (bytes, fds) = (handle.bytes.as_slice(), handle.fds.as_slice());
    let mismatch = |what: &str, expected: usize, received: usize| {
        Error::Protocol(format!(
            "received a CUDA handle of kind {kind} with {received} {what}, expected {expected}"
        ))
    };
    Ok((
        bytes.try_into().map_err(|_| mismatch("bytes", BYTES, bytes.len()))?,
        fds.try_into().map_err(|_| mismatch("file descriptors", FDS, fds.len()))?,
    ))
}

/// Returns the error for a read-only open of a kind that is always mapped read-write.
pub(super) fn cannot_be_read_only(kind: HandleKind) -> Error {
    unsupported(
        &format!("open a handle of kind {} ({}) read-only", kind.0, kind::name(kind)),
        "CUDA maps these handles read-write only; open it read-write, receive a copy, or have the exporter share memory \
         of kind 2 (virtual-memory) or 4 (fabric), which the hardware can protect from writes",
    )
}

/// Returns the error of a failed import of virtual memory or of a pool.
pub(super) fn import_error(library: &CudaLibrary, call: &'static str, status: i32) -> Error {
    let hint = match status {
        // The driver's statuses for descriptors of files (999), and for a pool's descriptor in place of a block's
        // (801).
        number::ERROR_UNKNOWN
        | number::ERROR_NOT_SUPPORTED
        | number::ERROR_INVALID_VALUE
        | number::ERROR_INVALID_HANDLE => {
            "The handle is corrupt, or of another kind than stated; or the process has too many open files (ulimit -n)"
        }
        _ => "",
    };
    library.error(call, status, hint)
}

/// Returns the error of an import without enough memory or addresses.
pub(super) fn out_of_memory(on: DeviceOrdinal, bytes: u64, call: &str) -> Error {
    Error::OutOfMemory {
        device: on,
        bytes,
        detail: format!("{call} could not map them; close idle mappings"),
    }
}

/// Returns the error for a device that cannot reach the home device of a handle, which may be hidden from this process.
/// `None` if the driver's status has another reason: the device is the home itself, or nothing is known about the home.
pub(super) fn no_peer_access(handle: &ReceivedHandle, from: DeviceOrdinal, status: i32) -> Option<Error> {
    let is_refused = matches!(status, number::ERROR_INVALID_DEVICE | number::ERROR_PEER_ACCESS_UNSUPPORTED);
    let to = handle.home_identity.filter(|_| is_refused && handle.home != Some(from))?;
    Some(Error::NoPeerAccess { from, to })
}

/// Returns the error for an unsupported open.
pub(super) fn unsupported(what: &str, why: &str) -> Error {
    Error::Unsupported { backend: NAME, what: what.into(), why: why.into() }
}

#[cfg(test)]
pub(super) mod tests {
    use device_ipc_core::ProcessIdentity;
    use device_ipc_core::backend::HandleBytes;

    use super::*;
    use crate::memory::kind::{FABRIC, LEGACY, POOL, VIRTUAL_MEMORY};

    pub(crate) fn received(kind: HandleKind, len: usize) -> ReceivedHandle {
        let bytes = HandleBytes::new(vec![7; len]);
        let exporter = ProcessIdentity::current().unwrap();
        let (fds, generation) = (Vec::new(), None);
        ReceivedHandle { kind, bytes, fds, size: 4096, generation, home: None, home_identity: None, exporter }
    }

    fn with_fds(mut handle: ReceivedHandle, count: usize) -> ReceivedHandle {
        handle.fds.extend((0..count).map(|_| std::fs::File::open("/dev/null").unwrap().into()));
        handle
    }

    #[test]
    fn handles_of_different_kinds_are_rejected() {
        assert_eq!(common_kind(&[received(POOL, 0), received(POOL, 0)]).unwrap(), POOL);
        assert!(common_kind(&[]).unwrap_err().to_string().contains("open 0 handles"));
        let mixed =
            common_kind(&[received(LEGACY, 64), received(VIRTUAL_MEMORY, 0)]).unwrap_err().to_string();
        assert!(mixed.contains("kinds 1 (legacy) and 2 (virtual-memory)"), "{mixed}");
        assert!(single(&[received(LEGACY, 64)]).is_ok());
        let two = single(&[received(LEGACY, 64), received(LEGACY, 64)]).map(|_| ()).unwrap_err();
        assert!(two.to_string().contains("open 2 handles"));
    }

    #[test]
    fn handle_with_wrong_number_of_parts_is_rejected() {
        assert!(parts::<64, 0>(&received(LEGACY, 64)).is_ok());
        assert!(parts::<0, 1>(&with_fds(received(VIRTUAL_MEMORY, 0), 1)).is_ok());
        assert!(parts::<81, 1>(&with_fds(received(POOL, 81), 1)).is_ok());
        let refused = |handle: &ReceivedHandle| parts::<64, 0>(handle).map(|_| ()).unwrap_err().to_string();
        for len in [0, 1, 63, 65, 4096] {
            let error = refused(&received(LEGACY, len));
            assert!(error.contains(&format!("legacy with {len} bytes, expected 64")), "{error}");
        }
        let error = refused(&with_fds(received(FABRIC, 64), 1));
        assert!(error.contains("fabric with 1 file descriptors, expected 0"), "{error}");
    }

    #[test]
    fn read_only_refusal_names_the_kinds_that_support_it() {
        for kind in [LEGACY, POOL] {
            let error = cannot_be_read_only(kind).to_string();
            assert!(
                error.contains(kind::name(kind)) && error.contains("kind 2 (virtual-memory) or 4 (fabric)")
            );
        }
    }
}
