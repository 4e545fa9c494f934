//! Admission of connections: limits, and which connections make room for others.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::SocketFlags;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::super::closer;
use super::super::connection::Connection;
use super::super::fairness::descriptor_limit;
use super::super::served::Served;
use super::super::service::{ConnectionId, Service, Session};
use super::super::socket::{self, PeerCredentials, PeerSocket};
use super::{EventLoop, ListeningSource, Source, Timer};
use crate::os::clock;
use crate::os::kill::kill_point;
use crate::os::log::Throttle;
use crate::wire::Refusal;
use crate::wire::protocol::{Reply, RequestId, encode};

/// Maximum number of connections served at a time.
const MAX_CONNECTIONS: usize = 4096;

/// Each connection takes two descriptors, its socket and its process. All connections together take at most half of the process's
/// limit: the program needs the others.
const DESCRIPTORS_PER_CONNECTION: usize = 4;

/// Number of connections that are served whatever the limit of descriptors.
const MIN_CONNECTIONS: usize = 4;

/// Maximum number of connections without a lease; the oldest one of the user with most of them makes room for a new one.
const MAX_WITHOUT_LEASE: usize = 256;

/// Maximum number of connections of one process. A process needs one.
const MAX_OF_ONE_PROCESS: usize = 8;

/// Maximum time between the accept of a connection and its peer's hello.
const HELLO_DEADLINE: Duration = Duration::from_secs(5);

/// Maximum number of connections accepted before the event loop serves the existing ones.
const ACCEPTED_PER_TURN: usize = 16;

/// Pause in accepting connections after an accept has failed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Maximum number of sockets that wait to be closed on other threads; above it no connection is accepted.
const MAX_CLOSING: usize = 64;

impl<S: Service> EventLoop<S> {
    pub(super) fn accept(&mut self, listener: u64) {
        for _ in 0..ACCEPTED_PER_TURN {
            if closer::backlog() > MAX_CLOSING {
                return self
                    .pause_accepting(listener, "too many sockets of refused connections wait to be closed");
            }
            let Some(Source::Listener(ListeningSource { socket, refuses_fds, .. })) =
                self.sources.get(&listener)
            else {
                return;
            };
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match rustix::net::accept_with(socket, flags) {
                Ok(accepted) => {
                    let accepted = PeerSocket::new(accepted, !refuses_fds);
                    self.admit(accepted);
                }
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return,
                Err(Errno::MFILE | Errno::NFILE) if self.close_oldest_without_lease() => return,
                Err(Errno::MFILE | Errno::NFILE) => {
                    return self.pause_accepting(
                        listener,
                        "this process has no descriptors left for importers; raise its limit (ulimit -n)",
                    );
                }
                Err(error) => return self.pause_accepting(listener, &error.to_string()),
            }
        }
    }

    /// The kernel reports a pending connection repeatedly; without a pause the poller would do nothing else.
    fn pause_accepting(&mut self, listener: u64, why: &str) {
        static WARNINGS: Throttle = Throttle::new();
        if let Some(count) = WARNINGS.count() {
            tracing::warn!(target: crate::os::log::TRANSPORT, why, pause_ms = ACCEPT_PAUSE.as_millis(), count, "no connection can be accepted");
        }
        if let Some(Source::Listener(ListeningSource { socket, .. })) = self.sources.get(&listener) {
            self.modify(socket.as_fd(), listener, EventFlags::empty());
            self.timers.insert(clock::now() + ACCEPT_PAUSE, (listener, Timer::Listen));
        }
    }

    fn admit(&mut self, accepted: PeerSocket) {
        let Ok(peer) = socket::peer_credentials(accepted.owned()) else { return };
        if !self.service.permits(&peer) {
            return self.refuse(&accepted, &peer);
        }
        if let Err(why) = self.make_room_for(&peer) {
            self.metrics.connections_refused_total.add(1);
            if let Some(count) = self.refusals.count() {
                tracing::warn!(target: crate::os::log::TRANSPORT, pid = peer.pid, uid = peer.uid, count, why, "a connection is refused");
            }
            return;
        }
        let id = self.take_id();
        if !self.add(accepted.fd(), id, EventFlags::IN) {
            return;
        }
        let process =
            Pid::from_raw(peer.pid as i32).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        if let Some(process) = process {
            let process_id = self.take_id();
            if self.add(process.as_fd(), process_id, EventFlags::IN | EventFlags::ONESHOT) {
                self.sources.insert(process_id, Source::ServedProcess(id, process));
                self.processes.insert(id, process_id);
            }
        }
        self.timers.insert(clock::now() + HELLO_DEADLINE, (id, Timer::Hello));
        self.connections += 1;
        let session = self.service.connected(ConnectionId(id));
        let connection = Connection::new(accepted, peer);
        self.sources.insert(id, Source::Served(Box::new(Served { connection, session })));
        kill_point!("exporter:accepted");
    }

