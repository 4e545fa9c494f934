//! Readers and writers of rings that do not follow the protocol.

use super::*;

const NO_RING: &[u8] = &[2, 5];
const LEAVE: &[u8] = &[5];

fn join() -> Vec<u8> {
    [&[3], &OPEN[1..]].concat()
}

fn acknowledge(sequence: u8) -> [u8; 2] {
    [4, sequence]
}

/// Starts a writer of a ring of two slots.
fn writer() -> (Process, SocketAddr, String) {
    let (mut writer, address, _) = exporter_of_one();
    let descriptor = writer.ask("ring r 2 256");
    (writer, address, descriptor)
}

fn receive(connection: &mut AuthenticatedConnection) -> Vec<u8> {
    connection.receive(Some(Instant::now() + LONG)).unwrap()
}

fn joined(address: SocketAddr, descriptor: &str) -> AuthenticatedConnection {
    let mut connection = authenticated(address, descriptor);
    assert_eq!(ask(&mut connection, &join()).unwrap(), GRANTED);
    assert_eq!(receive(&mut connection)[..2], [1, 1], "the metadata of one region");
    assert_eq!(receive(&mut connection), [4, 0], "it begins with sequence 0");
    connection
}

#[test]
fn messages_of_a_ring_are_those_of_the_specification() {
    let (mut writer, address, descriptor) = writer();
    let mut connection = joined(address, &descriptor);
    assert_eq!(writer.ask("holders r"), "7 x on 127.0.0.1");
    assert_eq!(ask(&mut connection, PING).unwrap(), PONG);
    writer.ask("publish r 2 60000");
    assert_eq!([receive(&mut connection), receive(&mut connection)], [[5, 0], [5, 1]]);
    assert_eq!(ask(&mut connection, &acknowledge(0)).unwrap(), [6, 0]);
    assert_eq!(writer.ask("publish r 1 60000"), "1 published", "the slot is free");
    assert_eq!(receive(&mut connection), [5, 2]);
    writer.send("close-ring r 60000");
    assert_eq!(receive(&mut connection), [7, 0]);
    for sequence in [1, 2] {
        assert_eq!(ask(&mut connection, &acknowledge(sequence)).unwrap(), [6, sequence]);
    }
    connection.send(RELEASE, Some(Instant::now() + LONG)).unwrap();
    assert_eq!(writer.receive(), "closed");
}

#[test]
fn dismissed_reader_is_confirmed_nothing() {
    let (mut writer, address, descriptor) = writer();
    let mut connection = joined(address, &descriptor);
    writer.ask("publish r 2 60000");
    assert_eq!([receive(&mut connection), receive(&mut connection)], [[5, 0], [5, 1]]);
    assert_eq!(writer.ask("dismiss r"), "1");
    assert_eq!(ask(&mut connection, &acknowledge(0)).unwrap(), [7, 1]);
    assert_eq!(ask(&mut connection, PING).unwrap(), PONG);
    assert_eq!(writer.ask("publish r 2 60000"), "2 published");
    assert_eq!(ask(&mut connection, PING).unwrap(), PONG, "nothing is announced any longer");
}

#[test]
fn reader_that_has_left_keeps_its_lease_and_blocks_no_writer() {
    let (mut writer, address, descriptor) = writer();
    let mut connection = joined(address, &descriptor);
    writer.ask("publish r 2 60000");
    assert_eq!([receive(&mut connection), receive(&mut connection)], [[5, 0], [5, 1]]);
    connection.send(LEAVE, Some(Instant::now() + LONG)).unwrap();
    assert_eq!(writer.ask("publish r 5 60000"), "5 published", "of two slots");
    assert_eq!(ask(&mut connection, PING).unwrap(), PONG, "nothing is announced or confirmed any longer");
    assert_eq!(writer.ask("holders r"), "7 x on 127.0.0.1", "its engine may still read");
    connection.send(RELEASE, Some(Instant::now() + LONG)).unwrap();
    eventually(&mut writer, "holders r", "");
}

#[test]
fn export_that_is_no_ring_is_not_joined() {
    let (mut exporter, address, descriptor) = exporter_of_one();
    let mut connection = authenticated(address, &descriptor);
    for _ in 0..2 {
        assert_eq!(ask(&mut connection, &join()).unwrap(), NO_RING);
        eventually(&mut exporter, "holders x", "");
    }
    assert_eq!(ask(&mut connection, OPEN).unwrap(), GRANTED);
}

#[test]
fn reader_that_violates_the_protocol_leaves_the_ring() {
    let (mut writer, address, descriptor) = writer();
    for violation in [OPEN, &join(), &acknowledge(0), &acknowledge(9), &[4], &[5, 0], b"\xff"] {
        let mut connection = joined(address, &descriptor);
        let error = ask(&mut connection, violation).unwrap_err();
        assert!(is_closed(&error), "{violation:?}: {error}");
        eventually(&mut writer, "readers r", "0");
    }
    // Without a ring.
    for opens in [false, true] {
        let mut connection = authenticated(address, &descriptor);
        if opens {
            ask(&mut connection, OPEN).unwrap();
            receive(&mut connection);
        }
        let error = ask(&mut connection, &acknowledge(0)).unwrap_err();
        assert!(is_closed(&error), "{error}");
    }
}

