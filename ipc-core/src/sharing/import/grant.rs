//! Unused grants, of channel messages or as bytes: the right to open an export once, also after its guard was dropped.
//!
//! An open that reuses a lease sends no message, so the exporter does not learn that the grant is not needed any longer: such a
//! grant becomes one of the [`EndedGrants`].

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::ended_grants::{EndedGrant, EndedGrants};
use crate::model::error::{DescriptorError, Result};
use crate::os::process::ProcessIdentity;
use crate::sharing::export::ChannelId;
use crate::sharing::{Runtime, RuntimeRef};
use crate::transport::{AllowList, Deadline};
use crate::wire::descriptor::{Descriptor, ExportId, NamedExport};
use crate::wire::{BrokerAddress, Grant, Token};

/// Maximum time of the connection to an exporter to which a grant is given back.
const GIVE_BACK_DEADLINE: Duration = Duration::from_secs(1);

/// The report of ended grants to an exporter on another host, whose broker this process does not reach.
pub(crate) trait GrantReturn: fmt::Debug + Send + Sync {
    /// Reports that a grant is no longer needed. Does not wait.
    fn give_back(&self, export: ExportId, token: Token);
}

/// A grant until it is used. The drop of one that came with a message gives it back. One that came as bytes stays valid, because the
/// caller has the bytes and may try again.
pub(crate) struct UnusedGrant {
    exporter: ProcessIdentity,
    broker: BrokerAddress,
    export: ExportId,
    token: Token,
    /// The channel of its message; `None` for a grant that came as bytes.
    channel: Option<(ChannelId, RuntimeRef)>,
    /// For a grant that came over the network.
    returns: Option<Arc<dyn GrantReturn>>,
    allow: AllowList,
    /// Cleared by the one thread that uses the grant or gives it back, so that it is reported once.
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

    /// Returns the token that opens the export, unless the grant was used.
    pub(crate) fn token(&self) -> Option<Token> {
        self.held.load(Ordering::Acquire).then_some(self.token)
    }

    /// Notes that the exporter has begun a lease for the grant.
    pub(crate) fn used_up(&self) {
        self.held.store(false, Ordering::Release);
    }

    /// Notes that an existing lease was used instead, which the exporter does not know. Returns whether it has to be reported soon.
    pub(super) fn replaced(&self, ended: &EndedGrants) -> bool {
        if !self.held.swap(false, Ordering::AcqRel) {
            return false;
        }
        let channel = self.channel.map(|(id, _)| id);
        ended.note(&self.exporter, EndedGrant { channel, export: self.export, token: self.token })
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
                // The exporter ends it when the channel is closed.
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
        self.end(false);
    }

    /// As [`give_back`](Self::give_back), but the exporter learns it soon in any case: the grant keeps more than this process has open.
    #[doc(hidden)]
    pub fn give_back_soon(&self) {
        self.end(true);
    }

    fn end(&self, is_urgent: bool) {
        let Some(runtime) = Runtime::existing() else { return };
        if self.exporter() == (&runtime.identity).into() {
            self.parts().iter().for_each(|(export, token)| runtime.exports.end_grant(*export, *token));
            return;
        }
        let imports = &runtime.imports;
        let Some(exporter) = imports.exporter_of(self.exporter()) else { return };
        for &(export, token) in self.parts() {
            let is_full = imports.ended.note(&exporter, EndedGrant { channel: None, export, token });
            // Looked at after the grant, so that no notification is missed in between.
            let may_wait = || imports.known_links(&exporter).iter().any(|link| link.may_keep(export));
            if is_urgent || is_full || !may_wait() {
                imports.give_back_soon(runtime, &exporter);
            }
        }
    }
}
