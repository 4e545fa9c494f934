//! Log events of the library, for Python's `logging`.
//!
//! The poller never takes the interpreter lock, and no other thread should wait for it to log. So an event is put into a bounded
//! queue, and a thread of Python (`device_ipc/_logging.py`) passes it to `logging`. Nothing is queued, and that thread does not
//! exist, unless the logger `device_ipc` has a handler.

use std::collections::VecDeque;
use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::os::fd::{IntoRawFd as _, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// The number of events that wait for the thread of Python. Further ones are counted.
const LIMIT: usize = 1024;

/// The levels of `logging` for those of tracing.
const LEVELS: [(Level, u32); 5] =
    [(Level::ERROR, 40), (Level::WARN, 30), (Level::INFO, 20), (Level::DEBUG, 10), (Level::TRACE, 5)];

/// The least level of `logging` that is recorded.
static THRESHOLD: AtomicU32 = AtomicU32::new(u32::MAX);

static QUEUE: Mutex<Queue> = Mutex::new(Queue { events: VecDeque::new(), dropped: 0, wake: None });

/// A level, the name of a logger, a text, a time in seconds since 1970, and the name of a thread.
type Entry = (u32, String, String, f64, String);

struct Queue {
    events: VecDeque<Entry>,
    dropped: u64,
    /// Wakes the thread of Python; `None` before it starts, and after it has ended.
    wake: Option<UnixStream>,
}

fn queue() -> MutexGuard<'static, Queue> {
    QUEUE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The process that has the thread: its forked children queue nothing, and do not take the lock.
static OWNER: AtomicU32 = AtomicU32::new(0);

struct Bridge;

impl Subscriber for Bridge {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        level(metadata) >= THRESHOLD.load(Ordering::Relaxed)
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        let threshold = THRESHOLD.load(Ordering::Relaxed);
        let most = LEVELS.iter().rev().find(|(_, number)| *number >= threshold);
        Some(most.map_or(LevelFilter::OFF, |(level, _)| LevelFilter::from_level(*level)))
    }

    fn event(&self, event: &Event<'_>) {
        if OWNER.load(Ordering::Relaxed) != std::process::id() {
            return;
        }
        let mut text = Text::default();
        event.record(&mut text);
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let metadata = event.metadata();
        let thread = std::thread::current().name().unwrap_or_default().to_owned();
        let entry =
            (level(metadata), metadata.target().replace("::", "."), text.line(), time.as_secs_f64(), thread);
        let mut queue = queue();
        if queue.events.len() >= LIMIT {
            queue.dropped += 1;
            return;
        }
        queue.events.push_back(entry);
        if let (1, Some(wake)) = (queue.events.len(), &mut queue.wake) {
            // The socket is full only if the thread has to wake up in any case.
            let _ = wake.write(&[0]);
        }
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// Returns the level of `logging`.
fn level(metadata: &Metadata<'_>) -> u32 {
    LEVELS.iter().find(|(level, _)| level == metadata.level()).map_or(0, |(_, number)| *number)
}

/// The message of an event, and its fields.
#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Text {
    fn line(mut self) -> String {
        self.message.push_str(&self.fields);
        self.message
    }
}

impl Visit for Text {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "message" {
            self.message.push_str(value);
        } else {
            self.record_debug(field, &value);
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}

/// Has the thread of Python start or the level change, where the configuration of `logging` has changed. Every call that
/// selects a backend calls it.
pub(crate) fn refresh(py: Python<'_>) -> PyResult<()> {
    static REFRESH: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let refresh = REFRESH.get_or_try_init(py, || -> PyResult<_> {
        Ok(py.import("device_ipc._logging")?.getattr("refresh")?.unbind())
    })?;
    refresh.call0(py).map(drop)
}

/// Sets the least level of `logging` that is recorded.
#[pyfunction]
pub(crate) fn _log_level(py: Python<'_>, level: u32) {
    THRESHOLD.store(level, Ordering::Relaxed);
    py.detach(tracing::callsite::rebuild_interest_cache);
}

/// Begins to queue events for this process. Returns a descriptor that becomes readable when there are events, and reports its end
/// after `_log_stop`.
#[pyfunction]
pub(crate) fn _log_start() -> PyResult<RawFd> {
    let pair = UnixStream::pair().and_then(|pair| pair.0.set_nonblocking(true).map(|()| pair));
    let (wake, waiting) = pair.map_err(|error| PyOSError::new_err(error.to_string()))?;
    queue().wake = Some(wake);
    OWNER.store(std::process::id(), Ordering::Relaxed);
    // It fails after the first time.
    let _ = tracing::subscriber::set_global_default(Bridge);
    Ok(waiting.into_raw_fd())
}

/// Ends the queue, and the wait for its descriptor.
#[pyfunction]
pub(crate) fn _log_stop() {
    OWNER.store(0, Ordering::Relaxed);
    queue().wake = None;
}

/// Takes the events of the queue, and the number of those that found no room.
#[pyfunction]
pub(crate) fn _log_take() -> (Vec<Entry>, u64) {
    let mut queue = queue();
    (queue.events.drain(..).collect(), std::mem::take(&mut queue.dropped))
}
