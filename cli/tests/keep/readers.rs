//! Processes that open kept weights, and end.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;

use device_ipc::Access;
use rustix::process::Signal;

use super::{TIMEOUT, ipc, keep, model, open, release, unique, values};
use crate::support::{Directory, run, wait};

/// The environment variable by which [`reader_process`] is a child of a test.
const READER: &str = "DEVICE_IPC_TEST_KEPT";

/// Opens weights, states so, and waits to be killed.
#[test]
#[ignore = "a child process of other tests"]
fn reader_process() {
    let Ok(name) = std::env::var(READER) else { return };
    let _open = open(&ipc(), &name).expect("opened");
    println!("\nopened");
    std::thread::sleep(TIMEOUT);
}

fn start_reader(name: &str) -> Child {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", "readers::reader_process", "--ignored", "--nocapture"]).env(READER, name);
    let mut reader = command.stdout(Stdio::piped()).spawn().expect("a reader starts");
    let lines = BufReader::new(reader.stdout.take().expect("piped")).lines();
    let opened = lines.map_while(Result::ok).any(|line| line == "opened");
    assert!(opened, "the reader has opened the weights");
    reader
}

#[test]
fn kept_tensor_is_read_by_name_until_the_keeper_stops() {
    let directory = Directory::new();
    let file = model(&directory, "m.safetensors", &[("norm", &[1.0, 2.0, 3.0]), ("bias", &[-1.0])]);
    let name = unique("basic");
    let keeper = keep(&[&file, "--name", &name]);
    let at = format!("keeper:{name}");
    for _ in 0..2 {
        let read = run(["attach", &at, "read", "--tensor", "norm"]).good();
        assert!(read.contains("shape=[3] dtype=float32") && read.contains("mean=2.0"), "{read}");
    }
    let info = run(["attach", &at, "info"]).good();
    assert!(info.contains("norm") && info.contains("bias") && info.contains("read-only"), "{info}");
    keeper.signal(Signal::TERM);
    let stopped = keeper.wait().good();
    assert!(stopped.contains("stopped by SIGTERM") && stopped.contains("the weights are freed"), "{stopped}");
    let error = run(["attach", &at, "read", "--tensor", "norm", "--timeout", "100ms"]).bad();
    assert!(error.contains("no keeper of") && error.contains("--list"), "{error}");
}

#[test]
fn kept_tensor_cannot_be_written() {
    let directory = Directory::new();
    let file = model(&directory, "m.safetensors", &[("w", &[1.0])]);
    let name = unique("readonly");
    let _keeper = keep(&[&file, "--name", &name]);
    let error = run(["attach", &format!("keeper:{name}"), "add", "1", "--tensor", "w"]).bad();
    assert!(error.contains("read-only"), "{error}");
    let ipc = ipc();
    let kept = ipc.find(&name).timeout(TIMEOUT).start().unwrap();
    let refused = kept.open().access(Access::ReadWrite).at_home().unwrap_err();
    assert!(refused.is_not_permitted(), "{refused}");
}

#[test]
fn writable_weights_are_shared_by_all_readers() {
    let directory = Directory::new();
    let file = model(&directory, "m.safetensors", &[("w", &[1.0])]);
    let name = unique("writable");
    let _keeper = keep(&[&file, "--name", &name, "--writable"]);
    run(["attach", &format!("keeper:{name}"), "add", "1", "--tensor", "w"]).good();
    let ipc = ipc();
    assert_eq!(values(&ipc, &open(&ipc, &name).unwrap().1, "w"), [2.0]);
}

#[test]
fn killed_reader_leaves_no_lease() {
    let directory = Directory::new();
    let file = model(&directory, "m.safetensors", &[("w", &[1.0])]);
    let name = unique("killed-reader");
    let keeper = keep(&[&file, "--name", &name]);
    let mut readers = [start_reader(&name), start_reader(&name)];
    let ipc = ipc();
    let readers_now = || ipc.find(&name).timeout(TIMEOUT).start().unwrap().readers();
    assert_eq!(readers_now(), 2);
    for reader in &mut readers {
        reader.kill().unwrap();
        wait(reader);
    }
    // The keeper's poller sees the closed sockets in its own time.
    let end = std::time::Instant::now() + TIMEOUT;
    while readers_now() > 0 {
        assert!(std::time::Instant::now() < end, "the leases of killed readers do not end");
        std::thread::yield_now();
    }
    keeper.signal(Signal::INT);
    // The grant of this process's last question may be on its way back, so that this process is listed.
    let stopped = keeper.wait().good();
    assert!(!readers.iter().any(|reader| stopped.contains(&reader.id().to_string())), "{stopped}");
}

#[test]
fn killed_keeper_is_reported_and_replaced_by_another() {
    let directory = Directory::new();
    let file = model(&directory, "m.safetensors", &[("w", &[1.0])]);
    let name = unique("killed-keeper");
    let keeper = keep(&[&file, "--name", &name]);
    let ipc = ipc();
    let (_, mapping) = open(&ipc, &name).unwrap();
    let (sender, gone) = channel();
    mapping.on_gone(move |error| sender.send(error.to_string()).unwrap());
    keeper.kill();
    assert!(gone.recv_timeout(TIMEOUT).unwrap().contains("ended"));
    drop(mapping);
    let error = ipc.find(&name).timeout(std::time::Duration::from_millis(50)).start().unwrap_err();
    assert!(error.is_timeout(), "{error}");
    // A process that waits for the name is answered by the next keeper.
    let waiting = std::thread::spawn({
        let (ipc, name) = (ipc.clone(), name.clone());
        move || open(&ipc, &name).map(|(version, mapping)| (version, values(&ipc, &mapping, "w")))
    });
    let _next = keep(&[&file, "--name", &name]);
    assert_eq!(waiting.join().unwrap().unwrap(), (1, vec![1.0]));
}

#[test]
fn stopping_keeper_names_its_readers_and_leaves_them_the_memory() {
    let directory = Directory::new();
    let file = model(&directory, "m.safetensors", &[("w", &[1.0])]);
    let name = unique("stopped");
    let keeper = keep(&[&file, "--name", &name]);
    let ipc = ipc();
    let (_, mapping) = open(&ipc, &name).unwrap();
    keeper.signal(Signal::TERM);
    let out = keeper.wait().good();
    assert!(out.contains("notified") && out.contains(&std::process::id().to_string()), "{out}");
    release(&ipc, mapping);
}
