//! Grants that are not needed any longer, until they are reported to their exporters.
//!
//! An exporter need not learn soon that a lease was used in place of a grant: the grant keeps no memory that the lease does not keep.
//! So ended grants are reported with other messages: with the next message of their channel, or in batches of [`MAX_ENDED_GRANTS`] to
//! the exporter's broker. They are reported at once if the exporter waits for its memory, and when the lease ends, because then they
//! alone keep it.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::os::process::ProcessIdentity;
use crate::sharing::export::ChannelId;
use crate::wire::Token;
use crate::wire::channel::MAX_ENDED_GRANTS;
use crate::wire::descriptor::ExportId;

/// A grant that is not needed any longer, and the channel of its message, if it came with one.
pub(super) struct EndedGrant {
    pub(super) channel: Option<ChannelId>,
    pub(super) export: ExportId,
    pub(super) token: Token,
}

/// Ended grants that have not been reported, by exporter.
#[derive(Debug, Default)]
pub(crate) struct EndedGrants(Mutex<HashMap<ProcessIdentity, Vec<EndedGrant>>>);

impl EndedGrants {
    /// Keeps an ended grant until it is reported. Returns whether a batch is complete, which is to be reported soon.
    pub(super) fn note(&self, exporter: &ProcessIdentity, ended: EndedGrant) -> bool {
        let mut all = self.lock();
        let waiting = all.entry(*exporter).or_default();
        waiting.push(ended);
        waiting.len().is_multiple_of(MAX_ENDED_GRANTS)
    }

    /// Returns whether there are any of this exporter.
    pub(super) fn has_any_of(&self, exporter: &ProcessIdentity) -> bool {
        self.lock().contains_key(exporter)
    }

    /// Takes all of an exporter.
    pub(super) fn take_all_of(&self, exporter: &ProcessIdentity) -> Vec<(ExportId, Token)> {
        let taken = self.lock().remove(exporter);
        taken.into_iter().flatten().map(|ended| (ended.export, ended.token)).collect()
    }

    /// Takes those of messages of this channel, which reports them with its next message.
    pub(crate) fn take(&self, exporter: &ProcessIdentity, channel: ChannelId) -> Vec<(ExportId, Token)> {
        let mut all = self.lock();
        let Some(waiting) = all.get_mut(exporter) else { return Vec::new() };
        let taken = waiting.extract_if(.., |ended| ended.channel == Some(channel));
        let taken = taken.map(|ended| (ended.export, ended.token)).collect();
        if waiting.is_empty() {
            all.remove(exporter);
        }
        taken
    }

    /// Puts back grants that the channel could not report.
    pub(crate) fn put_back(
        &self,
        exporter: &ProcessIdentity,
        channel: ChannelId,
        grants: Vec<(ExportId, Token)>,
    ) {
        if !grants.is_empty() {
            let back = grants.into_iter().map(|(export, token)| EndedGrant {
                channel: Some(channel),
                export,
                token,
            });
            self.lock().entry(*exporter).or_default().extend(back);
        }
    }

    /// Forgets those of an exporter that has terminated.
    pub(super) fn forget(&self, exporter: &ProcessIdentity) {
        self.lock().remove(exporter);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<ProcessIdentity, Vec<EndedGrant>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for EndedGrant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EndedGrant({})", self.export)
    }
}
