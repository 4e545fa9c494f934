//! Conversion of the engine's errors.

use std::time::Duration;

use device_ipc_core::backend::{HandleKind, VendorError, VendorStatus};
use device_ipc_core::{DeviceOrdinal, Error};
use device_ipc_mock_engine::{EngineError, Operation};

use crate::kinds::NAME;
use crate::profile::Kinds;

/// `CUDA_ERROR_ALREADY_MAPPED`.
const ALREADY_MAPPED: i32 = 208;

/// Returns the conversion of an error of the engine's call `call`.
pub(crate) fn engine(call: &'static str) -> impl FnOnce(EngineError) -> Error {
    move |error| match error {
        EngineError::InvalidDevice { ordinal, count } => {
            Error::NoSuchDevice { backend: NAME, ordinal: DeviceOrdinal::new(ordinal as u32), count }
        }
        EngineError::OutOfMemory { device, requested, .. } => Error::OutOfMemory {
            device: DeviceOrdinal::new(device as u32),
            bytes: requested,
            detail: error.to_string(),
        },
        EngineError::Forked => Error::Forked,
        // A fault with CUDA's number plays an error that the engine itself never returns.
        EngineError::Injected { operation: Operation::Open, code: ALREADY_MAPPED } => {
            Error::OverlapsInUse { detail: error.to_string() }
        }
        other => vendor(call, &other),
    }
}

fn vendor(call: &'static str, error: &EngineError) -> Error {
    let debug = format!("{error:?}");
    let name = debug.split([' ', '{', '(']).next().unwrap_or("error").to_owned();
    let hint = match error {
        EngineError::InvalidHandle { .. } => "the handle is corrupt, or its memory has been freed",
        other if other.is_descriptor_limit() => "raise the limit on open files (ulimit -n)",
        EngineError::Revoked { .. } => "close the mapping and ask the exporter for a new descriptor",
        _ => "",
    };
    VendorError::new(NAME, call, VendorStatus(error.code()), name)
        .with_message(error.to_string())
        .with_hint(hint)
        .into()
}

pub(crate) fn unsupported(what: impl Into<String>, why: impl Into<String>) -> Error {
    Error::Unsupported { backend: NAME, what: what.into(), why: why.into() }
}

pub(crate) fn timeout(what: &str, after: Duration) -> Error {
    Error::Timeout { what: what.to_owned(), after, detail: String::new() }
}

pub(crate) fn unknown_kind(kind: HandleKind, kinds: &Kinds) -> Error {
    let known: Vec<_> =
        kinds.all().iter().map(|known| format!("{} ({})", known.info.kind.0, known.info.name)).collect();
    unsupported(
        format!("use a handle of kind {}", kind.0),
        format!("this machine has the kinds {}", known.join(", ")),
    )
}
