//! Words that streams write and wait on.

use std::alloc::{Layout, alloc_zeroed};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use device_ipc_core::Error;
use device_ipc_core::backend::{DeviceIpc, DeviceMemory};

use super::memory::{ONE, ZERO, backend};
use super::support::{Raw, scene};

#[test]
fn timelines_are_reported_only_after_a_trial() {
    for machine in ["soc=910b;devices=1", "soc=310p;devices=1"] {
        scene!(machine).play(&[], |scene| {
            let backend = backend();
            // No page of the manual states that the calls accept host memory, and the simulator refuses it.
            assert!(!backend.capabilities(ZERO).expect("capabilities").timelines, "{}", scene.machine);
            let timelines = backend.timelines().expect("the functions exist");
            let page = std::ptr::NonNull::dangling();
            // SAFETY: refused before the address is used.
            let error = unsafe { timelines.register(ZERO, page, 4096) }.unwrap_err();
            assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
        });
    }
}

#[test]
fn timelines_work_after_a_successful_trial() {
    scene!("devices=2;host-words").play(&[], |_| {
        let (backend, raw) = (backend(), Raw::open());
        for device in [ZERO, ONE] {
            assert!(backend.capabilities(device).expect("capabilities").timelines);
        }
        let timelines = backend.timelines().expect("the functions exist");
        let layout = Layout::from_size_align(4096, 4096).expect("a page");
        // SAFETY: the layout has a size.
        let page = NonNull::new(unsafe { alloc_zeroed(layout) }).expect("a page");
        // SAFETY: the page stays allocated until the test's process exits.
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
        // SAFETY: the stream is idle.
        unsafe { timelines.unregister(ZERO, page) }.expect("the last one");
        // SAFETY: the page is no longer used.
        assert!(unsafe { timelines.unregister(ZERO, page) }.is_err(), "a further one");
        assert_eq!(raw.calls("aclrtHostRegister"), raw.calls("aclrtHostUnregister"));
    });
}

#[test]
fn failed_trial_reports_no_timelines() {
    for machine in [
        "devices=1;host-words;fault=aclrtValueWrite:1:507899",
        "devices=1;host-words;fault=aclrtValueWait:1:207000",
        "devices=1;host-words;fault=aclrtHostRegister:1:4242",
        "devices=1;host-words;fault=aclrtSynchronizeStreamWithTimeout:1:507046",
    ] {
        scene!(machine).play(&[], |scene| {
            let backend = backend();
            for _ in 0..2 {
                let capabilities = backend.capabilities(ZERO).expect("no error");
                assert!(!capabilities.timelines, "{}", scene.machine);
                assert!(capabilities.ipc_events, "the other trial stands by itself");
            }
            let stream = backend.create_stream(ZERO).expect("the device is none the worse for it");
            backend.synchronize(stream.as_borrowed()).expect("and neither are its streams");
        });
    }
}
