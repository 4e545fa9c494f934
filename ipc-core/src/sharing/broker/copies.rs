//! Requests for copies through host memory.

use super::session::BrokerSession;
use crate::sharing::export::{Importer, OpenRequest};
use crate::sharing::staging::{Outgoing, Refused};
use crate::sharing::timeline::Termination;
use crate::transport::{Connection, Next};
use crate::wire::protocol::{MAX_SPANS, Reply, RequestId, Span};
use crate::wire::{Failure, Refusal};

/// Maximum number of copies of one peer that have begun or wait for room.
const MAX_STAGINGS: usize = 64;

impl BrokerSession<'_> {
    /// Begins a lease under which the bytes of these spans are copied. The worker does the rest.
    pub(super) fn stage(
        &mut self,
        request: RequestId,
        (wanted, spans): (OpenRequest, &[Span]),
        importer: Importer,
        connection: &mut Connection,
    ) -> Next {
        let too_many_leases = self.too_many_leases(connection);
        let too_many_copies = || {
            let many = self.stagings.len() >= MAX_STAGINGS;
            many.then(|| format!("the importing process has {MAX_STAGINGS} copies under way already"))
        };
        if spans.len() > MAX_SPANS {
            return connection.violated("it requested a copy of more spans than the protocol permits");
        }
        if let Some(detail) = too_many_leases.or_else(too_many_copies) {
            let refusal = Refusal::Failed(Failure::quota(detail));
            return connection.send(&Reply::Refused { request, refusal }, &[]);
        }
        let export = wanted.export;
        let granted = match self.exports.grant(wanted, importer) {
            Ok(granted) => granted,
            Err(refusal) => return self.refuse(request, export, refusal, connection),
        };
        let (lease, importer) = (granted.lease, (self.connection, connection.peer().pid));
        match Outgoing::begin(self.runtime, importer, (export, spans), request, &granted) {
            Ok(staging) => {
                self.leases.insert(lease, export);
                self.stagings.insert(lease, staging);
                Next::Keep
            }
            Err(refusal) => {
                drop(granted);
                self.exports.release(export, lease, Termination::Released);
                self.refuse(request, export, refusal, connection)
            }
        }
    }

    /// Refuses a copy that could not begin. Its importer has not received the lease.
    pub(super) fn staging_refused(&mut self, refused: Refused, connection: &mut Connection) -> Next {
        let Refused { lease, request, refusal } = refused;
        let Some(staging) = self.stagings.remove(&lease) else { return Next::Keep };
        if let Some(export) = self.leases.remove(&lease)
            && staging.end(Termination::Released)
        {
            self.exports.release(export, lease, Termination::Released);
        }
        connection.send(&Reply::Refused { request, refusal }, &[])
    }

    /// Ends the copies that this importer does not continue, if others wait for their host memory.
    pub(super) fn end_silent_stagings(&self) {
        self.stagings.values().for_each(|staging| staging.end_if_silent());
    }
}
