//! The vendor's rules that the backend keeps, one test for each, on the simulator, which refuses whoever breaks them.
//! `docs/ascend-rules.md` says where the vendor states them.
//!
//! Each test runs in a process of its own, on a machine that it describes.

mod support;

use std::alloc::{Layout, alloc_zeroed};
use std::process::{Child, Command};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use device_ipc_ascend::{AscendBackend, KEY, LoadOptions, PidValidation, SHAREABLE};
use device_ipc_core::{
    Access, BorrowedStream, DeviceIdentity, DeviceIpc, DeviceMemory, DeviceOrdinal, DevicePtr, DeviceRange,
    DeviceStream, Error, Exported, Extent, HandleBytes, HandleKind, HostId, Ipc, Lifetime, Opened,
    ProcessIdentity, ReceivedHandle, Result, Unavailable, VendorStatus,
};
use device_ipc_sim_ascendcl::Cann;
use support::{Peer, Raw, Role, Scene, Told, has_simulator, library_of};

const ZERO: DeviceOrdinal = DeviceOrdinal::new(0);
const ONE: DeviceOrdinal = DeviceOrdinal::new(1);
const HUGE: u64 = 2 << 20;

fn backend() -> Arc<AscendBackend> {
    AscendBackend::load().expect("the simulator is there")
}

fn extent_of(backend: &AscendBackend, range: DeviceRange) -> Extent {
    backend.extents_of(range, None).expect("an allocation of our own")[0]
}

fn range(device: DeviceOrdinal, address: u64, len: u64) -> DeviceRange {
    DeviceRange::new(device, DevicePtr::new(address), len)
}

fn read(backend: &AscendBackend, range: DeviceRange, stream: &dyn DeviceStream) -> Result<Vec<u8>> {
    let mut bytes = vec![0; range.len as usize];
    // SAFETY: the range is mapped, and nobody else uses it meanwhile.
    unsafe { backend.read(range, &mut bytes, stream.as_borrowed()) }.map(|()| bytes)
}

fn write(backend: &AscendBackend, range: DeviceRange, bytes: &[u8], stream: &dyn DeviceStream) -> Result<()> {
    // SAFETY: as in `read`.
    unsafe { backend.write(range, bytes, stream.as_borrowed()) }?;
    backend.synchronize(stream.as_borrowed())
}

/// Bytes of which neighbours differ; no power of two is a multiple of the period.
fn pattern(len: usize) -> Vec<u8> {
    let period: Vec<u8> = (0..251).collect();
    let mut bytes = period.repeat(len / period.len() + 1);
    bytes.truncate(len);
    bytes
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    text.as_bytes()
        .chunks(2)
        .map(|pair| u8::from_str_radix(str::from_utf8(pair).expect("digits"), 16).expect("digits"))
        .collect()
}

fn received(kind: HandleKind, bytes: Vec<u8>, size: u64, home: Option<DeviceOrdinal>) -> ReceivedHandle {
    let exporter = ProcessIdentity::current().expect("this process has an identity");
    let bytes = HandleBytes::new(bytes);
    ReceivedHandle { kind, bytes, fds: Vec::new(), size, generation: None, home, exporter }
}

/// The status of a vendor's error.
#[track_caller]
fn status_of<T: std::fmt::Debug>(result: Result<T>) -> (VendorStatus, String) {
    match result {
        Err(Error::Vendor(error)) => (error.status, error.to_string()),
        other => panic!("a vendor's error was expected: {other:?}"),
    }
}

/// An importer that opens, reads and closes on the bare backend, as it is told:
/// `id`, `open KIND HEX SIZE HOME ON` (several `KIND HEX SIZE` by commas), `read`, `write BYTE`, `fill BYTE`, `add VALUE`,
/// `copy`, `close`, `calls NAME`.
fn importer(told: &Told) {
    let backend = backend();
    let raw = Raw::open();
    let mut open: Vec<Opened> = Vec::new();
    let stream = |device| backend.create_stream(device).expect("a stream");
    told.serve(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let last = open.last().map(|opened| opened.range);
        let answer = |result: Result<String>| match result {
            Ok(text) => format!("ok {text}"),
            Err(error) => format!("err {error:?} {error}"),
        };
        match (words.as_slice(), last) {
            (["id"], _) => hex(&backend.local_peer_id(ZERO).expect("an id")),
            (["calls", name], _) => raw.calls(name).to_string(),
            (["open", handles, home, on], _) => {
                let home = home.parse().ok().map(DeviceOrdinal::new);
                let handles = handles.split(',').map(|handle| {
                    let parts: Vec<&str> = handle.split(':').collect();
                    let kind = HandleKind(parts[0].parse().expect("a number"));
                    received(kind, unhex(parts[1]), parts[2].parse().expect("a number"), home)
                });
                let on = DeviceOrdinal::new(on.parse().expect("a number"));
                answer(backend.open(handles.collect(), on, Access::ReadWrite).map(|opened| {
                    let text = format!("{} {}", opened.range.ptr.get(), opened.range.len);
                    open.push(opened);
                    text
                }))
            }
            (["read"], Some(range)) => answer(
                read(&backend, range, &*stream(range.device)).map(|bytes| hex(&bytes[..64.min(bytes.len())])),
            ),
            (["whole"], Some(range)) => {
                let bytes = read(&backend, range, &*stream(range.device)).expect("it can be read");
                (bytes == pattern(bytes.len())).to_string()
            }
            (["pattern"], Some(range)) => {
                let bytes = pattern(range.len as usize);
                answer(write(&backend, range, &bytes, &*stream(range.device)).map(|()| String::new()))
            }
            (["fill", byte], Some(range)) => {
                let stream = stream(range.device);
                let byte = byte.parse().expect("a byte");
                // SAFETY: the range is mapped.
                let filled = unsafe { backend.fill(range, byte, stream.as_borrowed()) };
                answer(
                    filled.and_then(|()| backend.synchronize(stream.as_borrowed())).map(|()| String::new()),
                )
            }
            (["add", value], Some(range)) => {
                let stream = stream(range.device);
                let value = value.parse().expect("a number");
                // SAFETY: the range is mapped.
                let added = unsafe { backend.add_f32(range, value, stream.as_borrowed()) };
                answer(added.and_then(|()| backend.synchronize(stream.as_borrowed())).map(|()| String::new()))
            }
            (["copy"], Some(range)) => {
                let stream = stream(range.device);
                let copy = backend.allocate(range.device, range.len).expect("memory");
                // SAFETY: both are mapped.
                let copied = unsafe { backend.copy(copy, range, stream.as_borrowed()) };
                answer(copied.and_then(|()| read(&backend, copy, &*stream)).map(|bytes| hex(&bytes[..64])))
            }
            (["close"], Some(_)) => {
                let opened = open.pop().expect("one is open");
                answer(backend.close(opened).map(|()| String::new()))
            }
            other => panic!("the importer does not know {other:?}"),
        }
    });
}

const IMPORTER: &[Role] = &[("importer", importer)];

/// The handle as the importer is told it.
fn told(exported: &Exported) -> String {
    format!("{}:{}:{}", exported.kind.0, hex(exported.bytes.as_slice()), exported.extent.allocation.len)
}

fn told_all(exports: &[Exported]) -> String {
    exports.iter().map(told).collect::<Vec<_>>().join(",")
}

/// Lists the importer, and has it open the handle.
#[track_caller]
fn hand_over(backend: &AscendBackend, exported: &Exported, peer: &mut Peer, home: &str, on: u32) -> String {
    backend.authorize(exported, &unhex(&peer.ask("id"))).expect("the importer is listed");
    peer.ask(format!("open {} {home} {on}", told(exported)))
}

