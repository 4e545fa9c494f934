//! Receivers that connect by TCP: each has a thread of its own, so that none waits for another.

use std::collections::VecDeque;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::road::handshake;
use crate::road::key::{Key, KeyArguments};
use crate::road::message::{FromReceiver, FromSender};
use crate::road::sealed::Sealed;
use crate::road::{Wire, printable};

/// How long a receiver may take to prove the key and to ask for the descriptor.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// How many connections may be without a proof at a time. The oldest gives way to a new one, so that those who connect and
/// say nothing keep nobody out.
const MAX_STRANGERS: usize = 64;

/// How long accepting pauses where the system lets it fail, as when this process has no file descriptors left.
const PAUSE: Duration = Duration::from_millis(100);

/// What the main thread is told.
pub(super) enum Told {
    /// Something for the transcript.
    Note(String),
    /// A receiver that had the tensor open is done, well or not.
    Done(String),
    /// Others hold the export than before, or fewer receivers talk.
    Changed,
    /// A signal came.
    Stop(&'static str),
}

/// A socket that nobody has been accepted from yet.
pub(super) struct Listener {
    listener: TcpListener,
    address: SocketAddr,
    key: Key,
}

/// A thread that accepts connections. It ends with the process.
pub(super) struct Server {
    shared: Arc<Shared>,
}

struct Shared {
    key: Key,
    descriptor: String,
    tell: Mutex<Sender<Told>>,
    strangers: Mutex<VecDeque<(u64, TcpStream)>>,
    next: AtomicU64,
    /// Receivers that have been sent the descriptor and have not said that they are done.
    talking: AtomicUsize,
}

/// How long a process may take that writes the key to a pipe; it may ask a person for a passphrase.
const KEY_PATIENCE: Duration = Duration::from_secs(60);

/// Reads the key and takes the address.
pub(super) fn bind(address: &str, key: &KeyArguments) -> Result<Listener> {
    let key = key.read(KEY_PATIENCE)?;
    let listener =
        TcpListener::bind(address).with_context(|| format!("listening at {address} (--listen HOST:PORT)"))?;
    let address = listener.local_addr().context("asking where it listens")?;
    Ok(Listener { listener, address, key })
}

impl Listener {
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Hands out the descriptor from now on.
    pub(super) fn serve(self, descriptor: String, tell: Sender<Told>) -> Server {
        let shared = Arc::new(Shared {
            key: self.key,
            descriptor,
            tell: Mutex::new(tell),
            strangers: Mutex::default(),
            next: AtomicU64::new(0),
            talking: AtomicUsize::new(0),
        });
        let server = Server { shared: Arc::clone(&shared) };
        std::thread::spawn(move || {
            loop {
                match self.listener.accept() {
                    Ok((stream, from)) => shared.welcome(stream, from),
                    Err(error) => {
                        shared.tell(Told::Note(format!(
                            "[sender]   a connection could not be accepted: {error}"
                        )));
                        std::thread::sleep(PAUSE);
                    }
                }
            }
        });
        server
    }
}

impl Server {
    /// How many receivers have the descriptor and have not said that they are done.
    pub(super) fn talking(&self) -> usize {
        self.shared.talking.load(Ordering::Acquire)
    }
}

impl Shared {
    fn tell(&self, told: Told) {
        // Nobody listens any more where the process is about to end.
        let _ = self.tell.lock().unwrap_or_else(PoisonError::into_inner).send(told);
    }

    fn strangers(&self) -> std::sync::MutexGuard<'_, VecDeque<(u64, TcpStream)>> {
        self.strangers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a thread for a connection.
    fn welcome(self: &Arc<Self>, stream: TcpStream, from: SocketAddr) {
        let deadline = Instant::now() + HANDSHAKE;
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let remembered = stream.try_clone().map(|clone| {
            let mut strangers = self.strangers();
            strangers.push_back((number, clone));
            if strangers.len() > MAX_STRANGERS
                && let Some((_, oldest)) = strangers.pop_front()
            {
                let _ = oldest.shutdown(Shutdown::Both);
            }
        });
        let shared = Arc::clone(self);
        let started = remembered.and_then(|()| {
            let thread = std::thread::Builder::new().name(format!("receiver {from}"));
            thread.spawn(move || shared.meet(stream, from, number, deadline)).map(drop)
        });
        if let Err(error) = started {
            self.strangers().retain(|(one, _)| *one != number);
            self.tell(Told::Note(format!("[sender]   {from} could not be served: {error}")));
        }
    }

    fn meet(&self, stream: TcpStream, from: SocketAddr, number: u64, deadline: Instant) {
        let met = Wire::new(stream).context("using the connection").and_then(|wire| {
            let mut sealed = handshake::serve(wire, &self.key, deadline)?;
            let FromReceiver::Ready = sealed.hear(Some(deadline))? else {
                anyhow::bail!("it did not ask for the descriptor");
            };
            Ok(sealed)
        });
        self.strangers().retain(|(one, _)| *one != number);
        match met {
            Ok(sealed) => self.hand_over(sealed, from, deadline),
            Err(error) => {
                self.tell(Told::Note(format!(
                    "[sender]   refused {from}: {}",
                    printable(&format!("{error:#}"))
                )));
            }
        }
    }

    /// Sends the descriptor, and listens to what becomes of it.
    fn hand_over(&self, mut sealed: Sealed, from: SocketAddr, deadline: Instant) {
        self.talking.fetch_add(1, Ordering::AcqRel);
        let offer = FromSender::Offer { descriptor: self.descriptor.clone(), pid: std::process::id() };
        if let Err(error) = sealed.say(&offer, Some(deadline)) {
            self.tell(Told::Note(format!(
                "[sender]   the descriptor could not be sent to {from}: {error:#}"
            )));
        } else {
            self.listen(&mut sealed, from);
        }
        self.talking.fetch_sub(1, Ordering::AcqRel);
        self.tell(Told::Changed);
    }

    /// Without a deadline: a receiver may work for as long as it likes, and holds up nobody.
    fn listen(&self, sealed: &mut Sealed, from: SocketAddr) {
        let mut opened = None;
        loop {
            match sealed.hear(None) {
                Ok(FromReceiver::Opened { pid, place }) => {
                    self.tell(Told::Note(format!(
                        "[receiver] {from} pid={pid} opened {}",
                        printable(&place)
                    )));
                    opened = Some(pid);
                }
                Ok(FromReceiver::Finished { summary }) => {
                    return self
                        .tell(Told::Done(format!("[receiver] {from} is done: {}", printable(&summary))));
                }
                Ok(FromReceiver::Failed { error }) => {
                    let failed = format!("[receiver] {from} failed: {}", printable(&error));
                    return self.tell(if opened.is_some() { Told::Done(failed) } else { Told::Note(failed) });
                }
                Ok(FromReceiver::Ready) => {}
                Err(_) => {
                    return self.tell(match opened {
                        Some(pid) => Told::Done(format!(
                            "[receiver] {from} pid={pid} ended without saying that it was done"
                        )),
                        None => Told::Note(format!("[receiver] {from} left without opening the tensor")),
                    });
                }
            }
        }
    }
}
