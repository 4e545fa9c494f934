//! The importer's side: a real [`Link`] to an exporter that replies as a script describes.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::net::{Shutdown, SocketFlags, accept_with, bind, listen, shutdown};

use super::script::{Script, Step};
use crate::model::device::DeviceOrdinal;
use crate::model::error::Error;
use crate::os::clock;
use crate::sharing::Runtime;
use crate::sharing::import::Link;
use crate::transport::{AllowList, Deadline, socket};
use crate::wire::BrokerAddress;
use crate::wire::descriptor::Descriptor;
use crate::wire::examples::{SOMEBODY, plain_descriptor};
use crate::wire::protocol::{PROTOCOL_VERSION, Reply, Request, decode, encode};

/// The kinds of steps, except [`SEND`].
pub(super) const SEND: u8 = 0;
pub(super) const SEND_WITH_DESCRIPTORS: u8 = 1;

/// The first byte of a script: the importer abandons its first request and sends another one.
pub(super) const GIVE_UP_FIRST: u8 = 1;
/// The first byte of a script: the first packet of the script replaces the exporter's hello.
pub(super) const OWN_HELLO: u8 = 2;

/// A timeout that no correct run reaches.
const PATIENCE: Duration = Duration::from_secs(10);

/// Maximum number of packets of a script: fewer than a socket queues.
const MOST_PACKETS: usize = 100;

/// The number of requests, and the connection, shut down for writing.
type Played = (usize, OwnedFd);

/// An importing process, and its exporter.
#[derive(Debug)]
pub struct Importer {
    descriptor: Descriptor,
    scripts: Sender<Vec<u8>>,
    /// The exporter's end of the connection and the number of requests, after it has sent everything.
    done: Receiver<Played>,
}

impl Importer {
    /// Starts the thread of the exporter.
    ///
    /// # Panics
    ///
    /// If this process cannot create a socket or thread.
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        // Not a broker's name, which processes that list the exports of this host would connect to.
        let name = format!("fuzzing-device-ipc-{}-{number}", std::process::id());
        let broker = BrokerAddress::Abstract(name.into_bytes().into());
        let listener = socket::new_socket().expect("this process may have a socket");
        bind(&listener, &broker.to_socket_address().expect("the name is short")).expect("the name is new");
        listen(&listener, 8).expect("the socket is bound");
        let (scripts, to_play) = channel::<Vec<u8>>();
        let (played, done) = channel();
        std::thread::spawn(move || {
            for script in to_play {
                if played.send(play(&listener, &script)).is_err() {
                    break;
                }
            }
        });
        let descriptor = plain_descriptor().with(|contents| contents.broker = broker);
        Self { descriptor, scripts, done }
    }

    /// Opens an export over a connection to the exporter of the script, and receives its further packets.
    ///
    /// # Panics
    ///
    /// If the importer accepts a wrong reply, or continues after the exporter has terminated.
    pub fn open(&self, input: &[u8]) {
        let [mode, ..] = input else { return };
        self.scripts.send(input.to_vec()).expect("the exporter's thread runs");
        let descriptor = &self.descriptor;
        let allow = AllowList::own_user();
        let runtime = Runtime::get().expect("this process has an identity");
        let connected = Link::connect_to(
            descriptor.exporter(),
            &descriptor.contents().broker,
            &allow,
            Deadline::after(PATIENCE),
            runtime,
        );
        let link = match connected {
            Ok(link) => link,
            Err(error) => {
                assert!(mode & OWN_HELLO != 0, "the hello was right: {error}");
                // An exporter may also refuse this user.
                let expected =
                    matches!(error, Error::Protocol(_) | Error::ExporterGone { .. } | Error::NotPermitted(_));
                assert!(expected, "{error:?}");
                clock::receive(&self.done, PATIENCE).expect("the exporter has seen the end");
                return;
            }
        };
        let open = |deadline| {
            let on = (DeviceOrdinal::new(0), Vec::new());
            link.open(
                descriptor.export(),
                (descriptor.contents().first().token, None),
                descriptor.access(),
                on,
                None,
                deadline,
                |_| {},
            )
        };
        let mut request = 1;
        if mode & GIVE_UP_FIRST != 0 {
            let given_up = open(Deadline::after(Duration::ZERO));
            assert!(matches!(given_up, Err(Error::Timeout { .. })), "nobody has answered yet");
            request = 2;
        }
        match open(Deadline::after(PATIENCE)) {
            Ok((grant, _fds)) => assert_eq!(grant.request.0, request, "another one's answer"),
            Err(Error::Timeout { .. }) => panic!("the exporter ended, and the importer went on to wait"),
            Err(_) => {}
        }
        let (seen, connection) =
            clock::receive(&self.done, PATIENCE).expect("the exporter has sent everything");
        assert_eq!(seen as u64, request, "requests that the exporter got");
        // The poller receives the remaining packets, and then the end.
        assert!(link.is_gone() || link.on_readable(), "nobody else reads");
        assert!(link.is_gone(), "the exporter has shut down its end");
        let late = open(Deadline::after(PATIENCE));
        assert!(matches!(late, Err(Error::ExporterGone { .. })), "it went on with one that has gone");
        let mut buffer = Vec::new();
        let mut releases = 0;
        while let Ok(Some(packet)) = socket::receive(connection.as_fd(), &mut buffer) {
            assert!(matches!(decode(&packet.bytes), Ok(Request::Release { .. })));
            releases += 1;
        }
        assert!(releases <= u32::from(mode & GIVE_UP_FIRST), "it gave back what it had not been granted");
    }
}

