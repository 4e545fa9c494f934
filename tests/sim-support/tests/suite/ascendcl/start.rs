//! Initialization, threads and contexts.

use super::support::{
    CONTEXT_NULL, INVALID_DEVICE, INVALID_PARAM, PARAM, Process, REPEAT_INITIALIZE, STREAM_CONTEXT,
    UNINITIALIZE,
};

#[test]
fn calls_before_init_are_rejected() {
    let mut process = Process::start("");
    for call in ["aclrtSetDevice 0", "aclrtMalloc &p 4096 0", "aclrtIpcMemClose @key"] {
        process.gives(call, UNINITIALIZE);
    }
    process.ok("aclrtGetVersion &major &minor &patch");
    assert_eq!(process.get32("major"), 1);
    process.ok("aclrtGetDeviceCount &n");
    assert_eq!(process.get32("n"), 2);
    process.ok("aclrtDeviceGetUuid 0 &uuid");
    process.ok("aclInit 0");
    process.ok("aclrtSetDevice 0");
    process.ok("aclrtGetRunMode &mode");
    assert_eq!(process.get32("mode"), 1, "the host");
}

#[test]
fn second_init_is_reported_and_counted() {
    let mut process = Process::start("");
    process.ok("aclInit 0");
    process.gives("aclInit 0", REPEAT_INITIALIZE);
    process.ok("aclFinalizeReference &left");
    assert_eq!(process.get("left"), 1);
    process.ok("aclrtSetDevice 0");
    process.ok("aclFinalizeReference &left");
    process.gives("aclrtSetDevice 0", UNINITIALIZE);
    process.ok("aclInit 0");
    process.gives("aclInit 0", REPEAT_INITIALIZE);
    process.ok("aclFinalize");
    process.gives("aclrtSetDevice 0", UNINITIALIZE);
    process.gives("aclFinalize", 100_037);
}

#[test]
fn first_configuration_of_process_applies() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = |name: &str, content: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, content).expect("written");
        path.display().to_string()
    };
    let (first, other) = (file("first.json", "{\"dump\":{}}"), file("other.json", "{}"));
    let mut process = Process::start("");
    process.gives("aclInit @/nowhere/acl.json", 100_003);
    process.ok(&format!("aclInit @{first}"));
    process.gives(&format!("aclInit @{other}"), REPEAT_INITIALIZE);
    process.ok("aclFinalize");
    process.gives(&format!("aclInit @{other}"), INVALID_PARAM);
    process.gives("aclInit 0", INVALID_PARAM);
    process.ok(&format!("aclInit @{first}"));
}

#[test]
fn thread_without_context_is_rejected() {
    let mut process = Process::ready("", 0);
    process.ok("aclrtMalloc &p 4096 0");
    process.ok("aclrtCreateStream &s");
    for call in [
        "aclrtMalloc &q 4096 0",
        "aclrtMemset p 4096 0 4096",
        "aclrtFree p",
        "aclrtCreateStream &t",
        "aclrtSynchronizeStream s",
        "aclrtIpcMemGetExportKey p 4096 &key 65 1",
        "aclrtIpcMemImportByKey &q @00000001 0",
        "aclrtIpcMemSetImportPid @00000001 &pid 1",
        "aclrtIpcMemClose @00000001",
        "aclrtCreateNotify &n 0",
        "aclrtCreateEventExWithFlag &e 0x40",
        "aclrtGetDevice &d",
        "aclrtGetCurrentContext &c",
    ] {
        process.gives(&format!("elsewhere {call}"), CONTEXT_NULL);
    }
    process.ok("aclrtGetDevice &d");
}