/// Memory with a pattern.
fn memory(backend: &AscendBackend, device: DeviceOrdinal, bytes: u64, kind: HandleKind) -> DeviceRange {
    let range = backend.allocate_as(device, bytes, kind).expect("memory");
    let stream = backend.create_stream(device).expect("a stream");
    write(backend, range, &pattern(bytes as usize), &*stream).expect("it can be written");
    range
}

// ---- The library and the process ----

#[test]
fn a_second_owner_of_the_runtime_goes_on_when_the_backend_goes() {
    Scene::on("a_second_owner_of_the_runtime_goes_on_when_the_backend_goes", "devices=1").play(
        |_| {
            let raw = Raw::open();
            assert_eq!(raw.call_with_null("aclInit"), 0);
            assert_eq!(raw.call_with("aclrtSetDevice", 0), 0);
            // The second initialisation returns 100002, and the third as well.
            let (first, second) = (backend(), backend());
            let stream = first.create_stream(ZERO).expect("a stream");
            drop(stream);
            drop(first);
            let range = second.allocate(ZERO, 64).expect("the other backend goes on");
            // SAFETY: nobody uses it.
            unsafe { second.free(range) }.expect("it can be freed");
            drop(second);
            assert_eq!(raw.calls("aclFinalize"), 0, "aclFinalize would end the runtime for everybody");
            assert_eq!(raw.told("aclrtGetDevice"), (0, 0), "the other owner's device is still set");
            raw.malloc(4096, 0);
        },
        &[],
    );
}

#[test]
fn the_second_name_of_the_library_is_found() {
    Scene::on("the_second_name_of_the_library_is_found", "devices=1").play(
        |scene| {
            let directory = std::env::temp_dir().join(format!("device-ipc-acl-rt-{}", std::process::id()));
            std::fs::create_dir_all(&directory).expect("a directory");
            std::fs::copy(library_of(scene.cann), directory.join("libacl_rt.so")).expect("a copy");
            let listed = Command::new(std::env::current_exe().expect("a file"))
                .args(["--exact", scene.name, "--nocapture"])
                .env("LD_LIBRARY_PATH", &directory)
                .env("DEVICE_IPC_ASCEND_ROLE", "loader")
                .env_remove(device_ipc_ascend::LIBRARY_VARIABLE)
                .status();
            std::fs::remove_dir_all(&directory).expect("the directory goes");
            assert!(listed.expect("the process ran").success());
        },
        &[("loader", |_| {
            let library = backend().info().library.clone().expect("a library");
            assert!(library.ends_with("/libacl_rt.so"), "{library}");
        })],
    );
}

// ---- Contexts ----

#[test]
fn the_context_is_set_on_each_thread_and_the_callers_is_restored() {
    Scene::on("the_context_is_set_on_each_thread_and_the_callers_is_restored", "devices=2").play(
        |_| {
            let backend = backend();
            let raw = Raw::open();
            let range = memory(&backend, ZERO, HUGE, KEY);
            let extent = extent_of(&backend, range);
            // A thread without a context.
            std::thread::scope(|scope| {
                scope.spawn(|| assert_eq!(extent_of(&backend, range), extent));
            });
            // A thread with the default context of another device, and one with a context of its own.
            for own in [false, true] {
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        assert_eq!(raw.call_with("aclrtSetDevice", 1), 0);
                        if own {
                            raw.create_context(1);
                        }
                        let before = raw.context();
                        let the_same = |what: &str| {
                            assert_eq!(raw.context(), before, "after {what}");
                            assert_eq!(raw.told("aclrtGetDevice"), (0, 1), "after {what}");
                        };
                        let stream = backend.create_stream(ZERO).expect("a stream");
                        the_same("create_stream");
                        read(&backend, range, &*stream).expect("it can be read");
                        the_same("read");
                        // SAFETY: the range is ours.
                        unsafe { backend.fill(range, 1, stream.as_borrowed()) }.expect("a fill");
                        the_same("fill");
                        // SAFETY: as above.
                        unsafe { backend.add_f32(range, 1.0, stream.as_borrowed()) }.expect("an addition");
                        the_same("add_f32");
                        backend.delay(Duration::from_millis(1), stream.as_borrowed()).expect("a delay");
                        the_same("delay");
                        backend.synchronize(stream.as_borrowed()).expect("a wait");
                        the_same("synchronize");
                        drop(stream);
                        the_same("the drop of a stream");
                        let exported = backend.export(&extent, None).expect("a key");
                        the_same("export");
                        backend.reach(&exported);
                        the_same("reach");
                        assert!(backend.authorize(&exported, &[1]).is_err());
                        the_same("authorize that fails");
                        backend.unexport(exported).expect("it goes back");
                        the_same("unexport");
                        assert!(backend.extents_of(DeviceRange { len: 1 << 40, ..range }, None).is_err());
                        the_same("extents_of that fails");
                        let handle =
                            received(KEY, [b'0'; 64].into_iter().chain([0]).collect(), 4096, Some(ZERO));
                        assert!(backend.open(vec![handle], ZERO, Access::ReadWrite).is_err());
                        the_same("open that fails");
                        backend.capabilities(ZERO).expect("capabilities");
                        the_same("capabilities");
                        drop(backend.create_event(ZERO).expect("an event"));
                        the_same("create_event");
                        backend.memory_info(ZERO).expect("memory_info");
                        the_same("memory_info");
                        backend.peer_access(ZERO, ONE).expect("peer_access");
                        the_same("peer_access");
                        backend.local_peer_id(ZERO).expect("local_peer_id");
                        the_same("local_peer_id");
                        backend.synchronize_device(ZERO).expect("synchronize_device");
                        the_same("synchronize_device");
                        let other = backend.allocate_as(ZERO, 1, SHAREABLE).expect("memory");
                        the_same("allocate_as");
                        // SAFETY: nobody uses it.
                        unsafe { backend.free(other) }.expect("it can be freed");
                        the_same("free");
                    });
                });
            }
        },
        &[],
    );
}

#[test]
fn a_device_that_somebody_resets_is_an_error_and_no_crash() {
    Scene::on("a_device_that_somebody_resets_is_an_error_and_no_crash", "devices=1").play(
        |_| {
            let backend = backend();
            let raw = Raw::open();
            let stream = backend.create_stream(ZERO).expect("a stream");
            let range = memory(&backend, ZERO, HUGE, KEY);
            assert_eq!(raw.call_with("aclrtResetDeviceForce", 0), 0);
            let (status, text) = status_of(read(&backend, range, &*stream));
            assert_eq!(status, VendorStatus(107_002), "{text}");
            assert!(text.contains("aclrtResetDeviceForce"), "{text}");
            drop(stream);
        },
        &[],
    );
}

#[test]
fn a_stream_of_another_context_is_refused_in_words() {
    Scene::on("a_stream_of_another_context_is_refused_in_words", "devices=1").play(
        |_| {
            let (backend, raw) = (backend(), Raw::open());
            let range = memory(&backend, ZERO, HUGE, KEY);
            let own = raw.create_context(0);
            let stream = raw.create_stream();
            // SAFETY: a stream of the simulator's, never destroyed.
            let stream = unsafe { BorrowedStream::from_raw("ascend", ZERO, stream) };
            // SAFETY: the range is ours.
            let (status, text) = status_of(unsafe { backend.fill(range, 1, stream) });
            assert_eq!(status, VendorStatus(107_003), "{text}");
            assert!(text.contains("default context"), "{text}");
            assert_eq!(raw.context(), own, "the caller's own context is current again");
        },
        &[],
    );
}

