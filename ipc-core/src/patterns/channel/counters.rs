//! The counter page of a channel: words of memory that both ends map. Each word has one writer.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::inbox::{self, Inbox};
use super::room::Room;
use crate::sharing::timeline::{Side, TimelineSlot, Word, WordPage};

/// The slots of the counter page. Each contains one word for either end.
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub(super) enum Slot {
    /// The counter that streams signal when the tensors of a message are ready.
    Ready = 0,
    /// The directions that the end has closed, as bits of [`Direction`]; stored before the sockets are closed.
    Closed = 1,
    /// The number of messages that the end has received, lost ones included.
    Received = 2,
    /// The number of tensors that the end has opened or discarded.
    Settled = 3,
    /// The number of messages that the end has sent by its socket, stored after sending, for a peer that spins.
    Sent = 4,
    /// The number of the last message that the end has taken from its inbox.
    Taken = 5,
    /// 1 while the end is awake: it polls its inbox before it sleeps, and before it receives from its socket.
    Awake = 6,
    /// The value of the peer's `Received` at which the end, which waits for room, wants a wake-up; 0 if it does not wait.
    WantsRoom = 7,
}

/// A direction of an end. Its value is a bit of `Slot::Closed`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(super) enum Direction {
    Sending = 1,
    Receiving = 2,
}

impl Direction {
    /// Returns the direction of the peer that this one is connected to.
    const fn of_peer(self) -> Self {
        match self {
            Self::Sending => Self::Receiving,
            Self::Receiving => Self::Sending,
        }
    }
}

/// Both directions.
pub(super) const BOTH: u64 = Direction::Sending as u64 | Direction::Receiving as u64;

/// The counter page from the view of one end.
#[derive(Clone, Debug)]
pub(super) struct SharedCounters {
    page: Arc<WordPage>,
    side: Side,
}

impl SharedCounters {
    pub(super) const fn new(page: Arc<WordPage>, side: Side) -> Self {
        Self { page, side }
    }

    /// Returns the side of this end. The listening end is the exporter of the page.
    pub(super) const fn side(&self) -> Side {
        self.side
    }

    /// Returns the place of the counter that streams signal.
    pub(super) fn ready_place(&self) -> TimelineSlot {
        TimelineSlot::first(Arc::clone(&self.page), Slot::Ready as u32)
    }

    /// Returns the word of a slot that this end writes.
    pub(super) fn own(&self, slot: Slot) -> &AtomicU64 {
        let own = if self.side == Side::Exporter { Word::FromExporter } else { Word::FromImporter };
        self.page.word(slot as u32, own)
    }

    /// Returns the word of a slot that the peer writes.
    pub(super) fn peers(&self, slot: Slot) -> &AtomicU64 {
        let peers = if self.side == Side::Exporter { Word::FromImporter } else { Word::FromExporter };
        self.page.word(slot as u32, peers)
    }

    /// Returns the inbox that the peer writes and this end reads.
    pub(super) fn inbox(&self) -> Inbox<'_> {
        let words = self.page.words(inbox::first_slot(self.side == Side::Exporter), inbox::WORDS);
        Inbox { taken: self.own(Slot::Taken), awake: self.own(Slot::Awake), words }
    }

    /// Returns the inbox that this end writes and the peer reads.
    pub(super) fn outbox(&self) -> Inbox<'_> {
        let words = self.page.words(inbox::first_slot(self.side != Side::Exporter), inbox::WORDS);
        Inbox { taken: self.peers(Slot::Taken), awake: self.peers(Slot::Awake), words }
    }

    /// Returns the words by which this end waits for room.
    pub(super) fn room(&self) -> Room<'_> {
        Room { received: self.peers(Slot::Received), wanted: self.own(Slot::WantsRoom) }
    }

    /// Returns the words by which the peer waits for room.
    pub(super) fn peers_room(&self) -> Room<'_> {
        Room { received: self.own(Slot::Received), wanted: self.peers(Slot::WantsRoom) }
    }

    /// Returns whether the peer sends no further messages. Its earlier messages can still be received.
    pub(super) fn peer_has_finished(&self) -> bool {
        self.peers(Slot::Closed).load(Ordering::Acquire) & Direction::Sending as u64 != 0
    }

    /// Returns whether this end has closed a direction.
    pub(super) fn is_closed(&self, direction: Direction) -> bool {
        self.own(Slot::Closed).load(Ordering::Acquire) & direction as u64 != 0
    }

    /// Returns whether this end has closed both directions.
    pub(super) fn is_closed_both_ways(&self) -> bool {
        self.own(Slot::Closed).load(Ordering::Acquire) & BOTH == BOTH
    }

    /// Returns whether the peer has closed both directions.
    pub(super) fn peer_has_closed_both_ways(&self) -> bool {
        self.peers(Slot::Closed).load(Ordering::Acquire) & BOTH == BOTH
    }

    /// Returns whether either end has closed a direction.
    pub(super) fn is_closed_by_either(&self, direction: Direction) -> bool {
        let peers = self.peers(Slot::Closed).load(Ordering::Acquire);
        self.is_closed(direction) || peers & direction.of_peer() as u64 != 0
    }

    /// Marks directions as closed. Returns the directions that were open.
    pub(super) fn mark_closed(&self, directions: u64) -> u64 {
        directions & !self.own(Slot::Closed).fetch_or(directions, Ordering::AcqRel)
    }
}