/// Returns the error of a reader whose writer knows the token, and answers with these messages.
fn error_of_reader(replies: &[&[u8]]) -> String {
    let (_writer, _, descriptor) = writer();
    let (address, impostor) = impostor(&descriptor, 3, replies, false);
    let (mut reader, _) = process("importer");
    let joined = reader.ask(&format!("join r pulled 700 {}", with_address(&descriptor, address)));
    let error = match joined.as_str() {
        "copied from 0" => reader.ask("read r 1 60000"),
        _ => joined,
    };
    reader.finish();
    impostor.join().unwrap();
    error
}

#[test]
fn writer_that_violates_the_protocol_causes_an_error() {
    let metadata: &[u8] = b"\x01\x01\x01x";
    let joined: &[u8] = &[4, 0];
    for replies in [
        &[GRANTED, metadata, &[5, 0]][..],
        // A sequence that a timeline cannot reach.
        &[GRANTED, metadata, b"\x04\x80\x80\x80\x80\x80\x80\x80\x80\x40"],
        &[GRANTED, metadata, joined, &[5, 1]],
        &[GRANTED, metadata, joined, &[6, 0]],
        &[GRANTED, metadata, joined, PONG],
        &[GRANTED, metadata, joined, GRANTED],
        &[GRANTED, metadata, joined, &[7, 2]],
        // Not the engine's metadata.
        &[GRANTED, metadata, joined, &[5, 0]],
    ] {
        let error = error_of_reader(replies);
        assert!(error.contains("Protocol of InPull"), "{replies:?}: {error}");
    }
    assert!(error_of_reader(&[NO_RING]).contains("Protocol of InPull"));
    assert_eq!(error_of_reader(&[GRANTED, metadata, joined, &[7, 0]]), "0 right, closed");
    let dismissed = error_of_reader(&[GRANTED, metadata, joined, &[7, 1]]);
    assert!(dismissed.starts_with("0 right, DismissedFromRing"), "{dismissed}");
    let silent = error_of_reader(&[GRANTED, metadata, joined]);
    assert!(silent.starts_with("0 right, Timeout of InPull"), "{silent}");
}

/// A writer whose engine reads sequence 0, and refuses sequence 1 once the reader has acknowledged sequence 0. It confirms sequence 0
/// after that.
#[test]
fn confirmed_publication_precedes_the_error_of_a_later_pull() {
    const SLOT: u64 = 256;
    let (_writer, _, descriptor) = writer();
    let (acknowledged, refuse) = std::sync::mpsc::channel();
    let engine = TcpListener::bind("127.0.0.1:0").unwrap();
    let metadata = format!("{} 0 {}", engine.local_addr().unwrap(), 2 * SLOT);
    let refused = std::thread::spawn(move || {
        let mut second = None;
        for _ in 0..2 {
            let mut stream = engine.accept().unwrap().0;
            let mut request = [0; 16];
            stream.read_exact(&mut request).unwrap();
            match u64::from_le_bytes(request[..8].try_into().unwrap()) {
                0 => stream.write_all(&contents(SLOT as usize, 0)).unwrap(),
                _ => second = Some(stream),
            }
        }
        refuse.recv().unwrap();
        drop(second);
    });
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let SocketAddr::V4(address) = listener.local_addr().unwrap() else { panic!("an IPv4 address") };
    let (_, token) = key_of(&descriptor);
    let writer = std::thread::spawn(move || {
        let deadline = Instant::now() + LONG;
        let until = Some(deadline);
        let key = |_| Some(Key::new(&token).unwrap());
        let mut connection = accept(listener.accept().unwrap().0, key, deadline).unwrap();
        connection.receive(until).unwrap();
        let regions = [&[1, 1, metadata.len() as u8], metadata.as_bytes()].concat();
        for message in [GRANTED, &regions, &[4, 0], &[5, 0], &[5, 1]] {
            connection.send(message, until).unwrap();
        }
        while connection.receive(until).unwrap() != acknowledge(0) {}
        acknowledged.send(()).unwrap();
        refused.join().unwrap();
        // The reader seeks the reason of the failed pull by then, which takes it longer.
        std::thread::sleep(Duration::from_millis(100));
        connection.send(&[6, 0], until).unwrap();
        while connection.receive(until).is_ok() {}
    });
    let (mut reader, _) = process("importer");
    let joined = reader.ask(&format!("join r pulled 60000 {}", with_address(&descriptor, address)));
    assert_eq!(joined, "copied from 0");
    let read = reader.ask("read r 2 60000");
    assert!(read.starts_with("1 right, Vendor"), "{read}");
    reader.finish();
    writer.join().unwrap();
}
