//! The access of an importer to shared memory.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The access of an importer to the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Access {
    /// Read only. The hardware enforces it for kinds of handles that can be mapped read-only; otherwise the call is refused.
    /// [Access and trust](crate::backend#access-and-trust) states what a hostile importer can do.
    ReadOnly,
    /// Read and write.
    ReadWrite,
}

impl Access {
    /// Returns whether the access permits writes.
    pub const fn is_writable(self) -> bool {
        matches!(self, Self::ReadWrite)
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ReadOnly => "read-only",
            Self::ReadWrite => "read-write",
        })
    }
}
