//! Pulls between two processes with the real NIXL, over TCP on the loopback interface.
//!
//! Every engine is in a child process, whose environment selects UCX's transport. The tests are skipped if no NIXL is
//! installed, unless `DEVICE_IPC_NIXL` names one; `.ci/nixl` provides it.

use std::collections::VecDeque;
use std::env;
use std::fs;
use std::time::{Duration, Instant};

use device_ipc_core::backend::Unavailable;
use device_ipc_core::backend::engine::{
    MemorySpace, Piece, PullRequest, RegisteredMemory, Transfer, TransferEngine, TransferMemory,
};
use device_ipc_core::{Error, Result};
use device_ipc_nixl::{LIBRARY_VARIABLE, NixlEngine};
use device_ipc_test_process::{Process, hex, request, serve, unhex};
use rustix::process::{Pid, Signal, kill_process};
use rustix::time::{ClockId, clock_gettime};

/// Time limit of a pull that is to succeed.
const LONG: Duration = Duration::from_secs(60);

/// Time limit of a pull from a suspended exporter.
const SHORT: Duration = Duration::from_millis(300);

/// The smallest, one page, and one of many packets.
const LENGTHS: [usize; 3] = [1, PAGE, 64 << 20];
const PAGE: usize = 4096;

/// The number of threads that pull at the same time, and of pulls of each.
const THREADS: usize = 4;
const PULLS: usize = 25;

/// UCX on the loopback interface, by TCP alone. NIXL logs the errors that the tests provoke.
const ENVIRONMENT: [(&str, &str); 3] =
    [("UCX_TLS", "tcp"), ("UCX_NET_DEVICES", "lo"), ("NIXL_LOG_LEVEL", "FATAL")];

fn process(path: &str) -> Process {
    Process::of_test(path, &ENVIRONMENT)
}

/// Starts the processes, unless no NIXL is installed; prints the reason then.
fn exporter_and_importer() -> Option<(Process, Process)> {
    let mut exporter = process(concat!(module_path!(), "::exporter"));
    let loaded = exporter.ask("load");
    if loaded.starts_with("library not found") && env::var_os(LIBRARY_VARIABLE).is_none() {
        eprintln!("skipped: {loaded}; `.ci/nixl` downloads it");
        return None;
    }
    assert_eq!(loaded, "loaded");
    let mut importer = process(concat!(module_path!(), "::importer"));
    assert_eq!(importer.ask("load"), "loaded");
    Some((exporter, importer))
}

