//! The keeper at work, beside the library, which answers: one thread for signals and hand-overs, and one more while a new version is
//! loaded.

use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use anyhow::{Context, Result};
use device_ipc::{Channel, Error, ErrorKind, Export, Ipc, Keeper, Listener};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use serde_json::json;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::{emulate_default_handler, signal_name};

use super::hand_over::{self, READY};
use super::{Source, describe};
use crate::output::{notice, set_stopping, warning};
use crate::transcript::Transcript;

/// Maximum number of processes that may have asked for a hand-over at a time. A further one replaces the oldest.
const MAX_SUCCESSORS: usize = 4;

/// Pause after an error of this process, such as a lack of file descriptors. The error of another process causes no pause.
const PAUSE: Duration = Duration::from_millis(20);

/// Timeout for closing an export without holders.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// An event of another thread.
enum Event {
    /// A signal with this name: end.
    Stop(&'static str),
    /// SIGHUP: read the files again.
    Reload,
    /// A new version has been loaded, or could not be.
    Loaded(Result<Export>),
}

/// Sends events, and wakes the thread of the keeper.
#[derive(Clone)]
struct Events {
    sender: Sender<Event>,
    wake: Arc<UnixStream>,
}

impl Events {
    fn send(&self, event: Event) {
        // The receiver is dropped while the process exits. A full socket is readable already.
        let _ = self.sender.send(event);
        let _ = (&*self.wake).write(&[0]);
    }
}

/// Interval between attempts to take a name back.
const RETRY: Duration = Duration::from_secs(1);

/// The two names of a keeper.
pub(super) struct Names {
    pub(super) keeper: Keeper,
    /// For processes that take the names over.
    pub(super) control: Listener,
}

impl Names {
    /// Answers to the names again, which were handed over.
    fn take_back(&mut self) -> Result<(), Error> {
        self.keeper.take_back()?;
        self.control.take_back()
    }
}

/// A keeper process.
pub(super) struct Server {
    names: Names,
    work: Work,
}

/// The state of a keeper.
struct Work {
    ipc: Ipc,
    source: Arc<Source>,
    transcript: Transcript,
    /// The processes that have asked for a hand-over and have not said that they are ready.
    successors: Vec<Channel>,
    events: Events,
    received: Receiver<Event>,
    woken: UnixStream,
    is_loading: bool,
    /// Whether a name is to be taken back.
    has_lost_name: bool,
}

/// Why a keeper no longer keeps its names.
enum Pause {
    Signal(&'static str),
    /// A process is ready to take the names.
    Successor(Channel),
}

impl Server {
    /// Answers to the name from now on.
    pub(super) fn new(ipc: Ipc, names: Names, source: Source, transcript: Transcript) -> Result<Self> {
        let (wake, woken) = UnixStream::pair().context("cannot create a pair of sockets")?;
        wake.set_nonblocking(true)?;
        woken.set_nonblocking(true)?;
        let (sender, received) = channel();
        let events = Events { sender, wake: Arc::new(wake) };
        on_signals(events.clone())?;
        let (name, version) = (names.keeper.name(), names.keeper.version());
        let (text, mut fields) = describe(&names.keeper.export());
        let pid = std::process::id();
        for (field, value) in [("name", json!(name)), ("version", json!(version)), ("pid", json!(pid))] {
            fields[field] = value;
        }
        let text = format!("[keeper]   pid={pid} keeps version {version}: {text}; open it as keeper:{name}");
        transcript.event("keeping", fields, text)?;
        let work = Work {
            ipc,
            source: Arc::new(source),
            transcript,
            successors: Vec::new(),
            events,
            received,
            woken,
            is_loading: false,
            has_lost_name: false,
        };
        Ok(Self { names, work })
    }

