//! Device memory, copies, words.

use super::support::{
    DEVICE_MEMORY, DRIVER, INVALID_PARAM, NOT_SUPPORTED, OUT_OF_MEMORY, PARAM, Process, STREAM_TIMEOUT,
    Setup, UNALIGNED,
};

const HUGE_PAGE: u64 = 2 << 20;

#[test]
fn memory_is_aligned_to_pages_of_its_policy() {
    let mut process = Process::ready("memory=4GiB", 0);
    for (size, policy, page) in [
        (4096, 0, 4096),
        ((1 << 20) - 32, 0, 4096),
        (1 << 20, 0, HUGE_PAGE),
        (4096, 1, HUGE_PAGE),
        (8 << 20, 2, 4096),
        (4096, 4, HUGE_PAGE),
        (4096, 6, 1 << 30),
    ] {
        process.ok(&format!("aclrtMalloc &p {size} {policy}"));
        process.ok("aclrtPointerGetAttributes p+77 &attributes");
        let attributes = process.bytes("attributes", 12);
        let word = |at: usize| u32::from_le_bytes(attributes[at..at + 4].try_into().expect("4 bytes"));
        assert_eq!((word(0), word(4), u64::from(word(8))), (0, 1, page), "{size} bytes by policy {policy}");
        assert!(process.get("p").is_multiple_of(page));
    }
}

#[test]
fn malloc_padding_takes_another_huge_page() {
    for (soc, pages) in [("910b", 2), ("950", 1)] {
        let mut process = Process::ready(&format!("soc={soc}"), 0);
        let mut used_by = |call: &str| {
            process.ok("aclrtGetMemInfo 1 &before &total");
            process.ok(call);
            process.ok("aclrtGetMemInfo 1 &after &total");
            process.get("before") - process.get("after")
        };
        assert_eq!(used_by("aclrtMalloc &p 2097152 0"), pages * HUGE_PAGE, "{soc}");
        assert_eq!(used_by("aclrtMallocAlign32 &q 2097152 0"), HUGE_PAGE, "{soc}");
        assert_eq!(used_by("aclrtMalloc &r 100 0"), 4096, "{soc}");
    }
}

#[test]
fn allocation_on_full_device_fails() {
    let mut process = Process::ready("memory=8MiB", 0);
    process.ok("aclrtMallocAlign32 &p 6291456 0");
    process.gives("aclrtMallocAlign32 &q 4194304 0", OUT_OF_MEMORY);
    process.ok("aclrtFree p");
    process.ok("aclrtMallocAlign32 &q 4194304 0");
}

#[test]
fn only_base_of_own_memory_is_freed_once() {
    let mut process = Process::ready("", 0);
    process.ok("aclrtMalloc &p 4096 0");
    process.ok("aclrtMallocHost &h 4096");
    for pointer in ["p+32", "h", "&p"] {
        process.gives(&format!("aclrtFree {pointer}"), PARAM);
    }
    process.gives("aclrtFreeHost p", PARAM);
    process.ok("aclrtFree p");
    process.gives("aclrtFree p", PARAM);
}

#[test]
fn free_does_not_wait_for_work() {
    let mut process = Process::ready("", 0);
    process.ok("aclrtCreateStream &s");
    process.ok("aclrtMalloc &gate 8 0");
    process.ok("aclrtMalloc &p 4096 0");
    process.write("gate", &[0; 8]);
    process.ok("aclrtValueWait gate 1 1 s");
    process.ok("aclrtMemsetAsync p 4096 1 4096 s");
    process.ok("aclrtFree p");
    process.write("gate", &1_u64.to_le_bytes());
    process.gives("aclrtSynchronizeStream s", DEVICE_MEMORY);
}

#[test]
fn synchronous_copy_does_not_wait_for_streams() {
    let mut process = Process::ready("", 0);
    process.ok("aclrtCreateStream &s");
    process.ok("aclrtMalloc &gate 8 0");
    process.ok("aclrtMalloc &p 8 0");
    process.write("gate", &[0; 8]);
    process.write("p", b"old one.");
    process.put("new", b"new one.");
    process.ok("aclrtValueWait gate 1 1 s");
    process.ok("aclrtMemcpyAsync p 8 &new 8 1 s");
    assert_eq!(process.read("p", 8), b"old one.");
    process.write("gate", &1_u64.to_le_bytes());
    process.ok("aclrtSynchronizeStream s");
    assert_eq!(process.read("p", 8), b"new one.");
}

