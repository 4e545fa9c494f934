//! Replies that wait for a call of the driver on the worker.

use super::session::{BrokerSession, Event, WaitingAnswer};
use crate::sharing::timeline::Termination;
use crate::transport::{Connection, Next};
use crate::wire::Refusal;
use crate::wire::protocol::Reply;

impl BrokerSession<'_> {
    /// Calls the driver on the worker; the reply waits for the outcome.
    pub(super) fn ask_the_driver(
        &mut self,
        answer: WaitingAnswer,
        ask: impl FnOnce() -> Result<(), Refusal> + Send + 'static,
    ) -> Next {
        let runtime = self.runtime;
        self.checks += 1;
        let (connection, check) = (self.connection, self.checks);
        self.waiting.insert(check, answer);
        runtime.worker.submit(move || runtime.poller.send_event(connection, Event::Checked(check, ask())));
        Next::Keep
    }

    /// Sends a reply that has waited for the driver.
    pub(super) fn checked(
        &mut self,
        check: u64,
        result: Result<(), Refusal>,
        connection: &mut Connection,
    ) -> Next {
        match (self.waiting.remove(&check), result) {
            (None, _) => Next::Keep,
            (Some(WaitingAnswer::Opened { request, lease, device }), Ok(())) => {
                let export = self.leases.get(&lease);
                match export.and_then(|export| self.exports.granted(*export, lease)) {
                    Some(granted) => self.send_opened(request, &granted, device, connection),
                    None => connection.send(&Reply::Refused { request, refusal: Refusal::Dropped }, &[]),
                }
            }
            (Some(WaitingAnswer::Confirmation(request)), Ok(())) => {
                connection.send(&Reply::Confirmed { request }, &[])
            }
            (Some(WaitingAnswer::Opened { request, lease, .. }), Err(refusal)) => {
                if let Some(export) = self.leases.remove(&lease) {
                    self.exports.release(export, lease, Termination::Released);
                    self.places.give_back(lease);
                }
                connection.send(&Reply::Refused { request, refusal }, &[])
            }
            (Some(WaitingAnswer::Timeline(request, lease, timeline)), Ok(())) => {
                self.send_timeline(request, lease, &timeline, connection)
            }
            (
                Some(WaitingAnswer::Confirmation(request) | WaitingAnswer::Timeline(request, ..)),
                Err(refusal),
            ) => connection.send(&Reply::Refused { request, refusal }, &[]),
        }
    }
}
