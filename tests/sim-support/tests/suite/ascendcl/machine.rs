//! The configuration: chips, drivers, versions, device numbers, faults.

use super::support::{DRIVER, INVALID_DEVICE, NOT_SUPPORTED, OUT_OF_MEMORY, Process, STUB, Setup};
use device_ipc_sim_ascendcl::{Cann, library};
use device_ipc_sim_support::defined_symbols;

/// Calls that require a feature, with arguments for success, and the chips that have it.
const FEATURES: &[(&str, &[&str])] = &[
    ("aclrtIpcMemGetExportKey p 4096 &key 65 1", &["910", "910b", "910_93", "310p", "950pr", "950dt"]),
    ("aclrtCreateEventExWithFlag &e 0x40", &["910b", "910_93", "950pr"]),
    ("aclrtNotifyGetExportKey n &key 65 2", &["910", "910b", "910_93", "310p", "950pr"]),
    ("aclrtValueWrite p 1 0 0", &["910b", "910_93", "950pr", "950dt"]),
    ("aclrtValueWait p 1 0 0", &["910b", "910_93", "950pr", "950dt"]),
    ("aclrtDeviceGetUuid 0 &uuid", &["910b", "910_93", "950pr", "950dt"]),
    ("aclrtMemExportToShareableHandleV2 h 1 2 &fabric", &["910_93"]),
    ("aclrtMalloc &giant 4096 6", &["910b", "910_93"]),
];

#[test]
fn chips_reject_missing_features() {
    for soc in ["910", "910b", "910_93", "310p", "310b", "950pr", "950dt"] {
        let mut process = Process::ready(&format!("soc={soc};memory=4GiB"), 0);
        process.ok("aclrtMalloc &p 4096 0");
        process.ok("aclrtCreateNotify &n 0");
        // An attribute of huge pages, on device 0.
        process.put("properties", &properties(4, 0));
        process.ok("aclrtMallocPhysical &h 2097152 &properties 0");
        for (call, chips) in FEATURES {
            let expected = if chips.contains(&soc) { 0 } else { NOT_SUPPORTED };
            assert_eq!(process.call(call), expected, "{call} on {soc}: {}", process.message());
        }
        let expected = if soc == "910_93" { 0 } else { NOT_SUPPORTED };
        if soc != "310b" {
            process.ok("aclrtIpcMemGetExportKey p 4096 &key 65 1");
            process.gives("aclrtIpcMemSetAttr &key 0 1", expected);
        }
    }
}

/// Returns an `aclrtPhysicalMemProp`.
fn properties(attribute: u32, device: u32) -> Vec<u8> {
    [0, 0, attribute, device, 1, 0, 0, 0].iter().flat_map(|word: &u32| word.to_le_bytes()).collect()
}

#[test]
fn the_chip_has_its_name() {
    for (soc, name) in [("910", "Ascend910A"), ("910b", "Ascend910B3"), ("310p", "Ascend310P3")] {
        assert_eq!(Process::start(&format!("soc={soc}")).string("aclrtGetSocName"), name);
    }
    assert_eq!(Process::start("devices=0").string("aclrtGetSocName"), "null");
}

#[test]
fn stub_prints_line_and_returns_100039() {
    const LINE: &str = "[ERROR]: stub library cannot be used for execution";
    let mut process = Process::start("stub");
    for call in ["aclInit 0", "aclrtGetDeviceCount &n", "aclrtIpcMemClose @key", "aclrtGetVersion &a &b &c"] {
        assert_eq!(process.prints(call, LINE), STUB.to_string(), "{call}");
    }
    for call in ["aclrtGetSocName", "aclGetRecentErrMsg"] {
        assert_eq!(process.prints(&format!("string {call}"), LINE), "null");
    }
}

#[test]
fn device_count_without_driver_fails() {
    let mut process = Process::start("no-driver");
    process.ok("aclInit 0");
    process.gives("aclrtGetDeviceCount &n", DRIVER);
    process.gives("aclrtSetDevice 0", INVALID_DEVICE);
    assert_eq!(process.string("aclrtGetSocName"), "null");
}

#[test]
fn old_driver_requires_lists_and_has_no_shared_events() {
    let mut process = Process::ready("old-driver", 0);
    process.ok("aclrtMalloc &p 4096 0");
    process.gives("aclrtIpcMemGetExportKey p 4096 &key 65 1", NOT_SUPPORTED);
    process.ok("aclrtIpcMemGetExportKey p 4096 &key 65 0");
    process.gives("aclrtCreateEventExWithFlag &e 0x40", NOT_SUPPORTED);
    process.ok("aclrtCreateEventExWithFlag &e 1");
}

#[test]
fn shared_events_need_pages_of_4096_bytes() {
    Process::ready("page-size=4096", 0).ok("aclrtCreateEventExWithFlag &e 0x40");
    Process::ready("page-size=65536", 0).gives("aclrtCreateEventExWithFlag &e 0x40", NOT_SUPPORTED);
}

