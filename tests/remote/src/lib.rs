//! Tests of copies between hosts, with any transfer engine.
//!
//! The two hosts are two network namespaces ([`Hosts`]), or two processes of one host. These copy although they could open the
//! memory, or their descriptor names another host ([`elsewhere`]). [`processes!`] defines ignored tests that run [`exporter`] and
//! [`importer`] with an engine.
//!
//! The processes use the mock, or the backend that `DEVICE_IPC_BACKEND` names: `cuda`, on a GPU or on the simulated driver.

mod backend;
mod cases;
mod channel;
mod channel_cases;
mod engine;
mod exporter;
mod hosts;
mod importer;
mod link;
mod pair;
mod rings;
mod steps;

use std::net::SocketAddrV4;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use device_ipc_core::backend::engine::TransferEngine;
use device_ipc_core::{Descriptor, Error};
use device_ipc_test_process::{Census, CountingHeap, Heap, Process};

pub use cases::*;
pub use channel::channel_end;
pub use channel_cases::*;
pub use engine::socket_engine;
pub use exporter::exporter;
pub use hosts::{DEVICE, Host, Hosts};
pub use importer::importer;
pub use link::*;
pub use pair::*;
pub use rings::*;
pub use steps::*;

/// Time limit of everything that is to happen.
const LONG: Duration = Duration::from_secs(60);

/// Creates the engine of a process, or returns why there is none.
pub type Load = fn() -> Result<Arc<dyn TransferEngine>, String>;

/// The variable with the address of a process's host, if that is not the loopback interface.
const ADDRESS_VARIABLE: &str = "DEVICE_IPC_TEST_ADDRESS";

/// Returns the address of this process's host.
fn own_address() -> String {
    std::env::var(ADDRESS_VARIABLE).unwrap_or_else(|_| LOOPBACK.to_owned())
}

/// The address of a host without one of its own.
const LOOPBACK: &str = "127.0.0.1";

