//! The importer's side of the connection to an exporter on another host, and the lease that it grants.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use device_ipc_tcp::{Key, TcpError};

use super::control::Control;
use super::idle::ConnectionKey;
use super::incoming::IncomingPull;
use super::serve::{GRACE, MAX_TRANSFER};
use crate::model::error::{Error, Remedy, Result};
use crate::os::kill::kill_point;
use crate::os::{clock, log};
use crate::sharing::{Runtime, RuntimeRef};
use crate::transport::{Deadline, program_name};
use crate::wire::descriptor::NamedExport;
use crate::wire::protocol::encode;
use crate::wire::remote::{RemoteOpen, RemoteRefusal, RemoteReply, RemoteRequest, RingEnd};

/// The slowest transfer that is waited for, in bytes a second.
const SLOWEST_RATE: u64 = 16 << 20;

/// The interval at which the exporter is asked for a sign of life.
const PING: Duration = Duration::from_secs(1);

/// The time limit for sending a message, which the system's buffer takes at once unless the exporter does not read.
const SEND: Duration = Duration::from_millis(100);

/// The time for which the end of the exporter's connection is awaited after another error.
const AFTERMATH: Duration = Duration::from_millis(500);

/// Maximum number of confirmed sequences that are kept after an error; an exporter has no more announcements in flight.
const MAX_CONFIRMED: usize = 64;

/// Maximum number of bytes of metadata of an export.
const MAX_METADATA_BYTES: usize = 64 << 20;

/// Returns the time limit of a transfer.
pub(super) fn transfer_limit(timeout: Duration, bytes: u64) -> Duration {
    timeout.saturating_add(Duration::from_secs(bytes / SLOWEST_RATE)).min(MAX_TRANSFER)
}

fn milliseconds(time: Duration) -> u32 {
    time.as_millis().try_into().unwrap_or(u32::MAX)
}

/// The exporter, for errors.
#[derive(Clone, Debug)]
pub(super) struct RemoteExporter {
    pub(super) pid: u32,
    host: String,
    address: SocketAddr,
}

impl RemoteExporter {
    fn at(incoming: &IncomingPull<'_>, address: SocketAddr) -> Self {
        let exporter = &incoming.named.contents.exporter;
        Self { pid: exporter.pid, host: exporter.host.to_string(), address }
    }

    pub(super) fn error(&self, cause: Error) -> Error {
        let Self { pid, host, address } = self.clone();
        Error::InPull { pid, host, address, cause: Box::new(cause) }
    }

    /// Returns the error of a failure of the connection.
    fn failed(&self, what: &str, error: TcpError, after: Duration) -> Error {
        let pid = self.pid;
        self.error(match error {
            TcpError::Closed { .. } => Error::ExporterGone { pid },
            TcpError::Io { cause, .. }
                if matches!(cause.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) =>
            {
                Error::ExporterGone { pid }
            }
            TcpError::Io { cause, .. } | TcpError::Random { cause } => Error::io(what, cause),
            TcpError::TimedOut { .. } => {
                Error::Timeout { what: what.to_owned(), after, detail: String::new() }
            }
            // The exporter does not say whether it has no such export, or the token is wrong.
            TcpError::Refused => Error::ExportDropped { pid },
            TcpError::ServerWithoutKey => Error::wrong_token(pid),
            TcpError::Unusable { .. } => Error::io(what, ErrorKind::NotConnected),
            other => Error::Protocol(other.to_string()),
        })
    }

    pub(super) fn protocol(&self, why: impl Into<String>) -> Error {
        self.error(Error::Protocol(why.into()))
    }
}

/// A lease of an exporter on another host. It ends when it is dropped.
#[derive(Debug)]
pub(super) struct RemoteLease {
    pub(super) runtime: RuntimeRef,
    /// `None` after the end of the lease.
    control: Option<Control>,
    key: ConnectionKey,
    pub(super) exporter: RemoteExporter,
    /// The time limit of the transfer, which the exporter knows.
    limit: Duration,
    /// A time before the last message that the exporter is known to have received.
    renewed: Instant,
    /// The longest silence of the exporter.
    timeout: Duration,
    next_ping: Instant,
    /// The times of the pings that have not been answered, and that of the oldest one or of the last answer.
    unanswered: VecDeque<Instant>,
    silent_since: Instant,
    /// Confirmed sequences of a ring that were received while the reason of an error was sought.
    confirmed: VecDeque<u64>,
    is_over: bool,
}