#[test]
fn only_pinned_memory_is_copied_when_its_stream_reaches_it() {
    let mut process = Process::ready("", 0);
    process.ok("aclrtCreateStream &s");
    process.ok("aclrtMalloc &gate 8 0");
    process.ok("aclrtMalloc &p 16 0");
    process.ok("aclrtMallocHost &pinned 16");
    let write_host = |process: &mut Process, bytes: &[u8; 8]| {
        process.put("plain", bytes);
        process.ok("aclrtMemcpy pinned 8 &plain 8 0");
    };
    process.write("gate", &[0; 8]);
    write_host(&mut process, b"old one.");
    process.ok("aclrtValueWait gate 1 1 s");
    process.ok("aclrtMemcpyAsync p 16 pinned 8 1 s");
    process.ok("aclrtMemcpyAsync p+8 8 &plain 8 1 s");
    write_host(&mut process, b"new one.");
    process.write("gate", &1_u64.to_le_bytes());
    process.ok("aclrtMemcpyAsync pinned 16 p 16 2 s");
    process.ok("aclrtSynchronizeStream s");
    assert_eq!(process.read("p", 16), b"new one.old one.");
    process.ok("aclrtMemcpy &in 16 pinned 16 0");
    assert_eq!(process.bytes("in", 16), b"new one.old one.");
}

#[test]
fn copies_beyond_memory_or_capacity_are_rejected() {
    let mut process = Process::ready("", 0);
    process.ok("aclrtMalloc &p 64 0");
    process.ok("aclrtMalloc &q 64 0");
    process.gives("aclrtMemcpy p 8 &x 9 1", PARAM);
    process.gives("aclrtMemcpy p 4096 q 4096 3", PARAM);
    process.gives("aclrtMemset p 8 0 9", PARAM);
    process.gives("aclrtMemcpy p 8 &x 8 9", INVALID_PARAM);
    process.ok("aclrtMemcpy p 8 &x 0 9");
}

#[test]
fn asynchronous_copy_checks_its_kind() {
    let mut process = Process::ready("", 0);
    process.ok("aclrtMalloc &p 64 0");
    process.ok("aclrtMallocHost &h 64");
    for (call, kind) in [("p 64 h 64", 1), ("h 64 p 64", 2), ("p 64 p+32 32", 3), ("h 64 &x 64", 0)] {
        for other in 0..4 {
            let expected = if other == kind { 0 } else { PARAM };
            assert_eq!(
                process.call(&format!("aclrtMemcpyAsync {call} {other} 0")),
                expected,
                "{call} {other}"
            );
        }
        process.ok(&format!("aclrtMemcpyAsync {call} 4 0"));
        // The synchronous copy determines the kind by the addresses.
        process.ok(&format!("aclrtMemcpy {call} 1"));
    }
    process.ok("aclrtSynchronizeStream 0");
}

#[test]
fn access_to_another_device_needs_peer_access() {
    let mut process = Process::ready("devices=3;peers=1>0,0>1", 0);
    process.ok("aclrtMalloc &p 8 0");
    process.write("p", b"on zero.");
    process.ok("aclrtSetDevice 1");
    process.ok("aclrtMalloc &q 8 0");
    for call in ["aclrtMemcpy q 8 p 8 3", "aclrtMemcpyAsync q 8 p 8 3 0", "aclrtValueWrite p 1 0 0"] {
        process.gives(call, DRIVER);
    }
    process.ok("aclrtDeviceEnablePeerAccess 0 0");
    process.gives("aclrtMemcpy q 8 p 8 3", DRIVER);
    process.ok("aclrtSetDevice 0");
    process.ok("aclrtDeviceEnablePeerAccess 1 0");
    // Both directions are enabled, so each is in effect.
    process.ok("aclrtMemcpy p 8 q 8 3");
    process.write("p", b"on zero.");
    process.ok("aclrtSetDevice 1");
    process.ok("aclrtMemcpy q 8 p 8 3");
    assert_eq!(process.read("q", 8), b"on zero.");
    process.ok("aclrtSetDevice 0");
    process.ok("aclrtDeviceDisablePeerAccess 1");
    process.gives("aclrtMemcpy p 8 q 8 3", DRIVER);
    // Only where there is a link.
    process.ok("aclrtDeviceCanAccessPeer &can 0 2");
    assert_eq!(process.get32("can"), 0);
    process.gives("aclrtDeviceEnablePeerAccess 2 0", DRIVER);
}

