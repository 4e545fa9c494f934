//! The messages that arrive over a client's connection: replies, late replies, notifications.

use std::time::Duration;

use super::super::async_requests::AsyncRequests;
use super::super::conversation::Deadline;
use super::super::socket::ReceivedFds;
use super::handles::Arrived;
use super::{Calls, Client, Subscriber};
use crate::model::error::{Error, Result};
use crate::wire::protocol::{Reply, Request, RequestId};

/// Maximum number of messages that the poller reads before it turns to other connections.
const MESSAGES_PER_TURN: u32 = 16;

impl<S: Subscriber> Client<S> {
    /// Reads messages until the reply to a request has arrived.
    pub(super) fn reply_to(
        &self,
        calls: &mut Calls,
        request: RequestId,
        deadline: Deadline,
    ) -> Result<(Reply, ReceivedFds)> {
        // The handles of the packets before the last.
        let mut arrived = Arrived::default();
        let reply = self.read_reply(calls, request, deadline, &mut arrived);
        // Of a request that fails.
        let unused = std::mem::take(&mut arrived.ahead);
        unused.iter().try_for_each(|ahead| self.send_at_once(&Request::release_unused(ahead.lease)))?;
        reply
    }

    fn read_reply(
        &self,
        calls: &mut Calls,
        request: RequestId,
        deadline: Deadline,
        arrived: &mut Arrived,
    ) -> Result<(Reply, ReceivedFds)> {
        loop {
            let received = self.conversation.receive(&mut calls.inbox, deadline);
            let (reply, fds) = received.map_err(|error| self.check_gone(error))?;
            match reply {
                Reply::Handles { request: answered, handles } if answered == request => {
                    arrived.add(handles, fds).map_err(|error| self.check_gone(error))?;
                }
                Reply::Ahead { request: answered, leases } if answered == request => {
                    arrived.add_ahead(leases).map_err(|error| self.check_gone(error))?;
                }
                Reply::Opened(mut opened) if opened.request == request => {
                    let last = std::mem::take(&mut opened.handles);
                    arrived.add(last, fds).map_err(|error| self.check_gone(error))?;
                    let Arrived { handles, fds, ahead, .. } = std::mem::take(arrived);
                    (opened.handles, opened.ahead) = (handles, ahead);
                    return Ok((Reply::Opened(opened), fds));
                }
                Reply::Confirmed { request: answered }
                | Reply::Timeline { request: answered, .. }
                | Reply::Granted { request: answered, .. }
                | Reply::Claims { request: answered, .. }
                    if answered == request =>
                {
                    return Ok((reply, fds));
                }
                Reply::Refused { request: refused, refusal } if refused == request => {
                    return Err(self.explain(refusal));
                }
                other => {
                    self.take_other(calls, other, fds).map_err(|error| self.check_gone(error))?;
                    // Looked at after each message: a peer that sends without end does not extend the deadline.
                    if deadline.left().is_zero() {
                        return Err(self.conversation.no_answer(deadline));
                    }
                }
            }
        }
    }

    /// Hands the reply to an asynchronous request to its caller.
    fn take_async(&self, reply: Reply, fds: ReceivedFds) -> Result<()> {
        let undo = undo(&reply);
        let delivered = self.lock_async_requests().deliver(reply, fds)?;
        undo.filter(|_| !delivered).map_or(Ok(()), |undo| self.send_at_once(&undo))
    }

    /// Handles a message that is not the reply to a waiting caller's request.
    fn take_other(&self, calls: &mut Calls, reply: Reply, fds: ReceivedFds) -> Result<()> {
        match reply {
            reply if AsyncRequests::has_request_of(&reply) => self.take_async(reply, fds),
            Reply::Dropped { .. } | Reply::Recall { .. } => self.subscriber.notify(reply),
            // Its descriptors were closed with the packet.
            Reply::Opened(ref opened) if calls.abandoned.remove(&opened.request.0) => {
                undo(&reply).map_or(Ok(()), |undo| self.send_at_once(&undo))
            }
            Reply::Refused { request, .. }
            | Reply::Confirmed { request }
            | Reply::Timeline { request, .. }
            | Reply::Granted { request, .. }
            | Reply::Claims { request, .. }
                if calls.abandoned.remove(&request.0) =>
            {
                Ok(())
            }
            Reply::Handles { request, .. } if calls.abandoned.contains(&request.0) => Ok(()),
            Reply::Ahead { request, leases } if calls.abandoned.contains(&request.0) => {
                leases.iter().try_for_each(|ahead| self.send_at_once(&Request::release_unused(ahead.lease)))
            }
            _ => Err(Error::Protocol("it sent a reply without a request".into())),
        }
    }

    /// Reads the messages that have arrived while no caller waits for a reply. False where a caller is reading.
    pub(crate) fn on_readable(&self) -> bool {
        let Some(mut calls) = self.calls.try_lock() else { return false };
        for _ in 0..MESSAGES_PER_TURN {
            let taken = match self.conversation.try_receive(&mut calls.inbox.buffer) {
                Ok(None) => return true,
                Ok(Some((reply, fds))) => self.take_other(&mut calls, reply, fds),
                Err(error) => Err(error),
            };
            if taken.is_err() {
                self.mark_gone();
                return true;
            }
        }
        // The poller reads the rest after the other connections.
        true
    }

    /// Sends a request without waiting for room. An exporter that let a caller time out and does not read either counts as
    /// terminated: the poller waits for no peer.
    fn send_at_once(&self, request: &Request) -> Result<()> {
        self.conversation.send(request, Deadline::after(Duration::ZERO))
    }
}

/// Returns the request that gives back what a reply brings, for one that no caller waits for any longer.
fn undo(reply: &Reply) -> Option<Request> {
    match reply {
        Reply::Opened(opened) => Some(Request::release_unused(opened.lease)),
        Reply::Staging { lease, .. } => Some(Request::release_unused(*lease)),
        _ => None,
    }
}