/// Returns the contents of a region.
pub fn contents(length: usize, seed: u8) -> Vec<u8> {
    // No multiple of a page.
    const PERIOD: usize = 65_521;
    let byte = |at: u64| (at + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes()[0] ^ seed;
    let mut bytes: Vec<u8> = (0..PERIOD.min(length) as u64).map(byte).collect();
    bytes = bytes.repeat(length.div_ceil(PERIOD));
    bytes.truncate(length);
    bytes
}

/// Returns the name of an error's variant, of the innermost error, and its text.
fn report(error: &Error) -> String {
    let name = |error: &Error| format!("{error:?}").split(['{', '(', ' ']).next().unwrap_or("").to_owned();
    let stated = match error.innermost() {
        Error::Refused { kind, .. } => format!(" {kind:?}"),
        _ => String::new(),
    };
    format!("{}{stated} of {}: {error}", name(error.innermost()), name(error))
}

/// Defines the processes of a test module, as ignored tests: the name of each, what it runs, and what loads its engine.
#[macro_export]
macro_rules! processes {
    ($($role:ident: $run:ident, $load:expr;)+) => {
        $(
            #[test]
            #[ignore = "a process of the other tests"]
            fn $role() {
                $crate::$run($load);
            }
        )+
    };
}

fn argument<T: FromStr>(words: &[&str], at: usize) -> T {
    let word = words.get(at).unwrap_or_else(|| panic!("{words:?} has no word {at}"));
    word.parse().unwrap_or_else(|_| panic!("{word} of {words:?}"))
}

#[global_allocator]
static ALLOCATOR: CountingHeap = CountingHeap;

/// Returns the open files of this process, its mappings of the mock's memory, and the blocks and bytes on its heap.
fn resources() -> String {
    let (census, heap) = (Census::of(std::process::id()), Heap::now());
    format!("{} {} {} {}", census.all_descriptors(), census.mock_mappings, heap.blocks, heap.bytes)
}

fn open_files() -> usize {
    Census::of(std::process::id()).all_descriptors()
}

/// Returns a descriptor as an exporter of another host would have made it.
pub fn elsewhere(descriptor: &str) -> String {
    // The host id and the boot id are behind the envelope and the head of the first section.
    changed(descriptor, 20..52)
}

/// Returns a descriptor with a wrong token.
pub fn with_wrong_token(descriptor: &str) -> String {
    changed(descriptor, token_of(&bytes_of(descriptor)))
}

fn bytes_of(descriptor: &str) -> Vec<u8> {
    descriptor.parse::<Descriptor>().expect("a descriptor").to_bytes()
}

fn changed(descriptor: &str, range: std::ops::Range<usize>) -> String {
    let mut bytes = bytes_of(descriptor);
    bytes[range].iter_mut().for_each(|byte| *byte ^= 0x5a);
    repaired(bytes)
}

/// Returns the descriptor of these bytes with a correct checksum.
fn repaired(mut bytes: Vec<u8>) -> String {
    let covered = bytes.len() - 4;
    let checksum = crc32fast::hash(&bytes[..covered]);
    bytes[covered..].copy_from_slice(&checksum.to_le_bytes());
    Descriptor::from_bytes(&bytes).expect("it is repaired").to_string()
}

/// Asks a process until it answers as expected.
#[track_caller]
pub fn eventually(process: &mut Process, request: &str, expected: &str) {
    let deadline = Instant::now() + LONG;
    loop {
        let answer = process.ask(request);
        if answer == expected {
            return;
        }
        assert!(Instant::now() < deadline, "{request} remains {answer:?}, not {expected:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Advances the clock of a process until it answers as expected. Returns the time that has passed on its clock, at most.
#[track_caller]
pub fn after_a_while(process: &mut Process, request: &str, expected: &str) -> Duration {
    advance_until(process, |process| process.ask(request) == expected)
}

/// Advances the clock of a process until something has happened. Returns the time that has passed on its clock, at most.
#[track_caller]
pub(crate) fn advance_until(
    process: &mut Process,
    mut is_over: impl FnMut(&mut Process) -> bool,
) -> Duration {
    /// Waits take a time from the clock's reading on, so that an advance may end one of several waits only.
    const STEP: Duration = Duration::from_secs(1);
    let (begun, mut advanced) = (Instant::now(), Duration::ZERO);
    while !is_over(process) {
        assert!(begun.elapsed() < LONG, "nothing has happened although the clock is {advanced:?} ahead");
        process.ask(&format!("advance {}", STEP.as_millis()));
        advanced += STEP;
    }
    begun.elapsed() + advanced
}

/// Waits until a process has at most as many open files as before. Its earlier connections may not have been closed completely when these
/// were counted.
#[track_caller]
pub fn eventually_files(process: &mut Process, before: &str) {
    let before: u64 = before.parse().expect("a number");
    let deadline = Instant::now() + LONG;
    loop {
        let files = process.ask("files");
        if files.parse::<u64>().expect("a number") <= before {
            return;
        }
        assert!(Instant::now() < deadline, "{files} files remain open, of {before}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Returns a descriptor with another IPv4 address in its section of network addresses, the last one.
pub fn with_address(descriptor: &str, address: SocketAddrV4) -> String {
    let mut bytes = bytes_of(descriptor);
    let end = bytes.len() - 4;
    bytes[end - 6..end - 2].copy_from_slice(&address.ip().octets());
    bytes[end - 2..end].copy_from_slice(&address.port().to_be_bytes());
    repaired(bytes)
}

/// Returns the number of the only export of a descriptor, and its token.
pub fn key_of(descriptor: &str) -> (u64, [u8; 16]) {
    let bytes = bytes_of(descriptor);
    let export = token_of(&bytes).start - 8;
    let number = u64::from_le_bytes(bytes[export..export + 8].try_into().expect("8 bytes"));
    (number, bytes[export + 8..export + 24].try_into().expect("16 bytes"))
}

/// Returns the place of the first token: behind the first section and the number of the export.
fn token_of(bytes: &[u8]) -> std::ops::Range<usize> {
    let exporter = u32::from_le_bytes(bytes[16..20].try_into().expect("4 bytes")) as usize;
    let token = 20 + exporter + 8 + 8;
    token..token + 16
}
