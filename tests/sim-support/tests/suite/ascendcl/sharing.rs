//! Events, notifies and physical memory between processes.

use super::support::{
    DRIVER, INVALID_HANDLE, KERNEL_TRAP, NO_NOTIFY, NO_PERMISSION, NOT_SUPPORTED, PARAM, Process, REMOTE,
    STREAM_TIMEOUT, TASK_TIMEOUT,
};

/// Starts a process with a shared event. Returns it with the handle.
fn recorder() -> (Process, Vec<u8>) {
    let mut recorder = Process::ready("", 0);
    recorder.ok("aclrtCreateEventExWithFlag &e 0x40");
    recorder.ok("aclrtIpcGetEventHandle e &handle");
    let handle = recorder.bytes("handle", 64);
    (recorder, handle)
}

fn waiter(device: u32, handle: &[u8]) -> Process {
    let mut waiter = Process::ready("", device);
    waiter.put("handle", handle);
    waiter.ok("aclrtIpcOpenEventHandle handle &e");
    waiter
}

#[test]
fn shared_event_flag_excludes_others() {
    let mut process = Process::ready("", 0);
    for flags in ["0", "0x41", "0x48", "0x80", "0x60"] {
        process.gives(&format!("aclrtCreateEventExWithFlag &e {flags}"), PARAM);
    }
    process.gives("aclrtCreateEventWithFlag &e 0x40", PARAM);
    process.ok("aclrtCreateEventExWithFlag &e 1");
    process.gives("aclrtIpcGetEventHandle e &handle", PARAM);
}

#[test]
fn event_handle_has_8_written_bytes() {
    let mut process = Process::ready("", 0);
    process.ok("aclrtCreateEventExWithFlag &e 0x40");
    process.put("handle", &[0xee; 64]);
    process.ok("aclrtIpcGetEventHandle e &handle");
    let handle = process.bytes("handle", 64);
    assert_ne!(handle[..8], [0xee; 8]);
    assert_eq!(handle[8..], [0xee; 56]);
}

#[test]
fn wait_before_first_record_completes_at_once() {
    let (mut recorder, handle) = recorder();
    let mut waiter = waiter(1, &handle);
    waiter.ok("aclrtQueryEventStatus e &status");
    assert_eq!(waiter.get32("status"), 1);
    waiter.ok("aclrtStreamWaitEvent 0 e");
    waiter.ok("aclrtSynchronizeStream 0");
    waiter.ok("aclrtSynchronizeEvent e");
    // A wait captures the record that was submitted before it.
    recorder.ok("aclrtMalloc &gate 8 0");
    recorder.write("gate", &[0; 8]);
    recorder.ok("aclrtValueWait gate 1 1 0");
    recorder.ok("aclrtRecordEvent e 0");
    waiter.ok("aclrtQueryEventStatus e &status");
    assert_eq!(waiter.get32("status"), 0);
    waiter.ok("aclrtStreamWaitEvent 0 e");
    waiter.gives("aclrtSynchronizeStreamWithTimeout 0 1", STREAM_TIMEOUT);
    waiter.gives("aclrtSynchronizeEventWithTimeout e 1", 507_047);
    recorder.ok("aclrtCreateStream &s");
    recorder.ok("aclrtValueWrite gate 1 0 s");
    waiter.ok("aclrtSynchronizeStream 0");
}

#[test]
fn shared_events_lack_some_calls() {
    let (mut recorder, handle) = recorder();
    let mut waiter = waiter(0, &handle);
    for process in [&mut recorder, &mut waiter] {
        process.ok("aclrtCreateEvent &plain");
        for call in [
            "aclrtResetEvent e 0",
            "aclrtQueryEvent e &status",
            "aclrtQueryEventWaitStatus e &status",
            "aclrtEventElapsedTime &ms e plain",
            "aclrtEventElapsedTime &ms plain e",
            "aclrtEventGetTimestamp e &stamp",
            "aclrtGetEventId e &id",
        ] {
            let status = process.call(call);
            // The time between two events is a call on the first one.
            let expected = if call.contains("plain e") { 107_006 } else { NOT_SUPPORTED };
            assert_eq!(status, expected, "{call}");
        }
    }
}

