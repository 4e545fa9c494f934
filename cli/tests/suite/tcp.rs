//! `send` and `recv` over TCP with a shared key, and peers without the key.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};

use crate::support::{Directory, Terminal, device_ipc, run, start, start_unread};
use rustix::process::Signal;

const KEY: &str = "a key that nobody guesses";

/// Starts a sender that listens; returns it with its address and its key file.
fn listening(directory: &Directory, arguments: &[&str]) -> (Terminal, String, String) {
    let key = directory.key("key", KEY);
    let mut sender = start(["send", "--listen", "127.0.0.1:0", "--key-file", &key].iter().chain(arguments));
    let line = sender.until("listening at");
    let address = line.rsplit(' ').next().expect("an address").to_owned();
    (sender, address, key)
}

fn hello(version: u16) -> Vec<u8> {
    [&b"dipc-tcp"[..], &version.to_be_bytes(), &[7; 32]].concat()
}

#[test]
fn two_receivers_on_two_devices_report_to_the_sender() {
    let directory = Directory::new();
    let (sender, address, key) = listening(&directory, &["--receivers", "2"]);
    let receive =
        |device| run(["recv", "--connect", &address, "--key-file", &key, "--device", device, "--add", "1"]);
    assert!(receive("0").good().contains("device=mock:0 (its home)"));
    assert!(receive("1").good().contains("added 1 on the device, mean=3.000000"));
    let sent = sender.wait().good();
    for expected in [
        "opened shape=[4, 5] dtype=float32 device=mock:1 (across cards)",
        "is done: added 1",
        "mean delta=2.0",
    ] {
        assert!(sent.contains(expected), "{expected:?} not found in:\n{sent}");
    }
}

#[test]
fn wrong_key_is_rejected_and_right_key_still_works() {
    let directory = Directory::new();
    let (mut sender, address, _) = listening(&directory, &[]);
    let wrong = directory.key("wrong", "another key, which is wrong");
    let error = run(["recv", "--connect", &address, "--key-file", &wrong]).bad();
    assert!(error.contains("the server has a different key"), "{error}");
    sender.until("the client does not know the key");
    let mut command = device_ipc();
    command.args(["recv", "--connect", &address]).env("DEVICE_IPC_KEY", KEY);
    let received = Terminal::start(command).wait().good();
    assert!(!received.contains(KEY), "{received}");
    let sent = sender.wait();
    assert!(!sent.out.contains(KEY) && !sent.err.contains(KEY), "{sent:?}");
    sent.good();
}

#[test]
fn silent_and_invalid_peers_do_not_block_receivers() {
    let directory = Directory::new();
    let (mut sender, address, key) = listening(&directory, &[]);
    let mut garbage = TcpStream::connect(&address).unwrap();
    garbage.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    sender.until("the peer speaks another protocol; its first bytes are 'GET / HT'");
    // More connections than the server keeps, some of which send part of a hello.
    let silent: Vec<TcpStream> = (0..100)
        .map(|index| {
            let mut one = TcpStream::connect(&address).unwrap();
            let part = &hello(3)[..index % 42];
            // The server may have closed it in favour of a newer connection.
            let _ = one.write_all(part);
            one
        })
        .collect();
    // The server closes the oldest connection long before its deadline.
    sender.until("cannot receive the hello: closed by peer");
    run(["recv", "--connect", &address, "--key-file", &key]).good();
    sender.wait().good();
    drop(silent);
}

#[test]
fn version_mismatch_is_reported_on_both_sides() {
    let directory = Directory::new();
    let (mut sender, address, key) = listening(&directory, &[]);
    let mut newer = TcpStream::connect(&address).unwrap();
    newer.write_all(&hello(9)).unwrap();
    sender.until("the peer uses version 9 of the protocol, but this program uses version 3");
    let mut answer = Vec::new();
    newer.read_to_end(&mut answer).unwrap();
    assert!(answer.len() == 42 && answer.starts_with(b"dipc-tcp\0\x03"), "{answer:?}");
    run(["recv", "--connect", &address, "--key-file", &key]).good();
    sender.wait().good();

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let receiver = start(["recv", "--connect", &address, "--key-file", &key]);
    let mut met = listener.accept().unwrap().0;
    met.read_exact(&mut [0; 50]).unwrap();
    met.write_all(&hello(9)).unwrap();
    let error = receiver.wait().bad();
    assert!(error.contains("version 9") && error.contains("version 3"), "{error}");
}

#[test]
fn server_of_another_protocol_is_rejected() {
    let directory = Directory::new();
    let key = directory.key("key", KEY);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let receiver = start(["recv", "--connect", &address, "--key-file", &key]);
    let mut met = listener.accept().unwrap().0;
    met.write_all(b"SSH-2.0-OpenSSH_9.9\r\n").unwrap();
    let error = receiver.wait().bad();
    assert!(error.contains("its first bytes are 'SSH-2.0-'"), "{error}");

    // A server that follows the protocol without knowing the key.
    let receiver = start(["recv", "--connect", &address, "--key-file", &key]);
    let mut met = listener.accept().unwrap().0;
    let mut proof = [0; 32];
    met.read_exact(&mut [0; 50]).unwrap();
    met.write_all(&hello(3)).unwrap();
    met.read_exact(&mut proof).unwrap();
    met.write_all(&[0]).unwrap();
    met.write_all(&proof).unwrap();
    let error = receiver.wait().bad();
    assert!(error.contains("the server does not know the key"), "{error}");
}

