//! A list of the keepers on this machine.

use std::fmt;
use std::path::{Path, PathBuf};

use super::name;
use crate::model::error::Result;
use crate::os::environment::nonempty_variable;
use crate::patterns::channel::listening_names;
use crate::wire::SOCKET_DIR_VARIABLE;

/// The name of a keeper, and the user that its process claims to have. `Display` is the form for [`Ipc::find`](crate::Ipc::find).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub struct KeeperName {
    /// The uid in the address of its socket. [`Ipc::find`](crate::Ipc::find) verifies it.
    pub user: u32,
    /// The name.
    pub name: String,
}

impl fmt::Display for KeeperName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        name::write(f, self.user, &self.name)
    }
}

/// Lists the names that keepers listen under: in this network namespace, and in the socket directory if there is one.
///
/// Contacts no process, so a name may be that of a keeper that does not allow this user, or of a process that was killed and
/// left its socket in the directory. [`Ipc::find`](crate::Ipc::find) asks one of them.
///
/// # Errors
///
/// [`Error::Io`](crate::Error::Io) if `/proc/net/unix` or the directory cannot be read.
pub fn list_keepers(directory: Option<&Path>) -> Result<Vec<KeeperName>> {
    let from_environment = || nonempty_variable(SOCKET_DIR_VARIABLE).map(PathBuf::from);
    let directory = directory.map(Path::to_owned).or_else(from_environment);
    let listening = listening_names(directory.as_deref())?;
    let keepers = listening.into_iter().filter_map(|(user, channel)| {
        let name = channel.strip_prefix(name::PREFIX)?.to_owned();
        Some(KeeperName { user, name })
    });
    let mut keepers: Vec<_> = keepers.collect();
    keepers.sort_unstable();
    keepers.dedup();
    Ok(keepers)
}