#[test]
fn event_opens_in_others_while_creator_lives() {
    let (mut recorder, handle) = recorder();
    recorder.gives("aclrtIpcOpenEventHandle handle &own", DRIVER);
    let mut first = waiter(0, &handle);
    let mut late = Process::ready("", 0);
    late.put("handle", &handle);
    recorder.kill();
    late.gives("aclrtIpcOpenEventHandle handle &e", DRIVER);
    late.put("handle", &[0; 64]);
    late.gives("aclrtIpcOpenEventHandle handle &e", DRIVER);
    // A process that has it open continues to use it.
    first.ok("aclrtRecordEvent e 0");
    first.ok("aclrtSynchronizeEvent e");
    first.ok("aclrtDestroyEvent e");
    first.gives("aclrtDestroyEvent e", INVALID_HANDLE);
}

#[test]
fn opener_records_for_creator() {
    for device in [0, 1] {
        let (mut creator, handle) = recorder();
        let mut opener = waiter(device, &handle);
        opener.ok("aclrtCreateStream &s");
        opener.ok("aclrtMalloc &gate 8 0");
        opener.write("gate", &[0; 8]);
        opener.ok("aclrtValueWait gate 1 1 s");
        opener.ok("aclrtRecordEvent e s");
        creator.ok("aclrtStreamWaitEvent 0 e");
        creator.gives("aclrtSynchronizeStreamWithTimeout 0 1", STREAM_TIMEOUT);
        opener.write("gate", &1_u64.to_le_bytes());
        creator.ok("aclrtSynchronizeStream 0");
    }
}

#[test]
fn event_open_enables_peer_access_both_ways() {
    let (_recorder, handle) = recorder();
    let mut waiter = waiter(1, &handle);
    for pair in ["0 1", "1 0"] {
        waiter.ok(&format!("aclrtDevicePeerAccessStatus {pair} &status"));
        assert_eq!(waiter.get32("status"), 1);
    }
}

#[test]
fn old_and_new_events_differ_before_first_record() {
    let mut process = Process::ready("", 0);
    process.ok("aclrtCreateEvent &old");
    process.ok("aclrtCreateEventExWithFlag &new 1");
    for (event, status) in [("old", 0), ("new", 1)] {
        process.ok(&format!("aclrtQueryEventStatus {event} &status"));
        assert_eq!(process.get32("status"), status, "{event}");
        process.ok(&format!("aclrtRecordEvent {event} 0"));
        process.ok(&format!("aclrtSynchronizeEvent {event}"));
        process.ok(&format!("aclrtQueryEventStatus {event} &status"));
        assert_eq!(process.get32("status"), 1, "{event}");
    }
    // The query of a stream returns the reverse values. The end of an event is not yet that of its stream.
    process.ok("aclrtSynchronizeStream 0");
    process.ok("aclrtStreamQuery 0 &status");
    assert_eq!(process.get32("status"), 0);
}

#[test]
fn notify_has_separate_flags_and_list() {
    let mut creator = Process::ready("", 0);
    creator.ok("aclrtCreateNotify &n 0");
    for arguments in ["n &key 65 1", "n &key 65 3", "n &key 64 2"] {
        creator.gives(&format!("aclrtNotifyGetExportKey {arguments}"), PARAM);
    }
    creator.ok("aclrtNotifyGetExportKey n &key 65 0");
    creator.gives("aclrtNotifyImportByKey &own &key 2", DRIVER);
    let key = creator.bytes("key", 65);
    let mut importer = Process::ready("", 1);
    importer.put("key", &key);
    importer.gives("aclrtNotifyImportByKey &n &key 4", PARAM);
    importer.gives("aclrtNotifyImportByKey &n &key 2", DRIVER);
    creator.put("pid", &importer.pid().to_le_bytes());
    creator.ok("aclrtNotifySetImportPid n &pid 1");
    importer.gives("aclrtNotifyImportByKey &n &key 0", DRIVER);
    importer.ok("aclrtNotifyImportByKey &n &key 2");
    // A key of memory does not open a notify, and the reverse.
    importer.gives("aclrtIpcMemImportByKey &p &key 1", DRIVER);
    creator.ok("aclrtCreateNotify &open 0");
    creator.ok("aclrtNotifyGetExportKey open &key 65 2");
    creator.gives("aclrtNotifySetImportPid open &pid 1", NO_PERMISSION);
}

