//! Each mistake of a backend fails a case of the conformance suite, with a message that names the remedy.
//!
//! The mock with one deliberate mistake runs the case that detects it. Without the mistake the same case passes.

#[macro_use]
#[path = "../support/delegate.rs"]
mod delegate;
mod faulty;

use std::process::{Command, ExitCode};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use device_ipc_conformance::Suite;

use faulty::{Faulty, Mistake};

/// The environment variable with the mistake, for the processes of a run.
const MISTAKE_VARIABLE: &str = "DEVICE_IPC_TEST_MISTAKE";

/// The mistakes, each with the variant, the case that fails, and a part of the message.
const TABLE: &[(Mistake, &str, &str, &str)] = &[
    (
        Mistake::FreeDoesNotWait,
        "bytes",
        "device_memory::free_waits_for_submitted_work",
        "DeviceMemory::free has to wait for the work that was submitted",
    ),
    (
        Mistake::FreeUnmapsAtOnce,
        "bytes",
        "device_memory::free_waits_for_submitted_work",
        "killed by SIGSEGV (11): it accessed an address that is not mapped; a backend that unmaps memory in free",
    ),
    (
        Mistake::OpenIsOnePageTooLong,
        "bytes",
        "handles::opened_size_is_the_drivers",
        "Opened::range has to have the length that the driver mapped",
    ),
    (
        Mistake::OpenIsOnePageTooLong,
        "fds",
        "handles::opened_size_is_the_drivers",
        "Opened::range has to have the length that the driver mapped",
    ),
    (
        Mistake::OpenReturnsTheClaimedSize,
        "fds",
        "handles::opened_size_is_the_drivers",
        "Opened::range has to have the length that the driver mapped",
    ),
    (
        Mistake::CloseDoesNothing,
        "bytes",
        "handles::close_leaves_nothing_behind",
        "DeviceIpc::close has to unmap the range",
    ),
    (
        Mistake::CloseDoesNothing,
        "fds",
        "kinds::memory_is_free_again",
        "DeviceIpc::close, DeviceIpc::unexport or DeviceMemory::free keeps the memory",
    ),
    (
        Mistake::UnexportLeaks,
        "fds",
        "handles::unexport_leaves_nothing_behind",
        "DeviceIpc::unexport has to give back what export took",
    ),
    (
        Mistake::UnexportLeaks,
        "fds",
        "kinds::memory_is_free_again",
        "DeviceIpc::close, DeviceIpc::unexport or DeviceMemory::free keeps the memory",
    ),
    (
        Mistake::StatedBaseIsIgnored,
        "bytes",
        "backend_contract::stated_allocation_is_checked",
        "compare stated_base with the vendor's answer",
    ),
    (
        Mistake::ExtentsEndBeforeTheRange,
        "bytes",
        "backend_contract::extents_cover_the_range",
        "has to refuse a range that leaves its allocation with InvalidRegion",
    ),
    (
        Mistake::OpenedMemoryHasExtents,
        "bytes",
        "handles::opened_memory_has_no_extents",
        "it has to refuse with SharedOn",
    ),
    (
        Mistake::ForeignStreamsAreAccepted,
        "bytes",
        "device_memory::streams_of_another_backend_are_refused",
        "compare BorrowedStream::backend before",
    ),
    (
        Mistake::WriteKeepsTheBuffer,
        "bytes",
        "device_memory::written_bytes_may_be_reused",
        "DeviceMemory::write has to copy the bytes before it returns",
    ),
    (
        Mistake::MemoryInfoIsOfTheProcess,
        "bytes",
        "device_memory::memory_info_is_of_the_whole_device",
        "has to tell the free memory of the device, not of the process",
    ),
    (
        Mistake::EmptyRangesAreRefused,
        "bytes",
        "device_memory::empty_ranges_are_left_alone",
        "DeviceMemory::fill has to accept zero bytes",
    ),
    (
        Mistake::SubmittingWaits,
        "bytes",
        "device_memory::work_is_done_later_and_in_order",
        "submitting work should not wait for the stream",
    ),
    (
        Mistake::UnmapDoesNothing,
        "bytes",
        "reserved::suspended_addresses_hold_nothing",
        "DeviceReservations::unmap has to unmap the range",
    ),
    (
        Mistake::ImportIsAlwaysWritable,
        "bytes",
        "reserved::read_only_is_kept",
        "DeviceReservations::map has to give the access of the import",
    ),
    (
        Mistake::ReleaseDoesNothing,
        "fds",
        "reserved::nothing_is_left_behind",
        "DeviceIpc::close, DeviceIpc::unexport or DeviceMemory::free keeps the memory",
    ),
    (
        Mistake::UnreserveDoesNothing,
        "bytes",
        "reserved::nothing_is_left_behind",
        "DeviceReservations::unreserve has to free the addresses",
    ),
];

fn main() -> ExitCode {
    if let Ok(name) = std::env::var(MISTAKE_VARIABLE) {
        let mistake = TABLE.iter().map(|row| row.0).find(|mistake| format!("{mistake:?}") == name);
        return Suite::new("faulty")
            .variant("bytes", move || Ok(Faulty::new("devices=2", mistake)?))
            .variant("fds", move || Ok(Faulty::new("devices=2;handles=fds", mistake)?))
            .run();
    }
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let filters: Vec<_> = arguments.iter().filter(|argument| !argument.starts_with('-')).collect();
    let wanted = |name: &String| filters.is_empty() || filters.iter().any(|filter| name.contains(*filter));
    let tests: Vec<_> =
        TABLE.iter().map(|row| (name_of(row), row)).filter(|(name, _)| wanted(name)).collect();
    if arguments.iter().any(|argument| argument == "--list") {
        let listed = if arguments.iter().any(|argument| argument == "--ignored") { &[][..] } else { &tests };
        listed.iter().for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while let Some((name, row)) = tests.get(next.fetch_add(1, Ordering::Relaxed)) {
                    match check(row) {
                        Ok(()) => println!("ok       {name}"),
                        Err(what) => {
                            println!("FAILED   {name}: {what}");
                            failed.lock().expect("no thread panics with it").push(name);
                        }
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().expect("no thread panics with it");
    println!("{} mistakes, {} failed", tests.len(), failed.len());
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn name_of((mistake, variant, case, _): &(Mistake, &str, &str, &str)) -> String {
    format!("{mistake:?}/{variant}/{case}")
}

/// Checks that the case fails with the mistake and names the remedy, and passes without it.
fn check((mistake, variant, case, remedy): &(Mistake, &str, &str, &str)) -> Result<(), String> {
    let name = format!("{mistake:?}");
    let (passed, output) = run(&name, variant, case)?;
    if passed || !output.contains(&format!("FAILED   faulty/{variant}/{case}")) {
        return Err(format!("the case did not detect the mistake:\n{output}"));
    }
    if !output.contains(remedy) {
        return Err(format!("the message does not contain {remedy:?}:\n{output}"));
    }
    let (passed, output) = run("none", variant, case)?;
    if passed && output.contains("1 passed") {
        Ok(())
    } else {
        Err(format!("without the mistake:\n{output}"))
    }
}

fn run(mistake: &str, variant: &str, case: &str) -> Result<(bool, String), String> {
    let exe = std::env::current_exe().map_err(|error| error.to_string())?;
    let output = Command::new(exe)
        .args(["--exact", &format!("faulty/{variant}/{case}"), "--variant", variant])
        .env(MISTAKE_VARIABLE, mistake)
        .output()
        .map_err(|error| error.to_string())?;
    Ok((output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned()))
}
