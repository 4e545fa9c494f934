//! Events that order the streams of two processes.

use std::fmt;
use std::thread;
use std::time::{Duration, Instant};

use crate::backend::HandleBytes;
use crate::backend::stream::BorrowedStream;
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Result};

/// A vendor's event, created here or opened from another process. Dropping it destroys it.
///
/// The process that recorded last keeps its event until the waits for that record have completed
/// (`cudaIpcGetEventHandle`: waiting on an event whose creator has freed it is undefined). Any thread may call, and several
/// at once. A stream of another backend is [`Error::WrongBackend`] in each call.
pub trait DeviceEvent: fmt::Debug + Send + Sync {
    /// The device whose streams the event was created or opened for.
    fn device(&self) -> DeviceOrdinal;

    /// The bytes by which another process opens this event.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`](crate::Error::Unsupported) for an event that was opened from another process.
    fn export(&self) -> Result<HandleBytes>;

    /// Records the event on a stream. The record has been submitted to the device when the call returns.
    ///
    /// # Errors
    ///
    /// [`Error::WrongStream`](crate::Error::WrongStream), else the vendor's error.
    fn record(&self, stream: BorrowedStream<'_>) -> Result<()>;

    /// Makes the work that is submitted to `stream` from now on wait for the last record, on the device. The stream may be
    /// of any device.
    ///
    /// # Errors
    ///
    /// The vendor's error; [`Error::WrongStream`](crate::Error::WrongStream) where the vendor has no way to wait for
    /// another device.
    fn wait_on(&self, stream: BorrowedStream<'_>) -> Result<()>;

    /// Returns whether the stream has reached the last record. True for an event that has never been recorded.
    ///
    /// # Errors
    ///
    /// The vendor's error.
    fn query(&self) -> Result<bool>;

    /// Waits on the host until the last record has been reached.
    ///
    /// Polls [`query`](Self::query), at first without a pause, then with pauses that grow to 200 µs, for vendors that have no
    /// wait with a timeout.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`], else the vendor's error.
    fn synchronize(&self, timeout: Duration) -> Result<()> {
        let begin = Instant::now();
        let mut pause = FIRST_SLEEP;
        while !self.query()? {
            let waited = begin.elapsed();
            if waited >= timeout {
                return Err(Error::Timeout {
                    what: "the event's last record".into(),
                    after: timeout,
                    detail: "; the stream that it was recorded on has not got there yet".into(),
                });
            }
            if waited < SPIN {
                std::hint::spin_loop();
            } else {
                thread::sleep(pause.min(timeout - waited));
                pause = (pause * 2).min(LONGEST_SLEEP);
            }
        }
        Ok(())
    }
}

/// How long a wait on the host asks again and again before it begins to sleep.
const SPIN: Duration = Duration::from_micros(20);
/// The first sleep of a wait on the host; each is twice as long as the one before.
const FIRST_SLEEP: Duration = Duration::from_micros(10);
/// The longest sleep: what a wait on the host can be late by.
const LONGEST_SLEEP: Duration = Duration::from_micros(200);
