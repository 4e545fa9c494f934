//! The secret key that both sides know.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::error::TcpError;

/// A secret key; its `Debug` output does not show it.
#[derive(Clone)]
pub struct Key(Vec<u8>);

impl Key {
    /// Returns the key with these bytes.
    ///
    /// A key needs at least 16 random bytes: a client sends a proof to every server, and a server that does not know the key
    /// can compare the proof with proofs by guessed keys. The length is not checked.
    pub fn new(bytes: &[u8]) -> Self {
        Self(bytes.to_vec())
    }

    /// Returns a random key, which no peer knows.
    pub(crate) fn random() -> Result<Self, TcpError> {
        random().map(|bytes| Self(bytes.to_vec()))
    }

    /// Returns an HMAC over these parts, not finalized. Each part but the last has a fixed length, so that different parts
    /// never result in the same input.
    pub(crate) fn mac(&self, parts: &[&[u8]]) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes keys of any length");
        for part in parts {
            mac.update(part);
        }
        mac
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

/// Returns 32 random bytes of the system.
pub(crate) fn random() -> Result<[u8; 32], TcpError> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes)
        .map_err(|cause| TcpError::Random { cause: std::io::Error::other(cause.to_string()) })?;
    Ok(bytes)
}
