//! Physical memory and reservations, also those of other processes.

use super::support::{DRIVER, INVALID_HANDLE, NO_PERMISSION, NOT_SUPPORTED, PARAM, Process};

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