#[test]
fn the_oldest_cann_that_is_supported_shares_memory() {
    Scene::on("the_oldest_cann_that_is_supported_shares_memory", "soc=910b;devices=2").cann(Cann::V8_3).play(
        |scene| {
            let backend = backend();
            let capabilities = backend.capabilities(ZERO).expect("capabilities");
            assert!(!capabilities.ipc_events && !capabilities.timelines, "both came later");
            for kind in backend.handle_kinds() {
                for on in [0, 1] {
                    let range = memory(&backend, ZERO, HUGE, kind.kind);
                    let exported = backend.export(&extent_of(&backend, range), None).expect("a handle");
                    let mut peer = scene.peer("importer");
                    let opened = hand_over(&backend, &exported, &mut peer, "0", on);
                    assert!(opened.starts_with("ok "), "{} on {on}: {opened}", kind.name);
                    assert_eq!(peer.ask("whole"), "true");
                    if kind.kind == SHAREABLE {
                        let refused = peer.ask(format!("open {} 0 {}", told(&exported), 1 - on));
                        assert!(refused.contains("aclrtMemSetAccess"), "{refused}");
                    }
                    assert_eq!(peer.ask("close"), "ok ");
                    peer.finish();
                    backend.unexport(exported).expect("it goes back");
                }
            }
        },
        IMPORTER,
    );
}

// ---- What is exported ----

#[test]
fn memory_lies_in_whole_huge_pages_of_its_own() {
    Scene::on("memory_lies_in_whole_huge_pages_of_its_own", "soc=910b;devices=1").play(
        |_| {
            let (backend, raw) = (backend(), Raw::open());
            for bytes in [1, 4096, HUGE - 1, HUGE, HUGE + 1] {
                let range = backend.allocate(ZERO, bytes).expect("memory");
                let extent = extent_of(&backend, range);
                assert_eq!(range.len, bytes);
                assert_eq!(extent.allocation.ptr, range.ptr);
                assert!(range.ptr.get().is_multiple_of(HUGE), "{range:?}");
                assert_eq!(extent.allocation.len, bytes.next_multiple_of(HUGE), "{extent:?}");
                let exported = backend.export(&extent, None).expect("it can be shared");
                assert_eq!(backend.reach(&exported), Some(extent.allocation), "nothing else is in its pages");
            }
            assert_eq!(raw.calls("aclrtMalloc"), 0, "aclrtMalloc adds 32 bytes, and with them a page");
        },
        &[],
    );
}

#[test]
fn an_interior_address_is_shared_by_its_allocations_base() {
    for cann in [Cann::V9_0, Cann::V8_5] {
        let scene =
            Scene::on("an_interior_address_is_shared_by_its_allocations_base", "devices=1").cann(cann);
        scene.play(
            |scene| {
                let backend = backend();
                let whole = memory(&backend, ZERO, 3 * HUGE, KEY);
                let inner = whole.slice(HUGE + 77, 100).expect("it lies inside");
                let extents = backend.extents_of(inner, None).expect("the base is known");
                assert_eq!(extents[0].allocation.ptr, whole.ptr);
                // The vendor's own call refuses an interior address, so this is not for nothing.
                let interior = Extent { allocation: inner, generation: None };
                assert!(backend.export(&interior, Some(KEY)).is_err());
                let exported = backend.export(&extents[0], None).expect("the base can be shared");
                let mut peer = scene.peer("importer");
                let opened = hand_over(&backend, &exported, &mut peer, "0", 0);
                assert!(opened.starts_with("ok "), "{opened}");
                assert_eq!(peer.ask("whole"), "true");
                assert_eq!(peer.ask("close"), "ok ");
                peer.finish();
                backend.unexport(exported).expect("it goes back");
            },
            IMPORTER,
        );
    }
}

#[test]
fn before_cann_9_the_base_of_foreign_memory_is_stated_by_its_owner() {
    Scene::on("before_cann_9_the_base_of_foreign_memory_is_stated_by_its_owner", "devices=1")
        .cann(Cann::V8_5)
        .play(
            |_| {
                let (backend, raw) = (backend(), Raw::open());
                assert_eq!(raw.call_with("aclrtSetDevice", 0), 0);
                let base = raw.malloc(2 * HUGE as usize - 32, 0);
                let whole = range(ZERO, base, 2 * HUGE - 32);
                let inner = whole.slice(HUGE, 64).expect("it lies inside");
                let error = backend.extents_of(inner, None).unwrap_err().to_string();
                assert!(error.contains("with_allocation") && error.contains("CANN 9.0"), "{error}");
                let extents = backend.extents_of(inner, Some(whole)).expect("the base was stated");
                assert_eq!(extents, [Extent { allocation: whole, generation: None }]);
                drop(backend.export(&extents[0], None).expect("it can be shared"));
                // What is stated is checked as far as ACL can tell.
                for wrong in [
                    range(ZERO, base, 1 << 40),
                    range(ZERO, base, 64),
                    range(ZERO, base + HUGE + 4096, 64),
                    range(ZERO, 0x10, u64::MAX),
                ] {
                    let error = backend.extents_of(inner, Some(wrong)).unwrap_err();
                    assert!(
                        matches!(
                            error,
                            Error::InvalidRegion(_)
                                | Error::NotDeviceMemory { .. }
                                | Error::NotShareable { .. }
                        ),
                        "{wrong:?}: {error:?}"
                    );
                }
            },
            &[],
        );
}

#[test]
fn from_cann_9_on_a_wrong_base_is_noticed() {
    Scene::on("from_cann_9_on_a_wrong_base_is_noticed", "devices=1").cann(Cann::V9_0).play(
        |_| {
            let (backend, raw) = (backend(), Raw::open());
            assert_eq!(raw.call_with("aclrtSetDevice", 0), 0);
            let base = raw.malloc(2 * HUGE as usize - 32, 0);
            let inner = range(ZERO, base + HUGE, 64);
            let told = backend.extents_of(inner, None).expect("ACL tells the base");
            assert_eq!(told[0].allocation.ptr.get(), base);
            for wrong in [range(ZERO, base + HUGE, 64), range(ZERO, base, 4 * HUGE)] {
                let error = backend.extents_of(inner, Some(wrong)).unwrap_err().to_string();
                assert!(error.contains("was stated to be"), "{error}");
            }
        },
        &[],
    );
}

#[test]
fn a_base_inside_a_page_is_refused_with_the_remedy() {
    Scene::on("a_base_inside_a_page_is_refused_with_the_remedy", "devices=1").cann(Cann::V8_5).play(
        |_| {
            let (backend, raw) = (backend(), Raw::open());
            assert_eq!(raw.call_with("aclrtSetDevice", 0), 0);
            let base = raw.malloc(4 * HUGE as usize - 32, 0);
            // What a caching allocator calls a block.
            let block = range(ZERO, base + 512, 4096);
            let error = backend.extents_of(block, Some(block)).unwrap_err();
            assert!(matches!(error, Error::NotShareable { .. }), "{error:?}");
            let text = error.to_string();
            assert!(text.contains("2097152") && text.contains("ACL_MEM_MALLOC_HUGE_FIRST"), "{text}");
        },
        &[],
    );
}

#[test]
fn imported_memory_is_not_exported_again() {
    Scene::on("imported_memory_is_not_exported_again", "devices=1").play(
        |scene| {
            let backend = backend();
            let range = memory(&backend, ZERO, HUGE, KEY);
            let exported = backend.export(&extent_of(&backend, range), None).expect("a key");
            let mut peer = scene.peer("forwarder");
            backend.authorize(&exported, &unhex(&peer.hear())).expect("the importer is listed");
            peer.say(told(&exported));
            assert_eq!(peer.hear(), "SharedOn");
            peer.finish();
            backend.unexport(exported).expect("it goes back");
        },
        &[("forwarder", |told| {
            let backend = backend();
            told.say(hex(&backend.local_peer_id(ZERO).expect("an id")));
            let line = told.hear().expect("a handle");
            let parts: Vec<&str> = line.split(':').collect();
            let handle = received(KEY, unhex(parts[1]), HUGE, Some(ZERO));
            let opened = backend.open(vec![handle], ZERO, Access::ReadWrite).expect("it can be opened");
            let inner = opened.range.slice(77, 1).expect("it lies inside");
            told.say(match backend.extents_of(inner, None) {
                Err(Error::SharedOn { .. }) => "SharedOn".to_owned(),
                other => format!("{other:?}"),
            });
            backend.close(opened).expect("it closes");
        })],
    );
}

