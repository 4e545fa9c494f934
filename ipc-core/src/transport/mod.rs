//! Sockets between processes: the broker's event loop, the clients of other brokers, the worker's thread, deadlines.
//!
//! A process listens on a socket, the *broker*, and connects to the brokers of other processes. Both sides ask the kernel for the
//! credentials of the peer. The messages are specified in `docs/protocol.md`; this layer moves them, and knows neither exports
//! nor imports: the layer above answers requests as a [`Service`], and handles notifications as a [`Subscriber`].
//!
//! The *poller* is one thread for all sockets of the process, in both roles. It never calls a driver, runs the user's code or
//! blocks on a send. The *worker* is the thread that does.

mod alive;
mod allow;
mod async_requests;
mod client;
mod closer;
mod commands;
mod connection;
mod conversation;
mod epoch;
mod event_loop;
mod fairness;
mod listing;
mod metrics;
mod poller;
mod served;
mod service;
pub(crate) mod socket;
pub(crate) mod socket_file;
mod tcp_server;
mod timed_mutex;
mod watch;
mod worker;

pub use allow::AllowList;
pub(crate) use allow::{UserName, is_own_user};
pub(crate) use async_requests::{AsyncReply, Outcome};
pub(crate) use client::{Client, Subscriber};
#[cfg(feature = "kill-points")]
pub(crate) use closer::wait_until_closed;
pub(crate) use connection::{Connection, Next};
pub(crate) use conversation::{Deadline, program_name};
pub(crate) use epoch::Epoch;
pub(crate) use fairness::{Allotment, Budget, descriptor_limit, greediest};
pub use listing::{ListedProcess, list_exports};
pub(crate) use listing::{abstract_names, names_in, program_of};
pub use metrics::Counters;
pub(crate) use metrics::Metrics;
pub(crate) use poller::Poller;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use served::Served;
pub(crate) use service::{ConnectionId, Service, Session};
pub(crate) use socket::PeerCredentials;
pub(crate) use tcp_server::{Admission, ConnectionPermit, MAX_REQUEST_BYTES, ServerId, TcpServer};
pub(crate) use timed_mutex::TimedMutex;
pub(crate) use watch::{WatchedSocket, new_socket_number};
pub(crate) use worker::{Worker, check_may_wait};
