//! The open that reserved the addresses of a mapping, after which its next versions are opened.

use std::sync::Arc;
use std::time::Duration;

use crate::sharing::Ipc;

/// The parameters with which the next versions of a reserved mapping are opened.
#[derive(Debug)]
pub(super) struct ReservedOpen {
    pub(super) ipc: Ipc,
    pub(super) timeout: Duration,
    pub(super) keeper: Option<Arc<KeeperAddress>>,
    /// The exporter's count of changes at which the mapped export was the keeper's present one.
    pub(super) current_at: Option<u64>,
}

/// The keeper that has answered with an export.
#[derive(Debug)]
pub(crate) struct KeeperAddress {
    pub(crate) name: String,
    /// The user of its process; `None` for the user of this process.
    pub(crate) user: Option<u32>,
}