// ---- Keys ----

#[test]
fn keys_are_65_bytes_that_need_not_be_text() {
    for machine in ["soc=910b;devices=1", "soc=950;devices=1"] {
        Scene::on("keys_are_65_bytes_that_need_not_be_text", machine).play(
            |scene| {
                let backend = backend();
                let range = memory(&backend, ZERO, HUGE, KEY);
                let exported = backend.export(&extent_of(&backend, range), Some(KEY)).expect("a key");
                let key = &exported.bytes.as_slice()[..65];
                let len = key.iter().position(|byte| *byte == 0).expect("a key ends");
                assert!(len > 0, "a key is not empty");
                if backend.devices().expect("devices")[0].name.contains("950") {
                    assert!(!key[..len].is_ascii(), "the driver of 950 makes keys of any bytes");
                }
                let mut peer = scene.peer("importer");
                assert!(hand_over(&backend, &exported, &mut peer, "0", 0).starts_with("ok "));
                assert_eq!(peer.ask("whole"), "true");
                assert_eq!(peer.ask("close"), "ok ");
                peer.finish();
                backend.unexport(exported).expect("it goes back");
            },
            IMPORTER,
        );
    }
}

#[test]
fn the_list_is_filled_for_each_importer_and_once() {
    Scene::on("the_list_is_filled_for_each_importer_and_once", "devices=1").play(
        |scene| {
            let (backend, raw) = (backend(), Raw::open());
            for (kind, call) in
                [(KEY, "aclrtIpcMemSetImportPid"), (SHAREABLE, "aclrtMemSetPidToShareableHandle")]
            {
                let range = memory(&backend, ZERO, HUGE, kind);
                let exported = backend.export(&extent_of(&backend, range), None).expect("a handle");
                assert_eq!(exported.kind, kind);
                let mut peer = scene.peer("importer");
                let id = unhex(&peer.ask("id"));
                let refused = peer.ask(format!("open {} 0 0", told(&exported)));
                assert!(refused.starts_with("err "), "an importer that is not listed: {refused}");
                for _ in 0..3 {
                    backend.authorize(&exported, &id).expect("the importer is listed");
                }
                assert_eq!(raw.calls(call), 1, "a process is listed once");
                let opened = peer.ask(format!("open {} 0 0", told(&exported)));
                assert!(opened.starts_with("ok "), "{opened}");
                assert_eq!(peer.ask("close"), "ok ");
                peer.finish();
                backend.unexport(exported).expect("it goes back");
            }
        },
        IMPORTER,
    );
}

#[test]
fn at_most_31_processes_are_listed_at_once() {
    Scene::on("at_most_31_processes_are_listed_at_once", "devices=1").play(
        |_| {
            /// Processes that do nothing, ended with the test.
            struct Idle(Vec<Child>);
            impl Drop for Idle {
                fn drop(&mut self) {
                    for child in &mut self.0 {
                        let _ = child.kill();
                        let _ = child.wait();
                    }
                }
            }
            let idle = || Command::new("sleep").arg("60").spawn().expect("sleep is there");
            let idle = Idle((0..64).map(|_| idle()).collect());
            let peers: Vec<u8> = idle.0.iter().flat_map(|child| (child.id() as i32).to_le_bytes()).collect();
            let (backend, raw) = (backend(), Raw::open());
            let range = memory(&backend, ZERO, HUGE, KEY);
            let exported = backend.export(&extent_of(&backend, range), None).expect("a key");
            backend.authorize(&exported, &peers).expect("all are listed");
            assert_eq!(raw.calls("aclrtIpcMemSetImportPid"), 3, "31, 31 and 2");
        },
        &[],
    );
}

#[test]
fn an_importer_that_goes_by_the_exporters_own_id_is_refused() {
    Scene::on("an_importer_that_goes_by_the_exporters_own_id_is_refused", "devices=1").play(
        |_| {
            let (backend, raw) = (backend(), Raw::open());
            let range = memory(&backend, ZERO, HUGE, KEY);
            let exported = backend.export(&extent_of(&backend, range), None).expect("a key");
            let own = backend.local_peer_id(ZERO).expect("an id");
            let error = backend.authorize(&exported, &own).unwrap_err();
            assert!(matches!(error, Error::NotPermitted(_)), "{error:?}");
            for bad in [&[][..], &[0; 4], &[0xff; 4], &[1, 2, 3]] {
                let error = backend.authorize(&exported, bad).unwrap_err();
                assert!(matches!(error, Error::Protocol(_)), "{bad:?}: {error:?}");
            }
            assert_eq!(raw.calls("aclrtIpcMemSetImportPid"), 0, "none of these reaches the driver");
        },
        &[],
    );
}

#[test]
fn validation_is_off_where_that_was_asked_for() {
    const OFF: &[(&str, &str)] = &[("DEVICE_IPC_ASCEND_PID_VALIDATION", "off")];
    Scene::on("validation_is_off_where_that_was_asked_for", "devices=1").environment(OFF).play(
        |scene| {
            let (backend, raw) = (backend(), Raw::open());
            assert!(backend.handle_kinds().iter().all(|kind| !kind.whitelist));
            let listed = LoadOptions::new().pid_validation(PidValidation::On).load().expect("a backend");
            assert!(listed.handle_kinds().iter().all(|kind| kind.whitelist), "the option goes before");
            for kind in [KEY, SHAREABLE] {
                let range = memory(&backend, ZERO, HUGE, kind);
                let exported = backend.export(&extent_of(&backend, range), None).expect("a handle");
                let mut peer = scene.peer("importer");
                let opened = peer.ask(format!("open {} 0 0", told(&exported)));
                assert!(opened.starts_with("ok "), "nobody was listed: {opened}");
                backend.authorize(&exported, &unhex(&peer.ask("id"))).expect("there is nothing to do");
                assert_eq!(peer.ask("close"), "ok ");
                peer.finish();
                backend.unexport(exported).expect("it goes back");
            }
            assert_eq!(raw.calls("aclrtIpcMemSetImportPid"), 0, "there is no list to fill");
            assert_eq!(raw.calls("aclrtMemSetPidToShareableHandle"), 0, "there is no list to fill");
        },
        IMPORTER,
    );
}

#[test]
fn a_driver_that_cannot_do_without_its_list_is_named() {
    Scene::on("a_driver_that_cannot_do_without_its_list_is_named", "devices=1;old-driver").play(
        |_| {
            let backend = LoadOptions::new().pid_validation(PidValidation::Off).load().expect("a backend");
            let range = memory(&backend, ZERO, HUGE, KEY);
            let (status, text) = status_of(backend.export(&extent_of(&backend, range), None));
            assert_eq!(status, VendorStatus(207_000));
            assert!(text.contains("25.3.RC1") && text.contains("PID_VALIDATION=on"), "{text}");
        },
        &[],
    );
}

