//! Constructors and conversions of errors, and the context that a caller adds.

use std::sync::Arc;

use super::{Error, Unavailable, VendorError};

impl Error {
    /// Creates an error of a system call or of input and output.
    pub fn io(what: impl Into<String>, cause: impl Into<std::io::Error>) -> Self {
        Self::Io { what: what.into(), cause: Arc::new(cause.into()) }
    }

    /// Creates an error of an argument, which is named with its value.
    pub(crate) fn invalid_input(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self::InvalidInput { what: what.into(), why: why.into() }
    }

    /// Returns the innermost error of an [`InBundle`](Self::InBundle) or an [`InPull`](Self::InPull), or the error itself.
    pub fn innermost(&self) -> &Self {
        match self {
            Self::InBundle { cause, .. } | Self::InPull { cause, .. } => cause.innermost(),
            other => other,
        }
    }

    /// Wraps the error with the name of a tensor, unless it contains that name, or concerns the exporting process, the connection
    /// or the timeout.
    pub(crate) fn of_tensor(self, tensor: &str) -> Self {
        match self {
            Self::InBundle { .. }
            | Self::InPull { .. }
            | Self::NoSuchTensor { .. }
            | Self::ExporterGone { .. }
            | Self::Timeout { .. }
            | Self::Protocol(_)
            | Self::Io { .. }
            | Self::Forked => self,
            other => Self::InBundle { tensor: tensor.to_owned(), cause: Box::new(other) },
        }
    }

    pub(crate) fn wrong_token(pid: u32) -> Self {
        Self::NotPermitted(format!(
            "process {pid} does not know the descriptor's token; the descriptor was altered"
        ))
    }
}

impl From<Unavailable> for Error {
    fn from(reason: Unavailable) -> Self {
        Self::BackendUnavailable { backend: None, reason }
    }
}

impl From<VendorError> for Error {
    fn from(error: VendorError) -> Self {
        Self::Vendor(Box::new(error))
    }
}