#[test]
fn peer_status_is_by_physical_id_and_both_directions() {
    let setup = Setup { machine: "devices=8", visible: Some("4,5"), ..Setup::default() };
    let mut process = Process::with(&setup);
    process.ok("aclInit 0");
    let status = |process: &mut Process, device: u32, peer: i32| {
        process.ok(&format!("aclrtDevicePeerAccessStatus {device} {peer} &status"));
        process.get32("status")
    };
    process.ok("aclrtSetDevice 0");
    process.ok("aclrtDeviceEnablePeerAccess 1 0");
    assert_eq!(status(&mut process, 0, 5), 0, "one direction is not enough");
    process.ok("aclrtSetDevice 1");
    process.ok("aclrtDeviceEnablePeerAccess 0 0");
    process.ok("aclrtDeviceEnablePeerAccess 0 0");
    assert_eq!((status(&mut process, 0, 5), status(&mut process, 1, 4)), (1, 1));
    assert_eq!(
        status(&mut process, 0, 1),
        0,
        "the user id of the peer means another device, and is no error"
    );
    assert_eq!(status(&mut process, 0, 4), 0, "a device and itself");
    // Enables are counted.
    process.ok("aclrtDeviceDisablePeerAccess 0");
    assert_eq!(status(&mut process, 0, 5), 1);
    process.ok("aclrtDeviceDisablePeerAccess 0");
    assert_eq!(status(&mut process, 0, 5), 0);
    process.gives("aclrtDeviceDisablePeerAccess 0", DRIVER);
}

#[test]
fn processes_of_named_machine_share_peer_counts() {
    let machine = format!("shared-peers=test{}", std::process::id());
    let (mut one, mut other) = (Process::ready(&machine, 0), Process::ready(&machine, 1));
    let status = |process: &mut Process| {
        process.ok("aclrtDevicePeerAccessStatus 0 1 &status");
        process.get32("status")
    };
    one.ok("aclrtDeviceEnablePeerAccess 1 0");
    assert_eq!(status(&mut one), 0);
    other.ok("aclrtDeviceEnablePeerAccess 0 0");
    assert_eq!((status(&mut one), status(&mut other)), (1, 1));
    // The enables of a process disappear with it.
    other.kill();
    assert_eq!(status(&mut one), 0);
}

#[test]
fn dies_behind_one_link_need_no_peer_access() {
    let mut process = Process::ready("soc=910_93;devices=4", 0);
    let can = |process: &mut Process, device: u32, peer: u32| {
        process.ok(&format!("aclrtDeviceCanAccessPeer &can {device} {peer}"));
        process.get32("can")
    };
    let seen = [(0, 1), (0, 2), (0, 3), (1, 3)].map(|(device, peer)| can(&mut process, device, peer));
    assert_eq!(seen, [0, 1, 0, 0], "the second die of a chip has no peers by what the driver says");
    process.gives("aclrtDeviceEnablePeerAccess 1 0", DRIVER);
    process.ok("aclrtDeviceEnablePeerAccess 2 0");
    process.ok("aclrtMalloc &p 8 0");
    process.write("p", b"on zero.");
    process.ok("aclrtSetDevice 1");
    process.ok("aclrtMalloc &q 8 0");
    process.ok("aclrtMemcpy q 8 p 8 3");
    assert_eq!(process.read("q", 8), b"on zero.");
    process.ok("aclrtGetDeviceInfo 0 402 &chip");
    process.ok("aclrtGetDeviceInfo 1 402 &sibling");
    assert_eq!(process.get("chip"), process.get("sibling"));
    let mut apart = Process::ready("soc=910_93;devices=2;two-links", 0);
    assert_eq!(can(&mut apart, 0, 1), 1);
    apart.ok("aclrtDeviceEnablePeerAccess 1 0");
}

#[test]
fn unaligned_small_memory_has_no_key() {
    let mut process = Process::ready("unaligned", 0);
    process.ok("aclrtMalloc &p 4096 0");
    assert_eq!(process.get("p") % 4096, 512);
    process.write("p", b"inside");
    process.gives("aclrtIpcMemGetExportKey p 4096 &key 65 1", DRIVER);
    process.ok("aclrtFree p");
    process.ok("aclrtMalloc &p 2097152 0");
    process.key_of("p", 2_097_152, 1);
}

#[test]
fn core_limits_are_rejected() {
    let mut process = Process::ready("", 0);
    process.gives("aclrtSetDeviceResLimit 0 0 8", NOT_SUPPORTED);
    process.gives("aclrtResetDeviceResLimit 0", NOT_SUPPORTED);
}

