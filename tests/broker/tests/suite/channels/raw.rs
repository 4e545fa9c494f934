//! A channel peer that implements the protocol of `docs/spec/channel.md` without the library.

use std::ops::Deref;
use std::os::fd::OwnedFd;

use device_ipc_broker_tests::{Child, Connection, DEADLINE, Received};
use device_ipc_core::ProcessIdentity;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use serde::Serialize;

/// The first message of a peer.
#[derive(Serialize)]
pub(super) struct Hello {
    program: String,
    backend: String,
    pub(super) process: ProcessIdentity,
    devices: Vec<()>,
    map: Vec<()>,
    limit: u64,
}

pub(super) fn hello() -> Hello {
    Hello {
        program: "raw".into(),
        backend: "mock".into(),
        process: ProcessIdentity::current().expect("/proc is there"),
        devices: Vec::new(),
        map: Vec::new(),
        limit: 1 << 20,
    }
}

pub(super) fn greeting(version: u16, hello: &Hello) -> Vec<u8> {
    let mut packet = b"dipcchan".to_vec();
    packet.extend(version.to_le_bytes());
    packet.push(0);
    packet.extend(postcard::to_stdvec(hello).expect("it can be encoded"));
    packet
}

pub(super) fn address(under: &str) -> Vec<u8> {
    format!("device-ipc.{}.{under}", rustix::process::geteuid().as_raw()).into_bytes()
}

/// The two sockets of a raw peer.
pub(super) struct RawPeer {
    messages: Connection,
    pub(super) control: OwnedFd,
}

impl Deref for RawPeer {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        &self.messages
    }
}

/// Returns a raw peer whose hello has been answered, and its page.
pub(super) fn greeted(child: &mut Child, under: &str) -> (RawPeer, OwnedFd) {
    let raw = Connection::to(&address(under)).expect("it listens");
    raw.send_bytes(&greeting(1, &hello()), &[]).expect("it reads");
    child.ok(&format!("accept {under} c 20000"));
    match raw.receive(DEADLINE) {
        Received::Packet(bytes, mut fds) => {
            assert_eq!(&bytes[..11], b"dipcchan\x01\x00\x00", "a hello of version 1");
            assert_eq!(fds.len(), 2, "the page of words, and the control socket");
            let (page, control) = (fds.remove(0), fds.remove(0));
            (RawPeer { messages: raw, control }, page)
        }
        other => panic!("no hello, but {other:?}"),
    }
}

pub(super) fn file(bytes: &[u8], seals: SealFlags) -> OwnedFd {
    let file = memfd_create("raw", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("a file");
    rustix::io::pwrite(&file, bytes, 0).expect("it takes them");
    fcntl_add_seals(&file, seals).expect("it can be sealed");
    file
}

pub(super) const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::WRITE);

/// A varint of the wire format.
pub(super) fn varint(number: u64) -> Vec<u8> {
    postcard::to_stdvec(&number).expect("it can be encoded")
}
