//! Events that order the streams of two processes.

use std::fmt;
use std::time::Duration;

use crate::backend::HandleBytes;
use crate::backend::stream::BorrowedStream;
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Result};
use crate::os::{Backoff, clock};

/// A vendor's event, created in this process or opened from another one. Dropping it destroys the event.
///
/// The process that recorded the event last keeps it until the waits for that record have completed
/// (`cudaIpcGetEventHandle`: waiting on an event whose creator has freed it is undefined). Any thread may call any method,
/// concurrently with others. Each method returns [`Error::WrongBackend`] for a stream of another backend.
pub trait DeviceEvent: fmt::Debug + Send + Sync {
    /// Returns the device whose streams the event was created or opened for.
    fn device(&self) -> DeviceOrdinal;

    /// Returns the handle with which another process opens this event.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`](crate::Error::Unsupported) for an event that was opened from another process, or
    /// created for this one alone.
    fn export(&self) -> Result<HandleBytes>;

    /// Records the event on a stream. When the call returns, the record has been submitted to the device.
    ///
    /// # Errors
    ///
    /// [`Error::WrongStream`](crate::Error::WrongStream); otherwise the vendor's error.
    fn record(&self, stream: BorrowedStream<'_>) -> Result<()>;

    /// Makes later work of `stream` wait, on the device, for the last record before this call. The stream may be of any device.
    ///
    /// # Errors
    ///
    /// The vendor's error; [`Error::WrongStream`](crate::Error::WrongStream) if the vendor does not support waiting for another
    /// device.
    fn wait_on(&self, stream: BorrowedStream<'_>) -> Result<()>;

    /// Returns whether the last record is complete. True for an event that has never been recorded.
    ///
    /// # Errors
    ///
    /// The vendor's error.
    fn query(&self) -> Result<bool>;

    /// Waits on the host until the last record is complete.
    ///
    /// The default implementation, for vendors that have no wait with a timeout, polls [`query`](Self::query): at first without
    /// a pause, then with pauses that grow to 200 µs.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`]; otherwise the vendor's error.
    fn synchronize(&self, timeout: Duration) -> Result<()> {
        POLL.wait(
            SPIN,
            timeout,
            || self.query(),
            || Error::Timeout {
                what: "the event's last record".into(),
                after: timeout,
                detail: "; the stream that recorded it has not reached the record yet".into(),
            },
        )
    }
}

impl dyn DeviceEvent {
    /// As [`synchronize`](Self::synchronize), in slices between which the wait can be interrupted.
    pub(crate) fn wait(&self, timeout: Duration) -> Result<()> {
        let begin = clock::now();
        loop {
            let left = timeout.saturating_sub(clock::elapsed(begin));
            match self.synchronize(clock::slice(left)) {
                Err(Error::Timeout { .. }) if !left.is_zero() => {}
                Err(Error::Timeout { what, detail, .. }) => {
                    return Err(Error::Timeout { what, after: timeout, detail });
                }
                other => return other,
            }
        }
    }
}

/// The time for which a wait on the host polls before it begins to sleep.
const SPIN: Duration = Duration::from_micros(20);
/// The sleeps of a wait on the host. The longest one is its maximum delay.
const POLL: Backoff = Backoff::doubling(Duration::from_micros(10), Duration::from_micros(200));
