//! The replies that the specification expects of the exporter.

use super::EXPORTS;
use crate::model::lease::LeaseId;
use crate::wire::Refusal;
use crate::wire::examples::SOMEBODY;
use crate::wire::protocol::{PROTOCOL_VERSION, Reply};

/// An expected reply.
#[derive(Debug)]
pub(super) enum Expected {
    Hello,
    Opened {
        request: u64,
        lease: u64,
        like: bool,
    },
    Refused {
        request: u64,
        refusal: Refusal,
    },
    /// The reason is a text with this part.
    RefusedFor {
        request: u64,
        part: &'static str,
    },
    Listing {
        request: u64,
    },
    Granted {
        request: u64,
    },
    Confirmed {
        request: u64,
    },
    Timeline {
        request: u64,
    },
    Dropped {
        export: u64,
    },
}

impl Expected {
    /// Checks that a reply with this number of descriptors is the expected one.
    pub(super) fn check(expected: Option<&Self>, reply: &Reply, fds: usize, stranger: bool) {
        let fits = match (expected, reply) {
            (Some(Self::Hello), Reply::Hello { protocol, exporter }) => {
                *protocol == PROTOCOL_VERSION && *exporter == SOMEBODY
            }
            (Some(Self::Opened { request, lease, like }), Reply::Opened(grant)) => {
                let claimed: usize = grant.handles.iter().map(|handle| usize::from(handle.fds)).sum();
                grant.request.0 == *request
                    && grant.lease == LeaseId(*lease)
                    && claimed == fds
                    && grant.keep
                    && grant.like == *like
                    && (!grant.like || grant.handles.is_empty())
                    && grant.slot.is_some()
            }
            (
                Some(Self::Refused { request, refusal }),
                Reply::Refused { request: answered, refusal: found },
            ) => answered.0 == *request && format!("{refusal:?}") == format!("{found:?}"),
            (
                Some(Self::RefusedFor { request, part }),
                Reply::Refused { request: answered, refusal: Refusal::Failed(failure) },
            ) => answered.0 == *request && failure.detail.contains(part),
            (Some(Self::Listing { request }), Reply::Listing { request: answered, exports, more }) => {
                let permitted = |listed: u64| !stranger || EXPORTS[listed as usize - 1].1;
                answered.0 == *request && !more && exports.iter().all(|listed| permitted(listed.export.0))
            }
            (Some(Self::Timeline { request }), Reply::Timeline { request: answered, .. }) => {
                answered.0 == *request && fds == 1
            }
            (Some(Self::Granted { request }), Reply::Granted { request: answered, .. }) => {
                answered.0 == *request
            }
            (Some(Self::Confirmed { request }), Reply::Confirmed { request: answered }) => {
                answered.0 == *request
            }
            (Some(Self::Dropped { export }), Reply::Dropped { export: told }) => told.0 == *export,
            _ => false,
        };
        assert!(fits, "{reply:?}, not {expected:?}");
        let most = match reply {
            Reply::Opened(_) => fds,
            // The page of drop counts, and that of lease states.
            Reply::Hello { .. } => 2,
            // The counter page.
            Reply::Timeline { .. } => 1,
            _ => 0,
        };
        assert!(fds <= most, "{fds} descriptors came with {reply:?}");
    }
}
