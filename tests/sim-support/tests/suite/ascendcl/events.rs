//! Events and notifies, also those of other processes.

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
