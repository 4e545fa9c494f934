//! Each mistake of a backend fails a case of the suite, with a message that names the remedy. The cases pass on the machines
//! without a mistake.

mod faulty;

use device_ipc_conformance::Suite;

use faulty::{Faulty, Mistake};

/// The mistakes, each with the form of the handles, the case that fails, and a part of the message.
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
        Mistake::BlocksKeepTheirNumbers,
        "bytes",
        "device_memory::blocks_are_copied",
        "3 blocks of 3 bytes in 66 tensors",
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
        Mistake::ReserveIgnoresTheAddress,
        "bytes",
        "reserved::equal_addresses_in_two_processes",
        "DeviceReservations::reserve has to take free addresses",
    ),
    (
        Mistake::UnreserveDoesNothing,
        "bytes",
        "reserved::nothing_is_left_behind",
        "DeviceReservations::unreserve has to free the addresses",
    ),
];

/// Adds the mock with each of the mistakes.
pub(crate) fn add_to(suite: Suite) -> Suite {
    TABLE.iter().fold(suite, |suite, (mistake, handles, case, remedy)| {
        let theme = case.split("::").next().unwrap_or_default();
        let name = String::leak(format!("{mistake:?}-{handles}-{theme}"));
        suite.faulty_variant(name, case, remedy, move || {
            Ok(Faulty::new(&format!("devices=2;handles={handles}"), *mistake)?)
        })
    })
}
