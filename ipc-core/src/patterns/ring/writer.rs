//! The writer's guards.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::members::{Member, Members, ReaderPosition, in_words};
use super::slots::{Slots, count_host_wait};
use crate::backend::DeviceIpc;
use crate::backend::interop::{ViewStream, ViewTypes};
use crate::backend::stream::{AsStream, BorrowedStream};
use crate::model::address::DeviceRange;
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Result};
use crate::model::lease::{Holders, LeaseId};
use crate::model::tensor::{Element, TensorTable};
use crate::os::kill::kill_point;
use crate::os::process::Owner;
use crate::sharing::Runtime;
use crate::sharing::export::{Export, check_backend};
use crate::sharing::import::{Keeper, OwnMemory, Tensor};
use crate::sharing::timeline::{OwnCounter, TIMELINE_END, Timeline, pause};
use crate::transport::Deadline;
use crate::transport::check_may_wait;
use crate::wire::ring::RingDescriptor;

/// A ring, seen from its writer: memory that is shared once, in slots that are written again and again.
///
/// [`write`](Self::write) gives the next slot, once every reader's stream has passed what it held;
/// [`RingWriteSlot::publish`] tells the readers when the stream gets there. Where the device has timelines, no host waits.
/// Readers come ([`Ipc::open_ring`](crate::Ipc::open_ring)) and go at any time; one that dies leaves the ring, and the stream that
/// waited for it goes on.
///
/// Dropping the ring closes it without waiting: readers get what has been published, then [`Error::RingClosed`].
pub struct Ring {
    // Dropped in this order: readers are told that it is closed, then the export ends.
    closing: Closing,
    export: Export,
    /// What views of slots are made of.
    memory: OwnMemory,
    descriptor: RingDescriptor,
    backend: Arc<dyn DeviceIpc>,
    slots: Slots,
    members: Arc<Members>,
    /// The readers as they were at `version` of the list.
    known: Vec<Arc<Member>>,
    version: u64,
    next: u64,
    /// The stream that published last.
    last_stream: Option<StreamKey>,
    /// Counts publications for the writer's own streams; `None` where the host does the waiting.
    own: Option<Arc<OwnCounter>>,
    timeout: Duration,
    owner: Owner,
}

/// How long a publication by the host waits for the writer's own counter where a reader has been told already.
const OWN_COUNTER_FOLLOWS: Duration = Duration::from_secs(1);

/// Tells streams apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StreamKey(DeviceOrdinal, u64);

impl StreamKey {
    pub(super) const fn of(stream: BorrowedStream<'_>) -> Self {
        Self(stream.device(), stream.raw())
    }
}

/// Closes the ring when it is dropped.
struct Closing {
    members: Arc<Members>,
    owner: Owner,
}

impl Drop for Closing {
    fn drop(&mut self) {
        if self.owner.is_here() {
            self.members.close();
        }
    }
}

impl Ring {
    pub(super) fn new(
        export: Export,
        backend: Arc<dyn DeviceIpc>,
        slots: Slots,
        own: Option<Arc<OwnCounter>>,
        timeout: Duration,
    ) -> Self {
        let members = Arc::new(Members::new(own.clone()));
        let memory = export.descriptor().clone();
        if let Some(runtime) = Runtime::existing() {
            runtime.exports.observe(memory.export, Arc::clone(&members) as _);
        }
        let descriptor = RingDescriptor::new(memory, slots.count(), slots.bytes());
        Self {
            closing: Closing { members: Arc::clone(&members), owner: Owner::current() },
            export,
            memory: OwnMemory::new(Arc::clone(&backend), slots.device(), "the ring"),
            descriptor: descriptor.expect("the slots lie in the memory"),
            backend,
            slots,
            members,
            known: Vec::new(),
            version: 0,
            next: 0,
            last_stream: None,
            own,
            timeout,
            owner: Owner::current(),
        }
    }

    /// What readers need; send it by any road.
    pub const fn descriptor(&self) -> &RingDescriptor {
        &self.descriptor
    }

    /// Does the host do the waiting, as the device has no timelines? Then [`write`](Self::write) waits, and a publication is told
    /// of by a thread of the library.
    pub const fn waits_on_host(&self) -> bool {
        self.own.is_none()
    }

