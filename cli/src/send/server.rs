//! The TCP server for receivers, with one thread per connection.

use std::collections::VecDeque;
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use device_ipc_tcp::{AuthenticatedConnection, Key};
use serde_json::{Value, json};

use crate::transcript::Entry;
use crate::transport::key::{KEY_ID, KeyArguments};
use crate::transport::message::{self, FromReceiver, FromSender};
use crate::transport::printable;

/// Timeout for a receiver to authenticate and to request the descriptor.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum number of unauthenticated connections. A new connection closes the oldest one, so that silent connections do not
/// lock out receivers.
const MAX_UNAUTHENTICATED: usize = 64;

/// Maximum number of receivers at a time, each of which has a thread.
const MAX_RECEIVERS: usize = 256;

/// Maximum number of receivers of one address at a time.
const MAX_RECEIVERS_OF_ADDRESS: usize = 64;

/// Maximum length in bytes of a message of a receiver.
const MAX_REQUEST_BYTES: usize = 64 << 10;

/// Maximum number of lines about refused connections that are printed at once, after which one is printed per second.
const MAX_REFUSALS: f64 = 32.0;

/// Maximum number of events that wait for the main thread, which waits for the reader of the output.
pub(super) const MAX_EVENTS: usize = 1024;

/// Pause after a failed accept, for example if this process has no file descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// An event for the main thread.
pub(super) enum Event {
    /// An entry of the transcript.
    Transcript(Entry),
    /// A receiver that had opened the tensor is done, successfully or not; an entry of the transcript.
    ReceiverDone(Entry),
    /// The holders of the export or the active receivers have changed.
    Changed,
    /// A signal with this name has arrived.
    Stop(&'static str),
}

/// A bound socket that does not accept connections yet.
pub(super) struct Listener {
    listener: TcpListener,
    address: SocketAddr,
    key: Key,
}

/// A handle of the thread that accepts connections until the process exits.
pub(super) struct Server {
    shared: Arc<Shared>,
}

struct Shared {
    key: Key,
    descriptor: String,
    events: SyncSender<Event>,
    /// Number of entries that were omitted because the reader of the output does not read.
    omitted: AtomicU64,
    unauthenticated: Mutex<VecDeque<(u64, TcpStream)>>,
    next_id: AtomicU64,
    /// The addresses of the receivers that have the descriptor and have not reported completion.
    active_receivers: Mutex<Vec<IpAddr>>,
    /// Number of connections with a thread.
    connections: AtomicUsize,
    refusals: Mutex<Refusals>,
}

/// The budget of the lines about refused connections, which any host can cause.
struct Refusals {
    left: f64,
    since: Instant,
    /// Number of refusals that were not printed.
    omitted: u64,
}

impl Refusals {
    /// Counts a refusal. Returns the number of those that were not printed before it if it is to be printed.
    fn count(&mut self) -> Option<u64> {
        let now = Instant::now();
        self.left = (self.left + (now - self.since).as_secs_f64()).min(MAX_REFUSALS);
        self.since = now;
        if self.left < 1.0 {
            self.omitted += 1;
            return None;
        }
        self.left -= 1.0;
        Some(std::mem::take(&mut self.omitted))
    }
}

/// How long a process may take that writes the key to a pipe; it may ask a person for a passphrase.
const KEY_TIMEOUT: Duration = Duration::from_secs(60);

/// Reads the key and binds the address.
pub(super) fn bind(address: &str, key: &KeyArguments) -> Result<Listener> {
    let key = key.read(KEY_TIMEOUT)?;
    let listener = TcpListener::bind(address)
        .with_context(|| format!("--listen {address}: cannot listen at this address"))?;
    let address = listener.local_addr().context("cannot get the address of the listener")?;
    Ok(Listener { listener, address, key })
}

impl Listener {
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Starts to send the descriptor to receivers that connect.
    pub(super) fn serve(self, descriptor: String, events: SyncSender<Event>) -> Server {
        let shared = Arc::new(Shared {
            key: self.key,
            descriptor,
            events,
            omitted: AtomicU64::new(0),
            unauthenticated: Mutex::default(),
            next_id: AtomicU64::new(0),
            active_receivers: Mutex::default(),
            connections: AtomicUsize::new(0),
            refusals: Mutex::new(Refusals { left: MAX_REFUSALS, since: Instant::now(), omitted: 0 }),
        });
        let server = Server { shared: Arc::clone(&shared) };
        std::thread::spawn(move || {
            loop {
                match self.listener.accept() {
                    Ok((stream, from)) => shared.start_connection(stream, from),
                    Err(error) => {
                        let why = error.to_string();
                        let text = format!("[sender]   cannot accept a connection: {why}");
                        shared.notify(Event::Transcript(Entry::new(
                            "accept_failed",
                            json!({ "error": why }),
                            text,
                        )));
                        std::thread::sleep(ACCEPT_PAUSE);
                    }
                }
            }
        });
        server
    }
}

impl Server {
    /// Returns the number of receivers that have the descriptor and have not reported completion.
    pub(super) fn active_receivers(&self) -> usize {
        self.shared.receivers().len()
    }
}

/// Returns the fields and the line of an entry about a receiver that failed.
fn about(from: SocketAddr, error: &str, text: &str) -> (Value, String) {
    let error = printable(error);
    (json!({ "address": from, "error": error }), format!("{text} {from}: {error}"))
}

impl Shared {
    /// Sends an event to the main thread. Where too many wait, entries are omitted and counted; the end of a receiver waits for room.
    fn notify(&self, event: Event) {
        let omitted = self.omitted.swap(0, Ordering::Relaxed);
        if omitted > 0 {
            let text = format!("[sender]   {omitted} earlier lines are not shown");
            let entry = Entry::new("omitted", json!({ "count": omitted }), text);
            if self.events.try_send(Event::Transcript(entry)).is_err() {
                self.omitted.fetch_add(omitted, Ordering::Relaxed);
            }
        }
        // The receiver is dropped while the process exits.
        match self.events.try_send(event) {
            Err(TrySendError::Full(Event::Transcript(_))) => {
                self.omitted.fetch_add(1, Ordering::Relaxed);
            }
            Err(TrySendError::Full(event @ (Event::ReceiverDone(_) | Event::Stop(_)))) => {
                let _ = self.events.send(event);
            }
            // The main thread looks for changes after each event.
            Err(TrySendError::Full(Event::Changed) | TrySendError::Disconnected(_)) | Ok(()) => {}
        }
    }

