//! Listeners whose name another process takes over.

use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, thread};

use super::roles::{argument, start};
use device_ipc::mock::MockBackend;
use device_ipc::{Error, Ipc, Key, Listener};
use device_ipc_test_process::serve;

const TIMEOUT: Duration = Duration::from_secs(30);

fn ipc(directory: Option<&Path>) -> Ipc {
    let builder = Ipc::builder();
    let builder = if let Some(directory) = directory { builder.socket_directory(directory) } else { builder };
    builder.with_backend(MockBackend::from_spec("devices=1").expect("a valid machine"))
}

/// Checks that the listener accepts a channel of its name.
fn check_accepts(ipc: &Ipc, name: &str, listener: &Listener) {
    thread::scope(|scope| {
        let connecting = scope.spawn(|| ipc.connect(name).timeout(TIMEOUT).start().expect("it listens"));
        let accepted = listener.accept(TIMEOUT).expect("one connects");
        drop((connecting.join().expect("no panic"), accepted));
    });
}

/// Not a test: the process that takes a name over.
#[test]
#[ignore = "started by the tests"]
fn role() {
    let (name, directory) = (argument("NAME"), argument("DIRECTORY"));
    let ipc = ipc(Some(Path::new(&directory)).filter(|path| !path.as_os_str().is_empty()));
    let channel = ipc.connect(&name).timeout(TIMEOUT).start().expect("the test listens");
    let mut listener = None;
    serve(|command, _| match command {
        "take-over" => {
            listener = Some(ipc.listen(&name).take_over(&channel).expect("it was handed over"));
            "listens"
        }
        "accept" => {
            drop(listener.as_ref().expect("take-over comes first").accept(TIMEOUT).expect("one connects"));
            "accepted"
        }
        "stop" => {
            listener = None;
            "stopped"
        }
        other => panic!("unknown command {other:?}"),
    });
}

fn hand_over_and_take_back(directory: Option<&Path>) {
    let ipc = ipc(directory);
    let name = format!("take-over-{}-{}", std::process::id(), directory.is_some());
    let mut listener = ipc.listen(&name).start().expect("the name is new");
    let path = directory.map_or("", |path| path.to_str().expect("text"));
    let mut successor = start(module_path!(), "successor", &[("NAME", &name), ("DIRECTORY", path)]);
    let channel = listener.accept(TIMEOUT).expect("the successor connects");

    // The successor does not take it.
    listener.hand_over(&channel).expect("sent");
    listener.take_back().expect("no process has taken it");
    check_accepts(&ipc, &name, &listener);

    listener.hand_over(&channel).expect("sent");
    assert_eq!(successor.ask("take-over"), "listens");
    successor.send("accept");
    drop(ipc.connect(&name).timeout(TIMEOUT).start().expect("the successor listens"));
    assert_eq!(successor.receive(), "accepted");

    assert_eq!(successor.ask("stop"), "stopped");
    if directory.is_some() {
        // The successor has removed its file, and the name is free.
        let third = ipc.listen(&name).start().expect("the name is free");
        let refused = listener.take_back();
        assert!(matches!(refused, Err(Error::ChannelNameInUse { .. })), "{refused:?}");
        check_accepts(&ipc, &name, &third);
    }
    listener.take_back().expect("no other process listens");
    check_accepts(&ipc, &name, &listener);
    successor.finish();
}

#[test]
fn listener_of_the_network_namespace_is_handed_over_and_taken_back() {
    hand_over_and_take_back(None);
}

#[test]
fn listener_of_a_directory_is_handed_over_and_taken_back() {
    let directory: PathBuf =
        std::env::temp_dir().join(format!("device-ipc-take-over-{}", std::process::id()));
    fs::create_dir_all(&directory).expect("a new directory");
    hand_over_and_take_back(Some(&directory));
    let files = fs::read_dir(&directory).expect("it exists").map(|file| file.expect("it is read"));
    assert_eq!(files.filter(|file| file.file_type().is_ok_and(|kind| kind.is_socket())).count(), 0);
    fs::remove_dir_all(&directory).expect("removed");
}

#[test]
fn listener_at_an_address_is_not_handed_over() {
    let ipc = ipc(None);
    let key = Key::new(b"the key of these tests").expect("a long key");
    let name = format!("take-over-{}-tcp", std::process::id());
    let local = ipc.listen(&name).start().expect("the name is new");
    let (channel, _other) = thread::scope(|scope| {
        let connecting = scope.spawn(|| ipc.connect(&name).timeout(TIMEOUT).start().expect("it listens"));
        (local.accept(TIMEOUT).expect("one connects"), connecting.join().expect("no panic"))
    });
    let listener = ipc.listen_tcp("127.0.0.1:0", &key).start().expect("a free port");
    let refused = listener.hand_over(&channel);
    assert!(matches!(refused, Err(Error::Io { .. })), "{refused:?}");
}