#[test]
fn peer_access_to_itself_and_with_flags_is_rejected() {
    let mut process = Process::ready("", 0);
    process.gives("aclrtDeviceCanAccessPeer &can 1 1", INVALID_PARAM);
    process.gives("aclrtDeviceEnablePeerAccess 0 0", INVALID_PARAM);
    process.gives("aclrtDeviceEnablePeerAccess 1 1", 200_006);
    process.gives("aclrtDeviceDisablePeerAccess 1", DRIVER);
}

#[test]
fn unknown_memory_has_no_attributes_and_no_range() {
    let mut process = Process::ready("", 0);
    process.ok("aclrtMalloc &p 4096 0");
    process.ok("aclrtMallocHost &h 4096");
    process.gives("aclrtPointerGetAttributes &p &attributes", PARAM);
    process.gives("aclrtMemGetAddressRange h &base &size", PARAM);
    process.ok("aclrtMemGetAddressRange p+4000 &base &size");
    assert_eq!((process.get("base"), process.get("size")), (process.get("p"), 4096 + 32));
    process.ok("aclrtPointerGetAttributes h &attributes");
    assert_eq!(process.bytes("attributes", 8), [0; 8]);
}

#[test]
fn freed_memory_is_not_taken_for_host_memory() {
    let mut process = Process::ready("", 0);
    process.ok("aclrtMalloc &p 4096 0");
    process.ok("aclrtFree p");
    process.gives("aclrtMemset p 8 0 8", PARAM);
    process.gives("aclrtMemcpy p 8 &x 8 1", PARAM);
    process.gives("aclrtMemcpyAsync &x 8 p 8 4 0", PARAM);
    process.gives("aclrtMemset 4096 8 0 8", PARAM);
}

#[test]
fn words_check_alignment_comparison_and_chip() {
    let mut process = Process::ready("", 0);
    process.ok("aclrtMalloc &p 64 0");
    process.gives("aclrtValueWrite p+4 1 0 0", UNALIGNED);
    process.gives("aclrtValueWrite p 1 1 0", PARAM);
    process.gives("aclrtValueWait p 1 4 0", PARAM);
    process.gives("aclrtValueWrite &p 1 0 0", PARAM);
    process.gives("aclrtValueWrite p+96 1 0 0", PARAM);
    Process::ready("soc=310p", 0).gives("aclrtValueWrite 4096 1 0 0", NOT_SUPPORTED);
    // Greater or equal, signed: the wait for 5 ends with 6, and with the word that wraps around.
    process.ok("aclrtCreateStream &s");
    process.write("p", &4_u64.to_le_bytes());
    process.ok("aclrtValueWait p 5 0 s");
    process.gives("aclrtSynchronizeStreamWithTimeout s 1", STREAM_TIMEOUT);
    process.ok("aclrtValueWrite p 6 0 0");
    process.ok("aclrtSynchronizeStream s");
}

#[test]
fn words_in_host_memory_are_rejected_by_default() {
    for (machine, expected) in [("", PARAM), ("host-words", 0)] {
        let mut process = Process::ready(machine, 0);
        process.ok("aclrtHostRegister &page 512 0 &d");
        process.gives("aclrtValueWrite d 77 0 0", expected);
        process.ok("aclrtSynchronizeStream 0");
        assert_eq!(process.get("page"), if expected == 0 { 77 } else { 0 });
        process.gives("aclrtValueWait d 77 1 0", expected);
        process.ok("aclrtMallocHost &h 64");
        process.gives("aclrtValueWrite h 77 0 0", PARAM);
        process.ok("aclrtHostRegisterV2 h 64 2");
        process.gives("aclrtValueWrite h 77 0 0", expected);
        process.ok("aclrtSetDevice 1");
        process.gives("aclrtHostRegister &page 512 0 &d", if expected == 0 { 0 } else { 507_910 });
        process.ok("aclrtHostUnregister &page");
        process.gives("aclrtHostUnregister &page", 507_911);
    }
}

#[test]
fn host_memory_is_registered_once() {
    let mut process = Process::ready("", 0);
    process.gives("aclrtHostGetDevicePointer &page &d 0", 507_911);
    process.ok("aclrtHostRegisterV2 &page 512 2");
    process.gives("aclrtHostRegisterV2 &page 512 2", 507_910);
    process.ok("aclrtHostGetDevicePointer &page &d 0");
    process.gives("aclrtHostGetDevicePointer &page &d 1", PARAM);
    process.ok("aclrtHostUnregister &page");
    process.gives("aclrtHostUnregister &page", 507_911);
    process.gives("aclrtHostRegisterV2 &page 512 1", PARAM);
}
