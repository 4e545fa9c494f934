use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};

use super::*;
use crate::backend::BackendInfo;
use crate::backend::engine::{MemorySpace, Piece, RegisteredMemory, TransferMemory};
use crate::model::error::{ErrorKind, VendorError, VendorStatus};
use crate::sharing::Runtime;

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(5);
const RUNNING: i32 = 1;

/// An engine whose transfers have the state that the test sets: running, finished, or failed.
#[derive(Debug)]
struct Scripted {
    info: BackendInfo,
    state: Arc<AtomicI32>,
    /// The number of questions whether a transfer has finished.
    asked: Arc<AtomicU32>,
}

impl Scripted {
    fn new() -> Self {
        let info = BackendInfo::new("scripted", "1", None);
        Self { info, state: Arc::new(AtomicI32::new(RUNNING)), asked: Arc::default() }
    }

    fn end(&self, status: i32) {
        self.state.store(status, Ordering::SeqCst);
    }
}

#[derive(Debug)]
struct ScriptedTransfer(Arc<AtomicI32>, Arc<AtomicU32>);

impl TransferEngine for Scripted {
    fn info(&self) -> &BackendInfo {
        &self.info
    }

    fn supports(&self, _: MemorySpace) -> bool {
        true
    }

    unsafe fn register(&self, _: TransferMemory) -> Result<Box<dyn RegisteredMemory>> {
        unreachable!("a pull registers nothing")
    }

    unsafe fn pull(&self, request: &PullRequest<'_>) -> Result<Box<dyn Transfer>> {
        if request.sources.is_empty() {
            return Err(Error::Protocol("no metadata".into()));
        }
        Ok(Box::new(ScriptedTransfer(Arc::clone(&self.state), Arc::clone(&self.asked))))
    }
}

impl Transfer for ScriptedTransfer {
    fn is_finished(&self) -> Result<bool> {
        self.1.fetch_add(1, Ordering::SeqCst);
        match self.0.load(Ordering::SeqCst) {
            0 => Ok(true),
            RUNNING => Ok(false),
            status => Err(VendorError::new("scripted", "read", VendorStatus(status), "failed").into()),
        }
    }
}

/// Reports its drop, and the thread of it.
#[derive(Debug)]
struct Destination {
    dropped: Sender<Option<String>>,
    is_lost: bool,
}

impl Drop for Destination {
    fn drop(&mut self) {
        let _ = self.dropped.send(thread::current().name().map(str::to_owned));
    }
}

impl PullOwner for Destination {
    fn keep_alive(&mut self) -> Result<()> {
        if self.is_lost { Err(Error::ExporterGone { pid: 1 }) } else { Ok(()) }
    }

    fn failed(&mut self, error: Error) -> Error {
        error
    }

    fn with_exporter(&self, error: Error) -> Error {
        error
    }
}

const REQUEST: PullRequest<'_> = PullRequest {
    sources: &[&[1]],
    destinations: &[TransferMemory { space: MemorySpace::Host, address: 4096, len: 4096 }],
    pieces: &[Piece { source: 0, source_offset: 0, destination: 0, destination_offset: 0, len: 4096 }],
};

fn start(engine: &Scripted, limit: Duration) -> (Pull<Destination>, Receiver<Option<String>>) {
    let (sender, dropped) = channel();
    let owner = Destination { dropped: sender, is_lost: false };
    // SAFETY: the engine of this test accesses no memory.
    let pull = unsafe { Pull::start(Runtime::get().unwrap().for_guard(), engine, &REQUEST, owner, limit) };
    (pull.unwrap(), dropped)
}

#[test]
fn finished_pull_returns_the_owner() {
    let engine = Scripted::new();
    let (pull, dropped) = start(&engine, LONG);
    let waiting = thread::spawn(move || pull.wait(|_| {}));
    engine.end(0);
    let owner = waiting.join().unwrap().unwrap();
    assert_eq!(dropped.try_recv(), Err(TryRecvError::Empty));
    drop(owner);
    dropped.recv_timeout(LONG).unwrap();
}

#[test]
fn failed_pull_returns_the_engines_error_and_the_owner() {
    let engine = Scripted::new();
    let (pull, dropped) = start(&engine, LONG);
    engine.end(-2);
    let (error, owner) = pull.wait(|_| {}).unwrap_err().into_parts();
    assert!(
        matches!(&error, Error::Vendor(error) if error.backend == "scripted" && error.status.0 == -2),
        "{error}"
    );
    assert!(dropped.try_recv().is_err());
    drop(owner.expect("the engine has finished"));
    dropped.recv_timeout(LONG).unwrap();
}

#[test]
fn owner_of_refused_pull_is_returned() {
    let (sender, dropped) = channel();
    let (owner, request) =
        (Destination { dropped: sender, is_lost: false }, PullRequest { sources: &[], ..REQUEST });
    // SAFETY: the engine of this test accesses no memory.
    let pull =
        unsafe { Pull::start(Runtime::get().unwrap().for_guard(), &Scripted::new(), &request, owner, LONG) };
    let (Error::Protocol(_), Some(owner)) = pull.unwrap_err().into_parts() else { panic!() };
    assert!(dropped.try_recv().is_err(), "the owner is returned");
    drop(owner);
    dropped.recv_timeout(LONG).unwrap();
}

#[test]
fn owner_outlives_the_time_limit_until_the_engine_has_finished() {
    for end in [0, -2] {
        let engine = Scripted::new();
        let (pull, dropped) = start(&engine, SHORT);
        let (error, owner) = pull.wait(|_| {}).unwrap_err().into_parts();
        assert!(error.kind() == ErrorKind::Timeout && owner.is_none(), "{error}");
        assert!(error.to_string().contains("scripted to pull 4096 B"), "{error}");
        assert!(dropped.recv_timeout(2 * ABANDONED_POLL).is_err(), "the transfer is still running");
        engine.end(end);
        assert_eq!(dropped.recv_timeout(LONG).unwrap().as_deref(), Some("device-ipc-work"));
    }
}

#[test]
fn owner_outlives_a_dropped_pull_until_the_engine_has_finished() {
    let engine = Scripted::new();
    let (pull, dropped) = start(&engine, LONG);
    let begun = clock::now();
    drop(pull);
    assert!(dropped.recv_timeout(2 * ABANDONED_POLL).is_err(), "the transfer is still running");
    let asked = engine.asked.load(Ordering::SeqCst);
    let intervals = clock::elapsed(begun).as_millis() / ABANDONED_POLL.as_millis();
    assert!((1..=intervals + 1).contains(&asked.into()), "{asked} times in {intervals} intervals");
    engine.end(0);
    assert_eq!(dropped.recv_timeout(LONG).unwrap().as_deref(), Some("device-ipc-work"));
}

#[test]
fn owner_outlives_a_lost_exporter_until_the_engine_has_finished() {
    let engine = Scripted::new();
    let (sender, dropped) = channel();
    let owner = Destination { dropped: sender, is_lost: true };
    // SAFETY: the engine of this test accesses no memory.
    let pull =
        unsafe { Pull::start(Runtime::get().unwrap().for_guard(), &engine, &REQUEST, owner, LONG) }.unwrap();
    let (error, owner) = pull.wait(|_| {}).unwrap_err().into_parts();
    assert!(matches!(error, Error::ExporterGone { pid: 1 }) && owner.is_none());
    assert!(dropped.recv_timeout(2 * ABANDONED_POLL).is_err(), "the transfer is still running");
    engine.end(0);
    assert_eq!(dropped.recv_timeout(LONG).unwrap().as_deref(), Some("device-ipc-work"));
}
