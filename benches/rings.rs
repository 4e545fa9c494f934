//! Measures a ring whose reader copies over the network, beside bare reads by NIXL and a plain TCP socket, of the same bytes.
//!
//! All are measured between two processes of one host, in turn, by TCP on the loopback interface:
//!
//! ```console
//! UCX_TLS=tcp UCX_NET_DEVICES=lo DEVICE_IPC_NIXL=.../libnixl_capi.so cargo bench -p device-ipc-bench --bench rings
//! ```

#![allow(unsafe_code, reason = "bare reads by NIXL, beside those of the library")]

use std::collections::VecDeque;
use std::env;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use device_ipc::backend::engine::{
    MemorySpace, Piece, PullRequest, Transfer, TransferEngine, TransferMemory,
};
use device_ipc::mock::MockBackend;
use device_ipc::nixl::NixlEngine;
use device_ipc::{Descriptor, Ipc, Remote, Ring, RingReader};
use device_ipc_test_process::{Process, hex, serve, unhex};
use rustix::time::{ClockId, clock_gettime};

const WRITER: &str = "writer";
const LONG: Duration = Duration::from_secs(60);

/// The slots of each ring.
const SLOTS: u32 = 4;

/// The smallest slot, and those whose throughput is measured.
const SMALL: usize = 256;
const LARGE: [usize; 2] = [1 << 20, 16 << 20];

/// The publications whose latency is measured, and the time between them.
const PACED: usize = 2000;
const GAP: Duration = Duration::from_millis(5);

/// The bytes of one measurement of the throughput, and the number of measurements.
const BYTES: usize = 512 << 20;
const ROUNDS: usize = 11;

fn main() {
    if env::args().nth(1).as_deref() == Some(WRITER) {
        return write_all();
    }
    let engine: Arc<dyn TransferEngine> = match NixlEngine::load() {
        Ok(engine) => Arc::new(engine),
        Err(error) => return println!("skipped: {error}"),
    };
    let ipc = Ipc::builder().remote(Remote::new(Arc::clone(&engine))).with_backend(backend());
    let this = env::current_exe().expect("a program has a file");
    let mut writer = Process::start(WRITER, Command::new(this).arg(WRITER));

    println!("latency in µs of {SMALL} B, one each {} ms", GAP.as_millis());
    println!("  ring  {}", latency_of_ring(&ipc, &mut writer));
    println!("  NIXL  {}", latency_of_nixl(&*engine, &mut writer));
    println!("  TCP   {}", latency_of_tcp(&mut writer));
    for bytes in LARGE {
        println!("throughput in MiB/s of {} MiB", bytes >> 20);
        let (mut ring, mut nixl, mut tcp) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            ring.push(throughput_of_ring(&ipc, &mut writer, bytes));
            nixl.push(throughput_of_nixl(&*engine, &mut writer, bytes));
            tcp.push(throughput_of_tcp(&mut writer, bytes));
        }
        println!("  ring  {}", Spread::of(ring));
        println!("  NIXL  {}", Spread::of(nixl));
        println!("  TCP   {}", Spread::of(tcp));
    }
    writer.finish();
}

fn backend() -> Arc<MockBackend> {
    MockBackend::from_spec("devices=1").expect("a valid machine")
}

/// A median, and the range of the middle 80 %.
struct Spread {
    low: f64,
    median: f64,
    high: f64,
}

impl Spread {
    fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let at = |part: usize| values[(values.len() - 1) * part / 10];
        Self { low: at(1), median: at(5), high: at(9) }
    }
}

impl std::fmt::Display for Spread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.0} ({:.0} to {:.0})", self.median, self.low, self.high)
    }
}

/// Returns the time in ns of a clock that all processes share.
fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Returns the times in µs between the writer's times, which it answers, and these.
fn latencies(writer: &mut Process, arrived: &[u64]) -> Spread {
    let answer = writer.receive();
    let sent = answer.split(' ').map(|time| time.parse::<u64>().expect("a time in ns"));
    Spread::of(arrived.iter().zip(sent).map(|(arrived, sent)| (arrived - sent) as f64 / 1000.0).collect())
}