    /// The sequence that is published next: how many publications there have been.
    pub const fn sequence(&self) -> u64 {
        self.next
    }

    /// How many readers there are.
    pub fn readers(&self) -> usize {
        self.watch().count()
    }

    /// Waits until there are at least so many readers. What is published before a reader has joined is not for it.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`], which says how many there are; [`Error::OnWorkerThread`] in a callback; [`Error::Forked`].
    pub fn wait_readers(&self, count: usize, timeout: Duration) -> Result<()> {
        self.watch().wait_readers(count, timeout)
    }

    /// The readers that the next [`write`](Self::write) waits for, the last first.
    pub fn readers_behind(&self) -> Vec<ReaderPosition> {
        self.watch().readers_behind()
    }

    /// Goes on without a reader. True where it was one.
    ///
    /// Streams that wait for it go on; what it reads is written over, and it gets [`Error::DismissedFromRing`] when it asks for
    /// the next slot, releases one, or checks one. It may join again.
    pub fn dismiss(&self, reader: LeaseId) -> bool {
        self.watch().dismiss(reader)
    }

    /// The readers, for other threads: one that waits in a driver for a stream cannot ask who holds it up.
    pub fn watch(&self) -> RingReaders {
        RingReaders { members: Arc::clone(&self.members), slots: self.slots.count(), owner: self.owner }
    }

    /// Who has the memory open.
    pub fn holders(&self) -> Holders {
        self.export.holders()
    }

