//! Keepers that follow each other under one name.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use device_ipc::{Error, Message};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, socket_with};
use rustix::process::Signal;

use super::versions::read_repeatedly;
use super::{TIMEOUT, ipc, keep, model, open, release, unique, values};
use crate::support::{Directory, run, start_in};

#[test]
fn readers_never_fail_while_keepers_follow_each_other() {
    let directory = Directory::new();
    let first = model(&directory, "1.safetensors", &[("version", &[1.0])]);
    let second = model(&directory, "2.safetensors", &[("version", &[2.0])]);
    let name = unique("hand-over");
    let mut keeper = keep(&[&first, "--name", &name]);
    let stop = Arc::new(AtomicBool::new(false));
    let readers: Vec<_> = (0..2)
        .map(|_| {
            let (ipc, name, stop) = (ipc(), name.clone(), Arc::clone(&stop));
            std::thread::spawn(move || read_repeatedly(&ipc, &name, &stop))
        })
        .collect();
    // With the weights of the predecessor, then with other files, then with the weights again.
    for (arguments, version) in [
        (vec!["--hand-over", "--name", &name], 1),
        (vec!["--hand-over", "--name", &name, &second], 2),
        (vec!["--hand-over", "--name", &name], 2),
    ] {
        let next = keep(&arguments);
        let ended = keeper.wait();
        // The handles end before the memory is freed.
        assert!(!ended.err.contains("could not be taken back"), "{ended:?}");
        let out = ended.good();
        assert!(out.contains("has taken over") && out.contains("no process uses"), "{out}");
        keeper = next;
        let (now, mapping) = open(&ipc(), &name).unwrap();
        assert_eq!((now, values(&ipc(), &mapping, "version")), (version, vec![version as f32]));
    }
    stop.store(true, Ordering::Release);
    for reader in readers {
        let (opens, last) = reader.join().expect("no open failed");
        assert!(opens > 0 && last <= 2, "{opens} opens, last version {last}");
    }
    keeper.signal(Signal::TERM);
    keeper.wait().good();
}

#[test]
fn predecessor_ends_after_its_last_reader() {
    let directory = Directory::new();
    let file = model(&directory, "m.safetensors", &[("w", &[1.0])]);
    let name = unique("drain");
    let mut first = keep(&[&file, "--name", &name]);
    let ipc = ipc();
    let (_, mapping) = open(&ipc, &name).unwrap();
    let (sender, dropped) = channel();
    mapping.on_dropped(move || sender.send(()).unwrap());
    let _second = keep(&["--hand-over", "--name", &name]);
    first.until("has taken over");
    dropped.recv_timeout(TIMEOUT).expect("the reader is notified");
    assert_eq!(values(&ipc, &mapping, "w"), [1.0]);
    assert!(mapping.descriptor().exporter().pid == first.pid(), "it is the memory of the first keeper");
    release(&ipc, mapping);
    assert!(first.wait().good().contains("no process uses the former weights"));
    assert_eq!(values(&ipc, &open(&ipc, &name).unwrap().1, "w"), [1.0]);
}

#[test]
fn keeper_continues_when_its_successor_fails() {
    let directory = Directory::new();
    let file = model(&directory, "m.safetensors", &[("w", &[1.0])]);
    let name = unique("failed-successor");
    let mut keeper = keep(&[&file, "--name", &name]);
    let ipc = ipc();
    let opens = || assert_eq!(values(&ipc, &open(&ipc, &name).unwrap().1, "w"), [1.0]);
    let control = format!("keeper-control.{name}");
    let connect = || ipc.connect(&control).timeout(TIMEOUT).start().unwrap();
    // Before it is ready.
    drop(connect());
    opens();
    // After it has the names.
    let successor = connect();
    successor.receive(TIMEOUT).unwrap();
    successor.send(Message::new().bytes(&b"ready"[..]), TIMEOUT).unwrap();
    assert_eq!(successor.receive(TIMEOUT).unwrap().bytes(), b"released");
    drop(successor);
    keeper.until("has not taken over");
    opens();
    // A message of another version.
    let successor = connect();
    successor.send(Message::new().bytes(&b"whatever"[..]), TIMEOUT).unwrap();
    opens();
    drop(successor);
    // A real one succeeds after all that.
    let next = keep(&["--hand-over", "--name", &name]);
    keeper.wait().good();
    opens();
    drop(next);
}