impl RemoteLease {
    /// Requests a lease for transfers with this time limit, over a kept connection or a new one. Returns the metadata of the export's
    /// regions.
    pub(super) fn begin(
        incoming: &IncomingPull<'_>,
        request: fn(RemoteOpen) -> RemoteRequest,
        limit: Duration,
        deadline: Deadline,
    ) -> Result<(Self, Vec<Vec<u8>>)> {
        let runtime = incoming.runtime;
        let ask = |lease: &mut Self| lease.ask(runtime, incoming, request, deadline);
        let (mut lease, reply) = match Self::reuse(runtime, incoming, limit) {
            None => {
                let mut lease = Self::connect(incoming, limit, deadline)?;
                let reply = ask(&mut lease)?;
                (lease, reply)
            }
            Some(mut lease) => match ask(&mut lease) {
                // The exporter has closed it, for example in favour of another importer.
                Err(lost) if lease.is_over => {
                    let mut lease = Self::connect(incoming, limit, deadline).map_err(|error| {
                        // Nothing listens any longer: the process terminated after the request.
                        if matches!(error.innermost(), Error::Io { .. }) { lost } else { error }
                    })?;
                    let reply = ask(&mut lease)?;
                    (lease, reply)
                }
                reply => (lease, reply?),
            },
        };
        let metadata = lease.receive_metadata(reply, incoming.named.regions().len(), deadline)?;
        kill_point!("importer:remote-granted");
        Ok((lease, metadata))
    }

    /// Sends a request for a lease. Returns the reply.
    fn ask(
        &mut self,
        runtime: &Runtime,
        incoming: &IncomingPull<'_>,
        request: fn(RemoteOpen) -> RemoteRequest,
        deadline: Deadline,
    ) -> Result<RemoteReply> {
        self.send(&request(RemoteOpen {
            engine: incoming.remote.engine().info().name.to_owned(),
            // The reason of a refusal arrives before this process ceases to wait.
            wait_ms: milliseconds(deadline.left() / 10 * 9),
            limit_ms: milliseconds(self.limit),
            host: runtime.identity.host,
            pid: runtime.identity.pid,
            program: program_name(),
        }))?;
        kill_point!("importer:remote-asked");
        self.receive_until(deadline)
    }

    /// Receives the metadata of the regions after the reply to a request.
    fn receive_metadata(
        &mut self,
        reply: RemoteReply,
        named: usize,
        deadline: Deadline,
    ) -> Result<Vec<Vec<u8>>> {
        let regions = match reply {
            RemoteReply::Granted { regions } => regions as usize,
            RemoteReply::Refused(refusal) => return Err(self.refused(refusal)),
            _ => return Err(self.exporter.protocol("it sent another reply to a request for a lease")),
        };
        if regions != named {
            return Err(self.exporter.error(Error::InvalidRegion(format!(
                "the descriptor names {named} regions, and the exporter shares {regions}"
            ))));
        }
        let (mut metadata, mut bytes) = (Vec::new(), 0);
        while metadata.len() < regions {
            let RemoteReply::Regions { metadata: further } = self.receive_until(deadline)? else {
                return Err(self.exporter.protocol("it sent another reply than the metadata of its regions"));
            };
            bytes += further.iter().map(Vec::len).sum::<usize>();
            metadata.extend(further);
            if metadata.len() > regions || bytes > MAX_METADATA_BYTES {
                return Err(self.exporter.protocol("it sent more metadata than it has regions"));
            }
        }
        Ok(metadata)
    }

    /// Takes a connection to the exporter that was kept after another lease on the export.
    fn reuse(runtime: &Runtime, incoming: &IncomingPull<'_>, limit: Duration) -> Option<Self> {
        incoming.named.contents.network.iter().find_map(|address| {
            let control = runtime.idle_connections.take(&Self::key(incoming, *address))?;
            tracing::debug!(target: log::IMPORT, %address, "uses a connection to an exporter of another host again");
            Some(Self::new(incoming, *address, control, limit))
        })
    }

