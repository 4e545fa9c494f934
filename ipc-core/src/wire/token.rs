//! The secret that permits opening one export.

use std::fmt;

use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq;

use crate::model::error::{Error, Result};

/// 128 random bits that prove that a descriptor came from the exporter. Comparison takes constant time; `Debug` never shows
/// them.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Token([u8; 16]);

impl Token {
    pub(crate) const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    pub(crate) const fn to_bytes(self) -> [u8; 16] {
        self.0
    }

    fn halves(&self) -> [u64; 2] {
        let bytes = u128::from_ne_bytes(self.0);
        [bytes as u64, (bytes >> 64) as u64]
    }
}

/// Returns bytes of the kernel's random number generator.
pub(crate) fn random_bytes<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)
        .map_err(|error| Error::io("reading random bytes", std::io::Error::other(error.to_string())))?;
    Ok(bytes)
}

impl PartialEq for Token {
    fn eq(&self, other: &Self) -> bool {
        // Compared as two numbers: `ct_eq` of slices takes one step for each byte.
        let ([low, high], [other_low, other_high]) = (self.halves(), other.halves());
        (low.ct_eq(&other_low) & high.ct_eq(&other_high)).into()
    }
}

impl Eq for Token {}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(not shown)")
    }
}