#[test]
fn receiver_waits_for_the_sender() {
    let directory = Directory::new();
    let key = directory.key("key", KEY);
    // A port that was free a moment ago.
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let error = run(["recv", "--connect", &address, "--key-file", &key, "--timeout", "1s"]).bad();
    assert!(error.contains("cannot connect to") && error.contains("within 1s"), "{error}");
    let mut receiver = start(["recv", "--connect", &address, "--key-file", &key]);
    receiver.until("waiting up to 1m for a sender to listen");
    let sender = start(["send", "--listen", &address, "--key-file", &key]);
    receiver.wait().good();
    sender.wait().good();
}

#[test]
fn missing_key_or_invalid_address_is_an_error() {
    let directory = Directory::new();
    for arguments in [["send", "--listen", "127.0.0.1:0"], ["recv", "--connect", "127.0.0.1:1"]] {
        let error = run(arguments).usage();
        assert!(error.contains("--key-file") && error.contains("DEVICE_IPC_KEY"), "{error}");
    }
    let empty = directory.key("empty", " ");
    assert!(run(["send", "--listen", "127.0.0.1:0", "--key-file", &empty]).bad().contains("is empty"));
    let key = directory.key("key", KEY);
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let error = run(["send", "--listen", &address, "--key-file", &key]).bad();
    assert!(error.contains("cannot listen at this address") && error.contains(&address), "{error}");
    for arguments in [["send", "--listen", "nonsense"], ["recv", "--connect", "nonsense"]] {
        assert!(run(arguments).usage().contains("an address is HOST:PORT"));
    }
}

#[test]
fn sender_reports_failed_and_killed_receivers() {
    let directory = Directory::new();
    let (mut sender, address, key) = listening(&directory, &[]);
    // The receiver never opened the tensor, so the sender continues.
    let error = run(["recv", "--connect", &address, "--key-file", &key, "--device", "5"]).bad();
    assert!(error.contains("--device 5"), "{error}");
    sender.until("failed: --device 5");
    let mut receiver = start(["recv", "--connect", &address, "--key-file", &key, "--hold", "60s"]);
    receiver.until("holding it");
    let pid = receiver.pid();
    receiver.kill();
    assert!(sender.wait().good().contains(&format!("pid={pid} exited without reporting completion")));
}

#[test]
fn stopped_sender_names_the_holders() {
    let directory = Directory::new();
    let (sender, address, key) = listening(&directory, &[]);
    let mut receiver = start(["recv", "--connect", &address, "--key-file", &key, "--hold", "60s"]);
    receiver.until("holding it");
    sender.signal(Signal::TERM);
    let sent = sender.wait().good();
    assert!(sent.contains(&format!("still held: process {}", receiver.pid())), "{sent}");
    assert!(receiver.wait().bad().contains("has terminated"));
}

/// The timeout covers the handshake too: a sender that accepts and says nothing. Without that, the handshake alone took 10 s.
#[test]
fn timeout_covers_a_silent_sender() {
    let directory = Directory::new();
    let key = directory.key("key", KEY);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let begun = std::time::Instant::now();
    let error = run(["recv", "--connect", &address, "--key-file", &key, "--timeout", "10ms"]).bad();
    assert!(error.contains("in time"), "{error}");
    assert!(begun.elapsed() < std::time::Duration::from_secs(10), "{:?}", begun.elapsed());
}

#[test]
fn short_key_is_refused_by_both_sides() {
    let directory = Directory::new();
    let key = directory.key("key", "15 bytes, short");
    for arguments in [["send", "--listen"], ["recv", "--connect"]] {
        let error = run(arguments.iter().chain(&["127.0.0.1:1", "--key-file", &key])).bad();
        assert!(error.contains("15 B") && error.contains("at least 16"), "{error}");
    }
}

/// One address cannot use up the receivers' threads.
#[test]
fn receivers_of_one_address_are_limited() {
    let directory = Directory::new();
    let (mut sender, address, _) = listening(&directory, &[]);
    let key = device_ipc_tcp::Key::new(KEY.as_bytes()).unwrap();
    let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
    let connect = || {
        let mut one = device_ipc_tcp::connect(TcpStream::connect(&address).unwrap(), 0, &key, end).unwrap();
        one.send(br#"{"message":"ready"}"#, Some(end)).unwrap();
        let offer = one.receive(Some(end));
        (one, offer)
    };
    let held: Vec<_> = (0..64).map(|_| connect()).collect();
    assert!(held.iter().all(|(_, offer)| offer.is_ok()));
    assert!(connect().1.is_err(), "it is one too many");
    sender.until("too many receivers");
    drop(held);
}

#[test]
fn lines_for_an_unread_output_are_bounded_and_counted() {
    let mut command = device_ipc();
    command.args(["send", "--listen", "127.0.0.1:0", "--receivers", "0"]).env("DEVICE_IPC_KEY", KEY);
    let (mut sender, reader, line) = start_unread(command, "listening at");
    let address = line.split_whitespace().next_back().expect("an address");
    let key = device_ipc_tcp::Key::new(KEY.as_bytes()).unwrap();
    let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
    let receive = || {
        let mut one = device_ipc_tcp::connect(TcpStream::connect(address).unwrap(), 0, &key, end).unwrap();
        one.send(br#"{"message":"ready"}"#, Some(end)).unwrap();
        // It may be refused while earlier ones are being ended.
        let _ = one.receive(Some(end));
    };
    for _ in 0..1500 {
        receive();
    }
    // The sender stays ready while its output is not read.
    let mut lines = BufReader::new(reader).lines().map(|line| line.expect("a line"));
    let mut read = 0;
    let omitted = std::iter::from_fn(|| {
        receive();
        lines.next()
    })
    .inspect(|_| read += 1)
    .find(|line| line.contains("earlier lines are not shown"));
    assert!(omitted.is_some() && read < 1200, "{read} lines: {omitted:?}");
    sender.kill().expect("it is not reaped");
    crate::support::wait(&mut sender);
}