    /// Connects to the first address that accepts, and proves the token.
    fn connect(incoming: &IncomingPull<'_>, limit: Duration, deadline: Deadline) -> Result<Self> {
        let NamedExport { contents, part } = incoming.named;
        let (export, network) = (&part.export, &contents.network);
        let mut failed = None;
        for (tried, address) in network.iter().enumerate() {
            let exporter = RemoteExporter::at(incoming, *address);
            // An address that does not answer leaves time for the others.
            let share = deadline.left() / (network.len() - tried) as u32;
            let stream = TcpStream::connect_timeout(address, share.max(Duration::from_millis(1)));
            let stream = match stream {
                Ok(stream) => stream,
                Err(error) => {
                    let what =
                        "connecting by TCP (check that the exporter runs, and that the network permits it)";
                    failed = Some(exporter.error(Error::io(what, error)));
                    continue;
                }
            };
            kill_point!("importer:remote-connected");
            let key = Key::from(part.token.to_bytes());
            let connection =
                device_ipc_tcp::connect(stream, export.0, &key, clock::to_system(deadline.at))
                    .map_err(|error| exporter.failed("the exporter's proof", error, incoming.timeout))?;
            tracing::debug!(target: log::IMPORT, %export, %address, "connected to an exporter of another host");
            kill_point!("importer:remote-proved");
            return Ok(Self::new(incoming, *address, Control::new(connection), limit));
        }
        Err(failed.unwrap_or_else(|| Error::Unsupported {
            backend: incoming.remote.engine().info().name,
            what: "copy the memory over the network".into(),
            why: format!("the descriptor has no network address; {}", Remedy::ListenForRemote),
        }))
    }

    fn key(incoming: &IncomingPull<'_>, address: SocketAddr) -> ConnectionKey {
        let part = &incoming.named.part;
        ConnectionKey { address, export: part.export, token: part.token }
    }

    fn new(incoming: &IncomingPull<'_>, address: SocketAddr, control: Control, limit: Duration) -> Self {
        let now = clock::now();
        Self {
            runtime: incoming.runtime.for_guard(),
            control: Some(control),
            key: Self::key(incoming, address),
            exporter: RemoteExporter::at(incoming, address),
            limit,
            renewed: now,
            timeout: incoming.timeout,
            next_ping: now + PING,
            unanswered: VecDeque::new(),
            silent_since: now,
            confirmed: VecDeque::new(),
            is_over: false,
        }
    }

    fn control(&mut self) -> &mut Control {
        self.control.as_mut().expect("taken at the end alone")
    }

    pub(super) fn send(&mut self, request: &RemoteRequest) -> Result<()> {
        let sent = self.control().send(&encode(request)?, clock::now() + SEND);
        sent.map_err(|error| self.lost(error))
    }

    /// Returns the error of a failed connection.
    fn lost(&mut self, error: TcpError) -> Error {
        self.is_over = true;
        self.check().err().unwrap_or_else(|| self.exporter.failed("the exporter", error, self.timeout))
    }

    /// Returns the time limit of a transfer.
    pub(super) const fn limit(&self) -> Duration {
        self.limit
    }

    /// Fails if the exporter may have ended the lease, and freed the memory, because it has received no message for too long: if this
    /// process was suspended. Bytes that have arrived are then not known to be those of the export.
    pub(super) fn check(&self) -> Result<()> {
        let after = self.limit + GRACE;
        if clock::elapsed(self.renewed) < after {
            return Ok(());
        }
        Err(self.exporter.error(Error::Timeout {
            what: "the copy to end while the exporter keeps the memory".into(),
            after,
            detail: ", because this process was suspended; open the descriptor again".into(),
        }))
    }

    /// Receives a message other than the answer to a ping, if one arrives within `wait`.
    pub(super) fn receive(&mut self, wait: Duration) -> Result<Option<RemoteReply>> {
        match self.confirmed.pop_front() {
            Some(sequence) => Ok(Some(RemoteReply::Confirmed { sequence })),
            None => self.receive_next(wait),
        }
    }

    fn receive_next(&mut self, wait: Duration) -> Result<Option<RemoteReply>> {
        let until = clock::now() + wait;
        let mut left = wait;
        loop {
            let Some(message) = self.control().receive(left).map_err(|error| self.lost(error))? else {
                return Ok(None);
            };
            match RemoteReply::decode(&message) {
                Ok(RemoteReply::Pong) if !self.unanswered.is_empty() => {
                    self.renewed = self.unanswered.pop_front().unwrap_or(self.renewed);
                    self.silent_since = clock::now();
                }
                Ok(reply) => return Ok(Some(reply)),
                Err(why) => return Err(self.exporter.protocol(why)),
            }
            left = clock::left(until);
            if left.is_zero() {
                return Ok(None);
            }
        }
    }

