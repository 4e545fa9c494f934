//! Attackers in the network: replays, floods, and peers that vanish.

use std::net::{Shutdown, TcpListener};

use super::*;

/// The part of a hello that is equal in all versions, and the key id.
const HELLO: usize = 42;

/// Returns a hello for the key with this id.
fn hello(id: u64) -> Vec<u8> {
    [&b"dipc-tcp\x00\x03"[..], &[7; 32], &id.to_be_bytes()].concat()
}

/// Reads until the server closes the connection.
fn read_to_the_end(stream: &mut TcpStream) -> Vec<u8> {
    stream.set_read_timeout(Some(LONG)).unwrap();
    let mut answer = Vec::new();
    // An end or a reset, and not the timeout.
    if let Err(error) = stream.read_to_end(&mut answer) {
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    }
    answer
}

/// Passes what `from` sends on to `to` until the end, and returns it.
fn record(mut from: TcpStream, mut to: TcpStream) -> Vec<u8> {
    let (mut recorded, mut buffer) = (Vec::new(), [0; 1024]);
    while let Ok(read @ 1..) = from.read(&mut buffer) {
        recorded.extend_from_slice(&buffer[..read]);
        to.write_all(&buffer[..read]).unwrap();
    }
    let _ = to.shutdown(Shutdown::Write);
    recorded
}

#[test]
fn recorded_session_begins_no_lease() {
    let (mut exporter, address, descriptor) = exporter_of_one();
    let attacker = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(attacker.local_addr().unwrap()).unwrap();
    let (near, far) = (attacker.accept().unwrap().0, TcpStream::connect(address).unwrap());
    let (near_clone, far_clone) = (near.try_clone().unwrap(), far.try_clone().unwrap());
    let requests = std::thread::spawn(|| record(near, far));
    let replies = std::thread::spawn(|| record(far_clone, near_clone));

    let (export, token) = key_of(&descriptor);
    let mut client = connect(client, export, &Key::new(&token).unwrap(), Instant::now() + LONG).unwrap();
    assert_eq!(ask(&mut client, OPEN).unwrap(), GRANTED);
    client.receive(Some(Instant::now() + LONG)).unwrap();
    assert_eq!(exporter.ask("holders x"), "7 x on 127.0.0.1");
    client.send(RELEASE, Some(Instant::now() + LONG)).unwrap();
    assert_eq!(ask(&mut client, PING).unwrap(), PONG);
    drop(client);
    let (requests, replies) = (requests.join().unwrap(), replies.join().unwrap());
    assert!(requests.starts_with(b"dipc-tcp") && replies.len() > HELLO + 33);

    let mut replay = TcpStream::connect(address).unwrap();
    // The server may have closed the connection before it has read everything.
    let _ = replay.write_all(&requests);
    let answer = read_to_the_end(&mut replay);
    assert_eq!(answer.len(), HELLO + 1, "a hello and the refusal, and no proof");
    assert_eq!(answer[HELLO], 1);
    assert_eq!(exporter.ask("holders x"), "");

    // As a server, the attacker cannot answer an importer by what it has recorded either.
    let client = TcpStream::connect(attacker.local_addr().unwrap()).unwrap();
    let mut impostor = attacker.accept().unwrap().0;
    impostor.write_all(&replies).unwrap();
    let refused = connect(client, export, &Key::new(&token).unwrap(), Instant::now() + LONG);
    assert!(matches!(refused, Err(TcpError::ServerWithoutKey)), "{refused:?}");
    check_served(&descriptor);
}

#[test]
fn flood_of_garbage_keeps_out_no_importer_and_leaves_nothing() {
    let (mut exporter, address, descriptor) = exporter_of_one();
    check_served(&descriptor);
    let files = exporter.ask("files");
    let (export, _) = key_of(&descriptor);
    let mut flood = Vec::new();
    for number in 0..400_usize {
        let mut stream = TcpStream::connect_timeout(&address, LONG).expect("the server makes room");
        let garbage = [number as u8 | 0x80; 64];
        // Garbage in place of the magic, of the nonce, of the proof; and a part of a hello, after which the server waits.
        let bytes = match number % 4 {
            0 => garbage.to_vec(),
            1 => [&hello(export)[..10], &garbage].concat(),
            2 => [&hello(export)[..], &garbage].concat(),
            _ => hello(export)[..number % HELLO].to_vec(),
        };
        // The server may have closed it in favour of a newer connection.
        let _ = stream.write_all(&bytes);
        flood.push(stream);
    }
    check_served(&descriptor);
    drop(flood);
    eventually_files(&mut exporter, &files);
    assert_eq!(exporter.ask("holders x"), "");
}

#[test]
fn half_open_connection_is_closed_in_each_state() {
    // The client's host is gone: nothing arrives any more, not even the end of the connection.
    let (_exporter, address, descriptor) = exporter_of_one();
    let (export, _) = key_of(&descriptor);
    let silent = [0, 8, HELLO, HELLO + 8].map(|length| {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(&hello(export)[..length]).unwrap();
        stream
    });
    let authenticated = authenticated(address, &descriptor);
    // A part of a request.
    let mut socket = authenticated.socket();
    socket.write_all(&[0, 0]).unwrap();
    let begun = Instant::now();
    for mut stream in silent.into_iter().chain([authenticated.socket().try_clone().unwrap()]) {
        read_to_the_end(&mut stream);
    }
    assert!(begun.elapsed() < LONG / 2, "{:?}", begun.elapsed());
    check_served(&descriptor);
}
