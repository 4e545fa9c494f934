//! Grants that came with messages of channels, or as bytes: each opens its export once, whatever has become of the export's guard,
//! and is given back by whoever has no use for it.
//!
//! A receiver that has a lease already opens without a message, and then the exporter has to be told that the grant is
//! over, but not now: it keeps nothing that the lease does not keep. So these wait, and travel with what is sent anyway: a
//! message of the channel that they came by, or, sixty-four at a time, a message to the exporter's broker. They go at once
//! where the exporter waits for its memory, and when the lease ends.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use super::link::Link;
use super::table::ImportTable;
use crate::model::error::{DescriptorError, Result};
use crate::os::process::ProcessIdentity;
use crate::sharing::export::ChannelId;
use crate::sharing::{Runtime, RuntimeRef};
use crate::transport::{AllowList, Deadline};
use crate::wire::channel::MAX_ENDED_GRANTS;
use crate::wire::descriptor::{Descriptor, ExportId, NamedExport};
use crate::wire::{BrokerAddress, Grant, Token};

/// Maximum number of grants in one message to an exporter.
const MAX_GRANTS: usize = 1024;

/// Maximum time of the connection to an exporter to which a grant is given back.
const GIVE_BACK_DEADLINE: Duration = Duration::from_secs(1);

/// A grant that is over, and the channel that it came by, if it came by one.
pub(super) struct EndedGrant {
    channel: Option<ChannelId>,
    export: ExportId,
    token: Token,
}

impl fmt::Debug for EndedGrant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EndedGrant({})", self.export)
    }
}

/// Grants that are over, by exporter.
pub(super) type EndedGrants = HashMap<ProcessIdentity, Vec<EndedGrant>>;

/// The way of grants back to an exporter that has no broker which this process reaches.
pub(crate) trait GrantReturn: fmt::Debug + Send + Sync {
    /// Reports that a grant is no longer needed. Does not wait.
    fn give_back(&self, export: ExportId, token: Token);
}

/// A grant, until it is used. Dropping one that came with a message gives it back; of one that came as bytes, the caller has the
/// bytes, and may try again.
pub(crate) struct UnusedGrant {
    exporter: ProcessIdentity,
    broker: BrokerAddress,
    export: ExportId,
    token: Token,
    /// The channel that brought it.
    channel: Option<(ChannelId, RuntimeRef)>,
    /// For a grant that came over the network.
    returns: Option<Arc<dyn GrantReturn>>,
    allow: AllowList,
    held: AtomicBool,
}

impl UnusedGrant {
    pub(crate) fn new(
        named: &NamedExport<'_>,
        token: Token,
        channel: Option<(ChannelId, RuntimeRef)>,
        allow: AllowList,
    ) -> Self {
        let (exporter, broker, export) =
            (named.contents.exporter, named.contents.broker.clone(), named.part.export);
        let held = AtomicBool::new(true);
        Self { exporter, broker, export, token, channel, returns: None, allow, held }
    }

    /// Sets the way back of a grant that came over the network.
    pub(crate) fn returned_by(mut self, returns: Option<Arc<dyn GrantReturn>>) -> Self {
        self.returns = returns;
        self
    }

    /// Gives a grant back that came over the network: the memory was copied, and no lease has used the grant.
    pub(crate) fn copied(&self) {
        if let Some(returns) = &self.returns
            && self.held.swap(false, Ordering::AcqRel)
        {
            returns.give_back(self.export, self.token);
        }
    }

    /// The token that opens the export, as long as the grant has not been used.
    pub(crate) fn token(&self) -> Option<Token> {
        self.held.load(Ordering::Acquire).then_some(self.token)
    }

    /// A lease has begun by it; the exporter knows.
    pub(crate) fn used_up(&self) {
        self.held.store(false, Ordering::Release);
    }

    /// A lease that there was already has taken its place; the exporter does not know yet. True where it has to be told
    /// soon.
    pub(super) fn replaced(&self, imports: &ImportTable) -> bool {
        if !self.held.swap(false, Ordering::AcqRel) {
            return false;
        }
        let ended =
            EndedGrant { channel: self.channel.map(|(id, _)| id), export: self.export, token: self.token };
        imports.note_ended(&self.exporter, ended)
    }
}

impl Drop for UnusedGrant {
    fn drop(&mut self) {
        let Some((_, runtime)) = self.channel.filter(|_| *self.held.get_mut()) else { return };
        let Some(runtime) = runtime.here() else { return };
        let (export, token) = (self.export, self.token);
        if let Some(returns) = &self.returns {
            return returns.give_back(export, token);
        }
        if self.exporter == runtime.identity && runtime.poller.listens_at(&self.broker) {
            return runtime.exports.end_grant(export, token);
        }
        let (exporter, broker, allow) = (self.exporter, self.broker.clone(), self.allow.clone());
        runtime.worker.submit(move || {
            let connected = runtime.imports.link(
                runtime,
                (&exporter, &broker),
                &allow,
                Deadline::after(GIVE_BACK_DEADLINE),
            );
            match connected {
                Ok((link, _)) => link.end_grants(vec![(export, token)]),
                // It ends with the channel.
                Err(error) => {
                    tracing::debug!(target: crate::os::log::IMPORT, %error, "a grant could not be given back")
                }
            }
        });
    }
}