    /// The next slot. Work that is submitted to the stream from now on waits until every reader has passed what the slot
    /// held; the host does not wait, but where [`waits_on_host`](Self::waits_on_host).
    ///
    /// A reader that never releases what it has got holds the stream up: [`readers_behind`](Self::readers_behind) names it,
    /// [`dismiss`](Self::dismiss) goes on without it, [`wait_writable`](Self::wait_writable) is an error in time.
    ///
    /// # Errors
    ///
    /// [`Error::WrongBackend`]; [`Error::StreamCapturing`]; where the host waits, [`Error::Timeout`] with the readers that are
    /// behind, after the builder's time; [`Error::Unsupported`] for a stream of a device without timelines, in a ring of one
    /// that has them; [`Error::Forked`]. The next call gives the same slot.
    pub fn write<M>(&mut self, stream: &impl AsStream<M>) -> Result<RingWriteSlot<'_>> {
        let stream = stream.as_stream();
        self.owner.check()?;
        check_backend("the stream", stream.backend(), self.backend.info().name)?;
        if self.next + 1 >= TIMELINE_END {
            let why = "the ring has had all its publications; make a new one".into();
            return Err(Error::TimelineValue { value: self.next + 1, why });
        }
        self.members.update(&mut self.known, &mut self.version);
        if self.waits_on_host() {
            self.wait_writable(self.timeout)?;
        } else if let Some(before) = self.slots.takes_the_place_of(self.next) {
            self.stream_waits_for_release_of(before, stream)?;
        }
        kill_point!("exporter:ring-waited");
        let sequence = self.next;
        Ok(RingWriteSlot { ring: self, sequence })
    }

    fn stream_waits_for_release_of(&self, sequence: u64, stream: BorrowedStream<'_>) -> Result<()> {
        if let Some(own) = &self.own
            && self.last_stream != Some(StreamKey::of(stream))
        {
            // Behind what another stream of this process wrote there.
            own.wait_for_own(sequence + 1, stream)?;
        }
        for member in &self.known {
            // Who has released it already, or has gone, costs no driver call.
            if member.position().is_none_or(|position| position > sequence) {
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

    /// Waits on the host until no reader holds the slot that the next [`write`](Self::write) gives.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`], which names the readers that hold it; [`Error::OnWorkerThread`] in a callback; [`Error::Forked`].
    pub fn wait_writable(&self, timeout: Duration) -> Result<()> {
        self.owner.check()?;
        let Some(before) = self.slots.takes_the_place_of(self.next) else { return Ok(()) };
        let begun = Instant::now();
        let is_held = |member: &Arc<Member>| member.position().is_some_and(|position| position <= before);
        let is_kept =
            || self.known.iter().any(is_held) || (self.waits_on_host() && self.members.told() <= before);
        if !is_kept() {
            return Ok(());
        }
        check_may_wait("Ring::wait_writable", timeout)?;
        count_host_wait();
        while is_kept() {
            let waited = begun.elapsed();
            if waited >= timeout {
                return Err(Error::Timeout {
                    what: format!("the release of sequence {before}, whose slot is to be written again,"),
                    after: timeout,
                    detail: in_words(&self.members.behind(before)),
                });
            }
            pause(waited, timeout);
        }
        Ok(())
    }

    /// Tells every reader, and counts the publication.
    fn publish(&mut self, sequence: u64, stream: BorrowedStream<'_>) -> Result<()> {
        self.owner.check()?;
        check_backend("the stream", stream.backend(), self.backend.info().name)?;
        if self.waits_on_host() {
            self.publish_on_host(sequence, stream)?;
        } else {
            self.signal_all(sequence, stream)?;
        }
        self.next = sequence + 1;
        kill_point!("exporter:ring-published");
        Ok(())
    }

    /// Tells every reader at once, and counts the publication.
    fn publish_now(&mut self, sequence: u64) -> Result<()> {
        self.owner.check()?;
        self.check_writable_now(sequence)?;
        if self.waits_on_host() {
            self.count_publication(sequence);
            self.members.tell(sequence);
        } else {
            self.check_arrived(sequence)?;
            let now = |timeline: &Timeline| timeline.signal_now(sequence + 1);
            self.tell_all(sequence, now, |own| drop(now(own)))?;
            self.last_stream = None;
        }
        self.next = sequence + 1;
        kill_point!("exporter:ring-published");
        Ok(())
    }

    /// Has every reader released what the slot of this sequence held? Who joined since has not had it.
    fn check_writable_now(&self, sequence: u64) -> Result<()> {
        let Some(before) = self.slots.takes_the_place_of(sequence) else { return Ok(()) };
        if self.known.iter().all(|member| member.position().is_none_or(|position| position > before)) {
            return Ok(());
        }
        let why = format!(
            "sequence {before}, whose slot it takes, has not been released{}; wait for that before the slot is written \
             (Ring::wait_writable), or publish on the stream that waits for it",
            in_words(&self.members.behind(before))
        );
        Err(Error::RingNotYet { sequence, what: "published", why })
    }

    /// Have the streams got to all publications before this one? The writer's own counter says so, which streams write behind
    /// those of the readers; the readers can write theirs.
    fn check_arrived(&self, sequence: u64) -> Result<()> {
        let Some(own) = &self.own else { return Ok(()) };
        let told = |member: &Arc<Member>| member.has_been_told(sequence) && member.position().is_some();
        let (begun, longest) = (Instant::now(), self.timeout.min(OWN_COUNTER_FOLLOWS));
        loop {
            if own.has_arrived() {
                return Ok(());
            }
            let waited = begun.elapsed();
            // A stream that has told the readers comes to the writer's own counter next, and a reader that has heard of it may
            // be quicker. A reader that only claims so costs no more than the time.
            if !self.known.iter().any(told) || waited >= longest {
                let why = "a stream has yet to get to the publication of an earlier one; synchronise that stream, or \
                           publish on one";
                return Err(Error::RingNotYet { sequence, what: "published", why: why.into() });
            }
            pause(waited, longest);
        }
    }

    fn signal_all(&mut self, sequence: u64, stream: BorrowedStream<'_>) -> Result<()> {
        let key = StreamKey::of(stream);
        if let Some(own) = &self.own
            && self.last_stream != Some(key)
        {
            // Behind the publications on other streams. Not by the readers' words: one that leaves ends its own, and what
            // passes too early there would set it back.
            own.wait_for_own(sequence, stream)?;
        }
        self.tell_all(
            sequence,
            |timeline| timeline.signal(sequence + 1, &stream),
            |own| own.mark(sequence + 1, stream),
        )?;
        self.last_stream = Some(key);
        Ok(())
    }

    /// Signals to every reader, and marks that for the writer's own streams.
    fn tell_all(
        &mut self,
        sequence: u64,
        signal: impl Fn(&Timeline) -> Result<()>,
        mark: impl Fn(&OwnCounter),
    ) -> Result<()> {
        let mut told = 0;
        loop {
            self.members.update(&mut self.known, &mut self.version);
            for member in &self.known {
                if member.timeline.last_signalled() > sequence || member.position().is_none() {
                    continue;
                }
                match signal(&member.timeline) {
                    Ok(()) => told += 1,
                    // It has gone in between.
                    Err(_) if member.position().is_none() => continue,
                    // Nobody has been told: the slot is as before.
                    Err(error) if told == 0 => return Err(error),
                    // Others may be reading it by now, so it is published; this one would wait for ever.
                    Err(error) => {
                        tracing::warn!(pid = member.timeline.peer(), %error, "a reader of a ring cannot be told");
                        member.dismiss();
                    }
                }
                if member.is_dismissed() {
                    member.dismiss();
                }
                kill_point!("exporter:ring-signalled");
            }
            if let Some(own) = &self.own {
                // Without readers it is the first to say that the stream cannot.
                if own.last_signalled() <= sequence && told == 0 {
                    signal(own)?;
                }
                if own.last_signalled() <= sequence {
                    mark(own);
                }
            }
            // Who has joined in between begins with this one.
            if self.members.advance(sequence, self.version) {
                return Ok(());
            }
        }
    }

    /// A thread of the library tells the readers, when the stream has got there.
    fn publish_on_host(&mut self, sequence: u64, stream: BorrowedStream<'_>) -> Result<()> {
        let runtime = Runtime::get()?;
        let reached = event_on(&*self.backend, stream)?;
        self.count_publication(sequence);
        let members = Arc::clone(&self.members);
        match reached {
            Some(event) => runtime.worker.submit_when(event, move || members.tell(sequence)),
            None => members.tell(sequence),
        }
        Ok(())
    }

    /// Readers that join from now on begin behind it.
    fn count_publication(&mut self, sequence: u64) {
        while !self.members.advance(sequence, self.version) {
            self.members.update(&mut self.known, &mut self.version);
        }
    }

    /// Closes the ring, and waits until every reader has left and the memory's owner has been dropped.
    ///
    /// # Errors
    ///
    /// [`Error::StillHeld`] when the time is over, with the readers that are still there; the ring is closed all the same.
    /// [`Error::Forked`].
    pub fn close(self, timeout: Duration) -> Result<()> {
        let Self { closing, export, .. } = self;
        drop(closing);
        export.close(timeout)
    }
}

/// The event that says when a stream has got here; `None` where there are no events, and the stream has been waited for.
pub(super) fn event_on(
    backend: &dyn DeviceIpc,
    stream: BorrowedStream<'_>,
) -> Result<Option<Box<dyn crate::backend::DeviceEvent>>> {
    if !backend.capabilities(stream.device())?.ipc_events {
        backend.memory().synchronize(stream)?;
        return Ok(None);
    }
    let event = backend.create_event(stream.device())?;
    event.record(stream)?;
    Ok(Some(event))
}

pub(super) fn has_no_timelines(backend: &dyn DeviceIpc, device: DeviceOrdinal) -> Result<bool> {
    Ok(backend.timelines().is_none() || !backend.capabilities(device)?.timelines)
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring")
            .field("descriptor", &self.descriptor)
            .field("next", &self.next)
            .field("readers", &self.known.len())
            .finish_non_exhaustive()
    }
}

/// A slot that is being written. Dropping it unpublished gives it back: the next [`Ring::write`] gives the same sequence, and
/// readers hear nothing of it.
#[must_use = "nobody reads it before RingWriteSlot::publish"]
pub struct RingWriteSlot<'r> {
    ring: &'r mut Ring,
    sequence: u64,
}