#[test]
fn last_reset_destroys_context_and_memory() {
    let mut process = Process::ready("memory=64MiB", 0);
    process.ok("aclrtSetDevice 0");
    process.ok("aclrtMalloc &p 4194304 0");
    process.ok("aclrtResetDevice 0");
    process.ok("aclrtMemset p 4194304 1 4194304");
    process.ok("aclrtResetDevice 0");
    process.gives("aclrtMemset p 4194304 1 4194304", CONTEXT_NULL);
    process.gives("aclrtResetDevice 0", INVALID_DEVICE);
    process.ok("aclrtSetDevice 0");
    process.gives("aclrtFree p", PARAM);
    process.ok("aclrtGetMemInfo 1 &free &total");
    assert_eq!(process.get("free"), process.get("total"));
    process.ok("aclrtSetDevice 0");
    process.ok("aclrtResetDeviceForce 0");
    process.gives("aclrtMalloc &p 4096 0", CONTEXT_NULL);
}

#[test]
fn created_context_keeps_device() {
    let mut process = Process::ready("", 0);
    process.ok("aclrtGetCurrentContext &default");
    process.gives("aclrtDestroyContext default", PARAM);
    process.ok("aclrtCreateContext &c 0");
    process.ok("aclrtMalloc &p 4096 0");
    process.ok("aclrtResetDevice 0");
    process.ok("aclrtMemset p 4096 1 4096");
    process.gives("aclrtSetCurrentContext default", CONTEXT_NULL);
    process.ok("aclrtDestroyContext c");
    process.gives("aclrtMemset p 4096 1 4096", CONTEXT_NULL);
}

#[test]
fn stream_of_another_context_rejects_work() {
    let mut process = Process::ready("", 0);
    process.ok("aclrtCreateStream &s");
    process.ok("aclrtMalloc &p 4096 0");
    process.ok("aclrtCreateEventExWithFlag &e 1");
    process.ok("aclrtSetDevice 1");
    for call in [
        "aclrtRecordEvent e s",
        "aclrtStreamWaitEvent s e",
        "aclrtMemsetAsync p 4096 0 4096 s",
        "aclrtMemcpyAsync p 8 p 8 3 s",
        "aclrtValueWrite p 1 0 s",
    ] {
        process.gives(call, STREAM_CONTEXT);
    }
    process.ok("aclrtSynchronizeStream s");
}

#[test]
fn null_pointers_are_rejected() {
    let mut process = Process::ready("", 0);
    for call in [
        "aclrtMalloc 0 4096 0",
        "aclrtMalloc &p 0 0",
        "aclrtFree 0",
        "aclrtMemcpy 0 8 &p 8 1",
        "aclrtCreateStream 0",
        "aclrtIpcMemGetExportKey 0 8 &key 65 0",
        "aclrtIpcMemGetExportKey 4096 8 0 65 0",
        "aclrtIpcMemImportByKey 0 @key 0",
        "aclrtIpcMemImportByKey &p 0 0",
        "aclrtIpcMemClose 0",
        "aclrtIpcMemSetImportPid @key 0 1",
        "aclrtIpcGetEventHandle 0 &h",
        "aclrtNotifyImportByKey 0 @key 0",
        "aclrtPointerGetAttributes 0 &a",
    ] {
        process.gives(call, INVALID_PARAM);
    }
}

#[test]
fn error_message_is_returned_once_on_its_thread() {
    let mut process = Process::ready("", 0);
    assert_eq!(process.message(), "null");
    process.gives("elsewhere aclrtSetDevice 7", INVALID_DEVICE);
    assert_eq!(process.message(), "null");
    process.gives("aclrtSetDevice 7", INVALID_DEVICE);
    process.gives("aclrtPeekAtLastError 0", INVALID_DEVICE);
    process.gives("aclrtGetLastError 0", INVALID_DEVICE);
    process.gives("aclrtGetLastError 0", 0);
    let message = process.message();
    assert!(message.contains("aclrtSetDevice") && message.contains("107001"), "{message}");
    assert_eq!(process.message(), "null");
}

#[test]
fn calls_in_forked_child_fail() {
    let mut process = Process::ready("", 0);
    for call in ["aclrtMalloc &p 4096 0", "aclrtSetDevice 0", "aclInit 0", "aclrtSynchronizeDevice"] {
        process.gives(&format!("forked {call}"), 507_033);
    }
    process.ok("aclrtMalloc &p 4096 0");
}