/// Records the notify `n` of a process on its default stream, and waits for the stream.
fn record(process: &mut Process) {
    process.ok("aclrtRecordNotify n 0");
    process.ok("aclrtSynchronizeStream 0");
}

/// Waits for the notify `n` of a process, which is not set.
fn wait_times_out(process: &mut Process) {
    process.ok("aclrtWaitAndResetNotify n 0 1");
    process.gives("aclrtSynchronizeStream 0", TASK_TIMEOUT);
}

#[test]
fn only_creator_waits_for_notify() {
    let mut creator = Process::ready("", 0);
    creator.ok("aclrtCreateNotify &n 0");
    creator.ok("aclrtNotifyGetExportKey n &key 65 2");
    let key = creator.bytes("key", 65);
    let mut importer = Process::ready("", 1);
    importer.put("key", &key);
    importer.ok("aclrtNotifyImportByKey &n &key 2");
    importer.gives("aclrtWaitAndResetNotify n 0 1", PARAM);
    let mut neighbour = Process::ready("", 0);
    neighbour.put("key", &key);
    neighbour.ok("aclrtNotifyImportByKey &n &key 0");
    neighbour.gives("aclrtWaitAndResetNotify n 0 1", PARAM);
    creator.ok("aclrtWaitAndResetNotify n 0 0");
    creator.gives("aclrtSynchronizeStreamWithTimeout 0 1", STREAM_TIMEOUT);
    record(&mut importer);
    creator.ok("aclrtSynchronizeStream 0");
    wait_times_out(&mut creator);
    // Unlike an event, an earlier record satisfies the wait.
    record(&mut importer);
    creator.ok("aclrtWaitAndResetNotify n 0 1");
    creator.ok("aclrtSynchronizeStream 0");
    // A record can be reset.
    record(&mut importer);
    creator.ok("aclrtNotifyBatchReset &n 1");
    wait_times_out(&mut creator);
    creator.kill();
    importer.ok("aclrtRecordNotify n 0");
    importer.gives("aclrtSynchronizeStream 0", REMOTE);
    importer.ok("aclrtDestroyNotify n");
}

#[test]
fn device_has_limited_notifies() {
    for (soc, count) in [("310p", 1024), ("310b", 2048)] {
        let mut process = Process::ready(&format!("soc={soc}"), 0);
        for _ in 0..count {
            process.ok("aclrtCreateNotify &n 0");
        }
        process.gives("aclrtCreateNotify &other 0", NO_NOTIFY);
        process.ok("aclrtDestroyNotify n");
        process.ok("aclrtCreateNotify &other 0");
    }
}

const PAGE: u64 = 2 << 20;

/// Starts a process with mapped physical memory that is shared without a list. Returns it with the number.
fn sharer() -> (Process, u64) {
    let mut sharer = Process::ready("", 0);
    let words: [u32; 8] = [0, 0, 4, 0, 1, 0, 0, 0];
    sharer.put("properties", &words.map(u32::to_le_bytes).concat());
    sharer.ok(&format!("aclrtMallocPhysical &h {PAGE} &properties 0"));
    sharer.ok(&format!("aclrtReserveMemAddress &p {PAGE} 0 0 0"));
    sharer.ok(&format!("aclrtMapMem p {PAGE} 0 h 0"));
    sharer.write("p", b"physical");
    sharer.ok("aclrtMemExportToShareableHandle h 0 1 &number");
    let number = sharer.get("number");
    (sharer, number)
}

