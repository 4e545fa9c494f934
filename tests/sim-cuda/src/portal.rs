//! Requests to an exporter in another pid namespace.
//!
//! The driver finds memory and events in the kernel, wherever the two processes are. This library opens the
//! exporter's descriptors through `/proc`. If the exporter is not visible there, it sends requests over a socket in
//! the abstract namespace, which leaves no file behind. Both processes must then be in one network namespace, which
//! is a difference from the driver.

use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg, sockopt,
};

use crate::simulator::simulator;
use crate::status::{Result, Status};

/// The request for the exporter's directory.
pub(crate) const DIRECTORY: Request = Request { what: 0, number: 0 };

/// Time limit of both sides.
const TIMEOUT: Duration = Duration::from_secs(5);

/// A request of one process to another.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Request {
    what: u64,
    number: u64,
}

impl Request {
    /// Creates the request for the physical memory with this number.
    pub(crate) fn block(number: u64) -> Self {
        Self { what: 1, number }
    }

    /// Creates the request for the event in a slot.
    pub(crate) fn event(slot: u32) -> Self {
        Self { what: 2, number: slot.into() }
    }
}

fn address(nonce: u64) -> Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("device-ipc-sim-cuda-{nonce:016x}"))
        .map_err(|_| Status::OPERATING_SYSTEM)
}

/// Serves the directory and its objects for the life of the process.
pub(crate) fn serve(nonce: u64, directory: &OwnedFd) -> Result {
    let system = |_| Status::OPERATING_SYSTEM;
    let listener = UnixListener::bind_addr(&address(nonce)?).map_err(system)?;
    let directory = directory.try_clone().map_err(system)?;
    let serve = move || {
        for stream in listener.incoming().flatten() {
            // An invalid request gets no answer.
            let _ = answer(&stream, &directory);
        }
    };
    std::thread::Builder::new().name("sim-cuda-portal".into()).spawn(serve).map_err(system)?;
    Ok(())
}

fn answer(mut stream: &UnixStream, directory: &OwnedFd) -> std::io::Result<()> {
    stream.set_read_timeout(Some(TIMEOUT))?;
    let own = rustix::process::geteuid();
    if sockopt::socket_peercred(stream)?.uid != own {
        return Ok(());
    }
    let mut request = [0; 16];
    stream.read_exact(&mut request)?;
    let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|index| request[at + index]));
    let found = match word(0) {
        0 => directory.try_clone().ok(),
        1 => block(word(8)),
        _ => event(word(8)),
    };
    let Some(found) = found else { return Ok(()) };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [found.as_fd()];
    control.push(SendAncillaryMessage::ScmRights(&fds));
    sendmsg(stream, &[IoSlice::new(b"!")], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

fn block(number: u64) -> Option<OwnedFd> {
    let simulator = simulator().ok()?;
    let objects = simulator.objects();
    let is_it = |block| simulator.machine.export_block_number(block) == Ok(number);
    let found = objects.memory.chunks.values().map(|chunk| chunk.block).find(|block| is_it(*block))?;
    simulator.machine.export_block_fd(found).ok()
}

fn event(slot: u64) -> Option<OwnedFd> {
    let simulator = simulator().ok()?;
    let event = simulator.objects().directory.as_ref()?.event_in(u32::try_from(slot).ok()?)?;
    simulator.machine.export_event_fd(event).ok()
}

/// Sends a request to an exporter.
///
/// # Errors
/// `INVALID_HANDLE` if the exporter has exited, or does not have the object any more.
pub(crate) fn ask(nonce: u64, request: Request) -> Result<OwnedFd> {
    let reset_objects = |_| Status::INVALID_HANDLE;
    let mut stream = UnixStream::connect_addr(&address(nonce)?).map_err(reset_objects)?;
    stream.set_read_timeout(Some(TIMEOUT)).map_err(reset_objects)?;
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&request.what.to_le_bytes());
    bytes[8..].copy_from_slice(&request.number.to_le_bytes());
    stream.write_all(&bytes).map_err(reset_objects)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(&stream, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)
        .map_err(|_| Status::INVALID_HANDLE)?;
    let mut messages = control.drain();
    let found = messages.find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    found.ok_or(Status::INVALID_HANDLE)
}
