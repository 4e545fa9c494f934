//! The signals of a ring's writer to its readers.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::super::members::{Member, Members, describe_readers};
use crate::backend::stream::BorrowedStream;
use crate::backend::{DeviceEvent, DeviceIpc};
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Remedy, Result};
use crate::os::kill::kill_point;
use crate::os::wait_for_words;
use crate::sharing::RuntimeRef;
use crate::sharing::timeline::{OwnCounter, Timeline};

/// Maximum time for which a publication by the host waits for the writer's own counter after a reader was notified.
const OWN_COUNTER_TIMEOUT: Duration = Duration::from_secs(1);

/// The identity of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::patterns::ring) struct StreamKey(DeviceOrdinal, u64);

impl StreamKey {
    pub(in crate::patterns::ring) const fn of(stream: BorrowedStream<'_>) -> Self {
        Self(stream.device(), stream.raw())
    }
}

/// The readers as the writer knows them, and the order of its publications.
pub(super) struct Publisher {
    backend: Arc<dyn DeviceIpc>,
    members: Arc<Members>,
    /// The readers at `version` of the list.
    known: Vec<Arc<Member>>,
    version: u64,
    /// The stream that published last.
    last_stream: Option<StreamKey>,
    /// Counts publications for the writer's own streams; `None` if the host waits.
    own: Option<Arc<OwnCounter>>,
}

impl Publisher {
    pub(super) const fn new(
        backend: Arc<dyn DeviceIpc>,
        members: Arc<Members>,
        own: Option<Arc<OwnCounter>>,
    ) -> Self {
        Self { backend, members, known: Vec::new(), version: 0, last_stream: None, own }
    }

    pub(super) const fn members(&self) -> &Arc<Members> {
        &self.members
    }

    /// Returns whether the host waits because the device has no timelines.
    pub(super) const fn waits_on_host(&self) -> bool {
        self.own.is_none()
    }

    /// Takes note of the readers that have opened or closed the ring.
    pub(super) fn update(&mut self) {
        self.members.update(&mut self.known, &mut self.version);
    }

    /// Returns whether a reader has not released a sequence, or the host has not signalled it.
    pub(super) fn is_in_use(&self, sequence: u64) -> bool {
        self.known.iter().any(|member| member.is_behind(sequence))
            || (self.waits_on_host() && self.members.first_unsignalled() <= sequence)
    }

    /// Makes the stream wait until every reader has released a sequence.
    pub(super) fn wait_release_on_stream(&self, sequence: u64, stream: BorrowedStream<'_>) -> Result<()> {
        if let Some(own) = &self.own
            && self.last_stream != Some(StreamKey::of(stream))
        {
            // After the work of another stream of this process on the slot.
            own.wait_for_own(sequence + 1, stream)?;
        }
        for member in &self.known {
            // A reader that has released the slot or has left needs no driver call.
            if !member.is_behind(sequence) {
                continue;
            }
            if let Err(error) = member.timeline.wait(sequence + 1, &stream)
                && member.position().is_some()
            {
                return Err(error);
            }
        }
        Ok(())
    }

    /// Checks that every reader has released the previous sequence in a slot. Newer readers have never taken it.
    pub(super) fn check_released(&self, previous: u64, sequence: u64) -> Result<()> {
        if !self.known.iter().any(|member| member.is_behind(previous)) {
            return Ok(());
        }
        let why = format!(
            "sequence {previous} in the same slot has not been released{}; {}, or \
             publish on the stream that waits for the release",
            describe_readers(&self.members.behind(previous)),
            Remedy::WaitWritable
        );
        Err(Error::RingNotYet { sequence, what: "published", why })
    }

    /// Publishes a sequence to every reader by a stream.
    pub(super) fn publish(
        &mut self,
        sequence: u64,
        stream: BorrowedStream<'_>,
        runtime: RuntimeRef,
    ) -> Result<()> {
        if self.waits_on_host() {
            self.publish_on_host(sequence, stream, runtime)
        } else {
            self.signal_all(sequence, stream)
        }
    }

    /// Publishes a sequence to every reader from the host.
    pub(super) fn publish_now(&mut self, sequence: u64, timeout: Duration) -> Result<()> {
        if self.waits_on_host() {
            self.count_publication(sequence);
            self.members.signal_complete(sequence);
            return Ok(());
        }
        self.check_arrived(sequence, timeout)?;
        let now = |timeline: &Timeline| timeline.signal_now(sequence + 1);
        self.signal_readers(sequence, now, |own| drop(now(own)))?;
        self.last_stream = None;
        Ok(())
    }

