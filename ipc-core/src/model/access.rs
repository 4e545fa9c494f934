//! The access of an importer to shared memory.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The access of an importer to the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Access {
    /// Read only: the importer's mapping is protected by the hardware where the kind of handle allows it, else the call is
    /// refused. See [Access and trust](crate::backend#access-and-trust) for what a hostile importer can do.
    ReadOnly,
    /// Read and write.
    ReadWrite,
}

impl Access {
    /// Returns whether it permits to write.
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