fn joined(ipc: &Ipc, writer: &mut Process, bytes: usize) -> RingReader {
    let descriptor: Descriptor = writer.ask(&format!("ring {bytes}")).parse().expect("a descriptor");
    ipc.open_ring(&descriptor).pulled().on_device(0).expect("the writer listens")
}

fn latency_of_ring(ipc: &Ipc, writer: &mut Process) -> Spread {
    let mut reader = joined(ipc, writer, SMALL);
    writer.send("paced ring");
    let mut arrived = Vec::new();
    for _ in 0..PACED {
        let slot = reader.next(LONG).expect("the writer lives").expect("a publication");
        arrived.push(now());
        slot.release_now().expect("it is published");
    }
    latencies(writer, &arrived)
}

/// Reads by NIXL from memory of the writer whose metadata is known.
struct BareReads<'a> {
    engine: &'a dyn TransferEngine,
    metadata: Vec<u8>,
    destination: Vec<u8>,
}

impl<'a> BareReads<'a> {
    fn of(engine: &'a dyn TransferEngine, writer: &mut Process, bytes: usize) -> Self {
        let metadata = unhex(&writer.ask(&format!("register {bytes}")));
        Self { engine, metadata, destination: vec![1; bytes * SLOTS as usize] }
    }

    /// Starts to read one slot.
    fn start(&mut self, slot: usize) -> Box<dyn Transfer> {
        let len = (self.destination.len() / SLOTS as usize) as u64;
        let address = self.destination.as_mut_ptr() as u64 + slot as u64 * len;
        let memory = TransferMemory { space: MemorySpace::Host, address, len };
        let piece = Piece { source: 0, source_offset: 0, destination: 0, destination_offset: 0, len };
        let request = PullRequest { sources: &[&self.metadata], destinations: &[memory], pieces: &[piece] };
        // SAFETY: the destination exists until the transfer is over; the program ends otherwise.
        unsafe { self.engine.pull(&request) }.expect("the memory is registered")
    }
}

fn finish(transfer: &dyn Transfer) {
    while !transfer.is_finished().expect("the writer lives") {
        thread::sleep(Duration::from_micros(20));
    }
}

fn latency_of_nixl(engine: &dyn TransferEngine, writer: &mut Process) -> Spread {
    let mut reads = BareReads::of(engine, writer, SMALL);
    let mut times = Vec::new();
    for _ in 0..PACED {
        thread::sleep(GAP);
        let begun = Instant::now();
        finish(&*reads.start(0));
        times.push(begun.elapsed().as_secs_f64() * 1e6);
    }
    Spread::of(times)
}

fn throughput_of_nixl(engine: &dyn TransferEngine, writer: &mut Process, bytes: usize) -> f64 {
    let mut reads = BareReads::of(engine, writer, bytes);
    finish(&*reads.start(0));
    let count = BYTES / bytes;
    let begun = Instant::now();
    let mut running: VecDeque<Box<dyn Transfer>> = VecDeque::new();
    for index in 0..count {
        if running.len() == SLOTS as usize {
            finish(&*running.pop_front().expect("there are some"));
        }
        running.push_back(reads.start(index % SLOTS as usize));
    }
    running.iter().for_each(|transfer| finish(&**transfer));
    rate(bytes * count, begun)
}

fn latency_of_tcp(writer: &mut Process) -> Spread {
    let mut stream = connected(writer, "paced tcp", SMALL);
    let mut message = [0; SMALL];
    let mut arrived = Vec::new();
    for _ in 0..PACED {
        stream.read_exact(&mut message).expect("the writer lives");
        arrived.push(now());
    }
    latencies(writer, &arrived)
}