#[test]
fn user_logic_and_physical_ids_differ() {
    let setup = Setup { machine: "devices=8;visible=4,5,6,7", visible: Some("1,3"), cann: Cann::V9_1 };
    let mut process = Process::with(&setup);
    process.ok("aclInit 0");
    process.ok("aclrtGetDeviceCount &n");
    assert_eq!(process.get32("n"), 2);
    process.gives("aclrtSetDevice 2", INVALID_DEVICE);
    let mut id = |call: &str| {
        process.ok(&format!("{call} &id"));
        process.get32("id")
    };
    assert_eq!(id("aclrtGetLogicDevIdByUserDevId 1"), 3);
    assert_eq!(id("aclrtGetUserDevIdByLogicDevId 3"), 1);
    assert_eq!(id("aclrtGetLogicDevIdByPhyDevId 6"), 2);
    assert_eq!(id("aclrtGetPhyDevIdByUserDevId 1"), 7);
    // The argument is called the logic id, but is the user id.
    assert_eq!(id("aclrtGetPhyDevIdByLogicDevId 1"), 7);
    assert_eq!(id("aclrtGetUserDevIdByPhyDevId 5"), 0);
    process.gives("aclrtGetUserDevIdByLogicDevId 2 &id", INVALID_DEVICE);
    process.gives("aclrtGetLogicDevIdByPhyDevId 3 &id", INVALID_DEVICE);
}

#[test]
fn visible_devices_end_at_first_invalid_id() {
    for (visible, count) in [("0,1,2", 3), ("1, 2", 1), ("1,9,2", 1), ("2,1", 1), ("all", 0)] {
        let setup = Setup { machine: "devices=4", visible: Some(visible), cann: Cann::V9_1 };
        let mut process = Process::with(&setup);
        process.ok("aclInit 0");
        process.ok("aclrtGetDeviceCount &n");
        assert_eq!(process.get32("n"), count, "{visible}");
    }
}

#[test]
fn device_identities_are_stable_and_unique() {
    let uuid = |visible, device| {
        let mut process = Process::with(&Setup { machine: "devices=4", visible, cann: Cann::V9_1 });
        process.ok("aclInit 0");
        process.ok(&format!("aclrtDeviceGetUuid {device} &uuid"));
        process.bytes("uuid", 16)
    };
    assert_eq!(uuid(None, 3), uuid(Some("1,3"), 1));
    assert_ne!(uuid(None, 3), uuid(None, 1));
}

#[test]
fn older_versions_lack_symbols() {
    for cann in [Cann::V8_1, Cann::V8_3, Cann::V8_5, Cann::V9_0] {
        let mut process = Process::with(&Setup { cann, ..Setup::default() });
        for name in cann.lacks() {
            assert!(!process.has(name), "{name} in {}", cann.name());
        }
        for (name, since) in [
            ("aclrtMalloc", Cann::V8_1),
            ("aclrtDeviceGetBareTgid", Cann::V8_1),
            ("aclrtIpcMemGetExportKey", Cann::V8_3),
            ("aclrtIpcOpenEventHandle", Cann::V8_5),
            ("aclrtMemGetAddressRange", Cann::V9_0),
            ("aclrtGetPhyDevIdByUserDevId", Cann::V9_1),
        ] {
            assert_eq!(process.has(name), cann >= since, "{name} in {}", cann.name());
        }
        process.ok("aclInit 0");
        process.ok("aclrtSetDevice 0");
        process.ok("aclrtMalloc &p 4096 0");
        if process.has("aclsysGetVersionStr") {
            process.ok("aclsysGetVersionStr @runtime &version");
            let text = process.bytes("version", 16);
            assert!(text.starts_with(cann.name().as_bytes()));
        }
    }
}

#[test]
fn version_table_names_existing_symbols() {
    let defined = defined_symbols(&library().expect("it was built")).expect("it has symbols");
    for name in Cann::V8_1.lacks() {
        assert!(defined.iter().any(|symbol| symbol == name), "{name}");
    }
    let ours = |symbol: &&String| symbol.starts_with("acl") || symbol.starts_with("deviceIpcSim");
    assert!(defined.iter().filter(ours).count() > 150);
}

#[test]
fn fault_returns_any_status() {
    let mut process = Process::ready("fault=aclrtMalloc:2:207001,aclrtMalloc:3:4242,aclrtFree:1:-7", 0);
    process.ok("aclrtMalloc &p 4096 0");
    process.gives("aclrtMalloc &q 4096 0", OUT_OF_MEMORY);
    process.gives("aclrtMalloc &q 4096 0", 4242);
    process.ok("aclrtMalloc &q 4096 0");
    process.gives("aclrtFree p", -7);
    process.ok("aclrtFree p");
    process.ok("deviceIpcSimInject @aclrtFree 2 99");
    process.ok("aclrtFree q");
    process.gives("aclrtFree q", 99);
    process.ok("deviceIpcSimCalls @aclrtMalloc &count");
    assert_eq!(process.get("count"), 4);
}

#[test]
fn invalid_description_is_reported() {
    let mut process = Process::start("colour=red");
    process.gives("aclInit 0", 500_000);
}