/// Returns the contents of a region from `offset` on. The first byte is not 0. The period is no multiple of a page.
fn contents(offset: usize, length: usize, seed: u8) -> Vec<u8> {
    const PERIOD: usize = 65_521;
    let byte = |at: u64| (at + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes()[0] ^ seed;
    let period: Vec<u8> = (0..PERIOD as u64).map(byte).collect();
    let skipped = offset % PERIOD;
    let mut bytes = period.repeat((skipped + length).div_ceil(PERIOD));
    bytes.truncate(skipped + length);
    bytes.split_off(skipped)
}

fn memory_of(bytes: &mut [u8]) -> TransferMemory {
    TransferMemory { space: MemorySpace::Host, address: bytes.as_mut_ptr() as u64, len: bytes.len() as u64 }
}

/// Returns the answer of `load`.
fn load(engine: &mut Option<NixlEngine>) -> String {
    match NixlEngine::load() {
        Ok(loaded) => {
            *engine = Some(loaded);
            "loaded".into()
        }
        Err(error @ Unavailable::LibraryNotFound { .. }) => error.to_string(),
        Err(error) => format!("failed: {error}"),
    }
}

/// Shares regions: `share LENGTH SEED` answers with the metadata.
#[test]
#[ignore = "a process of the other tests"]
fn exporter() {
    let mut engine = None;
    let mut regions: Vec<(Box<dyn RegisteredMemory>, Vec<u8>)> = Vec::new();
    serve(|request, argument| match request {
        "load" => load(&mut engine),
        "share" => {
            let (length, seed) = argument.split_once(' ').unwrap();
            let (length, seed) = (length.parse().unwrap(), seed.parse().unwrap());
            let mut bytes = contents(0, length, seed);
            let engine = engine.as_ref().unwrap();
            // SAFETY: the bytes stay in the list of regions, behind their registration.
            let registered = unsafe { engine.register(memory_of(&mut bytes)).unwrap() };
            let metadata = hex(registered.metadata());
            regions.push((registered, bytes));
            metadata
        }
        // Registers the same memory again, with other contents.
        "renew" => {
            let seed = argument.parse().unwrap();
            let (registered, mut bytes) = regions.pop().unwrap();
            drop(registered);
            let length = bytes.len();
            bytes.copy_from_slice(&contents(0, length, seed));
            // SAFETY: as above.
            let registered = unsafe { engine.as_ref().unwrap().register(memory_of(&mut bytes)).unwrap() };
            let metadata = hex(registered.metadata());
            regions.push((registered, bytes));
            metadata
        }
        "files" => open_files().to_string(),
        "processor" => processor_time().as_millis().to_string(),
        other => unreachable!("{other}"),
    });
}

/// A read, and the memory that it writes. Dropped only after its end.
struct Reading {
    transfer: Box<dyn Transfer>,
    bytes: Vec<u8>,
    limit: Duration,
}

impl Reading {
    /// Starts a read of as many bytes as `bytes` has at `offset` of a region.
    fn start(
        engine: &NixlEngine,
        metadata: &[u8],
        offset: u64,
        mut bytes: Vec<u8>,
        limit: Duration,
    ) -> Result<Self> {
        let memory = memory_of(&mut bytes);
        let piece = Piece {
            source: 0,
            source_offset: offset,
            destination: 0,
            destination_offset: 0,
            len: memory.len,
        };
        let request = PullRequest { sources: &[metadata], destinations: &[memory], pieces: &[piece] };
        // SAFETY: the bytes stay allocated, and are read after the end of the transfer.
        let transfer = unsafe { engine.pull(&request)? };
        Ok(Self { transfer, bytes, limit })
    }

    /// Waits for the end of the transfer; false after the time limit.
    fn wait(&self) -> Result<bool> {
        let begun = Instant::now();
        while !self.transfer.is_finished()? {
            if begun.elapsed() > self.limit {
                return Ok(false);
            }
            // An engine notifies nobody of the end.
            std::thread::sleep(Duration::from_micros(100));
        }
        Ok(true)
    }
}

/// Returns whether bytes are those of a region from `offset` on, for a person to read.
fn check(bytes: &[u8], offset: usize, seed: u8) -> String {
    let expected = contents(offset, bytes.len(), seed);
    if bytes == expected {
        return format!("{} right", bytes.len());
    }
    let at = bytes.iter().zip(&expected).position(|(found, expected)| found != expected).unwrap();
    format!("wrong from {at} on")
}

fn report(error: &Error) -> String {
    let kind = match error {
        Error::Vendor(_) => "vendor",
        Error::InvalidRegion(_) => "region",
        Error::Protocol(_) => "protocol",
        Error::Unsupported { .. } => "unsupported",
        _ => "other",
    };
    format!("{kind}: {error}")
}

/// Pulls regions.
#[test]
#[ignore = "a process of the other tests"]
fn importer() {
    let mut engine = None;
    let mut reads: VecDeque<Reading> = VecDeque::new();
    while let Some(line) = request() {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| words[at].parse::<usize>().unwrap();
        let answer = match words[0] {
            "load" => load(&mut engine),
            // start METADATA OFFSET LENGTH LIMIT_MS [EXPORTER]: stops the exporter once the first byte has arrived.
            "start" => {
                let limit = Duration::from_millis(number(4) as u64);
                let (metadata, offset) = (unhex(words[1]), number(2) as u64);
                let engine = engine.as_ref().unwrap();
                match Reading::start(engine, &metadata, offset, vec![0; number(3)], limit) {
                    Ok(started) => {
                        if let Some(exporter) = words.get(5) {
                            let deadline = Instant::now() + LONG;
                            let first = started.bytes.as_ptr();
                            // SAFETY: the memory is allocated; the value decides only when to stop the exporter.
                            while unsafe { first.read_volatile() } == 0 && Instant::now() < deadline {
                                std::hint::spin_loop();
                            }
                            let exporter = Pid::from_raw(exporter.parse().unwrap()).unwrap();
                            kill_process(exporter, Signal::STOP).unwrap();
                        }
                        reads.push_back(started);
                        "started".into()
                    }
                    Err(error) => report(&error),
                }
            }
            // wait OFFSET SEED: waits for the oldest read, and checks the bytes.
            "wait" => {
                let reading = reads.pop_front().unwrap();
                match reading.wait() {
                    Ok(true) => check(&reading.bytes, number(1), number(2) as u8),
                    Ok(false) => {
                        reads.push_front(Reading { limit: LONG, ..reading });
                        "running".into()
                    }
                    Err(error) => report(&error),
                }
            }
            // pieces LENGTH SEED METADATA...: reads every second page of several regions, in one transfer, into two memories: the
            // pages of the first region into one, all others into the other.
            "pieces" => pieces(engine.as_ref().unwrap(), number(1), number(2) as u8, &words[3..]),
            // parallel METADATA LENGTH SEED: pulls on several threads at the same time.
            "parallel" => {
                let (engine, metadata) = (engine.as_ref().unwrap(), unhex(words[1]));
                let (length, seed) = (number(2), number(3) as u8);
                let pull = || {
                    let reading = Reading::start(engine, &metadata, 0, vec![0; length], LONG)?;
                    Ok(reading.wait()? && reading.bytes == contents(0, length, seed))
                };
                let pulls = || {
                    (0..PULLS)
                        .filter_map(|_| match pull() {
                            Ok(true) => None,
                            Ok(false) => Some("wrong bytes".to_owned()),
                            Err(error) => Some(report(&error)),
                        })
                        .collect::<Vec<_>>()
                };
                let faults = std::thread::scope(|scope| {
                    let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(pulls)).collect();
                    threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
                });
                format!("faults: {faults:?}")
            }
            // leak METADATA LENGTH: starts a transfer to memory that stays allocated, and drops it.
            "leak" => {
                let memory = memory_of(Box::leak(vec![0; number(2)].into_boxed_slice()));
                let transfer = pull_all(engine.as_ref().unwrap(), &unhex(words[1]), memory).unwrap();
                format!("{:?}", transfer.is_finished().unwrap())
            }
            // device METADATA: pulls to memory that NIXL does not support.
            "device" => {
                let space = MemorySpace::Device { backend: "ascend", ordinal: 0.into() };
                let memory = TransferMemory { space, address: 4096, len: 1 };
                report(&pull_all(engine.as_ref().unwrap(), &unhex(words[1]), memory).unwrap_err())
            }
            "files" => open_files().to_string(),
            other => unreachable!("{other}"),
        };
        device_ipc_test_process::answer(answer);
    }
}

