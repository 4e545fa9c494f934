//! Errors that contain a value of the caller.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use crate::backend::DeviceBound;
use crate::model::error::{Error, ErrorKind};

/// The error of an operation that takes a value, with that value: the owner that was not shared, or the mapping or slot that
/// was not released. Dropping the error drops the value, unless [`into_inner`](Self::into_inner) has returned it.
///
/// Converts into [`Error`], so that `?` drops the value.
///
/// # Examples
///
/// ```
/// # fn main() -> device_ipc_core::Result<()> {
/// # let backend = device_ipc_mock::MockBackend::from_spec("devices=1").expect("a valid specification");
/// # let ipc = device_ipc_core::Ipc::with_backend(backend);
/// use device_ipc_core::Access;
/// let buffer = ipc.allocate(0, 1024)?;
/// let failed = ipc.share(buffer).shape([4096]).start().expect_err("it has no element type");
/// let buffer = failed.into_inner(); // still allocated
/// let export = ipc.share(buffer).access(Access::ReadOnly).start()?;
/// # Ok(())
/// # }
/// ```
pub struct RecoverableError<T> {
    error: Error,
    /// In a mutex, so that the error is `Send` and `Sync` for any value that is `Send`.
    value: Box<Mutex<DeviceBound<T>>>,
}

impl<T> RecoverableError<T> {
    /// Creates an error with a value that is dropped in its device's context.
    pub(crate) fn bound(error: Error, value: DeviceBound<T>) -> Self {
        Self { error, value: Box::new(Mutex::new(value)) }
    }

    pub(crate) fn new(error: Error, value: T) -> Self {
        Self::bound(error, DeviceBound::unbound(value))
    }

    /// Returns the reason.
    pub const fn error(&self) -> &Error {
        &self.error
    }

    /// As [`Error::kind`].
    pub fn kind(&self) -> ErrorKind {
        self.error.kind()
    }

    /// Returns the value.
    pub fn into_inner(self) -> T {
        self.into_parts().1
    }

    pub(crate) fn into_parts(self) -> (Error, T) {
        (self.error, (*self.value).into_inner().unwrap_or_else(PoisonError::into_inner).into_inner())
    }
}

impl<T> fmt::Debug for RecoverableError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<T> fmt::Display for RecoverableError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<T> std::error::Error for RecoverableError<T> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

impl<T> From<RecoverableError<T>> for Error {
    fn from(failed: RecoverableError<T>) -> Self {
        failed.error
    }
}

#[cfg(test)]
mod tests;
