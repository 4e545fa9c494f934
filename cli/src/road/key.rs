//! The key that sender and receivers share.

use std::fmt;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use device_ipc::environment;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::input::{self, Input};

/// The key, where it is in no file.
pub(crate) const KEY_VARIABLE: &str = "DEVICE_IPC_KEY";

/// A key shorter than this can be guessed from a handshake that somebody has listened to.
const SHORT: usize = 16;

/// No key needs more.
const LONGEST: u64 = 4096;

/// Where the key is. Never on the command line, which every process of the machine can read.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct KeyArguments {
    /// The file that holds the key which sender and receiver share; the variable DEVICE_IPC_KEY unless given. Make one
    /// with: (umask 077; head -c 32 /dev/urandom | base64 > FILE).
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
}

/// A secret that is never shown.
#[derive(Clone)]
pub(crate) struct Key(Vec<u8>);

impl KeyArguments {
    /// Reads the key. `patience` is how long a process may take that writes it to a pipe.
    pub(crate) fn read(&self, patience: Duration) -> Result<Key> {
        let (bytes, from) = match (&self.key_file, environment::variable(KEY_VARIABLE)) {
            (Some(path), _) => (read_file(path, patience)?, path.display().to_string()),
            (None, Some(key)) => (key.into_encoded_bytes(), KEY_VARIABLE.to_owned()),
            (None, None) => bail!(
                "by TCP a key is needed that both sides know: write one with '(umask 077; head -c 32 /dev/urandom | \
                 base64 > key)' and give --key-file key to both, or set {KEY_VARIABLE} in both"
            ),
        };
        // What an editor or `echo` puts behind it is no part of the key.
        let key = bytes.trim_ascii();
        if key.is_empty() {
            bail!("the key in {from} is empty");
        }
        if key.len() < SHORT {
            eprintln!(
                "warning: the key in {from} has {} bytes; from {SHORT} on it is hard to guess",
                key.len()
            );
        }
        Ok(Key(key.to_vec()))
    }
}

fn read_file(path: &Path, patience: Duration) -> Result<Vec<u8>> {
    let shown = path.display();
    let file = input::open(path).with_context(|| format!("opening the key file {shown}"))?;
    let metadata = file.metadata().with_context(|| format!("reading the key file {shown}"))?;
    if metadata.is_file() && metadata.permissions().mode() & 0o077 != 0 {
        eprintln!("warning: others than you can read the key: chmod 600 {shown}");
    }
    let mut bytes = Vec::new();
    Input::new(file, patience)
        .take(LONGEST + 1)
        .read_to_end(&mut bytes)
        .with_context(|| format!("reading the key file {shown}"))?;
    if bytes.len() as u64 > LONGEST {
        bail!("the key file {shown} holds more than {LONGEST} bytes; is it another file?");
    }
    Ok(bytes)
}

impl Key {
    #[cfg(test)]
    pub(super) fn new(bytes: &[u8]) -> Self {
        Self(bytes.to_vec())
    }

    /// The start of a code of authenticity over these parts. Each part but the last has a fixed length, so that no two
    /// lists of parts look alike.
    pub(super) fn mac(&self, parts: &[&[u8]]) -> Hmac<Sha256> {
        mac(&self.0, parts)
    }
}

/// HMAC-SHA256 over the parts, one behind the other.
pub(super) fn mac(key: &[u8], parts: &[&[u8]]) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
    for part in parts {
        mac.update(part);
    }
    mac
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(not shown)")
    }
}