/// Starts a read into memory that stays allocated, and that no code accesses, or that the engine refuses.
fn pull_all(engine: &NixlEngine, metadata: &[u8], memory: TransferMemory) -> Result<Box<dyn Transfer>> {
    let piece = Piece { source: 0, source_offset: 0, destination: 0, destination_offset: 0, len: memory.len };
    // SAFETY: as above.
    unsafe { engine.pull(&PullRequest { sources: &[metadata], destinations: &[memory], pieces: &[piece] }) }
}

/// See `pieces` of the importer.
fn pieces(engine: &NixlEngine, length: usize, seed: u8, metadata: &[&str]) -> String {
    let metadata: Vec<_> = metadata.iter().map(|metadata| unhex(metadata)).collect();
    let sources: Vec<_> = metadata.iter().map(Vec::as_slice).collect();
    let mut first = vec![0; length];
    let mut others = vec![0; length * (sources.len() - 1)];
    let destinations = [memory_of(&mut first), memory_of(&mut others)];
    let mut pieces = Vec::new();
    for source in 0..sources.len() {
        for offset in (0..length as u64).step_by(2 * PAGE) {
            let place = source.saturating_sub(1) as u64 * length as u64 + offset;
            pieces.push(Piece {
                source,
                source_offset: offset,
                destination: source.min(1),
                destination_offset: place,
                len: PAGE as u64,
            });
        }
    }
    let request = PullRequest { sources: &sources, destinations: &destinations, pieces: &pieces };
    // SAFETY: the destinations are read after the end of the transfer.
    let transfer = match unsafe { engine.pull(&request) } {
        Ok(transfer) => transfer,
        Err(error) => return report(&error),
    };
    let deadline = Instant::now() + LONG;
    while !transfer.is_finished().unwrap() {
        assert!(Instant::now() < deadline, "the transfer does not end");
        std::thread::sleep(Duration::from_micros(100));
    }
    let mut wrong = Vec::new();
    for (index, found) in first.chunks(length).chain(others.chunks(length)).enumerate() {
        let mut expected = contents(0, length, seed + index as u8);
        expected.chunks_mut(PAGE).skip(1).step_by(2).for_each(|page| page.fill(0));
        if found != expected {
            wrong.push(index);
        }
    }
    format!("{} pieces, wrong: {wrong:?}", pieces.len())
}

fn open_files() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Returns the processor time that this process has used.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn start(importer: &mut Process, metadata: &str, offset: usize, length: usize, limit: Duration) -> String {
    importer.ask(&format!("start {metadata} {offset} {length} {}", limit.as_millis()))
}

