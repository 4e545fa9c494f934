//! The script of a conversation.

use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

/// One step: a byte that says what is done (its lower half) and how often (its upper half), a byte with the length of
/// the packet, and the packet.
pub(super) struct Step<'a> {
    pub(super) action: u8,
    pub(super) times: usize,
    pub(super) packet: &'a [u8],
}

/// How often a step is done, by the upper half of its first byte: mostly once; else more often than a peer may guess
/// tokens, or more often than messages are kept for a peer that does not read.
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

/// Writes a script, for seeds.
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

/// Two ends of a connection like those of the broker.
pub(super) fn connection() -> (OwnedFd, OwnedFd) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .expect("this process may have two sockets")
}
