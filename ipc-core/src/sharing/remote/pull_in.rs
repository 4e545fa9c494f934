//! The importer's side: a lease of an exporter on another host, and the pull of its bytes.

#![allow(unsafe_code, reason = "an engine writes to the new buffer, which the pull keeps")]

use std::fmt;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use device_ipc_tcp::{Key, TcpError};

use super::Remote;
use super::control::Control;
use super::serve::{GRACE, MAX_TRANSFER};
use crate::backend::engine::{Piece, PullRequest, TransferMemory};
use crate::backend::{Buffer, DeviceIpc, MemoryUse, with_device_context};
use crate::model::address::DeviceRange;
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Result};
use crate::os::kill::kill_point;
use crate::os::log;
use crate::sharing::pull::{Failed, Pull, PullOwner};
use crate::sharing::staging::CopyLayout;
use crate::sharing::{ErrorWith, Runtime};
use crate::transport::{Deadline, program_name};
use crate::wire::Span;
use crate::wire::descriptor::NamedExport;
use crate::wire::protocol::encode;
use crate::wire::remote::{RemoteOpen, RemoteRefusal, RemoteReply, RemoteRequest};

/// The slowest transfer that is waited for, in bytes a second.
const SLOWEST_RATE: u64 = 16 << 20;

/// The interval at which a running pull is reported to the exporter.
const PING: Duration = Duration::from_secs(1);

/// The interval at which the exporter's connection is looked at.
const LOOK: Duration = Duration::from_millis(10);

/// The time limit for sending a report, which the system's buffer takes at once unless the exporter does not read.
const SEND: Duration = Duration::from_millis(100);

/// The time for which the end of the exporter's connection is awaited after the engine has reported an error.
const AFTERMATH: Duration = Duration::from_millis(500);

/// Maximum number of bytes of metadata of an export.
const MAX_METADATA_BYTES: usize = 64 << 20;

/// The export to pull.
pub(crate) struct Incoming<'a> {
    pub(crate) remote: &'a Remote,
    pub(crate) backend: &'a Arc<dyn DeviceIpc>,
    pub(crate) named: NamedExport<'a>,
    /// The device of the destinations.
    pub(crate) device: DeviceOrdinal,
    /// The timeout for the lease, and for each later sign of life of the exporter.
    pub(crate) timeout: Duration,
    /// Called with the number of bytes that have arrived.
    pub(crate) report: &'a dyn Fn(u64),
}

/// Pulls an export to a new buffer, as the layout states, and waits until the copy is complete.
pub(crate) fn pull_in(incoming: &Incoming<'_>, layout: &CopyLayout) -> Result<Buffer> {
    let piece = |(span, offset): (&Span, u64)| Piece {
        source: span.region as usize,
        source_offset: span.offset,
        destination: 0,
        destination_offset: offset,
        len: span.len,
    };
    let pieces: Vec<_> = layout.spans().map(piece).collect();
    let granted = incoming.request(&pieces)?;
    let (backend, bytes) = (Arc::clone(incoming.backend), layout.buffer_bytes());
    let buffer = Buffer::allocate(backend, incoming.device, bytes, MemoryUse::new())?;
    let range = buffer.range();
    Ok(granted.pull(&[range], &pieces, buffer)?)
}

/// Pulls pieces of an export to memory on one device, which belongs to `owner`, and waits until the copy is complete.
///
/// # Errors
///
/// With the owner, if the engine does not use the memory any longer.
pub(crate) fn pull_into<O: fmt::Debug + Send + 'static>(
    incoming: &Incoming<'_>,
    destinations: &[DeviceRange],
    pieces: &[Piece],
    owner: O,
) -> Result<O, Failed<O>> {
    let granted = match incoming.request(pieces) {
        Ok(granted) => granted,
        Err(error) => return Err(ErrorWith::new(error, Some(owner))),
    };
    granted.pull(destinations, pieces, owner).map_err(|failed| {
        let (error, unused) = failed.into_parts();
        ErrorWith::new(error, unused.map(Destination::into_owner))
    })
}