#[test]
fn pulled_bytes_are_those_of_the_exporter() {
    let Some((mut exporter, mut importer)) = exporter_and_importer() else { return };
    for (seed, length) in LENGTHS.into_iter().enumerate() {
        let metadata = exporter.ask(&format!("share {length} {seed}"));
        for offset in [0, length / 2, length - 1] {
            assert_eq!(start(&mut importer, &metadata, offset, length - offset, LONG), "started");
            let expected = format!("{} right", length - offset);
            assert_eq!(importer.ask(&format!("wait {offset} {seed}")), expected);
        }
    }
    importer.finish();
    exporter.finish();
}

#[test]
fn threads_pull_at_the_same_time() {
    let Some((mut exporter, mut importer)) = exporter_and_importer() else { return };
    let metadata = exporter.ask("share 65536 7");
    assert_eq!(importer.ask(&format!("parallel {metadata} 65536 7")), "faults: []");
}

#[test]
fn one_transfer_reads_pieces_of_several_regions() {
    const REGIONS: u8 = 20;
    let Some((mut exporter, mut importer)) = exporter_and_importer() else { return };
    let length = 100 * PAGE;
    let regions: Vec<_> = (0..REGIONS).map(|seed| exporter.ask(&format!("share {length} {seed}"))).collect();
    let answer = importer.ask(&format!("pieces {length} 0 {}", regions.join(" ")));
    assert_eq!(answer, format!("{} pieces, wrong: []", usize::from(REGIONS) * 50));
}

#[test]
fn invalid_pulls_are_refused() {
    let Some((mut exporter, mut importer)) = exporter_and_importer() else { return };
    let metadata = exporter.ask("share 4096 1");
    let error = start(&mut importer, &metadata, 1, 4096, LONG);
    assert!(error.starts_with("region:") && error.contains("offset 1 exceed"), "{error}");
    let error = start(&mut importer, &metadata, 0, 0, LONG);
    assert!(error.starts_with("region:"), "{error}");
    let error = importer.ask(&format!("device {metadata}"));
    assert!(error.starts_with("unsupported:") && error.contains("ascend"), "{error}");
    let error = start(&mut importer, "02ff", 0, 1, LONG);
    assert!(error.starts_with("protocol:") && error.contains("version 2"), "{error}");
    // The form is right, but NIXL's own metadata is not.
    let error = start(&mut importer, "01000000640000", 0, 1, LONG);
    assert!(error.starts_with("vendor:") && error.contains("load_remote_md"), "{error}");
    // The importer is as before.
    assert_eq!(start(&mut importer, &metadata, 0, 4096, LONG), "started");
    assert_eq!(importer.ask("wait 0 1"), "4096 right");
}

#[test]
fn memory_that_is_registered_again_is_pulled_again() {
    let Some((mut exporter, mut importer)) = exporter_and_importer() else { return };
    let mut metadata = exporter.ask("share 4096 1");
    for seed in 1..4 {
        assert_eq!(start(&mut importer, &metadata, 0, 4096, LONG), "started");
        assert_eq!(importer.ask(&format!("wait 0 {seed}")), "4096 right");
        metadata = exporter.ask(&format!("renew {}", seed + 1));
    }
}

#[test]
fn pull_from_a_killed_exporter_fails() {
    let Some((mut exporter, mut importer)) = exporter_and_importer() else { return };
    let metadata = exporter.ask("share 4096 1");
    // The pull cannot finish before the exporter is killed.
    exporter.suspend();
    assert_eq!(start(&mut importer, &metadata, 0, 4096, LONG), "started");
    exporter.kill();
    let error = importer.ask("wait 0 1");
    assert!(error.starts_with("vendor: get_xfer_status") && error.contains("terminated"), "{error}");
}

#[test]
fn all_pulls_from_a_killed_exporter_fail() {
    let Some((mut exporter, mut importer)) = exporter_and_importer() else { return };
    let metadata = [exporter.ask("share 4096 1"), exporter.ask("share 1048576 2")];
    // With a connection, as opposed to the test above.
    assert_eq!(start(&mut importer, &metadata[0], 0, 4096, LONG), "started");
    assert_eq!(importer.ask("wait 0 1"), "4096 right");
    exporter.suspend();
    for metadata in [&metadata[0], &metadata[1], &metadata[0]] {
        assert_eq!(start(&mut importer, metadata, 0, 4096, LONG), "started");
    }
    exporter.kill();
    for _ in 0..3 {
        let error = importer.ask("wait 0 1");
        assert!(error.starts_with("vendor: get_xfer_status") && error.contains("terminated"), "{error}");
    }
    // The engine works with another exporter.
    let mut other = process(concat!(module_path!(), "::exporter"));
    assert_eq!(other.ask("load"), "loaded");
    let metadata = other.ask("share 4096 3");
    assert_eq!(start(&mut importer, &metadata, 0, 4096, LONG), "started");
    assert_eq!(importer.ask("wait 0 3"), "4096 right");
}