    fn unauthenticated(&self) -> std::sync::MutexGuard<'_, VecDeque<(u64, TcpStream)>> {
        self.unauthenticated.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn receivers(&self) -> std::sync::MutexGuard<'_, Vec<IpAddr>> {
        self.active_receivers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reports a connection that was refused, unless there are too many of these.
    fn refuse(&self, from: SocketAddr, error: &str) {
        let omitted = self.refusals.lock().unwrap_or_else(PoisonError::into_inner).count();
        let Some(omitted) = omitted else { return };
        let more =
            if omitted == 0 { String::new() } else { format!(" ({omitted} earlier ones are not shown)") };
        let (fields, text) = about(from, &format!("{error}{more}"), "[sender]   refused");
        self.notify(Event::Transcript(Entry::new("receiver_refused", fields, text)));
    }

    /// Returns whether a further receiver of this address is served, and counts it.
    fn begin_receiver(&self, address: IpAddr) -> bool {
        let mut receivers = self.receivers();
        let of_address = receivers.iter().filter(|other| **other == address).count();
        let begins = receivers.len() < MAX_RECEIVERS && of_address < MAX_RECEIVERS_OF_ADDRESS;
        if begins {
            receivers.push(address);
        }
        begins
    }

    /// Starts the thread of a connection.
    fn start_connection(self: &Arc<Self>, stream: TcpStream, from: SocketAddr) {
        // Threads of connections that were shut down end soon.
        if self.connections.load(Ordering::Acquire) >= MAX_RECEIVERS + 2 * MAX_UNAUTHENTICATED {
            return self.refuse(from, "there are too many connections");
        }
        let deadline = Instant::now() + HANDSHAKE_TIMEOUT;
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let registered = stream.try_clone().map(|clone| {
            let mut unauthenticated = self.unauthenticated();
            unauthenticated.push_back((id, clone));
            if unauthenticated.len() > MAX_UNAUTHENTICATED
                && let Some((_, oldest)) = unauthenticated.pop_front()
            {
                let _ = oldest.shutdown(Shutdown::Both);
            }
        });
        let shared = Arc::clone(self);
        let started = registered.and_then(|()| {
            let thread = std::thread::Builder::new().name(format!("receiver {from}"));
            self.connections.fetch_add(1, Ordering::AcqRel);
            let begun = thread.spawn(move || {
                shared.authenticate(stream, from, id, deadline);
                shared.connections.fetch_sub(1, Ordering::AcqRel);
            });
            begun.map(drop).inspect_err(|_| {
                self.connections.fetch_sub(1, Ordering::AcqRel);
            })
        });
        if let Err(error) = started {
            self.unauthenticated().retain(|(other, _)| *other != id);
            let (fields, text) = about(from, &error.to_string(), "[sender]   cannot serve");
            self.notify(Event::Transcript(Entry::new("serve_failed", fields, text)));
        }
    }