#[test]
fn a_key_is_imported_once_and_closed_once() {
    Scene::on("a_key_is_imported_once_and_closed_once", "devices=1").play(
        |scene| {
            let (backend, raw) = (backend(), Raw::open());
            let range = memory(&backend, ZERO, HUGE, KEY);
            let exported = backend.export(&extent_of(&backend, range), None).expect("a key");
            let mut peer = scene.peer("importer");
            let first = hand_over(&backend, &exported, &mut peer, "0", 0);
            let second = peer.ask(format!("open {} 0 0", told(&exported)));
            assert!(first.starts_with("ok ") && first == second, "{first} {second}");
            assert_eq!(peer.ask("calls aclrtIpcMemImportByKey"), "1");
            assert_eq!(peer.ask("close"), "ok ");
            assert_eq!(peer.ask("calls aclrtIpcMemClose"), "0", "the other one is still open");
            assert_eq!(peer.ask("whole"), "true");
            assert_eq!(peer.ask("close"), "ok ");
            assert_eq!(peer.ask("calls aclrtIpcMemClose"), "1");
            // It can be opened again.
            assert!(peer.ask(format!("open {} 0 0", told(&exported))).starts_with("ok "));
            assert_eq!(peer.ask("close"), "ok ");
            peer.finish();
            // Importers first, then the exporter, once.
            let again = Exported { bytes: exported.bytes.clone(), fds: Vec::new(), ..exported };
            backend
                .unexport(Exported { bytes: again.bytes.clone(), fds: Vec::new(), ..again })
                .expect("it goes back");
            assert!(
                backend.unexport(again).is_err(),
                "a second close would be an attempt at somebody else's key"
            );
            assert_eq!(raw.calls("aclrtIpcMemClose"), 1);
            // SAFETY: nobody uses it.
            unsafe { backend.free(range) }.expect("it can be freed");
        },
        IMPORTER,
    );
}

#[test]
fn a_second_device_of_a_process_needs_a_further_key() {
    Scene::on("a_second_device_of_a_process_needs_a_further_key", "devices=2").play(
        |scene| {
            let backend = backend();
            assert!(backend.handle_kinds()[0].one_open_per_process);
            let range = memory(&backend, ZERO, HUGE, KEY);
            let extent = extent_of(&backend, range);
            let [first, further] = [(); 2].map(|()| backend.export(&extent, None).expect("a key"));
            assert_ne!(first.bytes, further.bytes, "an allocation can have several keys");
            let mut peer = scene.peer("importer");
            assert!(hand_over(&backend, &first, &mut peer, "0", 0).starts_with("ok "));
            let refused = peer.ask(format!("open {} 0 1", told(&first)));
            assert!(refused.contains("Unsupported") && refused.contains("further one"), "{refused}");
            assert_eq!(peer.ask("calls aclrtIpcMemImportByKey"), "1", "the driver was not asked");
            let opened = hand_over(&backend, &further, &mut peer, "0", 1);
            assert!(opened.starts_with("ok "), "{opened}");
            assert_eq!(peer.ask("whole"), "true");
            assert_eq!(peer.ask("close"), "ok ");
            assert_eq!(peer.ask("close"), "ok ");
            peer.finish();
            for exported in [first, further] {
                backend.unexport(exported).expect("it goes back");
            }
        },
        IMPORTER,
    );
}

#[test]
fn the_exporters_end_revokes_a_key_and_use_is_an_error() {
    Scene::on("the_exporters_end_revokes_a_key_and_use_is_an_error", "devices=1").play(
        |scene| {
            let backend = backend();
            assert_eq!(backend.handle_kinds()[0].lifetime, Lifetime::Revokes);
            let opened = opened_of_the_dead(scene, KEY, &backend);
            let stream = backend.create_stream(ZERO).expect("a stream");
            let error = read(&backend, opened.range, &*stream).unwrap_err();
            assert!(matches!(error, Error::Vendor(_)), "{error:?}");
            // The range counts as closed, whatever the driver says of a key that has gone.
            let _ = backend.close(opened);
        },
        &[("exporter", exporter)],
    );
}

#[test]
fn a_shareable_handle_pins_the_memory_over_its_exporters_end() {
    Scene::on("a_shareable_handle_pins_the_memory_over_its_exporters_end", "devices=1").play(
        |scene| {
            let backend = backend();
            let kind =
                backend.handle_kinds().into_iter().find(|kind| kind.kind == SHAREABLE).expect("the kind");
            assert_eq!(kind.lifetime, Lifetime::Pins);
            let opened = opened_of_the_dead(scene, SHAREABLE, &backend);
            let stream = backend.create_stream(ZERO).expect("a stream");
            let bytes = read(&backend, opened.range, &*stream).expect("the memory is pinned");
            assert_eq!(bytes, pattern(bytes.len()));
            backend.close(opened).expect("it closes");
        },
        &[("exporter", exporter)],
    );
}

/// Has another process export memory, opens it, and kills that process.
fn opened_of_the_dead(scene: &Scene, kind: HandleKind, backend: &AscendBackend) -> Opened {
    let mut peer = scene.peer("exporter");
    peer.say(format!("{} {}", kind.0, hex(&backend.local_peer_id(ZERO).expect("an id"))));
    let handle = peer.hear();
    let parts: Vec<&str> = handle.split(':').collect();
    let size = parts[2].parse().expect("a number");
    let handle = received(kind, unhex(parts[1]), size, Some(ZERO));
    let opened = backend.open(vec![handle], ZERO, Access::ReadWrite).expect("it can be opened");
    let stream = backend.create_stream(ZERO).expect("a stream");
    let bytes = read(backend, opened.range, &*stream).expect("it can be read");
    assert_eq!(bytes, pattern(bytes.len()));
    peer.kill();
    opened
}

fn exporter(told_what: &Told) {
    let backend = backend();
    let line = told_what.hear().expect("a kind and an importer");
    let (kind, peer) = line.trim().split_once(' ').expect("two words");
    let range = memory(&backend, ZERO, HUGE, HandleKind(kind.parse().expect("a number")));
    let exported = backend.export(&extent_of(&backend, range), None).expect("a handle");
    backend.authorize(&exported, &unhex(peer)).expect("the importer is listed");
    told_what.say(told(&exported));
    told_what.hear();
}

// ---- Other cards ----

#[test]
fn memory_of_another_card_is_copied_in_the_ways_that_work() {
    Scene::on("memory_of_another_card_is_copied_in_the_ways_that_work", "soc=910b;devices=2")
        .play(|scene| copies_across(scene, KEY), IMPORTER);
}

#[test]
fn physical_memory_of_another_card_is_copied_in_the_ways_that_work() {
    Scene::on("physical_memory_of_another_card_is_copied_in_the_ways_that_work", "soc=910b;devices=2")
        .play(|scene| copies_across(scene, SHAREABLE), IMPORTER);
}

fn copies_across(scene: &Scene, kind: HandleKind) {
    let backend = backend();
    // Less than a staging buffer holds, and more than one.
    for bytes in [HUGE, (64 << 20) + HUGE] {
        let range = memory(&backend, ZERO, bytes, kind);
        let exported = backend.export(&extent_of(&backend, range), None).expect("a handle");
        let mut peer = scene.peer("importer");
        let opened = hand_over(&backend, &exported, &mut peer, "0", 1);
        assert!(opened.starts_with("ok "), "{opened}");
        let start = hex(&pattern(64));
        assert_eq!(peer.ask("read"), format!("ok {start}"));
        assert_eq!(peer.ask("copy"), format!("ok {start}"));
        assert_eq!(peer.ask("whole"), "true");
        assert_eq!(peer.ask("fill 7"), "ok ");
        let stream = backend.create_stream(ZERO).expect("a stream");
        let seen = read(&backend, range, &*stream).expect("it can be read");
        assert!(seen == vec![7; seen.len()], "all of it is filled");
        assert_eq!(peer.ask("fill 0"), "ok ");
        assert_eq!(peer.ask("add 1.5"), "ok ");
        let seen = read(&backend, range, &*stream).expect("it can be read");
        assert!(seen == 1.5f32.to_ne_bytes().repeat(seen.len() / 4), "1.5 in every float");
        assert_eq!(peer.ask("pattern"), "ok ");
        let seen = read(&backend, range, &*stream).expect("it can be read");
        assert!(seen == pattern(seen.len()), "what was written from the other card");
        assert_eq!(peer.ask("close"), "ok ");
        peer.finish();
        backend.unexport(exported).expect("it goes back");
        // SAFETY: nobody uses it.
        unsafe { backend.free(range) }.expect("it can be freed");
    }
}