    pub(super) fn receive_until(&mut self, deadline: Deadline) -> Result<RemoteReply> {
        while !deadline.left().is_zero() {
            self.control().wait_for_reply(deadline.left());
            if let Some(reply) = self.receive(deadline.left())? {
                return Ok(reply);
            }
        }
        Err(self.exporter.error(deadline.passed("the exporter's reply", "")))
    }

    fn refused(&self, refusal: RemoteRefusal) -> Error {
        let pid = self.exporter.pid;
        self.exporter.error(match refusal {
            RemoteRefusal::Dropped => Error::ExportDropped { pid },
            RemoteRefusal::OtherEngine { engine } => Error::Unsupported {
                backend: "the exporter",
                what: "be pulled from by another transfer engine than its own".into(),
                why: format!("it uses {engine:?}; {}", Remedy::UseOneEngine),
            },
            RemoteRefusal::NotReady => Error::Timeout {
                what: "the exporter's streams to write the bytes".into(),
                after: self.timeout,
                detail: String::new(),
            },
            RemoteRefusal::Stale { detail } => Error::StaleGeneration(detail),
            RemoteRefusal::Failed(failure) => failure.into_error(pid),
            RemoteRefusal::NoRing => {
                Error::Protocol(format!("process {pid} does not share this memory as a ring"))
            }
        })
    }

    /// Returns the time until the next [ping](Self::ping).
    pub(super) fn until_ping(&self) -> Duration {
        clock::left(self.next_ping)
    }

    /// Sends a ping if it is time for one, and checks that the exporter has answered the earlier ones, as far as its messages have
    /// been received.
    pub(super) fn ping(&mut self) -> Result<()> {
        let (now, timeout) = (clock::now(), self.timeout);
        if self.unanswered.is_empty() {
            self.silent_since = now;
        } else if now - self.silent_since > timeout {
            return Err(self.exporter.error(Error::Timeout {
                what: "the exporter to answer".into(),
                after: timeout,
                detail: ", because its process is suspended or cannot be reached; the destination of a copy stays allocated \
                         until the engine has finished with it"
                    .into(),
            }));
        }
        if now >= self.next_ping {
            self.next_ping = now + PING;
            self.unanswered.push_back(now);
            self.send(&RemoteRequest::Ping)?;
        }
        Ok(())
    }

    /// Returns the error to report after this one: the end of the exporter's process, and its last message, are better reasons.
    pub(super) fn reason(&mut self, error: Error) -> Error {
        let until = clock::now() + AFTERMATH;
        loop {
            match self.receive_next(clock::left(until)) {
                Ok(Some(RemoteReply::Ended(RingEnd::Dismissed))) => return self.dismissed(),
                Ok(Some(RemoteReply::Confirmed { sequence })) if self.confirmed.len() < MAX_CONFIRMED => {
                    self.confirmed.push_back(sequence);
                }
                Ok(Some(_)) => {}
                Ok(None) => return error,
                Err(gone) => return gone,
            }
        }
    }

    /// Returns the error of a reader that the writer of its ring has dismissed.
    pub(super) fn dismissed(&self) -> Error {
        Error::DismissedFromRing { pid: self.exporter.pid }
    }

    /// Waits until there is a message, the connection is closed, or another descriptor is readable.
    pub(super) fn wait(&self, time: Duration, or: BorrowedFd<'_>) {
        self.control.as_ref().expect("taken at the end alone").wait(time, Some(or));
    }

    pub(super) const fn is_over(&self) -> bool {
        self.is_over
    }

    /// Ends the lease of a copy, and keeps the connection for the next one on the export.
    pub(super) fn finish(&mut self) {
        // The answer to a ping would be taken for one to the next lease.
        if self.release()
            && self.unanswered.is_empty()
            && let (Some(control), Some(runtime)) = (self.control.take(), self.runtime.here())
        {
            runtime.idle_connections.keep(runtime, self.key, control);
        }
    }

    /// Ends the lease. Returns whether the exporter receives that.
    fn release(&mut self) -> bool {
        // The exporter ends the lease also when the connection is closed.
        !std::mem::replace(&mut self.is_over, true) && self.send(&RemoteRequest::Release).is_ok()
    }
}

impl Drop for RemoteLease {
    fn drop(&mut self) {
        self.release();
    }
}
