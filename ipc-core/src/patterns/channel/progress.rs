//! The progress of the two directions of an end.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::limits::{Limits, MessagesInFlight};
use crate::os::{Pace, SPIN};
use crate::transport::socket::{Packet, ReceivedFds};

/// The duration of a spin if the peer was asleep when the last message was sent: it must wake up before it can answer.
const SPIN_AFTER_WAKE: Duration = Duration::from_micros(200);

/// The state of the sending thread.
#[derive(Debug)]
pub(super) struct SendState {
    pub(super) messages: u64,
    /// The number of messages sent by the socket.
    pub(super) by_socket: u64,
    /// The number of the last message put into the peer's inbox.
    pub(super) last_put: u64,
    pub(super) tensors: u64,
    /// The last value of this end's counter that was submitted to a stream.
    pub(super) signalled: u64,
    pub(super) in_flight: MessagesInFlight,
    /// Whether the socket had no room for the last packet.
    pub(super) is_socket_full: bool,
    /// The buffer of the last packet, for reuse.
    pub(super) buffer: Vec<u8>,
    /// The buffer for wake-ups.
    pub(super) wakes: Vec<u8>,
}

impl SendState {
    pub(super) const fn new(limits: Limits) -> Self {
        Self {
            messages: 0,
            by_socket: 0,
            last_put: 0,
            tensors: 0,
            signalled: 0,
            in_flight: MessagesInFlight::new(limits),
            is_socket_full: false,
            buffer: Vec::new(),
            wakes: Vec::new(),
        }
    }
}

/// The state of the receiving thread.
#[derive(Debug, Default)]
pub(super) struct ReceiveState {
    pub(super) buffer: Vec<u8>,
    /// The number of taken messages, including lost and invalid ones.
    pub(super) taken: u64,
    /// The last value of the peer's `WantsRoom` that a wake-up was sent for.
    pub(super) woken_for: u64,
    /// The number of messages that arrived by the socket.
    pub(super) by_socket: u64,
    /// A packet that arrived while the previous message was in the inbox, or while this end slept.
    pub(super) early: Option<Packet>,
    pub(super) pace: Pace,
    /// Whether the kernel has reported a packet.
    pub(super) polled: bool,
    /// Whether the peer or its socket has reported the end of messages.
    pub(super) ended: bool,
    /// The files that the peer has handed over and this process has not taken.
    pub(super) files: VecDeque<ReceivedFds>,
}

impl ReceiveState {
    /// Returns whether a receive call has a result without reading the socket.
    pub(super) const fn has_packet(&self) -> bool {
        self.early.is_some() || self.ended
    }
}

/// Whether a receiver may spin before it sleeps, and for how long.
#[derive(Debug)]
pub(super) struct Spinning {
    is_permitted: AtomicBool,
    /// Whether the peer was asleep when the last message was sent to it.
    peer_slept: AtomicBool,
}

impl Spinning {
    pub(super) const fn new(is_permitted: bool) -> Self {
        Self { is_permitted: AtomicBool::new(is_permitted), peer_slept: AtomicBool::new(false) }
    }

    pub(super) fn permit(&self, is_permitted: bool) {
        self.is_permitted.store(is_permitted, Ordering::Relaxed);
    }

    pub(super) fn is_permitted(&self) -> bool {
        self.is_permitted.load(Ordering::Relaxed)
    }

    /// Notes that a message was sent by the socket, to a peer that was awake or asleep.
    pub(super) fn note_sent(&self, is_peer_awake: bool) {
        self.peer_slept.store(!is_peer_awake, Ordering::Relaxed);
    }

    /// Returns the maximum duration of the next spin.
    pub(super) fn take_limit(&self) -> Duration {
        if self.peer_slept.swap(false, Ordering::Relaxed) { SPIN_AFTER_WAKE } else { SPIN }
    }
}