/// Starts a process whose two devices have access to each other; device 1 is set.
fn taker_on_both_devices() -> Process {
    let mut taker = Process::ready("", 0);
    taker.ok("aclrtDeviceEnablePeerAccess 1 0");
    taker.ok("aclrtSetDevice 1");
    taker.ok("aclrtDeviceEnablePeerAccess 0 0");
    taker
}

#[test]
fn physical_memory_outlives_creator() {
    for killed in [false, true] {
        let (mut sharer, number) = sharer();
        let mut taker = Process::ready("", 0);
        taker.ok(&format!("aclrtMemImportFromShareableHandle {number} 0 &h"));
        taker.ok(&format!("aclrtReserveMemAddress &p {PAGE} 0 0 0"));
        taker.ok(&format!("aclrtMapMem p {PAGE} 0 h 0"));
        if killed {
            sharer.kill();
        } else {
            for call in ["aclrtUnmapMem p", "aclrtReleaseMemAddress p", "aclrtFreePhysical h"] {
                sharer.ok(call);
            }
        }
        assert_eq!(taker.read("p", 8), b"physical");
        taker.ok("aclrtUnmapMem p");
        taker.ok("aclrtFreePhysical h");
        taker.gives(&format!("aclrtMemImportFromShareableHandle {number} 0 &h"), DRIVER);
        let mut late = Process::ready("", 0);
        late.gives(&format!("aclrtMemImportFromShareableHandle {number} 0 &h"), DRIVER);
    }
}

#[test]
fn physical_memory_is_shared_once_with_others() {
    let (mut sharer, number) = sharer();
    sharer.gives("aclrtMemExportToShareableHandle h 0 1 &again", DRIVER);
    sharer.gives(&format!("aclrtMemImportFromShareableHandle {number} 0 &own"), DRIVER);
    sharer.put("pid", &7_i32.to_le_bytes());
    sharer.gives(&format!("aclrtMemSetPidToShareableHandle {number} &pid 1"), NO_PERMISSION);
    let mut taker = Process::ready("", 0);
    taker.ok(&format!("aclrtMemImportFromShareableHandle {number} 0 &h"));
    taker.gives("aclrtMemExportToShareableHandle h 0 1 &again", DRIVER);
    taker.gives("aclrtMemExportToShareableHandle h 0 2 &again", PARAM);
}

#[test]
fn physical_memory_with_list_needs_listing() {
    let mut sharer = Process::ready("", 0);
    let words: [u32; 8] = [0, 0, 4, 0, 1, 0, 0, 0];
    sharer.put("properties", &words.map(u32::to_le_bytes).concat());
    sharer.ok(&format!("aclrtMallocPhysical &h {PAGE} &properties 0"));
    sharer.ok("aclrtMemExportToShareableHandleV2 h 0 1 &number");
    let number = sharer.get("number");
    let mut taker = Process::ready("", 0);
    taker.set("number", number);
    taker.gives("aclrtMemImportFromShareableHandleV2 &number 1 0 &h", DRIVER);
    taker.put("pid", &taker.pid().to_le_bytes());
    taker.gives(&format!("aclrtMemSetPidToShareableHandle {number} &pid 1"), DRIVER);
    sharer.put("pid", &taker.pid().to_le_bytes());
    sharer.ok(&format!("aclrtMemSetPidToShareableHandle {number} &pid 1"));
    taker.ok("aclrtMemImportFromShareableHandleV2 &number 1 0 &h");
}

