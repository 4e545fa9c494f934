//! Memory shared by key between processes.

use super::support::{DEVICE_MEMORY, DRIVER, NO_PERMISSION, NOT_SUPPORTED, PARAM, Process, REMOTE, Setup};

const BYTES: u64 = 4 << 20;

/// Starts a process that has exported memory without a list of processes. Returns it with the key.
fn exporter(machine: &str) -> (Process, Vec<u8>) {
    let mut exporter = Process::ready(machine, 0);
    exporter.ok(&format!("aclrtMalloc &p {BYTES} 0"));
    exporter.write("p", b"shared memory...");
    let key = exporter.key_of("p", BYTES, 1);
    (exporter, key)
}

/// Starts a process that opens the key on a device.
fn importer(machine: &str, device: u32, key: &[u8]) -> Process {
    let mut importer = Process::ready(machine, device);
    importer.put("key", key);
    importer.ok("aclrtIpcMemImportByKey &q &key 1");
    importer
}

#[test]
fn two_processes_share_writes() {
    let (mut exporter, key) = exporter("");
    let mut importer = importer("", 0, &key);
    assert_eq!(importer.read("q", 16), b"shared memory...");
    importer.write("q+4096", b"from the importer");
    assert_eq!(exporter.read("p+4096", 17), b"from the importer");
    importer.ok("aclrtMemGetAddressRange q+4096 &base &size");
    assert_eq!(importer.get("base"), importer.get("q"));
}

#[test]
fn only_base_of_malloc_memory_is_exported() {
    let (mut process, key) = exporter("");
    process.ok("aclrtMallocHost &h 4096");
    for pointer in ["p+1", "p+32", "p+4096", "p+2097152", "h", "&p"] {
        process.gives(&format!("aclrtIpcMemGetExportKey {pointer} 4096 &other 65 1"), DRIVER);
    }
    // Two huge pages, and one for the 32 bytes of padding.
    process.ok("aclrtIpcMemGetExportKey p 6291456 &other 65 1");
    process.gives("aclrtIpcMemGetExportKey p 6291457 &other 65 1", DRIVER);
    let mut importer = importer("", 0, &key);
    importer.gives("aclrtIpcMemGetExportKey q 4096 &other 65 1", DRIVER);
    importer.gives("aclrtFree q", PARAM);
}

#[test]
fn invalid_sizes_and_flags_are_rejected() {
    let (mut process, key) = exporter("");
    for arguments in
        ["p 0 &k 65 0", "p 8 &k 0 0", "p 8 &k 64 0", "p 8 &k 65 2", "p 8 &k 65 3", "p 8 &k 65 0x100000000"]
    {
        process.gives(&format!("aclrtIpcMemGetExportKey {arguments}"), PARAM);
    }
    let mut importer = Process::ready("", 0);
    importer.put("key", &key);
    for flags in ["2", "3", "0x8000000000000000"] {
        importer.gives(&format!("aclrtIpcMemImportByKey &q &key {flags}"), PARAM);
    }
}

#[test]
fn key_is_text_except_on_950() {
    for (soc, is_text) in [("910b", true), ("950", false)] {
        let (_exporter, key) = exporter(&format!("soc={soc}"));
        let end = key.iter().position(|&byte| byte == 0).expect("a NUL");
        assert_eq!(std::str::from_utf8(&key[..end]).is_ok(), is_text);
        assert_eq!(end == 64 && key[..64].iter().all(u8::is_ascii_hexdigit), is_text);
        assert_eq!(importer(&format!("soc={soc}"), 0, &key).read("q", 6), b"shared");
    }
}

#[test]
fn invalid_key_is_rejected() {
    let (_exporter, key) = exporter("");
    let mut process = Process::ready("", 0);
    let mut gives = |key: &[u8], status| {
        let mut buffer = [0; 128];
        buffer[..key.len()].copy_from_slice(key);
        process.put("key", &buffer);
        process.gives("aclrtIpcMemImportByKey &q &key 1", status);
        process.gives("aclrtIpcMemClose &key", status);
    };
    gives(b"", PARAM);
    gives(&[b'1'; 65], PARAM);
    gives(b"not a key", DRIVER);
    gives(&[b'0'; 64], DRIVER);
    let mut other = key.clone();
    other[20] ^= 1;
    gives(&other, DRIVER);
}