    /// Answers until a signal arrives or another process has taken the names.
    pub(super) fn run(self) -> Result<()> {
        let Self { mut names, mut work } = self;
        let transcript = work.transcript;
        loop {
            let successor = match work.keep(&mut names)? {
                Pause::Signal(signal) => {
                    let text = format!("[keeper]   stopped by {signal}");
                    transcript.event("stopped", json!({ "signal": signal }), text)?;
                    drop(names.control);
                    return stopped(names.keeper.into_export(), transcript);
                }
                Pause::Successor(successor) => successor,
            };
            let pid = successor.peer().pid;
            match hand_over::release(&names, &successor) {
                Ok(()) => {
                    drop(names.control);
                    let export = names.keeper.into_export();
                    let text = format!("[keeper]   process {pid} has taken over");
                    transcript.event("handed_over", json!({ "pid": pid }), text)?;
                    return drain(export, &work);
                }
                Err(error) => {
                    warning(format_args!(
                        "process {pid} has not taken over, so this process continues: {error:#}"
                    ));
                    drop(successor);
                    work.has_lost_name = true;
                }
            }
        }
    }
}

impl Work {
    fn keep(&mut self, names: &mut Names) -> Result<Pause> {
        loop {
            if self.has_lost_name {
                self.take_back(names);
            }
            self.wait(names)?;
            if let Some(signal) = self.handle_events(&names.keeper)? {
                return Ok(Pause::Signal(signal));
            }
            self.accept_successors(names);
            if let Some(successor) = self.ready_successor() {
                return Ok(Pause::Successor(successor));
            }
        }
    }

    /// Takes the names back. If another process has one, the weights stay available to their readers, and a later call tries again.
    fn take_back(&mut self, names: &mut Names) {
        let taken = names.take_back();
        self.has_lost_name = taken.is_err();
        if let Err(error) = taken {
            warning(format_args!("cannot take the name back; the attempt is repeated: {error}"));
        }
    }

    fn wait(&self, names: &Names) -> Result<()> {
        let mut all = vec![self.woken.as_fd(), names.control.as_fd()];
        all.extend(self.successors.iter().map(AsFd::as_fd));
        wait_for(&all, self.has_lost_name.then_some(RETRY))
    }

    /// Takes the events that have arrived.
    fn events(&self) -> impl Iterator<Item = Event> {
        while matches!((&self.woken).read(&mut [0; 64]), Ok(1..)) {}
        self.received.try_iter()
    }

    /// Returns the name of the signal that ends the keeper, if one has arrived.
    fn handle_events(&mut self, keeper: &Keeper) -> Result<Option<&'static str>> {
        let events: Vec<_> = self.events().collect();
        for event in events {
            match event {
                Event::Stop(signal) => return Ok(Some(signal)),
                Event::Reload if self.is_loading => notice("a new version is being loaded already"),
                Event::Reload => self.start_loading()?,
                Event::Loaded(loaded) => {
                    self.is_loading = false;
                    self.replace(keeper, loaded)?;
                }
            }
        }
        Ok(None)
    }

    fn start_loading(&mut self) -> Result<()> {
        let (source, ipc, events) = (Arc::clone(&self.source), self.ipc.clone(), self.events.clone());
        let loading = std::thread::Builder::new().name("keep-load".into());
        loading
            .spawn(move || events.send(Event::Loaded(source.load(&ipc))))
            .context("cannot start a thread to load the new version")?;
        self.is_loading = true;
        Ok(())
    }

    /// Answers with a new version from now on. The drop of the former one notifies its readers.
    fn replace(&self, keeper: &Keeper, loaded: Result<Export>) -> Result<()> {
        let export = match loaded {
            Ok(export) => export,
            Err(error) => {
                let (name, version) = (keeper.name(), keeper.version());
                warning(format_args!(
                    "{name:?} stays at version {version}, because the files cannot be loaded: {error:#}"
                ));
                return Ok(());
            }
        };
        let version = keeper.version() + 1;
        let (text, mut fields) = describe(&export);
        drop(keeper.replace(version, export));
        fields["version"] = json!(version);
        self.transcript.event("replaced", fields, format!("[keeper]   keeps version {version}: {text}"))
    }

