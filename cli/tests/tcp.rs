//! Two terminals and TCP with a shared key, and those who do not know it.

mod support;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use rustix::process::Signal;
use support::{Folder, Terminal, device_ipc, run, start};

const KEY: &str = "a key that nobody guesses";

/// A sender that listens, its address, and the file with its key.
fn listening(folder: &Folder, arguments: &[&str]) -> (Terminal, String, String) {
    let key = folder.key("key", KEY);
    let mut sender = start(["send", "--listen", "127.0.0.1:0", "--key-file", &key].iter().chain(arguments));
    let line = sender.until("listening at");
    let address = line.rsplit(' ').next().expect("an address").to_owned();
    (sender, address, key)
}

fn hello(version: u16) -> Vec<u8> {
    [&b"dipc-tcp"[..], &version.to_be_bytes(), &[7; 32]].concat()
}

#[test]
fn two_receivers_on_two_devices_get_the_tensor_and_the_sender_hears_of_it() {
    let folder = Folder::new();
    let (sender, address, key) = listening(&folder, &["--receivers", "2"]);
    let receive =
        |device| run(["recv", "--connect", &address, "--key-file", &key, "--device", device, "--add", "1"]);
    assert!(receive("0").good().contains("device=mock:0 (its home)"));
    assert!(receive("1").good().contains("added 1 on the device, mean=3.000000"));
    let sent = sender.end().good();
    for said in [
        "opened shape=[4, 5] dtype=float32 device=mock:1 (across cards)",
        "is done: added 1",
        "mean delta=2.0",
    ] {
        assert!(sent.contains(said), "{said:?} is missing in:\n{sent}");
    }
}

#[test]
fn a_wrong_key_is_refused_on_both_sides_and_the_right_one_still_works() {
    let folder = Folder::new();
    let (mut sender, address, _) = listening(&folder, &[]);
    let wrong = folder.key("wrong", "another key, which is wrong");
    let error = run(["recv", "--connect", &address, "--key-file", &wrong]).bad();
    assert!(error.contains("it refused: the key here is another one than there"), "{error}");
    sender.until("it does not know the key");
    let mut command = device_ipc();
    command.args(["recv", "--connect", &address]).env("DEVICE_IPC_KEY", KEY);
    let received = Terminal::start(command).end().good();
    assert!(!received.contains(KEY), "{received}");
    let sent = sender.end();
    assert!(!sent.out.contains(KEY) && !sent.err.contains(KEY), "{sent:?}");
    sent.good();
}

#[test]
fn those_who_say_nothing_or_nonsense_keep_nobody_out() {
    let folder = Folder::new();
    let (mut sender, address, key) = listening(&folder, &[]);
    let mut garbage = TcpStream::connect(&address).unwrap();
    garbage.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    sender.until("it does not speak this protocol: it began with 'GET / HT'");
    // More than the server keeps, and some that stop in the middle of what a receiver would say.
    let silent: Vec<TcpStream> = (0..100)
        .map(|index| {
            let mut one = TcpStream::connect(&address).unwrap();
            let part = &hello(1)[..index % 42];
            // It may have been closed to make room for another one.
            let _ = one.write_all(part);
            one
        })
        .collect();
    // The oldest had to go, long before its time was over.
    sender.until("no hello came: unexpected end of file");
    run(["recv", "--connect", &address, "--key-file", &key]).good();
    sender.end().good();
    drop(silent);
}

#[test]
fn another_version_is_named_on_both_sides() {
    let folder = Folder::new();
    let (mut sender, address, key) = listening(&folder, &[]);
    let mut newer = TcpStream::connect(&address).unwrap();
    newer.write_all(&hello(9)).unwrap();
    sender.until("it speaks version 9 of the protocol, and this program version 1");
    let mut answer = Vec::new();
    newer.read_to_end(&mut answer).unwrap();
    assert!(answer.len() == 42 && answer.starts_with(b"dipc-tcp\0\x01"), "{answer:?}");
    run(["recv", "--connect", &address, "--key-file", &key]).good();
    sender.end().good();

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let receiver = start(["recv", "--connect", &address, "--key-file", &key]);
    let mut met = listener.accept().unwrap().0;
    met.read_exact(&mut [0; 42]).unwrap();
    met.write_all(&hello(9)).unwrap();
    let error = receiver.end().bad();
    assert!(error.contains("version 9") && error.contains("version 1"), "{error}");
}