#[test]
fn only_listed_processes_import() {
    let mut exporter = Process::ready("", 0);
    exporter.ok(&format!("aclrtMalloc &p {BYTES} 0"));
    let key = exporter.key_of("p", BYTES, 0);
    let mut importers = [Process::ready("", 0), Process::ready("", 0)];
    for importer in &mut importers {
        importer.put("key", &key);
        importer.gives("aclrtIpcMemImportByKey &q &key 0", DRIVER);
    }
    importers[0].ok("aclrtDeviceGetBareTgid &pid");
    let pid = importers[0].bytes("pid", 4);
    exporter.put("pid", &pid);
    exporter.ok("aclrtIpcMemSetImportPid &key &pid 1");
    importers[0].ok("aclrtIpcMemImportByKey &q &key 0");
    importers[1].gives("aclrtIpcMemImportByKey &q &key 0", DRIVER);
}

#[test]
fn list_call_takes_31_processes_except_creator() {
    let mut exporter = Process::ready("", 0);
    exporter.ok("aclrtMalloc &p 4096 0");
    exporter.key_of("p", 4096, 0);
    let own = exporter.pid();
    let pids = |list: &[u32]| list.iter().flat_map(|pid| pid.to_le_bytes()).collect::<Vec<u8>>();
    exporter.put("pids", &pids(&(1000..1040).collect::<Vec<u32>>()));
    exporter.gives("aclrtIpcMemSetImportPid &key &pids 0", PARAM);
    exporter.ok("aclrtIpcMemSetImportPid &key &pids 31");
    exporter.gives("aclrtIpcMemSetImportPid &key &pids 32", PARAM);
    exporter.put("pids", &pids(&[0, own]));
    exporter.gives("aclrtIpcMemSetImportPid &key &pids 1", DRIVER);
    exporter.gives("aclrtIpcMemSetImportPid &key &pids 2", DRIVER);
    exporter.put("pids", &pids(&[0, own, 1000]));
    exporter.ok("aclrtIpcMemSetImportPid &key &pids 3");
}

#[test]
fn only_creator_lists_processes() {
    let (mut exporter, key) = exporter("");
    let mut other = Process::ready("", 0);
    other.put("key", &key);
    other.put("pid", &other.pid().to_le_bytes());
    other.gives("aclrtIpcMemSetImportPid &key &pid 1", DRIVER);
    exporter.put("pid", &other.pid().to_le_bytes());
    exporter.gives("aclrtIpcMemSetImportPid &key &pid 1", NO_PERMISSION);
}

#[test]
fn creator_opens_own_key_only_without_list() {
    let mut process = Process::ready("", 0);
    process.ok("aclrtMalloc &p 4096 0");
    process.key_of("p", 4096, 0);
    process.gives("aclrtIpcMemImportByKey &q &key 0", DRIVER);
    process.ok("aclrtIpcMemClose &key");
    process.key_of("p", 4096, 1);
    process.ok("aclrtIpcMemImportByKey &q &key 0");
    assert_ne!(process.get("p"), process.get("q"));
    process.write("q", b"two addresses");
    assert_eq!(process.read("p", 13), b"two addresses");
    // The first close is that of the import, the second that of the export.
    process.ok("aclrtIpcMemClose &key");
    process.gives("aclrtMemset q 8 0 8", PARAM);
    assert_eq!(process.read("p", 13), b"two addresses");
    process.ok("aclrtIpcMemClose &key");
    process.gives("aclrtIpcMemClose &key", DRIVER);
}

#[test]
fn process_opens_key_on_one_device() {
    let (_exporter, key) = exporter("");
    let mut importer = importer("", 0, &key);
    importer.ok("aclrtSetDevice 1");
    importer.gives("aclrtIpcMemImportByKey &other &key 1", DRIVER);
    importer.ok("aclrtIpcMemClose &key");
    importer.ok("aclrtIpcMemImportByKey &other &key 1");
}