#[test]
fn transfer_that_is_dropped_early_does_not_disturb_others() {
    let Some((mut exporter, mut importer)) = exporter_and_importer() else { return };
    let metadata = exporter.ask("share 4096 1");
    exporter.suspend();
    assert_eq!(importer.ask(&format!("leak {metadata} 4096")), "false");
    exporter.resume();
    assert_eq!(start(&mut importer, &metadata, 0, 4096, LONG), "started");
    assert_eq!(importer.ask("wait 0 1"), "4096 right");
    importer.finish();
    exporter.finish();
}

/// The length of a pull whose exporter is suspended after the first bytes.
const MANY: usize = 128 << 20;

/// Starts a pull of many bytes, and suspends its exporter.
fn start_and_suspend(exporter: &mut Process, importer: &mut Process, limit: Duration) {
    let metadata = exporter.ask(&format!("share {MANY} 1"));
    let request = format!("start {metadata} 0 {MANY} {} {}", limit.as_millis(), exporter.id());
    assert_eq!(importer.ask(&request), "started");
}

#[test]
fn read_from_a_suspended_exporter_continues_with_it() {
    let Some((mut exporter, mut importer)) = exporter_and_importer() else { return };
    start_and_suspend(&mut exporter, &mut importer, SHORT);
    assert_eq!(importer.ask("wait 0 1"), "running");
    exporter.resume();
    assert_eq!(importer.ask("wait 0 1"), format!("{MANY} right"));
    exporter.finish();
}

#[test]
fn read_of_many_bytes_fails_when_the_exporter_is_killed() {
    let Some((mut exporter, mut importer)) = exporter_and_importer() else { return };
    start_and_suspend(&mut exporter, &mut importer, LONG);
    exporter.kill();
    let error = importer.ask("wait 0 1");
    assert!(error.starts_with("vendor: get_xfer_status"), "{error}");
}

#[test]
fn repeated_pulls_leave_no_files_open() {
    let Some((mut exporter, mut importer)) = exporter_and_importer() else { return };
    let metadata = exporter.ask("share 4096 1");
    let mut pulls = |count: usize, exporter: &mut Process| {
        for _ in 0..count {
            assert_eq!(start(&mut importer, &metadata, 0, 4096, LONG), "started");
            assert_eq!(importer.ask("wait 0 1"), "4096 right");
        }
        [exporter.ask("files"), importer.ask("files")].map(|files| files.parse::<usize>().unwrap())
    };
    let before = pulls(3, &mut exporter);
    assert_eq!(pulls(50, &mut exporter), before, "open files of the exporter and of the importer");
}

#[test]
fn idle_engine_uses_little_processor_time() {
    const IDLE: Duration = Duration::from_secs(1);
    let Some((mut exporter, _importer)) = exporter_and_importer() else { return };
    let mut used = || exporter.ask("processor").parse::<u64>().unwrap();
    let before = used();
    // What is measured is that nothing happens. A progress thread without a delay uses all of this time.
    std::thread::sleep(IDLE);
    let milliseconds = used() - before;
    assert!(milliseconds < 200, "the process used {milliseconds} ms of {IDLE:?}");
}

/// Answers with the error of a NIXL without plugins.
#[test]
#[ignore = "a process of the other tests"]
fn without_plugins() {
    let mut engine = None;
    serve(|_, _| load(&mut engine));
}

#[test]
fn missing_plugin_error_names_the_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let mut environment = ENVIRONMENT.to_vec();
    environment.push(("NIXL_PLUGIN_DIR", folder.path().to_str().unwrap()));
    let path = concat!(module_path!(), "::without_plugins");
    let error = Process::of_test(path, &environment).ask("load");
    if error.starts_with("library not found") && env::var_os(LIBRARY_VARIABLE).is_none() {
        eprintln!("skipped: {error}");
        return;
    }
    for phrase in ["get_plugin_params", "NIXL_PLUGIN_DIR", "libplugin_UCX.so", "nixl-cu13"] {
        assert!(error.contains(phrase), "{phrase:?} is missing in {error}");
    }
}