    fn accept_successors(&mut self, names: &Names) {
        loop {
            let channel = match names.control.try_accept() {
                Ok(Some(channel)) => channel,
                Ok(None) => return,
                Err(error) => return refused(&error),
            };
            match hand_over::offer(&channel, names.keeper.version(), &names.keeper.export()) {
                Ok(()) => self.successors.push(channel),
                // It has not waited for the offer.
                Err(error) if matches!(error.kind(), ErrorKind::Gone | ErrorKind::Closed) => {}
                Err(error) => refused(&error),
            }
            if self.successors.len() > MAX_SUCCESSORS {
                self.successors.remove(0);
            }
        }
    }

    /// Returns a successor that is ready. Removes those that have gone.
    fn ready_successor(&mut self) -> Option<Channel> {
        let mut index = 0;
        while let Some(channel) = self.successors.get(index) {
            match channel.try_receive() {
                Ok(Some(message)) if message.bytes() == READY => return Some(self.successors.remove(index)),
                Ok(None) => index += 1,
                Ok(Some(_)) | Err(_) => drop(self.successors.remove(index)),
            }
        }
        None
    }
}

/// Reports a process that asked for a hand-over and could not be answered; others can be.
fn refused(error: &Error) {
    warning(format_args!("a process could not be answered: {error}"));
    if matches!(error, Error::Io { .. }) {
        std::thread::sleep(PAUSE);
    }
}

/// Drops the export of a keeper whose successor answers, and waits until no process uses it.
fn drain(export: Arc<Export>, work: &Work) -> Result<()> {
    let Some(export) = Arc::into_inner(export) else { return Ok(()) };
    // Ends it without waiting.
    let export = match export.close(Duration::ZERO) {
        Ok(()) => None,
        Err(error) if error.kind() == ErrorKind::Timeout => Some(error.into_inner()),
        Err(error) => return Err(error.into()),
    };
    if let Some(export) = export {
        while export.holders().iter().len() > 0 {
            wait_for(&[export.as_fd(), work.woken.as_fd()], None)?;
            if work.events().any(|event| matches!(event, Event::Stop(_))) {
                return stopped(Arc::new(export), work.transcript);
            }
        }
        export.close(CLOSE_TIMEOUT)?;
    }
    work.transcript.event("closed", json!({}), "[keeper]   no process uses the former weights any longer")
}

/// Waits until one of these is readable, or for this time.
fn wait_for(descriptors: &[BorrowedFd<'_>], time: Option<Duration>) -> Result<()> {
    let time =
        time.map(|time| Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() });
    let mut polled: Vec<_> =
        descriptors.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    match poll(&mut polled, time.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error).context("cannot wait for processes"),
    }
}

/// Drops the export, and prints the processes that used it.
fn stopped(export: Arc<Export>, transcript: Transcript) -> Result<()> {
    let holders = export.holders();
    let pids: Vec<u32> = holders.iter().map(|holder| holder.pid).collect();
    drop(export);
    let text = if pids.is_empty() {
        "[keeper]   the weights are freed".to_owned()
    } else {
        format!("[keeper]   the name is free; processes that have opened the weights are notified: {holders}")
    };
    transcript.event("closed", json!({ "holder_pids": pids }), text)
}

/// Sends events for SIGHUP, and for the first SIGINT or SIGTERM. The next of these terminates the process immediately.
fn on_signals(events: Events) -> Result<()> {
    let mut signals = Signals::new([SIGHUP, SIGINT, SIGTERM]).context("cannot register signal handlers")?;
    std::thread::spawn(move || {
        let mut is_first = true;
        for signal in &mut signals {
            if signal == SIGHUP {
                events.send(Event::Reload);
                continue;
            }
            if !std::mem::take(&mut is_first) {
                let _ = emulate_default_handler(signal);
            }
            set_stopping();
            notice("stopping; send the signal again to exit immediately");
            events.send(Event::Stop(signal_name(signal).unwrap_or("a signal")));
        }
    });
    Ok(())
}