#[test]
fn second_open_returns_same_address_and_leaks() {
    let (_exporter, key) = exporter("");
    let mut importer = importer("", 0, &key);
    importer.ok("aclrtIpcMemImportByKey &again &key 1");
    assert_eq!(importer.get("q"), importer.get("again"));
    importer.ok("aclrtIpcMemClose &key");
    // The driver still counts one open; the runtime takes the call for an attempt to destroy the export.
    importer.gives("aclrtIpcMemClose &key", DRIVER);
    assert_eq!(importer.read("q", 6), b"shared");
}

#[test]
fn extra_close_is_rejected() {
    let (mut exporter, key) = exporter("");
    let mut importer = importer("", 0, &key);
    importer.ok("aclrtIpcMemClose &key");
    importer.gives("aclrtIpcMemClose &key", DRIVER);
    importer.gives("aclrtMemGetAddressRange q &base &size", PARAM);
    exporter.ok("aclrtIpcMemClose &key");
    exporter.gives("aclrtIpcMemClose &key", DRIVER);
    assert_eq!(exporter.read("p", 6), b"shared");
}

/// Revokes an export, and checks the importers that have it open, and a later import.
fn revokes(what: &str, end: impl FnOnce(&mut Process)) {
    let (mut exporter, key) = exporter("");
    let mut holder = importer("", 0, &key);
    let mut across = importer("", 1, &key);
    let mut late = Process::ready("", 0);
    late.put("key", &key);
    across.ok("aclrtMalloc &local 16 0");
    end(&mut exporter);
    holder.gives("aclrtMemcpy &in 16 q 16 2", REMOTE);
    across.ok("aclrtMemcpyAsync local 16 q 16 3 0");
    across.gives("aclrtSynchronizeStream 0", REMOTE);
    late.gives("aclrtIpcMemImportByKey &q &key 1", DRIVER);
    assert_eq!(holder.call("aclrtIpcMemClose &key"), 0, "{what}: a revoked mapping is still closed");
}

#[test]
fn close_by_exporter_revokes() {
    revokes("close", |exporter| exporter.ok("aclrtIpcMemClose &key"));
}

#[test]
fn free_by_exporter_revokes() {
    revokes("free", |exporter| {
        exporter.ok("aclrtFree p");
        exporter.gives("aclrtIpcMemClose &key", DRIVER);
    });
}

#[test]
fn device_reset_by_exporter_revokes() {
    revokes("reset", |exporter| exporter.ok("aclrtResetDevice 0"));
}

#[test]
fn death_of_exporter_revokes() {
    revokes("death", Process::kill);
}

#[test]
fn importer_death_does_not_affect_others() {
    let (mut exporter, key) = exporter("");
    let mut first = importer("", 0, &key);
    let mut second = importer("", 0, &key);
    first.kill();
    assert_eq!(second.read("q", 6), b"shared");
    assert_eq!(exporter.read("p", 6), b"shared");
    exporter.ok("aclrtIpcMemClose &key");
    exporter.ok("aclrtFree p");
}

#[test]
fn close_does_not_wait_for_work() {
    let (_exporter, key) = exporter("");
    let mut importer = importer("", 0, &key);
    importer.ok("aclrtCreateStream &s");
    importer.ok("aclrtMalloc &gate 8 0");
    importer.write("gate", &[0; 8]);
    importer.ok("aclrtValueWait gate 1 1 s");
    importer.ok("aclrtMemcpyAsync gate 8 q 8 3 s");
    importer.ok("aclrtIpcMemClose &key");
    importer.write("gate", &1_u64.to_le_bytes());
    importer.gives("aclrtSynchronizeStream s", DEVICE_MEMORY);
}