#[test]
fn mapping_covers_whole_block_and_has_no_key() {
    let (mut sharer, _) = sharer();
    sharer.ok(&format!("aclrtMallocPhysical &other {} &properties 0", 2 * PAGE));
    sharer.gives(&format!("aclrtMallocPhysical &odd {} &properties 0", PAGE + 4096), PARAM);
    sharer.ok(&format!("aclrtReserveMemAddress &q {} 0 0 0", 2 * PAGE));
    sharer.gives(&format!("aclrtMapMem q {PAGE} 0 other 0"), PARAM);
    sharer.gives(&format!("aclrtMapMem q {} 4096 other 0", 2 * PAGE), PARAM);
    sharer.ok(&format!("aclrtMapMem q {} 0 other 0", 2 * PAGE));
    sharer.gives("aclrtReleaseMemAddress q", PARAM);
    sharer.gives(&format!("aclrtIpcMemGetExportKey p {PAGE} &key 65 1"), DRIVER);
    sharer.gives("aclrtFree p", PARAM);
    sharer.ok("aclrtMemRetainAllocationHandle p &retained");
    sharer.ok("aclrtFreePhysical h");
    sharer.gives("aclrtFreePhysical h", INVALID_HANDLE);
    assert_eq!(sharer.read("p", 8), b"physical");
    sharer.ok("aclrtUnmapMem p");
    sharer.gives("aclrtUnmapMem p", PARAM);
    sharer.ok(&format!("aclrtMapMem p {PAGE} 0 retained 0"));
    assert_eq!(sharer.read("p", 8), b"physical");
}

#[test]
fn adjacent_mappings_are_one_range_for_copies() {
    let (mut sharer, _) = sharer();
    sharer.ok(&format!("aclrtReserveMemAddress &q {} 0 0 0", 4 * PAGE));
    for at in 0..3 {
        sharer.ok(&format!("aclrtMallocPhysical &part {PAGE} &properties 0"));
        sharer.ok(&format!("aclrtMapMem q+{} {PAGE} 0 part 0", at * PAGE));
    }
    let (start, count) = (PAGE - 8, PAGE + 16);
    sharer.ok(&format!("aclrtMemset q+{start} {count} 7 {count}"));
    assert_eq!(sharer.read(&format!("q+{}", 2 * PAGE - 4), 8), [7; 8]);
    assert_eq!(sharer.read(&format!("q+{}", 2 * PAGE + 4), 8), [7, 7, 7, 7, 0, 0, 0, 0]);
    sharer.gives(&format!("aclrtMemset q+{} 16 7 16", 3 * PAGE - 8), PARAM);
    sharer.ok(&format!("aclrtUnmapMem q+{PAGE}"));
    sharer.gives(&format!("aclrtMemset q+{start} {count} 7 {count}"), PARAM);
}

#[test]
fn mapping_on_another_device_needs_peer_access() {
    let (_sharer, number) = sharer();
    let mut taker = Process::ready("", 1);
    taker.ok(&format!("aclrtMemImportFromShareableHandle {number} 1 &h"));
    taker.ok(&format!("aclrtReserveMemAddress &p {PAGE} 0 0 0"));
    taker.gives(&format!("aclrtMapMem p {PAGE} 0 h 0"), DRIVER);
    taker.ok("aclrtDeviceEnablePeerAccess 0 0");
    taker.gives(&format!("aclrtMapMem p {PAGE} 0 h 0"), DRIVER);
    taker.ok("aclrtSetDevice 0");
    taker.ok("aclrtDeviceEnablePeerAccess 1 0");
    taker.ok("aclrtSetDevice 1");
    taker.ok(&format!("aclrtMapMem p {PAGE} 0 h 0"));
    taker.ok("aclrtMalloc &local 8 0");
    taker.gives("aclrtMemcpy local 8 p 8 3", DRIVER);
    taker.ok("aclrtMemcpyAsync local 8 p 8 3 0");
    taker.ok("aclrtSynchronizeStream 0");
    assert_eq!(taker.read("local", 8), b"physical");
}

