//! The secret key that both sides know.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use crate::error::TcpError;

/// Minimum length of a key in bytes: a client sends a proof to every server, and a server that does not know the key can compare
/// the proof with proofs by guessed keys.
pub const MIN_KEY_BYTES: usize = 16;

/// Precedes the bytes of a key where they are hashed.
const KEY_LABEL: &[u8; 24] = b"device-ipc key          ";

/// A secret key; its `Debug` output does not show it.
///
/// It is the SHA-256 of the bytes that it was made of, so that keys of different bytes differ: HMAC itself pads short keys with
/// zeros.
#[derive(Clone)]
pub struct Key([u8; 32]);

impl Key {
    /// Returns the key with these bytes, which should be random.
    ///
    /// # Errors
    ///
    /// [`TcpError::ShortKey`] for fewer than [`MIN_KEY_BYTES`].
    pub fn new(bytes: &[u8]) -> Result<Self, TcpError> {
        if bytes.len() < MIN_KEY_BYTES {
            return Err(TcpError::ShortKey { bytes: bytes.len() });
        }
        Ok(Self::hashed(bytes))
    }

    fn hashed(bytes: &[u8]) -> Self {
        Self(Sha256::new().chain_update(KEY_LABEL).chain_update(bytes).finalize().into())
    }

    /// Returns the key of a session, which was derived from another key.
    pub(crate) const fn derived(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Returns a random key, which no peer knows.
    pub(crate) fn random() -> Result<Self, TcpError> {
        random().map(Self)
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

impl From<[u8; MIN_KEY_BYTES]> for Key {
    /// Returns the key with these bytes, which is equal to that of [`Key::new`].
    fn from(bytes: [u8; MIN_KEY_BYTES]) -> Self {
        Self::hashed(&bytes)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_key_is_refused_and_zeros_at_the_end_count() {
        let short = Key::new(&[7; MIN_KEY_BYTES - 1]).map(drop);
        assert!(matches!(short, Err(TcpError::ShortKey { bytes: 15 })), "{short:?}");
        let code = |bytes: &[u8]| Key::new(bytes).unwrap().mac(&[b"text"]).finalize().into_bytes();
        assert_ne!(code(&[7; 16]), code(&[[7; 16], [0; 16]].concat()));
        assert_eq!(code(&[7; 16]), Key::from([7; 16]).mac(&[b"text"]).finalize().into_bytes());
    }
}