impl<'a> Incoming<'a> {
    /// Requests a lease.
    fn request(&'a self, pieces: &[Piece]) -> Result<Granted<'a>> {
        let Self { remote, backend, device, timeout, .. } = *self;
        let engine = remote.engine();
        if !engine.supports(backend.transfer_space(device)) {
            return Err(Error::Unsupported {
                backend: engine.info().name,
                what: format!("copy to device {device} of the backend {}", backend.info().name),
                why: "it does not support this kind of memory".into(),
            });
        }
        let bytes = pieces.iter().map(|piece| piece.len).fold(0, u64::saturating_add);
        let limit = transfer_limit(timeout, bytes);
        let (lease, metadata) = RemoteLease::begin(self, limit)?;
        Ok(Granted { incoming: self, lease, metadata })
    }
}

/// A lease, and the engine's metadata of the regions.
struct Granted<'a> {
    incoming: &'a Incoming<'a>,
    lease: RemoteLease,
    metadata: Vec<Vec<u8>>,
}

impl Granted<'_> {
    /// Pulls to memory that belongs to `owner`, waits, and releases the lease.
    fn pull<O: fmt::Debug + Send + 'static>(
        self,
        destinations: &[DeviceRange],
        pieces: &[Piece],
        owner: O,
    ) -> Result<O, Failed<Destination<O>>> {
        let Self { incoming: Incoming { remote, backend, device, report, .. }, lease, metadata } = self;
        if let Err(error) = lease.check() {
            return Err(ErrorWith::new(error, Some(Destination { owner: Some(owner), lease })));
        }
        let limit = lease.limit;
        let memory = |range: &DeviceRange| TransferMemory {
            space: backend.transfer_space(range.device),
            address: range.ptr.get(),
            len: range.len,
        };
        let sources: Vec<_> = metadata.iter().map(Vec::as_slice).collect();
        let destinations: Vec<_> = destinations.iter().map(memory).collect();
        let request = PullRequest { sources: &sources, destinations: &destinations, pieces };
        let owner = Destination { owner: Some(owner), lease };
        // SAFETY: the owner keeps the memory, and no other code accesses it until it is returned here.
        let start = || unsafe { Pull::start(remote.engine(), &request, owner, limit) };
        let pull = with_device_context(&***backend, *device, start)?;
        kill_point!("importer:remote-pulling");
        let mut finished = pull.wait(report)?;
        if let Err(error) = finished.lease.check() {
            return Err(ErrorWith::new(error, Some(finished)));
        }
        kill_point!("importer:remote-pulled");
        finished.lease.release();
        kill_point!("importer:remote-released");
        Ok(finished.into_owner())
    }
}

/// Returns the time limit of a transfer.
fn transfer_limit(timeout: Duration, bytes: u64) -> Duration {
    timeout.saturating_add(Duration::from_secs(bytes / SLOWEST_RATE)).min(MAX_TRANSFER)
}

fn milliseconds(time: Duration) -> u32 {
    time.as_millis().try_into().unwrap_or(u32::MAX)
}

/// The exporter, for errors.
#[derive(Clone, Debug)]
struct Exporter {
    pid: u32,
    host: String,
    address: SocketAddr,
}

impl Exporter {
    fn error(&self, cause: Error) -> Error {
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
            other => Error::Protocol(other.to_string()),
        })
    }

    fn protocol(&self, why: impl Into<String>) -> Error {
        self.error(Error::Protocol(why.into()))
    }
}

/// A lease of an exporter on another host. It ends when it is dropped.
#[derive(Debug)]
struct RemoteLease {
    control: Control,
    exporter: Exporter,
    /// The time limit of the transfer, which the exporter knows.
    limit: Duration,
    /// A time before the last message that the exporter is known to have received.
    renewed: Instant,
    /// The longest silence of the exporter.
    timeout: Duration,
    next_look: Instant,
    next_ping: Instant,
    /// The time of the oldest ping that has not been answered.
    unanswered: Option<Instant>,
    is_over: bool,
}