    /// Authenticates a receiver, then serves it.
    fn authenticate(&self, stream: TcpStream, from: SocketAddr, id: u64, deadline: Instant) {
        let authenticated = self.handshake(stream, deadline);
        self.unauthenticated().retain(|(other, _)| *other != id);
        match authenticated {
            Ok(connection) => self.send_descriptor(connection, from, deadline),
            Err(error) => self.refuse(from, &format!("{error:#}")),
        }
    }

    /// Runs the handshake with a receiver, and receives its request for the descriptor.
    fn handshake(&self, stream: TcpStream, deadline: Instant) -> Result<AuthenticatedConnection> {
        let key = |id| (id == KEY_ID).then(|| self.key.clone());
        let mut connection = device_ipc_tcp::accept(stream, key, deadline)?;
        connection.limit_received(MAX_REQUEST_BYTES);
        let FromReceiver::Ready = message::receive(&mut connection, Some(deadline))? else {
            anyhow::bail!("protocol violation: the receiver did not request the descriptor");
        };
        Ok(connection)
    }

    /// Sends the descriptor, then receives the reports of the receiver.
    fn send_descriptor(&self, mut connection: AuthenticatedConnection, from: SocketAddr, deadline: Instant) {
        if !self.begin_receiver(from.ip()) {
            return self.refuse(from, "there are too many receivers at a time, or of its address");
        }
        let offer = FromSender::Offer { descriptor: self.descriptor.clone(), pid: std::process::id() };
        if let Err(error) = message::send(&mut connection, &offer, Some(deadline)) {
            let (fields, text) =
                about(from, &format!("{error:#}"), "[sender]   cannot send the descriptor to");
            self.notify(Event::Transcript(Entry::new("send_failed", fields, text)));
        } else {
            self.receive_reports(&mut connection, from);
        }
        let mut receivers = self.receivers();
        if let Some(index) = receivers.iter().position(|address| *address == from.ip()) {
            receivers.swap_remove(index);
        }
        drop(receivers);
        self.notify(Event::Changed);
    }

    /// Forwards the reports of a receiver. There is no deadline, because a receiver may keep the tensor and delays no other.
    fn receive_reports(&self, connection: &mut AuthenticatedConnection, from: SocketAddr) {
        let mut opened = None;
        loop {
            match message::receive(connection, None) {
                Ok(FromReceiver::Opened { pid, place }) => {
                    let place = printable(&place);
                    let text = format!("[receiver] {from} pid={pid} opened {place}");
                    let fields = json!({ "address": from, "receiver_pid": pid, "place": place });
                    self.notify(Event::Transcript(Entry::new("receiver_opened", fields, text)));
                    opened = Some(pid);
                }
                Ok(FromReceiver::Finished { summary }) => {
                    let summary = printable(&summary);
                    let text = format!("[receiver] {from} is done: {summary}");
                    let fields = json!({ "address": from, "summary": summary });
                    return self.notify(Event::ReceiverDone(Entry::new("receiver_done", fields, text)));
                }
                Ok(FromReceiver::Failed { error }) => {
                    let error = printable(&error);
                    let fields = json!({ "address": from, "error": error });
                    let text = format!("[receiver] {from} failed: {error}");
                    let failed = Entry::new("receiver_failed", fields, text);
                    return self.notify(if opened.is_some() {
                        Event::ReceiverDone(failed)
                    } else {
                        Event::Transcript(failed)
                    });
                }
                Ok(FromReceiver::Ready) => {}
                Err(_) => {
                    let fields = json!({ "address": from, "receiver_pid": opened });
                    let event = "receiver_disconnected";
                    return self.notify(match opened {
                        Some(pid) => Event::ReceiverDone(Entry::new(
                            event,
                            fields,
                            format!("[receiver] {from} pid={pid} exited without reporting completion"),
                        )),
                        None => Event::Transcript(Entry::new(
                            event,
                            fields,
                            format!("[receiver] {from} disconnected without opening the tensor"),
                        )),
                    });
                }
            }
        }
    }
}
