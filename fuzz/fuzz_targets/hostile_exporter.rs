//! What an exporter may put into the pages that it shares with an importer, whose library is all there: it opens, takes
//! timelines, joins a ring and copies.
#![no_main]

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::OnceLock;

use device_ipc_core::DeviceOrdinal;
use device_ipc_core::backend::DeviceIpc;
use device_ipc_core::fuzzing::{ForeignHandle, HostileExporter};
use device_ipc_mock::MockBackend;

/// Set for the process whose memory the importer maps: a handle opens in another process than its own.
const OWNER: &str = "DEVICE_IPC_FUZZING_OWNER";

const BYTES: u64 = 65536;

/// Prints a handle of an allocation, and keeps it until the fuzzer ends.
fn own_memory() -> ! {
    let backend = MockBackend::from_spec("devices=1").expect("a machine without faults");
    let range = backend.memory().allocate(DeviceOrdinal::new(0), BYTES).expect("it has memory");
    let extent = backend.extents_of(range, None).expect("it was just allocated").remove(0);
    let exported = backend.export(&extent, None).expect("it can be exported");
    assert!(exported.fds.is_empty(), "its handles are bytes");
    let bytes: Vec<String> = exported.bytes.as_slice().iter().map(|byte| byte.to_string()).collect();
    let generation = extent.generation.map_or(0, |generation| generation.0);
    println!("{} {generation} {}", exported.kind.0, bytes.join(","));
    std::io::stdout().flush().expect("the fuzzer reads");
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    std::process::exit(0)
}

/// The exporter, and what keeps the owner of its memory alive.
fn exporter() -> (HostileExporter, ChildStdin) {
    let program = std::env::current_exe().expect("this program");
    let mut owner = Command::new(program)
        .env(OWNER, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("a process");
    let mut line = String::new();
    BufReader::new(owner.stdout.take().expect("it is piped"))
        .read_line(&mut line)
        .expect("it says the handle");
    let mut words = line.split_whitespace();
    let mut word = || words.next().expect("three words");
    let (kind, generation) = (word().parse().expect("a number"), word().parse().expect("a number"));
    let bytes = word().split(',').map(|byte| byte.parse().expect("a byte")).collect();
    let backend = MockBackend::from_spec("devices=1").expect("a machine without faults");
    let handle = ForeignHandle { kind, bytes, size: BYTES, generation };
    (HostileExporter::new(backend, handle), owner.stdin.take().expect("it is piped"))
}

libfuzzer_sys::fuzz_target!(
    init: {
        if std::env::var_os(OWNER).is_some() {
            own_memory();
        }
    },
    |bytes: &[u8]| {
        static EXPORTER: OnceLock<(HostileExporter, ChildStdin)> = OnceLock::new();
        EXPORTER.get_or_init(exporter).0.run(bytes);
    }
);