#[test]
fn import_of_another_device_permits_only_device_copies() {
    let (_exporter, key) = exporter("");
    let mut importer = importer("", 1, &key);
    importer.ok("aclrtMalloc &local 64 0");
    importer.ok("aclrtMallocHost &host 64");
    for call in [
        "aclrtMemcpy host 16 q 16 2",
        "aclrtMemcpy &stack 16 q 16 2",
        "aclrtMemcpy q 16 host 16 1",
        "aclrtMemcpy local 16 q 16 3",
        "aclrtMemcpy q 16 local 16 3",
        "aclrtMemcpyAsync host 16 q 16 2 0",
        "aclrtMemcpyAsync q 16 host 16 1 0",
        "aclrtMemcpyAsync local 16 q 16 4 0",
        "aclrtMemset q 16 0 16",
        "aclrtMemsetAsync q 16 0 16 0",
    ] {
        importer.gives(call, DRIVER);
    }
    importer.ok("aclrtMemcpyAsync local 16 q 16 3 0");
    importer.ok("aclrtSynchronizeStream 0");
    assert_eq!(importer.read("local", 16), b"shared memory...");
    importer.ok("aclrtValueWrite q 7 0 0");
    importer.ok("aclrtSynchronizeStream 0");
}

#[test]
fn import_on_same_device_permits_every_copy() {
    let (_exporter, key) = exporter("");
    let mut importer = importer("", 0, &key);
    importer.ok("aclrtMalloc &local 64 0");
    importer.ok("aclrtMallocHost &host 64");
    for call in [
        "aclrtMemcpy host 16 q 16 2",
        "aclrtMemcpy q 16 host 16 1",
        "aclrtMemcpy local 16 q 16 3",
        "aclrtMemcpyAsync host 16 q 16 2 0",
        "aclrtMemcpyAsync local 16 q 16 4 0",
        "aclrtMemset q+64 16 0 16",
        "aclrtMemsetAsync q+64 16 0 16 0",
        "aclrtSynchronizeStream 0",
    ] {
        importer.ok(call);
    }
}

#[test]
fn import_on_another_device_needs_flag_or_peer_access() {
    let (_exporter, key) = exporter("");
    let mut importer = Process::ready("", 1);
    importer.put("key", &key);
    importer.gives("aclrtIpcMemImportByKey &q &key 0", DRIVER);
    importer.ok("aclrtDeviceEnablePeerAccess 0 0");
    importer.gives("aclrtIpcMemImportByKey &q &key 0", DRIVER);
    importer.ok("aclrtSetDevice 0");
    importer.ok("aclrtDeviceEnablePeerAccess 1 0");
    importer.ok("aclrtSetDevice 1");
    importer.ok("aclrtIpcMemImportByKey &q &key 0");
    importer.ok("aclrtMalloc &local 64 0");
    importer.ok("aclrtMemcpyAsync local 16 q 16 3 0");
    importer.ok("aclrtDeviceDisablePeerAccess 0");
    importer.gives("aclrtMemcpyAsync local 16 q 16 3 0", DRIVER);
}

#[test]
fn import_flag_enables_both_directions_and_needs_link() {
    let (_exporter, key) = exporter("");
    let mut importer = importer("", 1, &key);
    for pair in ["0 1", "1 0"] {
        importer.ok(&format!("aclrtDevicePeerAccessStatus {pair} &status"));
        assert_eq!(importer.get32("status"), 1);
    }
    let mut unlinked = Process::ready("peers=none", 1);
    unlinked.put("key", &key);
    unlinked.gives("aclrtIpcMemImportByKey &q &key 1", DRIVER);
}

#[test]
fn device_of_exporter_must_be_in_container() {
    let (_exporter, key) = exporter("devices=4");
    let mut elsewhere = Process::ready("devices=4;visible=2,3", 0);
    elsewhere.put("key", &key);
    elsewhere.gives("aclrtIpcMemImportByKey &q &key 1", DRIVER);
    let setup = Setup { machine: "devices=4", visible: Some("3"), ..Setup::default() };
    let mut hidden = Process::with(&setup);
    hidden.ok("aclInit 0");
    hidden.ok("aclrtSetDevice 0");
    hidden.put("key", &key);
    hidden.ok("aclrtIpcMemImportByKey &q &key 1");
}