#[test]
fn a_card_that_cannot_import_a_key_is_told_the_way_out() {
    Scene::on("a_card_that_cannot_import_a_key_is_told_the_way_out", "devices=2").play(
        |scene| {
            let backend = backend();
            let mut peer = scene.peer("refused");
            let key = memory(&backend, ZERO, HUGE, KEY);
            let exported = backend.export(&extent_of(&backend, key), None).expect("a key");
            backend.authorize(&exported, &unhex(&peer.hear())).expect("the importer is listed");
            let text = peer.ask(told(&exported));
            for phrase in
                ["507899", "[simulator]", "device 0", "device 1", "25.5.2", "at_home", "allocate_as", "plog"]
            {
                assert!(text.contains(phrase), "{phrase:?} is missing in {text}");
            }
            peer.finish();
            // And the way out is one.
            let range = memory(&backend, ZERO, HUGE, SHAREABLE);
            let exported = backend.export(&extent_of(&backend, range), None).expect("a handle");
            let mut peer = scene.peer("importer");
            assert!(hand_over(&backend, &exported, &mut peer, "0", 1).starts_with("ok "));
            assert_eq!(peer.ask("whole"), "true");
            assert_eq!(peer.ask("close"), "ok ");
            peer.finish();
        },
        &[
            ("importer", importer),
            ("refused", |told| {
                let (backend, raw) = (backend(), Raw::open());
                told.say(hex(&backend.local_peer_id(ZERO).expect("an id")));
                let line = told.hear().expect("a handle");
                let parts: Vec<&str> = line.split(':').collect();
                raw.fail_next("aclrtIpcMemImportByKey", 507_899);
                let handle = received(KEY, unhex(parts[1]), HUGE, Some(ZERO));
                told.say(backend.open(vec![handle], ONE, Access::ReadWrite).unwrap_err().to_string());
            }),
        ],
    );
}

#[test]
fn cards_without_access_to_each_other_are_told_so_before_the_driver_is_asked() {
    Scene::on(
        "cards_without_access_to_each_other_are_told_so_before_the_driver_is_asked",
        "devices=2;peers=none",
    )
    .play(
        |_| {
            let (backend, raw) = (backend(), Raw::open());
            for kind in [KEY, SHAREABLE] {
                let bytes =
                    if kind == KEY { [b'a'; 64].into_iter().chain([0]).collect() } else { vec![1; 16] };
                let handle = received(kind, bytes, HUGE, Some(ZERO));
                let error = backend.open(vec![handle], ONE, Access::ReadWrite).unwrap_err();
                assert!(matches!(error, Error::NoPeerAccess { from: ONE, .. }), "{error:?}");
            }
            assert_eq!(raw.calls("aclrtIpcMemImportByKey"), 0);
            assert_eq!(raw.calls("aclrtMemImportFromShareableHandle"), 0);
        },
        &[],
    );
}

#[test]
fn a_310p_takes_pages_that_other_cards_reach() {
    Scene::on("a_310p_takes_pages_that_other_cards_reach", "soc=310p;devices=2").play(
        |scene| {
            let backend = backend();
            for kind in [KEY, SHAREABLE] {
                let range = memory(&backend, ZERO, HUGE, kind);
                let exported = backend.export(&extent_of(&backend, range), None).expect("a handle");
                let mut peer = scene.peer("importer");
                let opened = hand_over(&backend, &exported, &mut peer, "0", 1);
                assert!(opened.starts_with("ok "), "kind {}: {opened}", kind.0);
                assert_eq!(peer.ask("whole"), "true", "kind {}", kind.0);
                assert_eq!(peer.ask("close"), "ok ");
                peer.finish();
                backend.unexport(exported).expect("it goes back");
            }
        },
        IMPORTER,
    );
}

#[test]
fn memory_of_two_cards_of_one_process_is_copied_both_ways() {
    Scene::on("memory_of_two_cards_of_one_process_is_copied_both_ways", "devices=2").play(
        |_| {
            let backend = backend();
            for (kind, from, to) in [(KEY, ZERO, ONE), (SHAREABLE, ONE, ZERO), (SHAREABLE, ZERO, ONE)] {
                let source = memory(&backend, from, HUGE, kind);
                for on in [from, to] {
                    let target = backend.allocate_as(to, HUGE, kind).expect("memory");
                    let stream = backend.create_stream(on).expect("a stream");
                    // SAFETY: both ranges are ours.
                    unsafe { backend.copy(target, source, stream.as_borrowed()) }.expect("a copy");
                    backend.synchronize(stream.as_borrowed()).expect("it is done");
                    let stream = backend.create_stream(to).expect("a stream");
                    let seen = read(&backend, target, &*stream).expect("it can be read");
                    assert!(seen == pattern(seen.len()), "kind {}, {from} to {to}, on {on}", kind.0);
                    // SAFETY: nobody uses it.
                    unsafe { backend.free(target) }.expect("it can be freed");
                }
            }
        },
        &[],
    );
}

// ---- Shareable handles ----

#[test]
fn physical_memory_has_one_shareable_handle() {
    Scene::on("physical_memory_has_one_shareable_handle", "devices=2").play(
        |scene| {
            let (backend, raw) = (backend(), Raw::open());
            let range = memory(&backend, ZERO, HUGE, SHAREABLE);
            let extent = extent_of(&backend, range);
            let [first, second] = [(); 2].map(|()| backend.export(&extent, None).expect("a handle"));
            assert_eq!(first.bytes, second.bytes);
            assert_eq!(raw.calls("aclrtMemExportToShareableHandle"), 1, "the driver makes no second one");
            let mut peer = scene.peer("importer");
            backend.unexport(second).expect("it goes back");
            let home = hand_over(&backend, &first, &mut peer, "0", 0);
            // A further device of the same process gets the mapping that there is.
            let away = hand_over(&backend, &first, &mut peer, "0", 1);
            assert!(home.starts_with("ok ") && home == away, "{home} {away}");
            assert_eq!(peer.ask("calls aclrtMemImportFromShareableHandle"), "1");
            assert_eq!(peer.ask("whole"), "true");
            assert_eq!(peer.ask("close"), "ok ");
            assert_eq!(peer.ask("whole"), "true");
            assert_eq!(peer.ask("close"), "ok ");
            peer.finish();
            backend.unexport(first).expect("it goes back");
            // The next export of the same block is the same handle still.
            let again = backend.export(&extent, None).expect("a handle");
            backend.unexport(again).expect("it goes back");
            // SAFETY: nobody uses it.
            unsafe { backend.free(range) }.expect("it can be freed");
        },
        IMPORTER,
    );
}

#[test]
fn each_memory_has_the_handle_that_fits_it() {
    Scene::on("each_memory_has_the_handle_that_fits_it", "devices=1").play(
        |_| {
            let backend = backend();
            for (kind, other) in [(KEY, SHAREABLE), (SHAREABLE, KEY)] {
                let extent = extent_of(&backend, memory(&backend, ZERO, HUGE, kind));
                for wanted in [None, Some(kind)] {
                    let exported = backend.export(&extent, wanted).expect("the kind that fits");
                    assert_eq!(exported.kind, kind);
                    backend.unexport(exported).expect("it goes back");
                }
                let error = backend.export(&extent, Some(other)).unwrap_err();
                assert!(matches!(error, Error::NotShareable { .. }), "{error:?}");
                let error = backend.export(&extent, Some(HandleKind(9))).unwrap_err();
                assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
            }
        },
        &[],
    );
}

