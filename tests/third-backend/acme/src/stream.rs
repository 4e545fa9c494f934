//! Streams: threads that run work in the order of its submission.

use std::collections::HashMap;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use device_ipc_core::backend::{DeviceStream, check_backend};
use device_ipc_core::{BorrowedStream, Error, Result};

use crate::NAME;
use crate::backend::check_device;

type Work = Box<dyn FnOnce() + Send>;

/// The streams of this process.
#[derive(Clone, Debug, Default)]
pub(crate) struct Streams(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    table: Mutex<Table>,
    idle: Condvar,
}

#[derive(Debug, Default)]
struct Table {
    queues: HashMap<u64, Sender<Work>>,
    last: u64,
    /// Work that was submitted and has not finished, of destroyed streams too.
    unfinished: u64,
}

impl Streams {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn create(&self) -> Result<AcmeStream> {
        let (sender, work) = channel::<Work>();
        let thread = std::thread::Builder::new().name("acme-stream".into());
        // The thread ends with the last sender, after the work that was submitted before.
        thread
            .spawn(move || work.into_iter().for_each(|work| work()))
            .map_err(|error| Error::io("starting the thread of a stream", error))?;
        let mut table = self.table();
        table.last += 1;
        let number = table.last;
        table.queues.insert(number, sender);
        Ok(AcmeStream { number, streams: self.clone() })
    }

    /// Returns the queue of a stream.
    pub(crate) fn queue(&self, stream: BorrowedStream<'_>) -> Result<Queue> {
        check_backend("the stream", stream.backend(), NAME)?;
        check_device(stream.device())?;
        let sender = self.table().queues.get(&stream.raw()).cloned();
        let unknown = || Error::InvalidRegion(format!("{} is not a stream of {NAME}", stream.raw()));
        Ok(Queue { sender: sender.ok_or_else(unknown)?, streams: self.clone() })
    }

    /// Waits until all submitted work has finished.
    pub(crate) fn synchronize_all(&self) {
        let mut table = self.table();
        while table.unfinished > 0 {
            table = self.0.idle.wait(table).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// The queue of one stream.
pub(crate) struct Queue {
    sender: Sender<Work>,
    streams: Streams,
}

impl Queue {
    pub(crate) fn submit(&self, work: impl FnOnce() + Send + 'static) {
        self.streams.table().unfinished += 1;
        let streams = self.streams.clone();
        let counted = move || {
            work();
            let mut table = streams.table();
            table.unfinished -= 1;
            if table.unfinished == 0 {
                streams.0.idle.notify_all();
            }
        };
        self.sender.send(Box::new(counted)).expect("the thread of a stream lives as long as a sender");
    }

    /// Waits until the stream has reached this point.
    pub(crate) fn synchronize(&self) {
        let (reached, wait) = channel();
        self.submit(move || {
            // Fails if the waiting thread has panicked.
            let _ = reached.send(());
        });
        wait.recv().expect("the thread of a stream runs all work");
    }
}

/// A stream of this backend.
#[derive(Debug)]
pub(crate) struct AcmeStream {
    number: u64,
    streams: Streams,
}

impl DeviceStream for AcmeStream {
    fn as_borrowed(&self) -> BorrowedStream<'_> {
        // SAFETY: the stream is in the table until it is dropped.
        unsafe { BorrowedStream::from_raw(NAME, 0.into(), self.number) }
    }
}

impl Drop for AcmeStream {
    fn drop(&mut self) {
        self.streams.table().queues.remove(&self.number);
    }
}
