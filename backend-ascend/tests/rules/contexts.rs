//! Contexts and their streams: the backend sets a context on each thread, and restores the caller's.

use std::sync::Arc;

use device_ipc_ascend::{KEY, SHAREABLE};
use device_ipc_core::backend::{DeviceIpc, DeviceMemory, Gate, TestKernels, VendorStatus};
use device_ipc_core::{Access, BorrowedStream, DeviceRange};

use super::importer::received;
use super::memory::{HUGE, ONE, ZERO, backend, extent_of, memory, read, status_of};
use super::support::{Raw, scene};

#[test]
fn calls_set_and_restore_the_context_on_each_thread() {
    scene!("devices=2").play(&[], |_| {
        let backend = backend();
        let raw = Raw::open();
        let range = memory(&backend, ZERO, HUGE, KEY);
        let extent = extent_of(&backend, range);
        // A thread without a context.
        std::thread::scope(|scope| {
            scope.spawn(|| assert_eq!(extent_of(&backend, range), extent));
        });
        // A thread with the default context of another device, and one with a further context.
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
                        assert_eq!(raw.get_int("aclrtGetDevice"), (0, 1), "after {what}");
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
                    backend.host_function(Box::new(|| ()), stream.as_borrowed()).expect("a function");
                    the_same("host_function");
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
                    let handle = received(KEY, [b'0'; 64].into_iter().chain([0]).collect(), 4096, Some(ZERO));
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
                    // SAFETY: no longer used.
                    unsafe { backend.free(other) }.expect("it can be freed");
                    the_same("free");
                });
            });
        }
    });
}

#[test]
fn device_reset_is_reported_as_error() {
    scene!("devices=1").play(&[], |_| {
        let backend = backend();
        let raw = Raw::open();
        let stream = backend.create_stream(ZERO).expect("a stream");
        let range = memory(&backend, ZERO, HUGE, KEY);
        assert_eq!(raw.call_with("aclrtResetDeviceForce", 0), 0);
        let (status, text) = status_of(read(&backend, range, &*stream));
        assert_eq!(status, VendorStatus(107_002), "{text}");
        assert!(text.contains("aclrtResetDeviceForce"), "{text}");
        drop(stream);
    });
}

#[test]
fn stream_of_another_context_is_rejected() {
    scene!("devices=1").play(&[], |_| {
        let (backend, raw) = (backend(), Raw::open());
        let range = memory(&backend, ZERO, HUGE, KEY);
        let own = raw.create_context(0);
        let stream = raw.create_stream();
        // SAFETY: a stream of the simulator that is never destroyed.
        let stream = unsafe { BorrowedStream::from_raw("ascend", ZERO, stream) };
        // SAFETY: the range is ours.
        let (status, text) = status_of(unsafe { backend.fill(range, 1, stream) });
        assert_eq!(status, VendorStatus(107_003), "{text}");
        assert!(text.contains("default context"), "{text}");
        assert_eq!(raw.context(), own, "the caller's own context is current again");
    });
}

#[test]
fn stream_is_destroyed_after_its_work() {
    scene!("devices=1").play(&[], |_| {
        let (backend, raw) = (backend(), Raw::open());
        let range = backend.allocate(ZERO, HUGE).expect("memory");
        let stream = backend.create_stream(ZERO).expect("a stream");
        let dynamic: Arc<dyn DeviceIpc> = backend.clone();
        let gate = Gate::close(&dynamic, stream.as_borrowed()).expect("a gate");
        let destroyed = raw.calls("aclrtDestroyStream");
        // SAFETY: the range is ours.
        unsafe { backend.fill(range, 7, stream.as_borrowed()) }.expect("a fill");
        drop(stream);
        assert_eq!(raw.calls("aclrtDestroyStream"), destroyed, "it has work");
        gate.open();
        backend.synchronize_device(ZERO).expect("all is done");
        let other = backend.create_stream(ZERO).expect("a stream");
        assert_eq!(
            raw.calls("aclrtDestroyStream"),
            destroyed + 1,
            "the idle one is destroyed when the next is made"
        );
        assert_eq!(read(&backend, range, &*other).expect("it can be read"), vec![7; HUGE as usize]);
    });
}
