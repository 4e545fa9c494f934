//! The small server inside every exporting process, and its client.
//!
//! A descriptor opens nothing. The importer connects to the exporter's socket, both sides ask the kernel who the other
//! is, the importer shows the export's token, and the broker answers with a *lease*: the vendor's handle, its file
//! descriptors, and the promise that the memory stays until the lease ends. It ends exactly once: by a message, or by
//! the importer's death, which the kernel tells us by the closing of the socket or by a pidfd, whichever is first
//! (a forked child keeps the socket open, not the process).
//!
//! The poller is one thread for all sockets of the process, in both roles. It never calls a driver, runs the user's
//! code or blocks on a send. The messages are specified in `docs/spec/protocol.md`.

mod alive;
mod allow;
mod apart;
mod closer;
mod conversation;
mod epoch;
mod event_loop;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
mod gate;
mod link;
mod listing;
mod metrics;
mod notices;
mod poller;
mod served;
pub(crate) mod socket;
pub(crate) mod socket_file;
mod worker;

pub use allow::AllowList;
pub(crate) use allow::{UserName, is_own_user};
pub(crate) use conversation::{Deadline, program_name};
pub(crate) use epoch::Epoch;
pub(crate) use gate::Gate;
pub(crate) use link::{GoneCallback, Link};
pub(crate) use listing::program_of;
pub use listing::{ListedProcess, list_exports};
pub use metrics::Counters;
pub(crate) use metrics::Metrics;
pub(crate) use notices::ExportNotices;
pub(crate) use poller::{ConnectionId, Finish, Notice, Poison, Poller, WatchedSocket};
pub(crate) use socket::PeerCredentials;
pub(crate) use worker::{Worker, check_may_wait};
