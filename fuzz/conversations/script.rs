//! The script of a conversation.

use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

/// A step: a byte with its kind (lower half) and its repetitions (upper half), a byte with the length of the packet, and the
/// packet.
pub(super) struct Step<'a> {
    pub(super) action: u8,
    pub(super) times: usize,
    pub(super) packet: &'a [u8],
}

/// The repetitions of a step, by the upper half of its first byte: usually one; otherwise more than the limit of wrong tokens,
/// or of queued messages.
const TIMES: [usize; 16] = [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 17, 1100];

pub(super) struct Script<'a>(pub(super) &'a [u8]);

impl<'a> Iterator for Script<'a> {
    type Item = Step<'a>;

    fn next(&mut self) -> Option<Step<'a>> {
        let [head, len, rest @ ..] = self.0 else { return None };
        let (packet, rest) = rest.split_at(usize::from(*len).min(rest.len()));
        self.0 = rest;
        Some(Step { action: head & 15, times: TIMES[usize::from(head >> 4)], packet })
    }
}

/// Encodes a script, for seeds.
#[derive(Default)]
pub(super) struct Writer(pub(super) Vec<u8>);

impl Writer {
    pub(super) fn step(&mut self, action: u8, times: usize, packet: &[u8]) {
        let times =
            TIMES.iter().position(|known| *known == times).expect("a number of times that can be said");
        let len = u8::try_from(packet.len()).expect("a seed's packets are short");
        self.0.extend([(times as u8) << 4 | action, len]);
        self.0.extend_from_slice(packet);
    }
}

/// Returns two ends of a connection as the broker creates them.
pub(super) fn connection() -> (OwnedFd, OwnedFd) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .expect("this process may have two sockets")
}