#[test]
fn foreign_physical_memory_is_found_and_shared_over_several_blocks() {
    Scene::on("foreign_physical_memory_is_found_and_shared_over_several_blocks", "devices=1").play(
        |scene| {
            let (backend, raw) = (backend(), Raw::open());
            assert_eq!(raw.call_with("aclrtSetDevice", 0), 0);
            // As PyTorch's expandable segments are: one reservation, filled block by block.
            let sizes = [HUGE, 10 * HUGE, HUGE];
            let base = raw.reserve(sizes.iter().sum::<u64>() as usize);
            let mut at = base;
            for size in sizes {
                raw.map_new(at, size as usize, 0);
                at += size;
            }
            let whole = range(ZERO, base, sizes.iter().sum());
            let extents = backend.extents_of(whole, None).expect("three blocks");
            let found: Vec<u64> = extents.iter().map(|extent| extent.allocation.len).collect();
            assert_eq!(found, sizes);
            let inner = whole.slice(HUGE + 5, 10).expect("it lies inside");
            assert_eq!(backend.extents_of(inner, None).expect("one block"), [extents[1]]);
            let beyond = DeviceRange { len: whole.len + 1, ..whole };
            let error = backend.extents_of(beyond, None).unwrap_err();
            assert!(matches!(error, Error::InvalidRegion(_)), "{error:?}");
            let stream = backend.create_stream(ZERO).expect("a stream");
            write(&backend, whole, &pattern(whole.len as usize), &*stream).expect("it can be written");

            let exports: Vec<Exported> =
                extents.iter().map(|extent| backend.export(extent, None).expect("a handle")).collect();
            let mut peer = scene.peer("importer");
            let id = unhex(&peer.ask("id"));
            for exported in &exports {
                assert_eq!(exported.kind, SHAREABLE);
                backend.authorize(exported, &id).expect("the importer is listed");
            }
            let opened = peer.ask(format!("open {} 0 0", told_all(&exports)));
            assert!(opened.ends_with(&format!(" {}", whole.len)), "one range: {opened}");
            assert_eq!(peer.ask("whole"), "true");
            assert_eq!(peer.ask("close"), "ok ");
            // Nothing of it is left: it can be opened again.
            let opened = peer.ask(format!("open {} 0 0", told_all(&exports)));
            assert!(opened.starts_with("ok "), "{opened}");
            assert_eq!(peer.ask("close"), "ok ");
            peer.finish();
            for exported in exports {
                backend.unexport(exported).expect("it goes back");
            }
        },
        IMPORTER,
    );
}

#[test]
fn a_size_that_is_not_the_physical_memorys_is_refused_and_undone() {
    Scene::on("a_size_that_is_not_the_physical_memorys_is_refused_and_undone", "devices=1").play(
        |scene| {
            let backend = backend();
            let range = memory(&backend, ZERO, 2 * HUGE, SHAREABLE);
            let exported = backend.export(&extent_of(&backend, range), None).expect("a handle");
            let mut peer = scene.peer("importer");
            backend.authorize(&exported, &unhex(&peer.ask("id"))).expect("the importer is listed");
            let number = &exported.bytes.as_slice()[..8];
            for size in [1, HUGE, 4 * HUGE, u64::MAX] {
                let bytes = [number, &size.to_le_bytes()].concat();
                let refused = peer.ask(format!("open 2:{}:{size} 0 0", hex(&bytes)));
                assert!(refused.starts_with("err "), "{size}: {refused}");
            }
            let opened = peer.ask(format!("open {} 0 0", told(&exported)));
            assert!(opened.starts_with("ok "), "what failed before left nothing: {opened}");
            assert_eq!(peer.ask("close"), "ok ");
            peer.finish();
        },
        IMPORTER,
    );
}

// ---- Streams ----

#[test]
fn a_stream_is_destroyed_after_its_work() {
    Scene::on("a_stream_is_destroyed_after_its_work", "devices=1").play(
        |_| {
            let (backend, raw) = (backend(), Raw::open());
            let range = backend.allocate(ZERO, HUGE).expect("memory");
            let (delay, begun) = (Duration::from_secs(2), Instant::now());
            let stream = backend.create_stream(ZERO).expect("a stream");
            backend.delay(delay, stream.as_borrowed()).expect("a delay");
            // SAFETY: the range is ours.
            unsafe { backend.fill(range, 7, stream.as_borrowed()) }.expect("a fill");
            drop(stream);
            assert_eq!(raw.calls("aclrtDestroyStream"), 0, "it has work");
            assert!(begun.elapsed() < delay, "the drop does not wait for the work");
            backend.synchronize_device(ZERO).expect("all is done");
            let other = backend.create_stream(ZERO).expect("a stream");
            assert_eq!(raw.calls("aclrtDestroyStream"), 1, "the idle one is destroyed when the next is made");
            assert_eq!(read(&backend, range, &*other).expect("it can be read"), vec![7; HUGE as usize]);
        },
        &[],
    );
}

// ---- Events and words ----

#[test]
fn shared_events_are_claimed_only_where_the_trial_passes() {
    for machine in [
        "soc=910b;devices=1",
        "soc=910_93;devices=1",
        "soc=310p;devices=1",
        "soc=910;devices=1",
        "soc=950dt;devices=1",
        "soc=950;devices=1",
        "soc=910b;devices=1;old-driver",
        "soc=910b;devices=1;page-size=65536",
    ] {
        Scene::on("shared_events_are_claimed_only_where_the_trial_passes", machine).play(
            |scene| {
                let backend = backend();
                let claimed = backend.capabilities(ZERO).expect("capabilities").ipc_events;
                let works = ["soc=910b;devices=1", "soc=910_93;devices=1"].contains(&scene.machine);
                assert_eq!(claimed, works, "{}", scene.machine);
                if !works && !scene.machine.contains("soc=950;") {
                    let error = backend.create_event(ZERO).unwrap_err();
                    assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
                    assert!(error.to_string().contains("synchronise on the host"), "{error}");
                }
            },
            &[],
        );
    }
}

#[test]
fn an_events_handle_is_64_bytes_of_which_the_rest_is_zero() {
    Scene::on("an_events_handle_is_64_bytes_of_which_the_rest_is_zero", "devices=1").play(
        |_| {
            let backend = backend();
            let handles = [(); 2].map(|()| {
                let event = backend.create_event(ZERO).expect("an event");
                let handle = event.export().expect("a handle");
                (event, handle)
            });
            for (_, handle) in &handles {
                assert_eq!(handle.as_slice().len(), 64);
                assert_eq!(handle.as_slice()[8..], [0; 56], "the call writes 8 bytes");
            }
            assert_ne!(handles[0].1, handles[1].1);
            for len in [0, 8, 63, 65] {
                let error = backend.open_event(&vec![1; len], ZERO).unwrap_err();
                assert!(matches!(error, Error::Protocol(_)), "{len}: {error:?}");
            }
        },
        &[],
    );
}

#[test]
fn timelines_are_claimed_only_where_the_trial_passes() {
    for machine in ["soc=910b;devices=1", "soc=310p;devices=1"] {
        Scene::on("timelines_are_claimed_only_where_the_trial_passes", machine).play(
            |scene| {
                let backend = backend();
                // No page of the manual says that the calls take host memory, and the simulator refuses it.
                assert!(!backend.capabilities(ZERO).expect("capabilities").timelines, "{}", scene.machine);
                let timelines = backend.timelines().expect("the functions are there");
                let page = std::ptr::NonNull::dangling();
                // SAFETY: refused before the address is looked at.
                let error = unsafe { timelines.register(ZERO, page, 4096) }.unwrap_err();
                assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
            },
            &[],
        );
    }
}