fn throughput_of_ring(ipc: &Ipc, writer: &mut Process, bytes: usize) -> f64 {
    let mut reader = joined(ipc, writer, bytes);
    let count = BYTES / bytes;
    writer.send(&format!("flood ring {count}"));
    let mut begun = Instant::now();
    for index in 0..count {
        let slot = reader.next(LONG).expect("the writer lives").expect("a publication");
        slot.release_now().expect("it is published");
        if index == 0 {
            begun = Instant::now();
        }
    }
    let rate = rate(bytes * (count - 1), begun);
    writer.receive();
    rate
}

fn throughput_of_tcp(writer: &mut Process, bytes: usize) -> f64 {
    let mut stream = connected(writer, "flood tcp", bytes);
    let mut message = vec![0; bytes];
    let count = BYTES / bytes;
    let mut begun = Instant::now();
    for index in 0..count {
        stream.read_exact(&mut message).expect("the writer lives");
        if index == 0 {
            begun = Instant::now();
        }
    }
    let rate = rate(bytes * (count - 1), begun);
    writer.receive();
    rate
}

fn rate(bytes: usize, begun: Instant) -> f64 {
    bytes as f64 / begun.elapsed().as_secs_f64() / f64::from(1 << 20)
}

fn connected(writer: &mut Process, request: &str, bytes: usize) -> TcpStream {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("it is bound");
    writer.send(&format!("{request} {address} {bytes}"));
    listener.accept().expect("the writer connects").0
}

/// The writer's process.
fn write_all() {
    let engine: Arc<dyn TransferEngine> = Arc::new(NixlEngine::load().expect("the reader has loaded it"));
    let remote = Remote::new(Arc::clone(&engine)).listen("127.0.0.1").expect("a free port");
    let ipc = Ipc::builder().remote(remote).with_backend(backend());
    let stream = ipc.create_stream(0).expect("a device");
    let (mut ring, mut registered) = (None, None);
    serve(|request, words| {
        let words: Vec<_> = words.split(' ').collect();
        let mut times = Vec::new();
        let number = |at: usize| words[at].parse::<usize>().expect("a number");
        match (request, words[0]) {
            ("ring", _) => {
                let memory = ipc.allocate(0, (SLOTS as usize * number(0)) as u64).expect("memory");
                let shared = ipc.ring(memory).slots(SLOTS).start().expect("it can be shared");
                return ring.insert(shared).descriptor().to_string();
            }
            ("register", _) => {
                registered = None;
                let memory = vec![7; number(0)];
                let (address, len) = (memory.as_ptr() as u64, memory.len() as u64);
                let of_host = TransferMemory { space: MemorySpace::Host, address, len };
                // SAFETY: the memory is kept beside the registration, and dropped after it.
                let registration = unsafe { engine.register(of_host) }.expect("host memory");
                return hex(registered.insert((registration, memory)).0.metadata());
            }
            ("paced", "ring") => {
                let ring: &mut Ring = ring.as_mut().expect("there is a ring");
                for _ in 0..PACED {
                    thread::sleep(GAP);
                    ring.wait_writable(LONG).expect("the reader reads");
                    let slot = ring.write(&stream).expect("the slot is free");
                    times.push(now().to_string());
                    slot.publish_now().expect("the slot is free");
                }
            }
            ("flood", "ring") => {
                let ring: &mut Ring = ring.as_mut().expect("there is a ring");
                for _ in 0..number(1) {
                    ring.wait_writable(LONG).expect("the reader reads");
                    ring.write(&stream).expect("the slot is free").publish_now().expect("it is free");
                }
            }
            (kind, _) => {
                let mut stream = TcpStream::connect(words[1]).expect("the reader listens");
                stream.set_nodelay(true).expect("a socket");
                let message = vec![0; number(2)];
                let count = if kind == "paced" { PACED } else { BYTES / message.len() };
                for _ in 0..count {
                    if kind == "paced" {
                        thread::sleep(GAP);
                        times.push(now().to_string());
                    }
                    stream.write_all(&message).expect("the reader reads");
                }
            }
        }
        times.join(" ")
    });
}