impl RemoteLease {
    /// Requests a lease for a transfer with this time limit. Returns the metadata of the export's regions.
    fn begin(incoming: &Incoming<'_>, limit: Duration) -> Result<(Self, Vec<Vec<u8>>)> {
        let deadline = Deadline::after(incoming.timeout);
        let (mut lease, named) = (Self::connect(incoming, limit, deadline)?, incoming.named);
        kill_point!("importer:remote-proved");
        let identity = Runtime::get()?.identity;
        lease.send(&RemoteRequest::Open(RemoteOpen {
            engine: incoming.remote.engine().info().name.to_owned(),
            // The reason of a refusal arrives before this process ceases to wait.
            wait_ms: milliseconds(deadline.left() / 10 * 9),
            limit_ms: milliseconds(limit),
            host: identity.host,
            pid: identity.pid,
            program: program_name(),
        }))?;
        kill_point!("importer:remote-asked");
        let regions = match lease.receive_until(deadline)? {
            RemoteReply::Granted { regions } => regions as usize,
            RemoteReply::Refused(refusal) => return Err(lease.refused(refusal)),
            _ => return Err(lease.exporter.protocol("it sent another reply to a request for a lease")),
        };
        if regions != named.regions().len() {
            let named = named.regions().len();
            return Err(lease.exporter.error(Error::InvalidRegion(format!(
                "the descriptor names {named} regions, and the exporter shares {regions}"
            ))));
        }
        let (mut metadata, mut bytes) = (Vec::new(), 0);
        while metadata.len() < regions {
            let RemoteReply::Regions { metadata: further } = lease.receive_until(deadline)? else {
                return Err(lease
                    .exporter
                    .protocol("it sent another reply than the metadata of its regions"));
            };
            bytes += further.iter().map(Vec::len).sum::<usize>();
            metadata.extend(further);
            if metadata.len() > regions || bytes > MAX_METADATA_BYTES {
                return Err(lease.exporter.protocol("it sent more metadata than it has regions"));
            }
        }
        kill_point!("importer:remote-granted");
        Ok((lease, metadata))
    }

    /// Connects to the first address that accepts, and proves the token.
    fn connect(incoming: &Incoming<'_>, limit: Duration, deadline: Deadline) -> Result<Self> {
        let NamedExport { contents, part } = incoming.named;
        let (exporter, export, network) = (&contents.exporter, part.export, &contents.network);
        let mut failed = None;
        for (tried, address) in network.iter().enumerate() {
            let (pid, host) = (exporter.pid, exporter.host.to_string());
            let exporter = Exporter { pid, host, address: *address };
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
            let key = Key::new(&part.token.to_bytes());
            let connection = device_ipc_tcp::connect(stream, export.0, &key, deadline.at)
                .map_err(|error| exporter.failed("the exporter's proof", error, incoming.timeout))?;
            tracing::debug!(target: log::IMPORT, %export, %address, "connected to an exporter of another host");
            let now = Instant::now();
            return Ok(Self {
                control: Control::new(connection),
                exporter,
                limit,
                renewed: now,
                timeout: incoming.timeout,
                next_look: now + LOOK,
                next_ping: now + PING,
                unanswered: None,
                is_over: false,
            });
        }
        Err(failed.unwrap_or_else(|| Error::Unsupported {
            backend: incoming.remote.engine().info().name,
            what: "copy the memory over the network".into(),
            why: "the descriptor has no network address; the exporter has to listen (Remote::listen)".into(),
        }))
    }

    fn send(&mut self, request: &RemoteRequest) -> Result<()> {
        let sent = self.control.send(&encode(request)?, Instant::now() + SEND);
        sent.map_err(|error| self.lost(error))
    }

    /// Returns the error of a failed connection.
    fn lost(&mut self, error: TcpError) -> Error {
        self.is_over = true;
        self.check().err().unwrap_or_else(|| self.exporter.failed("the exporter", error, self.timeout))
    }

    /// Fails if the exporter may have ended the lease, and freed the memory, because it has received no message for too long: if this
    /// process was suspended. Bytes that have arrived are then not known to be those of the export.
    fn check(&self) -> Result<()> {
        let after = self.limit + GRACE;
        if self.renewed.elapsed() < after {
            return Ok(());
        }
        Err(self.exporter.error(Error::Timeout {
            what: "the copy to end while the exporter keeps the memory".into(),
            after,
            detail: ", because this process was suspended; open the descriptor again".into(),
        }))
    }