    /// Checks that the streams have reached all earlier publications.
    ///
    /// The check uses the writer's own counter, which streams write after the readers' counters. The readers' counters cannot
    /// be trusted, because the readers can write them.
    fn check_arrived(&self, sequence: u64, timeout: Duration) -> Result<()> {
        let Some(own) = &self.own else { return Ok(()) };
        let notified =
            |member: &Arc<Member>| member.has_been_notified(sequence) && member.position().is_some();
        let not_yet = || {
            let why = "a stream has not reached the publication of an earlier sequence; synchronise that stream, or \
                       publish on a stream";
            Error::RingNotYet { sequence, what: "published", why: why.into() }
        };
        let holds = || match own.has_arrived() {
            true => Ok(true),
            // A stream that has signalled the readers writes the writer's own counter next, and a reader may react before
            // that. A reader that falsely claims the signal only delays the error.
            false if self.known.iter().any(notified) => Ok(false),
            false => Err(not_yet()),
        };
        wait_for_words(timeout.min(OWN_COUNTER_TIMEOUT), holds, not_yet)
    }

    /// Signals a publication to every reader by a stream, after publications on other streams.
    fn signal_all(&mut self, sequence: u64, stream: BorrowedStream<'_>) -> Result<()> {
        let key = StreamKey::of(stream);
        if let Some(own) = &self.own
            && self.last_stream != Some(key)
        {
            // This does not wait for the readers' counters: a reader that leaves ends its counter, and a stream that passed it
            // too early would decrease it.
            own.wait_for_own(sequence, stream)?;
        }
        self.signal_readers(
            sequence,
            |timeline| timeline.signal(sequence + 1, &stream),
            |own| own.mark(sequence + 1, stream),
        )?;
        self.last_stream = Some(key);
        Ok(())
    }

    /// Signals a publication to every reader, and marks it on the writer's own counter.
    fn signal_readers(
        &mut self,
        sequence: u64,
        signal: impl Fn(&Timeline) -> Result<()>,
        mark: impl Fn(&OwnCounter),
    ) -> Result<()> {
        let mut signalled = 0;
        loop {
            self.update();
            for member in &self.known {
                if member.timeline.last_signalled() > sequence || member.position().is_none() {
                    continue;
                }
                match signal(&member.timeline) {
                    Ok(()) => signalled += 1,
                    // The reader has left meanwhile.
                    Err(_) if member.position().is_none() => continue,
                    // No reader has been signalled: the slot is unpublished.
                    Err(error) if signalled == 0 => return Err(error),
                    // Other readers may be reading the slot, so it is published. This reader would wait for ever.
                    Err(error) => {
                        tracing::warn!(target: crate::os::log::RING, pid = member.timeline.peer(), %error, "cannot signal a ring reader");
                        member.dismiss();
                    }
                }
                if member.is_dismissed() {
                    member.dismiss();
                }
                kill_point!("exporter:ring-signalled");
            }
            if let Some(own) = &self.own {
                // Without readers, this signal is the first that can fail.
                if own.last_signalled() <= sequence && signalled == 0 {
                    signal(own)?;
                }
                if own.last_signalled() <= sequence {
                    mark(own);
                }
            }
            // A reader that opened the ring meanwhile begins with this sequence.
            if self.members.advance(sequence, self.version) {
                return Ok(());
            }
        }
    }

    /// Publishes a sequence from a thread of the library when the stream reaches this point.
    fn publish_on_host(
        &mut self,
        sequence: u64,
        stream: BorrowedStream<'_>,
        runtime: RuntimeRef,
    ) -> Result<()> {
        let runtime = runtime.check()?;
        let reached = record_event_on(&*self.backend, stream)?;
        self.count_publication(sequence);
        let members = Arc::clone(&self.members);
        match reached {
            Some(event) => runtime.worker.submit_when(event, move || members.signal_complete(sequence)),
            None => members.signal_complete(sequence),
        }
        Ok(())
    }

    /// Makes new readers begin after a sequence.
    fn count_publication(&mut self, sequence: u64) {
        while !self.members.advance(sequence, self.version) {
            self.update();
        }
    }
}

impl fmt::Debug for Publisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Publisher").field("readers", &self.known.len()).finish_non_exhaustive()
    }
}

/// Records an event on a stream. If the device has no events, waits for the stream and returns `None`.
pub(in crate::patterns::ring) fn record_event_on(
    backend: &dyn DeviceIpc,
    stream: BorrowedStream<'_>,
) -> Result<Option<Box<dyn DeviceEvent>>> {
    if !backend.capabilities(stream.device())?.ipc_events {
        backend.memory().synchronize(stream)?;
        return Ok(None);
    }
    let event = backend.create_event(stream.device())?;
    event.record(stream)?;
    Ok(Some(event))
}
