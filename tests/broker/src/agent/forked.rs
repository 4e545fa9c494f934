//! The library in a forked child.

use std::os::fd::OwnedFd;
use std::time::Duration;

use device_ipc_conformance::agent::{Answer, Rings, Server};
use device_ipc_conformance::check::Refusal;
use device_ipc_core::{Error, Message, ProcessIdentity, Result};

use super::Agent;

/// The time limit of every call in the child.
const TIME: Duration = Duration::from_secs(5);

impl Agent {
    pub(super) fn fork(&mut self) -> Answer {
        let (done, tell_done): (OwnedFd, OwnedFd) = rustix::pipe::pipe().expect("a pipe");
        // SAFETY: the agent's own thread holds no lock here, and the child calls nothing that takes one which another
        // thread may hold: that calls into the library return before they do is what is tested.
        match unsafe { libc::fork() } {
            0 => {
                drop(done);
                if let Some(server) = self.server.take() {
                    try_everything(server);
                }
                self.mock = None;
                let is_own = ProcessIdentity::current().is_ok_and(|own| own.pid == std::process::id());
                write_line(if is_own { "event child done" } else { "event child has its parent's identity" });
                let _ = rustix::io::write(&tell_done, &[1]);
                loop {
                    // SAFETY: a plain system call.
                    unsafe { libc::pause() };
                }
            }
            pid => {
                drop(tell_done);
                assert!(pid > 0, "{}", std::io::Error::last_os_error());
                assert_eq!(rustix::io::read(&done, &mut [0]), Ok(1), "the child finishes");
                Answer::Number(pid as u64)
            }
        }
    }
}

/// Calls everything with the guards of the parent, reports the results and drops the guards.
fn try_everything(mut server: Server) {
    let exports = server.exports.values().map(|export| export.descriptor().clone());
    let mappings = server.mappings.values().map(|mapping| mapping.descriptor().clone());
    let descriptor = exports.chain(mappings).next();
    if let Some(descriptor) = descriptor {
        report("open", server.ipc.open(&descriptor).timeout(TIME).at_home().map(drop));
    }
    report("allocate", server.ipc.allocate(0, 4096).map(drop));
    report("shutdown", device_ipc_core::shutdown(TIME));
    report("close-unused", device_ipc_core::close_unused(TIME));
    try_channels(&mut server);
    try_rings(&mut server);
    report("cache", device_ipc_core::limits::set_cache_limits(device_ipc_core::limits::CacheLimits::NONE));
    for (_, export) in std::mem::take(&mut server.exports) {
        report("holders", if export.holders().iter().len() == 0 { Err(Error::Forked) } else { Ok(()) });
        report("wait-released", export.wait_released(TIME));
        report("close", export.close(TIME).map_err(Into::into));
    }
    let stream = server.streams.remove(&0);
    for (index, (_, mut mapping)) in std::mem::take(&mut server.mappings).into_iter().enumerate() {
        if let Some(stream) = &stream {
            report("view", mapping.view::<f32, _>(stream).map(drop));
            report("suspend", mapping.suspend());
            let descriptor = mapping.descriptor().clone();
            report("replace", mapping.replace(&descriptor));
            if index == 0 {
                report("release", mapping.release(stream).map_err(Error::from));
            }
        }
    }
}

fn try_channels(server: &mut Server) {
    if server.channels.is_empty() {
        return;
    }
    report("listen", server.ipc.listen("child").start().map(drop));
    report("connect", server.ipc.connect("child").timeout(TIME).start().map(drop));
    for (_, listener) in server.listeners.drain() {
        report("accept", listener.accept(TIME).map(drop));
    }
    for (_, received) in server.received.drain() {
        report("reply", received.reply(Message::new(), TIME));
        report("open-received", received.exports()[0].open().at_home().map(drop));
    }
    for (_, channel) in server.channels.drain() {
        report("send", channel.send(Message::new(), TIME));
        report("receive", channel.receive(TIME).map(drop));
        report("close-channel", channel.close(TIME));
    }
}

fn try_rings(server: &mut Server) {
    let Some(stream) = server.streams.get(&0) else { return };
    let Rings { ring, reader, slots } = std::mem::take(&mut server.rings);
    if let Some(mut ring) = ring {
        report("ring-write", ring.write(stream).map(drop));
        report("ring-try-write", ring.try_write(stream).map(drop));
        report("ring-writable", ring.wait_writable(TIME));
        report("ring-readers", ring.wait_readers(1, TIME));
        report("ring-close", ring.close(TIME));
    }
    if let Some(mut reader) = reader {
        report("ring-next", reader.next(TIME).map(drop));
        report("ring-try-next", reader.try_next().map(drop));
        report("ring-next-ahead", reader.next_ahead(stream).map(drop));
    }
    for slot in slots {
        report("ring-check", slot.check());
        let Err(refused) = slot.release(stream) else { return report("ring-release", Ok(())) };
        report("ring-release-now", refused.into_inner().release_now().map_err(Error::from));
    }
}

fn report(call: &str, result: Result<()>) {
    let outcome = result.map_or_else(|error| Refusal::from(error).kind, |()| "went well".to_owned());
    write_line(&format!("event child {call} {outcome}"));
}

/// Writes to the agent's socket directly: another thread of the parent may have held the lock of its connection.
fn write_line(line: &str) {
    let _ = rustix::io::write(rustix::stdio::stdin(), format!("{line}\n").as_bytes());
}