impl Default for Importer {
    fn default() -> Self {
        Self::new()
    }
}

/// Accepts one importer, waits for its requests, sends the script's packets and shuts the connection down.
fn play(listener: &OwnedFd, input: &[u8]) -> Played {
    let [mode, script @ ..] = input else { unreachable!("it has a first byte") };
    let patience = clock::now() + PATIENCE;
    let wait = |socket: &OwnedFd| {
        assert!(
            socket::wait_until(socket.as_fd(), PollFlags::IN, patience).expect("a socket can be waited for")
        );
    };
    wait(listener);
    let connection =
        accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK).expect("an importer waits");
    let mut buffer = Vec::new();
    let mut receive = || {
        wait(&connection);
        let packet = socket::receive(connection.as_fd(), &mut buffer).ok().flatten()?;
        decode::<Request>(&packet.bytes).ok()
    };
    assert!(matches!(receive(), Some(Request::Hello { protocol: PROTOCOL_VERSION, .. })));
    let mut steps = Script(script);
    let hello = if mode & OWN_HELLO == 0 {
        let hello = Reply::Hello { protocol: PROTOCOL_VERSION, exporter: SOMEBODY };
        encode(&hello).expect("a hello is short")
    } else {
        steps.next().map_or(Vec::new(), |step| step.packet.to_vec())
    };
    let _ = socket::send(connection.as_fd(), &hello, &[]);
    let wanted = if mode & GIVE_UP_FIRST == 0 { 1 } else { 2 };
    for seen in 0..wanted {
        // An importer that refuses the hello closes the connection.
        if !matches!(receive(), Some(Request::Open { .. })) {
            return (seen, connection);
        }
    }
    let mut packets = 0;
    for Step { action, times, packet } in steps {
        packets += times;
        if packets > MOST_PACKETS {
            break;
        }
        for _ in 0..times {
            let fds = [connection.as_fd(); 2];
            let fds = if action == SEND_WITH_DESCRIPTORS { &fds[..] } else { &[] };
            let _ = socket::send(connection.as_fd(), packet, fds);
        }
    }
    let _ = shutdown(&connection, Shutdown::Write);
    (wanted, connection)
}

#[cfg(test)]
mod tests;
