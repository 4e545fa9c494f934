//! The secret key that sender and receivers share.

use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use device_ipc::backend::environment;
use device_ipc_tcp::Key;

use super::input::{self, Input};
use crate::output::{UsageError, warning};

/// The environment variable that contains the key.
pub(crate) const KEY_VARIABLE: &str = "DEVICE_IPC_KEY";

/// The id of the key in the handshake: sender and receiver share a single key.
pub(crate) const KEY_ID: u64 = 0;

/// Maximum length of a key file in bytes.
const MAX_BYTES: u64 = 4096;

/// The source of the key. A key is never an argument, because every process of the machine can read command lines.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct KeyArguments {
    /// File with the key that sender and receiver share; default: the variable DEVICE_IPC_KEY. Create it with:
    /// (umask 077; head -c 32 /dev/urandom | base64 > FILE)
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
}

impl KeyArguments {
    /// Reads the key. The timeout applies to a pipe.
    pub(crate) fn read(&self, timeout: Duration) -> Result<Key> {
        let (bytes, from) = match (&self.key_file, environment::variable(KEY_VARIABLE)) {
            (Some(path), _) => (read_file(path, timeout)?, path.display().to_string()),
            (None, Some(key)) => (key.into_encoded_bytes(), KEY_VARIABLE.to_owned()),
            (None, None) => bail!(UsageError(format!(
                "TCP requires a key that sender and receiver share: create it with '(umask 077; head -c 32 /dev/urandom | \
                 base64 > key)' and use --key-file key on both sides, or set {KEY_VARIABLE} on both sides"
            ))),
        };
        // A newline that an editor or `echo` appends is not part of the key.
        let key = bytes.trim_ascii();
        if key.is_empty() {
            bail!("invalid key: {from} is empty");
        }
        Key::new(key).with_context(|| format!("invalid key in {from}"))
    }
}

fn read_file(path: &Path, timeout: Duration) -> Result<Vec<u8>> {
    let shown = path.display();
    let file = input::open(path).with_context(|| format!("cannot open the key file {shown}"))?;
    let metadata = file.metadata().with_context(|| format!("cannot read the key file {shown}"))?;
    if metadata.is_file() && metadata.permissions().mode() & 0o077 != 0 {
        warning(format_args!("other users can read the key file; restrict it: chmod 600 {shown}"));
    }
    let mut bytes = Vec::new();
    Input::new(file, timeout)
        .take(MAX_BYTES + 1)
        .read_to_end(&mut bytes)
        .with_context(|| format!("cannot read the key file {shown}"))?;
    if bytes.len() as u64 > MAX_BYTES {
        bail!("invalid key: the key file {shown} is larger than {MAX_BYTES} B; check its path");
    }
    Ok(bytes)
}