#[test]
fn sharing_on_310p_needs_peer_policy() {
    let mut exporter = Process::ready("soc=310p", 0);
    exporter.ok("aclrtMalloc &p 4096 0");
    exporter.ok("aclrtMalloc &shared 4096 3");
    let (plain, shared) = (exporter.key_of("p", 4096, 1), exporter.key_of("shared", 4096, 1));
    let mut importer = Process::ready("soc=310p", 1);
    importer.put("key", &plain);
    importer.gives("aclrtIpcMemImportByKey &q &key 1", DRIVER);
    importer.put("key", &shared);
    importer.ok("aclrtIpcMemImportByKey &q &key 1");
    assert_eq!(importer.call("aclrtDeviceGetUuid 0 &uuid"), NOT_SUPPORTED);
}

#[test]
fn keys_of_one_block_are_revoked_separately() {
    let (mut exporter, first) = exporter("");
    let second = exporter.key_of("p", 4096, 1);
    assert_ne!(first, second);
    let mut importer = importer("", 0, &first);
    importer.put("second", &second);
    importer.ok("aclrtIpcMemImportByKey &other &second 1");
    assert_ne!(importer.get("q"), importer.get("other"));
    exporter.put("first", &first);
    exporter.ok("aclrtIpcMemClose &first");
    importer.gives("aclrtMemcpy &in 6 q 6 2", REMOTE);
    assert_eq!(importer.read("other", 6), b"shared");
    importer.ok("aclrtIpcMemClose &key");
    assert_eq!(importer.read("other", 6), b"shared");
    exporter.ok("aclrtIpcMemClose &key");
    importer.gives("aclrtMemcpy &in 6 other 6 2", REMOTE);
}

#[test]
fn keys_of_one_block_are_destroyed_in_creation_order() {
    let (mut exporter, first) = exporter("");
    let second = exporter.key_of("p", 4096, 1);
    exporter.put("first", &first);
    exporter.put("second", &second);
    // The driver would remove the first key, and not revoke it when the process dies.
    exporter.gives("aclrtIpcMemClose &second", DRIVER);
    assert!(exporter.message().contains("in the order of their creation"));
    exporter.ok("aclrtIpcMemClose &first");
    exporter.ok("aclrtIpcMemClose &second");
    exporter.ok("aclrtFree p");
}

#[test]
fn block_with_remaining_key_is_not_freed() {
    let (mut exporter, first) = exporter("");
    let second = exporter.key_of("p", 4096, 1);
    exporter.put("first", &first);
    exporter.put("second", &second);
    exporter.ok("aclrtIpcMemClose &first");
    // The mark of the memory was removed with the first key: the driver would free the memory although the second
    // key has importers.
    exporter.gives("aclrtFree p", DRIVER);
    assert!(exporter.message().contains("that importers have open"));
    exporter.ok("aclrtIpcMemClose &second");
    exporter.ok("aclrtFree p");
}

#[test]
fn dies_behind_one_link_import_without_flag() {
    let machine = "soc=910_93;devices=2";
    let (_exporter, key) = exporter(machine);
    let mut importer = Process::ready(machine, 1);
    importer.put("key", &key);
    importer.gives("aclrtIpcMemImportByKey &q &key 1", DRIVER);
    importer.ok("aclrtIpcMemImportByKey &q &key 0");
}

#[test]
fn attribute_of_invalid_key_is_rejected() {
    Process::ready("soc=910_93", 0).gives("aclrtIpcMemSetAttr 0 0 1", PARAM);
}

#[test]
fn import_has_exported_size() {
    let mut exporter = Process::ready("", 0);
    exporter.ok("aclrtMalloc &p 65536 2");
    let key = exporter.key_of("p", 5000, 1);
    let mut importer = importer("", 0, &key);
    // Whole pages are mapped.
    importer.ok("aclrtMemset q+4096 4096 1 4096");
    importer.gives("aclrtMemset q+4096 8192 1 4097", PARAM);
}