/// A process without rights cannot take a name in the moment between two keepers.
#[test]
fn names_are_never_free_during_a_hand_over() {
    let directory = Directory::new();
    let file = model(&directory, "m.safetensors", &[("w", &[1.0])]);
    let name = unique("squatted");
    let mut keeper = keep(&[&file, "--name", &name]);
    let uid = rustix::process::geteuid().as_raw();
    let check_in_use = || {
        for prefix in ["keeper", "keeper-control"] {
            let address = format!("device-ipc.{uid}.{prefix}.{name}");
            let address = SocketAddrUnix::new_abstract_name(address.as_bytes()).unwrap();
            let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
            assert_eq!(bind(socket.unwrap(), &address), Err(Errno::ADDRINUSE), "{prefix}");
        }
    };
    let ipc = ipc();
    let connecting = ipc.connect(&format!("keeper-control.{name}")).timeout(TIMEOUT).start();
    let successor = connecting.unwrap();
    successor.receive(TIMEOUT).unwrap();
    successor.send(Message::new().bytes(&b"ready"[..]), TIMEOUT).unwrap();
    assert_eq!(successor.receive(TIMEOUT).unwrap().bytes(), b"released");
    // The keeper answers no longer, and the successor does not answer yet.
    let unanswered = ipc.find(&name, Duration::from_millis(300)).map(|found| found.version());
    assert!(matches!(unanswered, Err(Error::Timeout { .. })), "{unanswered:?}");
    check_in_use();
    drop(successor);
    keeper.until("has not taken over");
    check_in_use();
    assert_eq!(ipc.find(&name, TIMEOUT).unwrap().version(), 1, "the keeper answers again");
    let next = keep(&["--hand-over", "--name", &name]);
    check_in_use();
    keeper.wait().good();
    check_in_use();
    assert_eq!(values(&ipc, &open(&ipc, &name).unwrap().1, "w"), [1.0]);
    drop(next);
}

/// The socket's file stays in the directory while keepers follow each other, and is removed with the last one.
#[test]
fn hand_over_in_a_socket_directory_keeps_the_file() {
    let directory = Directory::new();
    let file = model(&directory, "m.safetensors", &[("w", &[3.0])]);
    let sockets = directory.text("sockets");
    std::fs::create_dir(&sockets).unwrap();
    let command = |arguments: &[&str]| start_in(&sockets, arguments);
    let mut keeper = command(&["keep", &file, "--name", "moving"]);
    keeper.until("keeps version");
    for _ in 0..2 {
        let mut next = command(&["keep", "--hand-over", "--name", "moving"]);
        next.until("keeps version");
        keeper.wait().good();
        keeper = next;
        let read = command(&["attach", "keeper:moving", "read", "--tensor", "w"]).wait().good();
        assert!(read.contains("mean=3.0"), "{read}");
    }
    keeper.signal(Signal::TERM);
    keeper.wait().good();
    let left: Vec<_> = std::fs::read_dir(&sockets).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn hand_over_without_a_keeper_needs_files() {
    let directory = Directory::new();
    let name = unique("alone");
    let error = run(["keep", "--hand-over", "--name", &name, "--timeout", "100ms"]).bad();
    assert!(error.contains("no keeper of") && error.contains("files"), "{error}");
    let file = model(&directory, "m.safetensors", &[("w", &[1.0])]);
    let _keeper = keep(&["--hand-over", &file, "--name", &name]);
    assert_eq!(values(&ipc(), &open(&ipc(), &name).unwrap().1, "w"), [1.0]);
}
