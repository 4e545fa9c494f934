//! The name of the backend and the kinds of its handles.

use device_ipc_core::backend::HandleKind;

/// The backend's name.
pub const NAME: &str = "mock";

/// Handles of bytes without a file descriptor.
pub(crate) const BYTES: HandleKind = HandleKind(1);
/// Handles with a file descriptor.
pub(crate) const FD: HandleKind = HandleKind(2);