impl RingWriteSlot<'_> {
    /// The sequence that it will be published as.
    pub const fn sequence(&self) -> u64 {
        self.sequence
    }

    /// The bytes.
    pub fn range(&self) -> DeviceRange {
        self.ring.slots.of(self.sequence)
    }

    /// The elements, to be written by work on `stream`. Take the stream that [`Ring::write`] was given, or one that has been
    /// ordered behind it.
    ///
    /// # Errors
    ///
    /// [`Error::WrongStream`] for a stream of another device than the memory's; [`Error::Layout`] where the bytes are not whole,
    /// aligned elements.
    pub fn view_mut<T: Element, M: ViewTypes>(
        &mut self,
        stream: &impl ViewStream<M>,
    ) -> Result<M::ViewMut<'_, T>> {
        Keeper::from(&self.ring.memory).view_mut(self.range(), None, stream)
    }

    /// The tensor of this name in a table of what lies in each slot. Its [`view_mut`](Tensor::view_mut) is for the stream that
    /// [`Ring::write`] was given, or one that has been ordered behind it.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchTensor`]; [`Error::Descriptor`] for one that does not fit the slot.
    pub fn tensor<'s>(&'s self, table: &'s TensorTable, name: &str) -> Result<Tensor<'s>> {
        Tensor::in_table(&self.ring.memory, self.range(), table, name)
    }

    /// Publishes the slot when the stream gets here: every reader then sees what has been written. Does not wait.
    ///
    /// The stream need not be the one that was written on, if it has been ordered behind that one. Publications on different
    /// streams are told in the order of their sequences: the stream waits for the publication before. Streams are told apart by
    /// their handle, so do not destroy one before its publication has arrived to go on with another.
    ///
    /// # Errors
    ///
    /// [`Error::WrongBackend`], [`Error::StreamCapturing`], [`Error::Unsupported`] for a stream of a device without timelines,
    /// else what the vendor says. Nothing has been published then, and the slot has been given back.
    pub fn publish<M>(self, stream: &impl AsStream<M>) -> Result<()> {
        self.ring.publish(self.sequence, stream.as_stream())
    }

    /// Publishes the slot at once. The caller says that its bytes are there: that no work which writes them is left on any
    /// stream. For hosts that hand over to hosts; does not wait, and neither calls the driver nor the system, nor allocates.
    ///
    /// It takes its turn: it never overtakes a publication on a stream. Where [`Ring::waits_on_host`], it is told when the
    /// stream has got to those before; else that has to have happened.
    ///
    /// # Errors
    ///
    /// [`Error::RingNotYet`] where a stream has yet to get to an earlier publication, or a reader has not released what the slot
    /// held, which [`Ring::wait_writable`] waits for; [`Error::Forked`]. Nothing has been published then, and the slot has been
    /// given back with what was written to it.
    pub fn publish_now(self) -> Result<()> {
        self.ring.publish_now(self.sequence)
    }
}

