//! Connections that are closed, or disturbed, between two leases.

use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::*;

/// A network between an importer and an exporter, which can fail as a test needs it.
struct Network {
    address: SocketAddrV4,
    state: Arc<State>,
    accepting: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct State {
    connections: AtomicUsize,
    importers: Mutex<Vec<TcpStream>>,
    /// Whether the connection on which the importer sends its next message is closed then.
    cuts: AtomicBool,
    /// Delays messages of the exporter while it is locked.
    gate: Mutex<()>,
    /// The number of parts of the importer's messages that were passed on.
    passed: AtomicUsize,
    is_closed: AtomicBool,
}

impl Network {
    fn start(exporter: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let SocketAddr::V4(address) = listener.local_addr().unwrap() else { panic!("an IPv4 address") };
        let state = Arc::<State>::default();
        let shared = Arc::clone(&state);
        let accepting = std::thread::spawn(move || {
            for importer in listener.incoming().map_while(Result::ok) {
                if shared.is_closed.load(Ordering::SeqCst) {
                    return;
                }
                let exporter = TcpStream::connect(exporter).unwrap();
                shared.connections.fetch_add(1, Ordering::SeqCst);
                let ends = [importer.try_clone().unwrap(), exporter.try_clone().unwrap()];
                shared.importers.lock().unwrap().push(importer.try_clone().unwrap());
                let (requests, replies) = (Arc::clone(&shared), Arc::clone(&shared));
                std::thread::spawn(move || {
                    pass(importer, exporter, || {
                        requests.passed.fetch_add(1, Ordering::SeqCst);
                        !requests.cuts.swap(false, Ordering::SeqCst)
                    });
                });
                let [importer, exporter] = ends;
                std::thread::spawn(move || {
                    pass(exporter, importer, || {
                        drop(replies.gate.lock().unwrap());
                        true
                    });
                });
            }
        });
        Self { address, state, accepting: Some(accepting) }
    }

    fn connections(&self) -> usize {
        self.state.connections.load(Ordering::SeqCst)
    }

