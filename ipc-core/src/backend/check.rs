//! Checks of arguments, for core and for backends.

use crate::backend::stream::BorrowedStream;
use crate::backend::{DeviceIpc, DeviceTimelines, TestKernels};
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Result};

/// Checks that an object belongs to the expected backend.
///
/// # Errors
///
/// [`Error::WrongBackend`].
pub fn check_backend(what: &'static str, found: &str, expected: &str) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(Error::WrongBackend { what, found: found.to_owned(), expected: expected.to_owned() })
}

/// Checks that a stream runs on the device that `what` needs.
///
/// # Errors
///
/// [`Error::WrongStream`].
pub fn check_stream_device(
    stream: BorrowedStream<'_>,
    what: &'static str,
    expected: DeviceOrdinal,
) -> Result<()> {
    let stream = stream.device();
    if stream == expected { Ok(()) } else { Err(Error::WrongStream { stream, what, expected }) }
}

/// Checks that a stream belongs to the backend and to the device of the memory, which `what` names.
pub(crate) fn check_stream_of(
    stream: BorrowedStream<'_>,
    backend: &dyn DeviceIpc,
    expected: DeviceOrdinal,
    what: &'static str,
) -> Result<()> {
    check_backend("the stream", stream.backend(), backend.info().name)?;
    check_stream_device(stream, what, expected)
}

/// Checks that source and destination of a copy have the same number of bytes.
///
/// # Errors
///
/// [`Error::InvalidRegion`].
pub fn check_copy_lengths(dst: u64, src: u64) -> Result<()> {
    if dst == src {
        return Ok(());
    }
    Err(Error::InvalidRegion(format!(
        "cannot copy {src} bytes to a range of {dst} bytes: the lengths must be equal"
    )))
}

/// Returns the backend's timelines, where the device supports them.
pub(crate) fn timelines_of(backend: &dyn DeviceIpc, device: DeviceOrdinal) -> Result<&dyn DeviceTimelines> {
    let usable = backend.capabilities(device)?.timelines;
    backend.timelines().filter(|_| usable).ok_or_else(|| Error::Unsupported {
        backend: backend.info().name,
        what: format!("let streams of device {device} write and wait on words"),
        why: "the device, or this driver, has no stream memory operations; order by events, or synchronise on the host"
            .into(),
    })
}

/// Returns the test kernels of a backend.
///
/// # Errors
///
/// [`Error::Unsupported`] if it has none.
pub(crate) fn test_kernels_of(backend: &dyn DeviceIpc) -> Result<&dyn TestKernels> {
    backend.test_kernels().ok_or_else(|| Error::Unsupported {
        backend: backend.info().name,
        what: "run a test kernel".into(),
        why: "it implements no `TestKernels`; submit a kernel of your own to the stream".into(),
    })
}
