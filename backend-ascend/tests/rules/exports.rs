//! Exports of whole allocations, by their base.

use device_ipc_ascend::KEY;
use device_ipc_core::backend::{DeviceIpc, DeviceMemory, Extent};
use device_ipc_core::{Access, Error};
use device_ipc_sim_ascendcl::Cann;
use device_ipc_test_process::{answer, hex, request, unhex};

use super::importer::{IMPORTER, close_and_unexport, encode, open_expecting_success, received};
use super::memory::{HUGE, ZERO, backend, extent_of, memory, range, share};
use super::support::{Raw, scene};

#[test]
fn allocations_are_whole_huge_pages() {
    scene!("soc=910b;devices=1").play(&[], |_| {
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
    });
}

#[test]
fn interior_address_is_shared_by_allocation_base() {
    for cann in [Cann::V9_0, Cann::V8_5] {
        let scene = scene!("devices=1").cann(cann);
        scene.play(IMPORTER, |scene| {
            let backend = backend();
            let whole = memory(&backend, ZERO, 3 * HUGE, KEY);
            let inner = whole.slice(HUGE + 77, 100).expect("it lies inside");
            let extents = backend.extents_of(inner, None).expect("the base is known");
            assert_eq!(extents[0].allocation.ptr, whole.ptr);
            // The vendor's call refuses an interior address, so the backend must find the base.
            let interior = Extent { allocation: inner, generation: None };
            assert!(backend.export(&interior, Some(KEY)).is_err());
            let exported = backend.export(&extents[0], None).expect("the base can be shared");
            let mut peer = scene.peer("importer");
            open_expecting_success(&backend, &exported, &mut peer, 0);
            assert_eq!(peer.ask("whole"), "true");
            close_and_unexport(&backend, exported, peer);
        });
    }
}

#[test]
fn foreign_memory_before_cann_9_needs_a_stated_base() {
    scene!("devices=1").cann(Cann::V8_5).play(&[], |_| {
        let (backend, raw) = (backend(), Raw::open());
        raw.own_device(0);
        let base = raw.malloc(2 * HUGE as usize - 32, 0);
        let whole = range(ZERO, base, 2 * HUGE - 32);
        let inner = whole.slice(HUGE, 64).expect("it lies inside");
        let error = backend.extents_of(inner, None).unwrap_err().to_string();
        assert!(error.contains("with_allocation") && error.contains("CANN 9.0"), "{error}");
        let extents = backend.extents_of(inner, Some(whole)).expect("the base was stated");
        assert_eq!(extents, [Extent { allocation: whole, generation: None }]);
        drop(backend.export(&extents[0], None).expect("it can be shared"));
        // The backend checks the stated base as far as ACL has queries for it.
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
                    Error::InvalidRegion(_) | Error::NotDeviceMemory { .. } | Error::NotShareable { .. }
                ),
                "{wrong:?}: {error:?}"
            );
        }
    });
}

#[test]
fn wrong_stated_base_is_rejected_since_cann_9() {
    scene!("devices=1").cann(Cann::V9_0).play(&[], |_| {
        let (backend, raw) = (backend(), Raw::open());
        raw.own_device(0);
        let base = raw.malloc(2 * HUGE as usize - 32, 0);
        let inner = range(ZERO, base + HUGE, 64);
        let extents = backend.extents_of(inner, None).expect("ACL returns the base");
        assert_eq!(extents[0].allocation.ptr.get(), base);
        for wrong in [range(ZERO, base + HUGE, 64), range(ZERO, base, 4 * HUGE)] {
            let error = backend.extents_of(inner, Some(wrong)).unwrap_err().to_string();
            assert!(error.contains("was stated as"), "{error}");
        }
    });
}

#[test]
fn small_unaligned_allocation_is_rejected_with_remedy() {
    const UNALIGNED: &str = "devices=1;unaligned";
    scene!(UNALIGNED).play(&[], |_| {
        let (backend, raw) = (backend(), Raw::open());
        raw.own_device(0);
        let tensor = range(ZERO, raw.malloc(4096, 0), 4096);
        let error = backend.extents_of(tensor, None).unwrap_err();
        assert!(matches!(error, Error::NotShareable { .. }), "{error:?}");
        assert!(error.to_string().contains("2 MiB"), "{error}");
    });
}

#[test]
fn unaligned_stated_base_is_rejected_with_remedy() {
    scene!("devices=1").cann(Cann::V8_5).play(&[], |_| {
        let (backend, raw) = (backend(), Raw::open());
        raw.own_device(0);
        let base = raw.malloc(4 * HUGE as usize - 32, 0);
        // A block of a caching allocator.
        let block = range(ZERO, base + 512, 4096);
        let error = backend.extents_of(block, Some(block)).unwrap_err();
        assert!(matches!(error, Error::NotShareable { .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.contains("2097152") && text.contains("ACL_MEM_MALLOC_HUGE_FIRST"), "{text}");
    });
}

#[test]
fn export_of_imported_memory_is_rejected() {
    scene!("devices=1").play(
        &[("forwarder", || {
            let backend = backend();
            answer(hex(&backend.local_peer_id(ZERO).expect("an id")));
            let line = request().expect("a handle");
            let parts: Vec<&str> = line.split(':').collect();
            let handle = received(KEY, unhex(parts[1]), HUGE, Some(ZERO));
            let opened = backend.open(vec![handle], ZERO, Access::ReadWrite).expect("it can be opened");
            let inner = opened.range.slice(77, 1).expect("it lies inside");
            answer(match backend.extents_of(inner, None) {
                Err(Error::SharedOn { .. }) => "SharedOn".to_owned(),
                other => format!("{other:?}"),
            });
            backend.close(opened).expect("it closes");
        })],
        |scene| {
            let backend = backend();
            let exported = share(&backend, ZERO, HUGE, KEY);
            let mut peer = scene.peer("forwarder");
            backend.authorize(&exported, &unhex(&peer.receive())).expect("the importer is listed");
            peer.send(&encode(&exported));
            assert_eq!(peer.receive(), "SharedOn");
            peer.finish();
            backend.unexport(exported).expect("it goes back");
        },
    );
}