    /// Receives a message if one arrives within `wait`.
    fn receive(&mut self, wait: Duration) -> Result<Option<RemoteReply>> {
        let Some(message) = self.control.receive(wait).map_err(|error| self.lost(error))? else {
            return Ok(None);
        };
        RemoteReply::decode(&message).map(Some).map_err(|why| self.exporter.protocol(why))
    }

    fn receive_until(&mut self, deadline: Deadline) -> Result<RemoteReply> {
        while !deadline.left().is_zero() {
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
                why: format!("it uses {engine:?}; use the same engine on both sides (Remote::new)"),
            },
            RemoteRefusal::NotReady => Error::Timeout {
                what: "the exporter's streams to write the bytes".into(),
                after: self.timeout,
                detail: String::new(),
            },
            RemoteRefusal::Stale { detail } => Error::StaleGeneration(detail),
            RemoteRefusal::Failed { detail } => Error::Unsupported {
                backend: "the exporter",
                what: "register the memory for a copy".into(),
                why: detail,
            },
        })
    }

    /// Reads the exporter's signs of life.
    fn look(&mut self) -> Result<()> {
        while let Some(reply) = self.receive(Duration::ZERO)? {
            if reply != RemoteReply::Pong {
                return Err(self.exporter.protocol("it sent another reply to a ping"));
            }
            if let Some(sent) = self.unanswered.take() {
                self.renewed = sent;
            }
        }
        let timeout = self.timeout;
        if self.unanswered.is_some_and(|since| since.elapsed() > timeout) {
            return Err(self.exporter.error(Error::Timeout {
                what: "the exporter to answer during the copy".into(),
                after: timeout,
                detail: ", because its process is suspended or cannot be reached; the destination stays allocated until the \
                         engine has finished with it"
                    .into(),
            }));
        }
        Ok(())
    }

    /// Ends the lease.
    fn release(&mut self) {
        if !std::mem::replace(&mut self.is_over, true) {
            // The exporter ends the lease also when the connection is closed.
            let _ = self.send(&RemoteRequest::Release);
        }
    }
}

impl Drop for RemoteLease {
    fn drop(&mut self) {
        self.release();
    }
}

/// The owner of the destinations, and the lease, which exist until the engine has finished.
#[derive(Debug)]
struct Destination<O: Send + 'static> {
    /// Taken when the engine has finished.
    owner: Option<O>,
    lease: RemoteLease,
}

impl<O: Send + 'static> Destination<O> {
    fn into_owner(mut self) -> O {
        self.owner.take().expect("taken here and by drop alone")
    }
}

impl<O: fmt::Debug + Send + 'static> PullOwner for Destination<O> {
    fn keep_alive(&mut self) -> Result<()> {
        let (lease, now) = (&mut self.lease, Instant::now());
        if lease.is_over || now < lease.next_look {
            return Ok(());
        }
        lease.next_look = now + LOOK;
        lease.look()?;
        if now >= lease.next_ping {
            lease.next_ping = now + PING;
            lease.unanswered.get_or_insert(now);
            lease.send(&RemoteRequest::Ping)?;
        }
        Ok(())
    }

    /// The end of the exporter's process is a better reason than that of the engine.
    fn failed(&mut self, error: Error) -> Error {
        let until = Instant::now() + AFTERMATH;
        loop {
            match self.lease.receive(until.saturating_duration_since(Instant::now())) {
                Ok(Some(_)) => {}
                Ok(None) => return self.lease.exporter.error(error),
                Err(gone) => return gone,
            }
        }
    }

    fn blame(&self, error: Error) -> Error {
        self.lease.exporter.error(error)
    }
}

impl<O: Send + 'static> Drop for Destination<O> {
    /// A driver's free waits for streams; the caller must not.
    fn drop(&mut self) {
        if let (Some(owner), Some(runtime)) = (self.owner.take(), Runtime::existing()) {
            runtime.worker.submit(move || drop(owner));
        }
    }
}