impl fmt::Debug for RingWriteSlot<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RingWriteSlot").field("sequence", &self.sequence).finish_non_exhaustive()
    }
}

/// The readers of a ring, for any thread. Clones are the same; it keeps neither the ring nor its memory.
#[derive(Clone, Debug)]
pub struct RingReaders {
    members: Arc<Members>,
    slots: u32,
    owner: Owner,
}

impl RingReaders {
    /// How many there are.
    pub fn count(&self) -> usize {
        if self.owner.is_here() { self.members.count() } else { 0 }
    }

    /// As [`Ring::wait_readers`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn wait_readers(&self, count: usize, timeout: Duration) -> Result<()> {
        self.owner.check()?;
        check_may_wait("Ring::wait_readers", timeout)?;
        self.members.wait(count, Deadline::after(timeout).at).map_err(|found| Error::Timeout {
            what: format!("a count of {count} readers of the ring"),
            after: timeout,
            detail: format!("; {found} have joined (Ipc::open_ring)"),
        })
    }

    /// As [`Ring::readers_behind`].
    pub fn readers_behind(&self) -> Vec<ReaderPosition> {
        if !self.owner.is_here() {
            return Vec::new();
        }
        let before = self.members.next_to_be_released(self.slots);
        before.map(|before| self.members.behind(before)).unwrap_or_default()
    }

    /// As [`Ring::dismiss`].
    pub fn dismiss(&self, reader: LeaseId) -> bool {
        self.owner.is_here() && self.members.dismiss(reader)
    }
}
