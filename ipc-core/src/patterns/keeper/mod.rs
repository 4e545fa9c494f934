//! Keepers: memory that other processes find by a name, in the version that is current now.
//!
//! A descriptor is a secret that has to be carried to every importer, and it ends with its export. A [`Keeper`] listens under a
//! name instead, and answers each process that connects with its present export and the version of it. So importers may
//! start at any time and as often as they like, and the export may be replaced between two opens.
//!
//! A keeper's name is the name of a [channel](super::channel) with a prefix: the address of the socket, the users that may
//! connect and the checks of both processes are those of channels, and there is no further registry. The answer is one message
//! with the export, and so with a grant: the importer can open the memory although it has been replaced meanwhile.

mod answers;
mod find;
mod follow;
mod keep;
mod list;
mod name;

pub use find::KeeperExport;
pub(crate) use find::Search;
pub use keep::Keeper;
pub use list::{KeeperName, list_keepers};

use serde::{Deserialize, Serialize};

/// The properties of its export that a keeper sends with its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Announcement {
    /// The version of this form.
    form: u8,
    version: u64,
    /// Number of processes that use the export.
    readers: u64,
}

/// The form of [`Announcement`] that this version writes and reads.
const FORM: u8 = 1;