#[test]
fn a_server_that_is_no_sender_gets_nothing_and_is_named() {
    let folder = Folder::new();
    let key = folder.key("key", KEY);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let receiver = start(["recv", "--connect", &address, "--key-file", &key]);
    let mut met = listener.accept().unwrap().0;
    met.write_all(b"SSH-2.0-OpenSSH_9.9\r\n").unwrap();
    let error = receiver.end().bad();
    assert!(error.contains("it began with 'SSH-2.0-'"), "{error}");

    // One that plays the sender and does not know the key.
    let receiver = start(["recv", "--connect", &address, "--key-file", &key]);
    let mut met = listener.accept().unwrap().0;
    let mut proof = [0; 32];
    met.read_exact(&mut [0; 42]).unwrap();
    met.write_all(&hello(1)).unwrap();
    met.read_exact(&mut proof).unwrap();
    met.write_all(&[0]).unwrap();
    met.write_all(&proof).unwrap();
    let error = receiver.end().bad();
    assert!(error.contains("does not know the key itself"), "{error}");
}

#[test]
fn a_receiver_waits_for_the_sender_and_says_so() {
    let folder = Folder::new();
    let key = folder.key("key", KEY);
    // A port that was free a moment ago.
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let error = run(["recv", "--connect", &address, "--key-file", &key, "--timeout", "1"]).bad();
    assert!(error.contains("nobody could be reached at") && error.contains("within 1 s"), "{error}");
    let mut receiver = start(["recv", "--connect", &address, "--key-file", &key]);
    receiver.until("waiting up to 60 s for a sender to listen");
    let sender = start(["send", "--listen", &address, "--key-file", &key]);
    receiver.end().good();
    sender.end().good();
}

#[test]
fn without_a_key_or_an_address_nothing_begins() {
    let folder = Folder::new();
    for arguments in [["send", "--listen", "127.0.0.1:0"], ["recv", "--connect", "127.0.0.1:1"]] {
        let error = run(arguments).bad();
        assert!(error.contains("--key-file") && error.contains("DEVICE_IPC_KEY"), "{error}");
    }
    let empty = folder.key("empty", " ");
    assert!(run(["send", "--listen", "127.0.0.1:0", "--key-file", &empty]).bad().contains("is empty"));
    let key = folder.key("key", KEY);
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    for address in [&address, "nonsense"] {
        let error = run(["send", "--listen", address, "--key-file", &key]).bad();
        assert!(error.contains("listening at") && error.contains(address), "{error}");
    }
    assert!(run(["recv", "--connect", "nonsense", "--key-file", &key]).bad().contains("no HOST:PORT"));
}

#[test]
fn a_receiver_that_dies_or_fails_is_told_of_by_the_sender() {
    let folder = Folder::new();
    let (mut sender, address, key) = listening(&folder, &[]);
    // It never had the tensor open, so the sender goes on.
    let error = run(["recv", "--connect", &address, "--key-file", &key, "--device", "5"]).bad();
    assert!(error.contains("--device 5"), "{error}");
    sender.until("failed: --device 5");
    let mut receiver = start(["recv", "--connect", &address, "--key-file", &key, "--hold", "60"]);
    receiver.until("holding it");
    let pid = receiver.pid();
    receiver.kill();
    assert!(sender.end().good().contains(&format!("pid={pid} ended without saying that it was done")));
}

#[test]
fn a_sender_that_is_stopped_names_who_held_the_tensor() {
    let folder = Folder::new();
    let (sender, address, key) = listening(&folder, &[]);
    let mut receiver = start(["recv", "--connect", &address, "--key-file", &key, "--hold", "60"]);
    receiver.until("holding it");
    sender.signal(Signal::TERM);
    let sent = sender.end().good();
    assert!(sent.contains(&format!("still held: process {}", receiver.pid())), "{sent}");
    assert!(receiver.end().bad().contains("has ended"));
}
