//! The TCP server for receivers, with one thread per connection.

use std::collections::VecDeque;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
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
    events: Mutex<Sender<Event>>,
    unauthenticated: Mutex<VecDeque<(u64, TcpStream)>>,
    next_id: AtomicU64,
    /// Number of receivers that have the descriptor and have not reported completion.
    active_receivers: AtomicUsize,
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
    pub(super) fn serve(self, descriptor: String, events: Sender<Event>) -> Server {
        let shared = Arc::new(Shared {
            key: self.key,
            descriptor,
            events: Mutex::new(events),
            unauthenticated: Mutex::default(),
            next_id: AtomicU64::new(0),
            active_receivers: AtomicUsize::new(0),
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
        self.shared.active_receivers.load(Ordering::Acquire)
    }
}

/// Returns the fields and the line of an entry about a receiver that failed.
fn about(from: SocketAddr, error: &str, text: &str) -> (Value, String) {
    let error = printable(error);
    (json!({ "address": from, "error": error }), format!("{text} {from}: {error}"))
}

impl Shared {
    fn notify(&self, event: Event) {
        // The receiver is dropped while the process exits.
        let _ = self.events.lock().unwrap_or_else(PoisonError::into_inner).send(event);
    }

    fn unauthenticated(&self) -> std::sync::MutexGuard<'_, VecDeque<(u64, TcpStream)>> {
        self.unauthenticated.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the thread of a connection.
    fn start_connection(self: &Arc<Self>, stream: TcpStream, from: SocketAddr) {
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
            thread.spawn(move || shared.authenticate(stream, from, id, deadline)).map(drop)
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
            Err(error) => {
                let (fields, text) = about(from, &format!("{error:#}"), "[sender]   refused");
                self.notify(Event::Transcript(Entry::new("receiver_refused", fields, text)));
            }
        }
    }

    /// Runs the handshake with a receiver, and receives its request for the descriptor.
    fn handshake(&self, stream: TcpStream, deadline: Instant) -> Result<AuthenticatedConnection> {
        let key = |id| (id == KEY_ID).then(|| self.key.clone());
        let mut connection = device_ipc_tcp::accept(stream, key, deadline)?;
        let FromReceiver::Ready = message::receive(&mut connection, Some(deadline))? else {
            anyhow::bail!("protocol violation: the receiver did not request the descriptor");
        };
        Ok(connection)
    }

    /// Sends the descriptor, then receives the reports of the receiver.
    fn send_descriptor(&self, mut connection: AuthenticatedConnection, from: SocketAddr, deadline: Instant) {
        self.active_receivers.fetch_add(1, Ordering::AcqRel);
        let offer = FromSender::Offer { descriptor: self.descriptor.clone(), pid: std::process::id() };
        if let Err(error) = message::send(&mut connection, &offer, Some(deadline)) {
            let (fields, text) =
                about(from, &format!("{error:#}"), "[sender]   cannot send the descriptor to");
            self.notify(Event::Transcript(Entry::new("send_failed", fields, text)));
        } else {
            self.receive_reports(&mut connection, from);
        }
        self.active_receivers.fetch_sub(1, Ordering::AcqRel);
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
