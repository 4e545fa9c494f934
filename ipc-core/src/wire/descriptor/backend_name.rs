//! The name of a backend in a descriptor.

use std::fmt;

use crate::model::error::{Error, Result};

const MAX_BYTES: usize = 32;

/// A name of 1 to 32 letters, digits, `-` or `_`, stored inline.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct BackendName {
    bytes: [u8; MAX_BYTES],
    len: u8,
}

impl BackendName {
    pub(super) fn read(name: &[u8]) -> Option<Self> {
        let good = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        if name.is_empty() || name.len() > MAX_BYTES || !name.iter().all(good) {
            return None;
        }
        let mut bytes = [0; MAX_BYTES];
        bytes[..name.len()].copy_from_slice(name);
        Some(Self { bytes, len: name.len() as u8 })
    }

    /// Checks the name of a backend of this process.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for a name that descriptors cannot contain.
    pub(crate) fn new(backend: &'static str) -> Result<Self> {
        Self::read(backend.as_bytes()).ok_or_else(|| Error::Unsupported {
            backend,
            what: "share memory".into(),
            why: "its name is not 1 to 32 letters, digits, '-' or '_'; rename the backend".into(),
        })
    }

    pub(crate) fn as_str(&self) -> &str {
        str::from_utf8(&self.bytes[..usize::from(self.len)]).expect("checked when it was made")
    }
}

impl fmt::Debug for BackendName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_str().fmt(f)
    }
}