    /// Stops listening.
    fn close(&mut self) {
        self.state.is_closed.store(true, Ordering::SeqCst);
        drop(TcpStream::connect(self.address));
        self.accepting.take().unwrap().join().unwrap();
    }
}

/// Passes messages on until the end, or until one may not continue.
fn pass(mut from: TcpStream, mut to: TcpStream, continues: impl Fn() -> bool) {
    let mut buffer = [0; 4096];
    while let Ok(read @ 1..) = from.read(&mut buffer)
        && continues()
        && to.write_all(&buffer[..read]).is_ok()
    {}
    // The other direction may have ended.
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

/// Waits until a condition holds.
#[track_caller]
fn wait_until(mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < LONG, "it does not happen");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// An importer that has copied 64 B over a network, and has a connection.
struct Connected {
    exporter: Process,
    importer: Process,
    network: Network,
    descriptor: String,
}

impl Connected {
    fn start() -> Self {
        let (exporter, address, descriptor) = exporter_of_one();
        let network = Network::start(address);
        let descriptor = with_address(&descriptor, network.address);
        let mut connected = Self { exporter, importer: process("importer").0, network, descriptor };
        connected.check_pull(1);
        connected.check_pull(1);
        connected
    }

    fn pull(&mut self) -> String {
        self.importer.ask(&format!("open pulled 1 20000 {}", self.descriptor))
    }

    /// Closes the connection on which the importer sends its next message.
    fn cut_at_next_message(&mut self) {
        // The importer releases the lease after it has answered.
        eventually(&mut self.exporter, "holders x", "");
        self.network.state.cuts.store(true, Ordering::SeqCst);
    }

    /// Checks that a copy succeeds, with as many connections since the begin.
    #[track_caller]
    fn check_pull(&mut self, connections: usize) {
        assert_eq!(self.pull(), "64 B right, copied");
        assert_eq!(self.network.connections(), connections);
    }
}

#[test]
fn connection_that_has_been_closed_is_replaced() {
    let mut connected = Connected::start();
    for importer in connected.network.state.importers.lock().unwrap().drain(..) {
        // An earlier one is closed.
        let _ = importer.shutdown(Shutdown::Both);
    }
    connected.check_pull(2);
    connected.check_pull(2);
}

#[test]
fn connection_that_is_closed_after_the_request_is_replaced_once() {
    let mut connected = Connected::start();
    connected.cut_at_next_message();
    connected.check_pull(2);
    connected.check_pull(2);
    // A new connection is not replaced.
    for importer in connected.network.state.importers.lock().unwrap().drain(..) {
        // An earlier one is closed.
        let _ = importer.shutdown(Shutdown::Both);
    }
    connected.cut_at_next_message();
    let error = connected.pull();
    assert!(error.starts_with("ExporterGone of InPull"), "{error}");
}

#[test]
fn connection_with_an_unrequested_message_is_replaced() {
    let mut connected = Connected::start();
    for mut importer in connected.network.state.importers.lock().unwrap().drain(..) {
        importer.write_all(&[0]).unwrap();
    }
    connected.check_pull(2);
    connected.check_pull(2);
}

#[test]
fn connection_with_an_unanswered_ping_is_not_used_again() {
    let mut connected = Connected::start();
    // A copy of some seconds, so that there is a ping.
    connected.exporter.ask("pace 150");
    let descriptor = connected.exporter.ask("share slow 33554432 1");
    let descriptor = with_address(&descriptor, connected.network.address);
    let pull = format!("open pulled 1 20000 {descriptor}");
    connected.importer.ask(&format!("begin {pull}"));
    wait_until(|| connected.importer.ask("arriving") == "true");
    let state = Arc::clone(&connected.network.state);
    let delayed = state.gate.lock().unwrap();
    assert_eq!(connected.importer.ask("end"), "33554432 B right, copied");
    assert_eq!(connected.network.connections(), 2);
    eventually(&mut connected.exporter, "holders slow", "");
    // The answer to the ping would arrive as that to the next request.
    connected.exporter.ask("pace 0");
    let passed = connected.network.state.passed.load(Ordering::SeqCst);
    connected.importer.ask(&format!("begin {pull}"));
    wait_until(|| connected.network.state.passed.load(Ordering::SeqCst) > passed);
    drop(delayed);
    assert_eq!(connected.importer.ask("end"), "33554432 B right, copied");
    assert_eq!(connected.network.connections(), 3);
    assert_eq!(connected.importer.ask(&pull), "33554432 B right, copied");
    assert_eq!(connected.network.connections(), 3);
}

#[test]
fn lost_connection_is_reported_if_no_other_one_can_be_made() {
    let mut connected = Connected::start();
    connected.cut_at_next_message();
    connected.network.close();
    let error = connected.pull();
    assert!(error.starts_with("ExporterGone of InPull"), "{error}");
    let error = connected.pull();
    assert!(error.starts_with("Io of InPull") && error.contains("refused"), "{error}");
}

#[test]
fn drop_of_the_export_is_reported_over_a_kept_and_over_a_new_connection() {
    for cuts in [false, true] {
        let mut connected = Connected::start();
        if cuts {
            connected.cut_at_next_message();
        }
        connected.exporter.ask("drop x");
        let error = connected.pull();
        assert!(error.starts_with("ExportDropped of InPull"), "{error}");
        assert_eq!(connected.network.connections(), 1 + usize::from(cuts));
    }
}

#[test]
fn suspended_exporter_is_reported_over_a_kept_connection() {
    let mut connected = Connected::start();
    connected.exporter.suspend();
    let error = connected.importer.ask(&format!("open pulled 1 700 {}", connected.descriptor));
    assert!(error.starts_with("Timeout of InPull") && error.contains("after 700 ms"), "{error}");
    connected.exporter.resume();
    connected.check_pull(2);
    eventually(&mut connected.exporter, "holders x", "");
}

/// Begins a lease, and releases it unless it is to be kept.
fn lease(address: SocketAddr, descriptor: &str, keeps: bool) -> AuthenticatedConnection {
    let mut connection = authenticated(address, descriptor);
    assert_eq!(ask(&mut connection, OPEN).unwrap(), GRANTED);
    connection.receive(Some(Instant::now() + LONG)).unwrap();
    if !keeps {
        connection.send(RELEASE, Some(Instant::now() + LONG)).unwrap();
        // The reply follows the release.
        assert_eq!(ask(&mut connection, PING).unwrap(), PONG);
    }
    connection
}

#[test]
fn idle_connections_keep_out_no_importer() {
    const SERVED: usize = 256;
    let (mut exporter, address, descriptor) = exporter_of_one();
    let (mut importer, _) = process("importer");
    let pull = format!("open pulled 1 20000 {descriptor}");
    assert_eq!(importer.ask(&pull), "64 B right, copied");
    let mut in_use = lease(address, &descriptor, true);
    // The last of them takes the place of the importer, whose connection is the oldest idle one.
    let mut idle: Vec<_> = (1..SERVED).map(|_| lease(address, &descriptor, false)).collect();
    check_served(&descriptor);
    assert_eq!(ask(&mut in_use, PING).unwrap(), PONG);
    let begun = Instant::now();
    assert_eq!(importer.ask(&pull), "64 B right, copied");
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    let error = ask(&mut idle[0], OPEN).unwrap_err();
    assert!(is_closed(&error), "the oldest one was closed: {error}");
    assert_eq!(ask(&mut in_use, PING).unwrap(), PONG, "a lease keeps its connection");
    assert_eq!(ask(idle.last_mut().unwrap(), OPEN).unwrap(), GRANTED);
    drop((idle, in_use));
    eventually(&mut exporter, "holders x", "");
}

#[test]
fn importers_wait_for_leases_and_not_for_idle_connections() {
    // Of one host with one export.
    const SERVED: usize = 64;
    let (mut exporter, address, descriptor) = exporter_of_one();
    let (mut importer, _) = process("importer");
    let mut leases: Vec<_> = (0..SERVED).map(|_| lease(address, &descriptor, true)).collect();
    importer.ask(&format!("begin open pulled 1 20000 {descriptor}"));
    wait_until(|| exporter.ask("connections").split(' ').count() > SERVED);
    // The connection becomes idle, and stays open, while the importer waits.
    let begun = Instant::now();
    leases[7].send(RELEASE, Some(Instant::now() + LONG)).unwrap();
    assert_eq!(importer.ask("end"), "64 B right, copied");
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    for connection in leases.iter_mut().enumerate().filter(|(number, _)| *number != 7).map(|(_, lease)| lease)
    {
        assert_eq!(ask(connection, PING).unwrap(), PONG);
    }
}