impl fmt::Debug for UnusedGrant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UnusedGrant").field("held", &self.held).finish_non_exhaustive()
    }
}

impl Grant {
    /// Reads the grants of a descriptor's parts.
    ///
    /// # Errors
    ///
    /// [`DescriptorError::BadGrant`] for a grant of another export.
    pub(super) fn of_parts(&self, descriptor: &Descriptor, allow: &AllowList) -> Result<Vec<UnusedGrant>> {
        let contents = descriptor.contents();
        let named = || (0..contents.parts.len()).map(|part| contents.named(part));
        let fits = self.exporter() == (&contents.exporter).into()
            && self.parts().len() == contents.parts.len()
            && named().zip(self.parts()).all(|(named, (export, _))| named.part.export == *export);
        if !fits {
            return Err(DescriptorError::BadGrant { why: "it belongs to another descriptor" }.into());
        }
        let unused = |(named, (_, token)): (NamedExport<'_>, &(ExportId, Token))| {
            UnusedGrant::new(&named, *token, None, allow.clone())
        };
        Ok(named().zip(self.parts()).map(unused).collect())
    }

    /// Gives the grant back, for a receiver that has the memory open already and does not open it by this grant. Does not wait: the
    /// exporter learns it with other grants, 64 at a time, when the lease ends, or at once where it waits for its memory. Without
    /// effect for a grant that has ended, and where this process has no connection to the exporter: the grant ends at its time
    /// limit then.
    pub fn give_back(&self) {
        let Some(runtime) = Runtime::existing() else { return };
        if self.exporter() == (&runtime.identity).into() {
            self.parts().iter().for_each(|(export, token)| runtime.exports.end_grant(*export, *token));
            return;
        }
        let imports = &runtime.imports;
        let Some(exporter) = imports.exporter_of(self.exporter()) else { return };
        for &(export, token) in self.parts() {
            let is_full = imports.note_ended(&exporter, EndedGrant { channel: None, export, token });
            // Looked at after the grant, so that no notification is missed in between.
            let may_wait = || imports.known_links(&exporter).iter().any(|link| link.may_keep(export));
            if is_full || !may_wait() {
                imports.give_back_soon(runtime, &exporter);
            }
        }
    }
}

impl ImportTable {
    /// Notes a grant that is over. Returns whether its exporter has to be notified soon.
    fn note_ended(&self, exporter: &ProcessIdentity, ended: EndedGrant) -> bool {
        let mut all = self.lock_ended();
        let waiting = all.entry(*exporter).or_default();
        waiting.push(ended);
        waiting.len().is_multiple_of(MAX_ENDED_GRANTS)
    }

    /// Takes the grants that are over and came by this channel, to be told by it.
    pub(crate) fn take_ended(
        &self,
        exporter: &ProcessIdentity,
        channel: ChannelId,
    ) -> Vec<(ExportId, Token)> {
        let mut all = self.lock_ended();
        let Some(waiting) = all.get_mut(exporter) else { return Vec::new() };
        let taken = waiting.extract_if(.., |ended| ended.channel == Some(channel));
        let taken = taken.map(|ended| (ended.export, ended.token)).collect();
        if waiting.is_empty() {
            all.remove(exporter);
        }
        taken
    }

    /// Puts back what could not be told.
    pub(crate) fn put_back_ended(
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
            self.lock_ended().entry(*exporter).or_default().extend(back);
        }
    }

    /// Has the worker tell an exporter which grants are over, where there are any.
    pub(crate) fn give_back_soon(&'static self, runtime: &Runtime, exporter: &ProcessIdentity) {
        if !self.lock_ended().contains_key(exporter) {
            return;
        }
        let exporter = *exporter;
        runtime.worker.submit(move || {
            // Without a connection the exporter has ended.
            self.give_back(&exporter, None);
        });
    }

    /// Reports the grants that are over to their exporter, also over this link if there is one. Of several brokers in the
    /// process, those that do not know a grant ignore it.
    pub(super) fn give_back(&self, exporter: &ProcessIdentity, link: Option<&Arc<Link>>) {
        if !self.lock_ended().contains_key(exporter) {
            return;
        }
        let mut links = self.known_links(exporter);
        links.extend(link.filter(|link| !links.iter().any(|known| Arc::ptr_eq(known, link))).cloned());
        if links.is_empty() {
            return;
        }
        let waiting = self.lock_ended().remove(exporter);
        let grants: Vec<_> = waiting.into_iter().flatten().map(|ended| (ended.export, ended.token)).collect();
        // A packet takes more of them, and there are rarely so many.
        for some in grants.chunks(MAX_GRANTS) {
            links.iter().for_each(|link| link.end_grants(some.to_vec()));
        }
    }

    /// The exporter has gone, and its exports with it.
    pub(super) fn forget_ended(&self, exporter: &ProcessIdentity) {
        self.lock_ended().remove(exporter);
    }

    pub(super) fn lock_ended(&self) -> MutexGuard<'_, EndedGrants> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