    /// Refuses a user whom no export has allowed. The reply says so, and nothing about this process.
    fn refuse(&mut self, accepted: &PeerSocket, peer: &PeerCredentials) {
        self.metrics.connections_refused_total.add(1);
        if let Some(count) = self.refusals.count() {
            tracing::warn!(target: crate::os::log::TRANSPORT,
                pid = peer.pid,
                uid = peer.uid,
                count,
                "a connection of a user that no export allows is refused"
            );
        }
        let refusal = Refusal::UserNotAllowed { uid: peer.uid };
        if let Ok(bytes) = encode(&Reply::Refused { request: RequestId(0), refusal }) {
            let _ = socket::send(accepted.fd(), &bytes, &[]);
        }
    }

    /// Closes connections without a lease where a new one needs their place: their importers connect again on demand. The error
    /// says why there is no place.
    fn make_room_for(&mut self, peer: &PeerCredentials) -> Result<(), String> {
        let same = |served: &Served<S::Session>| peer.pid != 0 && served.connection.peer().pid == peer.pid;
        if self.connections >= MAX_OF_ONE_PROCESS
            && self.served().filter(|(_, served)| same(served)).count() >= MAX_OF_ONE_PROCESS
        {
            return Err(format!("the process has {MAX_OF_ONE_PROCESS} connections already"));
        }
        let most = max_connections();
        // Another user gets half of them at most.
        let most_of_user =
            if peer.uid == rustix::process::geteuid().as_raw() { most } else { most.div_ceil(2) };
        if self.connections >= most_of_user {
            let of_user =
                self.served().filter(|(_, served)| served.connection.peer().uid == peer.uid).count();
            if of_user >= most_of_user && !self.close_oldest_of(Some(peer.uid)) {
                return Err(format!(
                    "user {} has {of_user} connections with leases, and {most_of_user} are served: a quarter of this \
                     process's limit of descriptors, or an eighth for another user; raise the limit (ulimit -n)",
                    peer.uid
                ));
            }
        }
        if self.connections >= MAX_WITHOUT_LEASE
            && self.served().filter(|(_, served)| !served.session.has_leases()).count() >= MAX_WITHOUT_LEASE
        {
            self.close_oldest_without_lease();
        }
        if self.connections < most || self.close_oldest_without_lease() {
            return Ok(());
        }
        Err(format!(
            "{} connections with leases are served, a quarter of this process's limit of descriptors; raise the limit \
             (ulimit -n)",
            self.connections
        ))
    }

    /// Closes the oldest connection without a lease of the user that has most of them.
    fn close_oldest_without_lease(&mut self) -> bool {
        let mut users = HashMap::<u32, usize>::new();
        for (_, served) in self.served().filter(|(_, served)| !served.session.has_leases()) {
            *users.entry(served.connection.peer().uid).or_default() += 1;
        }
        let user = users.into_iter().max_by_key(|(_, count)| *count).map(|(user, _)| user);
        user.is_some() && self.close_oldest_of(user)
    }

    fn close_oldest_of(&mut self, user: Option<u32>) -> bool {
        let of_user = |served: &Served<S::Session>| {
            Some(served.connection.peer().uid) == user && !served.session.has_leases()
        };
        let oldest = self.served().filter(|(_, served)| of_user(served)).map(|(id, _)| id).min();
        if let Some(id) = oldest {
            self.close(id);
        }
        oldest.is_some()
    }
}

fn max_connections() -> usize {
    (descriptor_limit() / DESCRIPTORS_PER_CONNECTION).clamp(MIN_CONNECTIONS, MAX_CONNECTIONS)
}