#[test]
fn access_is_set_by_logic_id_for_whole_mappings() {
    let setup = super::support::Setup {
        machine: "devices=4",
        visible: Some("2"),
        ..super::support::Setup::default()
    };
    let mut process = Process::with(&setup);
    process.ok("aclInit 0");
    process.ok("aclrtSetDevice 0");
    let words: [u32; 8] = [0, 0, 4, 0, 1, 0, 0, 0];
    process.put("properties", &words.map(u32::to_le_bytes).concat());
    process.ok(&format!("aclrtMallocPhysical &h {PAGE} &properties 0"));
    process.ok(&format!("aclrtReserveMemAddress &p {PAGE} 0 0 0"));
    process.ok(&format!("aclrtMapMem p {PAGE} 0 h 0"));
    // Flags, id and kind of the location, and 12 reserved bytes.
    let mut access = |id: u32, flags: u32, size: u64, status| {
        let words: [u32; 6] = [flags, id, 1, 0, 0, 0];
        process.put("access", &words.map(u32::to_le_bytes).concat());
        process.gives(&format!("aclrtMemSetAccess p {size} &access 1"), status);
    };
    access(0, 3, PAGE, DRIVER);
    access(2, 2, PAGE, PARAM);
    access(2, 3, PAGE / 2, PARAM);
    access(2, 1, PAGE, NOT_SUPPORTED);
    access(2, 3, PAGE, 0);
    access(2, 3, PAGE, 0);
    process.ok("aclrtMemsetAsync p 8 0 8 0");
    process.ok("aclrtSynchronizeStream 0");
}

#[test]
fn shareable_handle_is_imported_once_per_device() {
    let (_sharer, number) = sharer();
    let mut taker = taker_on_both_devices();
    taker.ok(&format!("aclrtMemImportFromShareableHandle {number} 0 &h"));
    taker.gives(&format!("aclrtMemImportFromShareableHandle {number} 0 &again"), DRIVER);
    taker.ok(&format!("aclrtMemImportFromShareableHandle {number} 1 &away"));
    taker.ok(&format!("aclrtReserveMemAddress &p {PAGE} 0 0 0"));
    taker.ok(&format!("aclrtReserveMemAddress &q {PAGE} 0 0 0"));
    taker.ok(&format!("aclrtMapMem p {PAGE} 0 h 0"));
    taker.ok(&format!("aclrtMapMem q {PAGE} 0 away 0"));
    // A released handle is valid while it is mapped.
    taker.ok("aclrtFreePhysical away");
    taker.gives(&format!("aclrtMemImportFromShareableHandle {number} 1 &again"), DRIVER);
    taker.ok("aclrtUnmapMem q");
    taker.ok(&format!("aclrtMemImportFromShareableHandle {number} 1 &again"));
}

#[test]
fn imported_memory_rejects_further_devices() {
    let (_sharer, number) = sharer();
    let mut taker = taker_on_both_devices();
    taker.ok(&format!("aclrtMemImportFromShareableHandle {number} 0 &h"));
    taker.ok(&format!("aclrtReserveMemAddress &p {PAGE} 0 0 0"));
    taker.ok(&format!("aclrtMapMem p {PAGE} 0 h 0"));
    for (device, status) in [(0, 0), (1, DRIVER)] {
        taker.put("access", &[3_u32, device, 1, 0, 0, 0].map(u32::to_le_bytes).concat());
        taker.gives(&format!("aclrtMemSetAccess p {PAGE} &access 1"), status);
    }
}

#[test]
fn reservation_has_memory_of_one_device_and_kind() {
    let (_sharer, number) = sharer();
    let mut taker = taker_on_both_devices();
    taker.ok(&format!("aclrtReserveMemAddress &p {} 0 0 0", 2 * PAGE));
    let properties = |device: u32| [0, 0, 4, device, 1, 0, 0, 0].map(u32::to_le_bytes).concat();
    for device in [0, 1] {
        taker.put("properties", &properties(device));
        taker.ok(&format!("aclrtMallocPhysical &own{device} {PAGE} &properties 0"));
    }
    taker.ok(&format!("aclrtMemImportFromShareableHandle {number} 0 &imported"));
    taker.ok(&format!("aclrtMapMem p {PAGE} 0 own0 0"));
    taker.gives(&format!("aclrtMapMem p+{PAGE} {PAGE} 0 own1 0"), DRIVER);
    taker.gives(&format!("aclrtMapMem p+{PAGE} {PAGE} 0 imported 0"), DRIVER);
    taker.ok("aclrtUnmapMem p");
    taker.ok(&format!("aclrtMapMem p {PAGE} 0 imported 0"));
}