#[test]
fn timelines_work_on_a_machine_that_passes_the_trial() {
    Scene::on("timelines_work_on_a_machine_that_passes_the_trial", "devices=2;host-words").play(
        |_| {
            let (backend, raw) = (backend(), Raw::open());
            for device in [ZERO, ONE] {
                assert!(backend.capabilities(device).expect("capabilities").timelines);
            }
            let timelines = backend.timelines().expect("the functions are there");
            let layout = Layout::from_size_align(4096, 4096).expect("a page");
            // SAFETY: the layout has a size.
            let page = NonNull::new(unsafe { alloc_zeroed(layout) }).expect("a page");
            // SAFETY: the page stays until the end of the test's process.
            let seen = unsafe { timelines.register(ZERO, page, 4096) }.expect("it can be registered");
            // SAFETY: as above.
            let again = unsafe { timelines.register(ZERO, page, 4096) }.expect("it is counted");
            assert_eq!(seen, again);
            // SAFETY: registered twice.
            unsafe { timelines.unregister(ZERO, page) }.expect("the other one is left");
            // SAFETY: as above.
            unsafe { timelines.register(ONE, page, 4096) }.expect("another device sees the same page");
            // SAFETY: no work of that device uses it.
            unsafe { timelines.unregister(ONE, page) }.expect("the first device's is left");
            let stream = backend.create_stream(ZERO).expect("a stream");
            // SAFETY: the words lie in the page, which is still registered.
            unsafe {
                timelines.wait_value(seen, 3, stream.as_borrowed()).expect("a wait");
                let second = seen.checked_add(8).expect("it lies in the page");
                timelines.write_value(second, 5, stream.as_borrowed()).expect("a write");
            }
            // SAFETY: aligned words of the page, which is zeroed.
            let words = unsafe { page.cast::<[AtomicU64; 2]>().as_ref() };
            words[0].store(2, Ordering::Release);
            assert_eq!(words[1].load(Ordering::Acquire), 0, "2 is less than 3");
            words[0].store(4, Ordering::Release);
            backend.synchronize(stream.as_borrowed()).expect("4 is enough");
            assert_eq!(words[1].load(Ordering::Acquire), 5);
            // SAFETY: the stream has passed.
            unsafe { timelines.unregister(ZERO, page) }.expect("the last one");
            // SAFETY: nobody uses the page.
            assert!(unsafe { timelines.unregister(ZERO, page) }.is_err(), "a further one");
            assert_eq!(raw.calls("aclrtHostRegister"), raw.calls("aclrtHostUnregister"));
        },
        &[],
    );
}

#[test]
fn a_trial_that_fails_claims_nothing() {
    for machine in [
        "devices=1;host-words;fault=aclrtValueWrite:1:507899",
        "devices=1;host-words;fault=aclrtValueWait:1:207000",
        "devices=1;host-words;fault=aclrtHostRegister:1:4242",
        "devices=1;host-words;fault=aclrtSynchronizeStreamWithTimeout:1:507046",
    ] {
        Scene::on("a_trial_that_fails_claims_nothing", machine).play(
            |scene| {
                let backend = backend();
                for _ in 0..2 {
                    let capabilities = backend.capabilities(ZERO).expect("no error");
                    assert!(!capabilities.timelines, "{}", scene.machine);
                    assert!(capabilities.ipc_events, "the other trial stands by itself");
                }
                let stream = backend.create_stream(ZERO).expect("the device is none the worse for it");
                backend.synchronize(stream.as_borrowed()).expect("and neither are its streams");
            },
            &[],
        );
    }
}

// ---- Devices ----

#[test]
fn a_chip_without_a_uuid_is_known_by_host_and_physical_id() {
    Scene::on("a_chip_without_a_uuid_is_known_by_host_and_physical_id", "soc=310p;devices=4").play(
        |scene| {
            let physical = |physical| DeviceIdentity::HostPhysical { host: HostId::local(), physical };
            let identities = |backend: &AscendBackend| -> Vec<DeviceIdentity> {
                backend.devices().expect("devices").iter().map(|device| device.identity).collect()
            };
            assert_eq!(identities(&backend()), [physical(0), physical(1), physical(2), physical(3)]);
            let peer = scene.peer_seeing("shower", "1,3");
            assert_eq!(peer.hear(), format!("{:?}", [physical(1), physical(3)]));
            peer.finish();
        },
        &[("shower", |told| {
            let devices = backend().devices().expect("devices");
            told.say(format!("{:?}", devices.iter().map(|device| device.identity).collect::<Vec<_>>()));
        })],
    );
}

#[test]
fn listing_devices_takes_no_context() {
    Scene::on("listing_devices_takes_no_context", "devices=2").play(
        |_| {
            let (backend, raw) = (backend(), Raw::open());
            assert_eq!(backend.devices().expect("devices").len(), 2);
            assert!(backend.peer_access(ZERO, ONE).expect("an answer"));
            drop(backend.handle_kinds());
            drop(Ipc::with_backend(backend as Arc<dyn DeviceIpc>));
            assert_eq!(raw.calls("aclrtSetDevice"), 0);
            assert_eq!(raw.context(), 0);
        },
        &[],
    );
}

// ---- Statuses ----

#[test]
fn a_number_that_nobody_knows_is_an_error_like_any_other() {
    Scene::on("a_number_that_nobody_knows_is_an_error_like_any_other", "devices=1").play(
        |_| {
            let (backend, raw) = (backend(), Raw::open());
            let range = memory(&backend, ZERO, HUGE, KEY);
            let extent = extent_of(&backend, range);
            raw.fail_next("aclrtIpcMemGetExportKey", 4242);
            let (status, text) = status_of(backend.export(&extent, None));
            assert_eq!(status, VendorStatus(4242));
            assert!(text.contains("aclrtIpcMemGetExportKey failed with unknown status (4242)"), "{text}");
            assert!(text.contains("[simulator]"), "the vendor's message is told: {text}");
            raw.fail_next("aclrtMallocAlign32", -7);
            assert_eq!(status_of(backend.allocate(ZERO, 1)).0, VendorStatus(-7));
            raw.fail_next("aclrtCreateStream", i32::MAX);
            assert_eq!(status_of(backend.create_stream(ZERO)).0, VendorStatus(i32::MAX));
            for status in [207_001, 207_018, 200_000] {
                raw.fail_next("aclrtMallocAlign32", status);
                let error = backend.allocate(ZERO, 1).unwrap_err();
                assert!(matches!(error, Error::OutOfMemory { bytes: 1, .. }), "{error:?}");
            }
        },
        &[],
    );
}

#[test]
fn memory_can_be_allocated_for_shareable_handles_throughout() {
    const SHARE: &[(&str, &str)] = &[("DEVICE_IPC_ASCEND_ALLOCATE", "shareable")];
    Scene::on("memory_can_be_allocated_for_shareable_handles_throughout", "devices=1")
        .environment(SHARE)
        .play(
            |_| {
                let backend = backend();
                assert_eq!(backend.handle_kinds()[0].kind, SHAREABLE);
                let range = backend.allocate(ZERO, 1).expect("memory");
                let exported = backend.export(&extent_of(&backend, range), None).expect("a handle");
                assert_eq!(exported.kind, SHAREABLE);
                let error = LoadOptions::new().allocates(HandleKind(7)).load().unwrap_err();
                assert!(matches!(error, Unavailable::Failed { .. }), "{error:?}");
            },
            &[],
        );
}

#[test]
fn the_simulator_is_there() {
    // Every other test passes where it is not; this one says so in one place.
    if has_simulator() {
        assert!(library_of(Cann::V9_1).is_file());
    }
}