#[test]
fn physical_memory_has_units_of_2_mib() {
    let mut process = Process::ready("", 0);
    for attribute in [0_u32, 1, 4, 5] {
        process.put("properties", &[0, 0, attribute, 0, 1, 0, 0, 0].map(u32::to_le_bytes).concat());
        process.ok("aclrtMemGetAllocationGranularity &properties 0 &size");
        assert_eq!(process.get("size"), PAGE);
        process.gives("aclrtMallocPhysical &h 4096 &properties 0", PARAM);
    }
}

#[test]
fn chosen_addresses_are_free_multiples_of_1_gib() {
    const GIB: u64 = 1 << 30;
    let mut process = Process::ready("", 0);
    process.ok(&format!("aclrtReserveMemAddress &room {} 0 0 0", 2 * GIB));
    let chosen = process.get("room").next_multiple_of(GIB);
    process.gives(&format!("aclrtReserveMemAddress &p {PAGE} 0 {chosen} 0"), 207_001);
    process.ok("aclrtReleaseMemAddress room");
    process.gives(&format!("aclrtReserveMemAddress &p {PAGE} 0 {} 0", chosen + PAGE), PARAM);
    process.ok(&format!("aclrtReserveMemAddress &p {PAGE} 0 {chosen} 0"));
    assert_eq!(process.get("p"), chosen);
    process.gives(&format!("aclrtReserveMemAddress &q {PAGE} 0 {chosen} 0"), 207_001);
    process.ok("aclrtReleaseMemAddress p");
}

#[test]
fn event_without_sync_flag_rejects_stream_wait() {
    let mut process = Process::ready("", 0);
    process.ok("aclrtCreateEventExWithFlag &event 8");
    process.ok("aclrtRecordEvent event 0");
    process.gives("aclrtStreamWaitEvent 0 event", NOT_SUPPORTED);
    process.gives("aclrtResetEvent event 0", NOT_SUPPORTED);
    for flags in [0x10, 0x20, 0x41, 0] {
        process.gives(&format!("aclrtCreateEventExWithFlag &event {flags}"), PARAM);
    }
    process.ok("aclrtCreateEvent &event");
    process.ok("aclrtRecordEvent event 0");
    process.ok("aclrtStreamWaitEvent 0 event");
}

#[test]
fn failure_is_reported_once_and_stops_its_stream_by_mode() {
    let mut process = Process::ready("", 0);
    process.ok("aclrtCreateStream &s");
    process.ok("aclrtMalloc &word 8 0");
    let fail = |process: &mut Process, later: u64| {
        process.ok("deviceIpcSimKernel s trap 0");
        process.ok(&format!("aclrtValueWrite word {later} 0 s"));
        process.gives("aclrtSynchronizeStream s", KERNEL_TRAP);
        process.read("word", 8)
    };
    assert_eq!(fail(&mut process, 9), 9_u64.to_le_bytes(), "later work runs");
    process.ok("aclrtSynchronizeStream s");
    process.ok("aclrtSetStreamFailureMode s 1");
    assert_eq!(fail(&mut process, 10), 9_u64.to_le_bytes(), "later work is dropped");
}

#[test]
fn time_between_events_is_not_negative() {
    let mut process = Process::ready("", 0);
    for event in ["start", "end"] {
        process.ok(&format!("aclrtCreateEvent &{event}"));
        process.ok(&format!("aclrtRecordEvent {event} 0"));
    }
    process.ok("aclrtSynchronizeEvent end");
    process.ok("aclrtEventElapsedTime &ms start end");
    assert!(f32::from_le_bytes(process.bytes("ms", 4).try_into().expect("4 bytes")) >= 0.0);
}

#[test]
fn failure_mode_of_stream_is_set_once() {
    let mut process = Process::ready("", 0);
    process.ok("aclrtCreateStream &s");
    process.gives("aclrtSetStreamFailureMode s 2", PARAM);
    process.ok("aclrtSetStreamFailureMode s 1");
    process.gives("aclrtSetStreamFailureMode s 1", PARAM);
}
