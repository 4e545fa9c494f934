//! Shareable handles of physical memory.

use device_ipc_ascend::{KEY, LoadOptions, SHAREABLE};
use device_ipc_core::backend::{DeviceIpc, DeviceMemory, Exported, HandleKind, Unavailable};
use device_ipc_core::{DeviceRange, Error};
use device_ipc_test_process::{hex, unhex};

use super::importer::{IMPORTER, close_and_unexport, encode, encode_all, open_listed};
use super::memory::{HUGE, ZERO, backend, extent_of, memory, pattern, range, share, write};
use super::support::{Raw, scene};

#[test]
fn physical_memory_has_one_shareable_handle() {
    scene!("devices=2").play(IMPORTER, |scene| {
        let (backend, raw) = (backend(), Raw::open());
        let range = memory(&backend, ZERO, HUGE, SHAREABLE);
        let extent = extent_of(&backend, range);
        let [first, second] = [(); 2].map(|()| backend.export(&extent, None).expect("a handle"));
        assert_eq!(first.bytes, second.bytes);
        assert_eq!(raw.calls("aclrtMemExportToShareableHandle"), 1, "the driver makes no second one");
        let mut peer = scene.peer("importer");
        backend.unexport(second).expect("it goes back");
        let home = open_listed(&backend, &first, &mut peer, 0);
        // Each further device of the same process has one separate import and mapping.
        let away = open_listed(&backend, &first, &mut peer, 1);
        assert!(home.starts_with("ok ") && away.starts_with("ok ") && home != away, "{home} {away}");
        assert_eq!(open_listed(&backend, &first, &mut peer, 1), away);
        assert_eq!(peer.ask("calls aclrtMemImportFromShareableHandle"), "2");
        assert_eq!(peer.ask("calls aclrtMemSetAccess"), "0", "imported memory is let to no further device");
        assert_eq!(peer.ask("close"), "ok ");
        assert_eq!(peer.ask("whole"), "true");
        assert_eq!(peer.ask("close"), "ok ");
        assert_eq!(peer.ask("whole"), "true");
        close_and_unexport(&backend, first, peer);
        // The next export of the same block returns the same handle.
        let again = backend.export(&extent, None).expect("a handle");
        backend.unexport(again).expect("it goes back");
        // SAFETY: no longer used.
        unsafe { backend.free(range) }.expect("it can be freed");
    });
}

#[test]
fn memory_exports_only_its_own_kind() {
    scene!("devices=1").play(&[], |_| {
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
    });
}

#[test]
fn foreign_physical_memory_is_shared_over_several_blocks() {
    scene!("devices=1").play(IMPORTER, |scene| {
        let (backend, raw) = (backend(), Raw::open());
        raw.own_device(0);
        // Like PyTorch's expandable segments: one reservation, filled block by block.
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
        let opened = peer.ask(&format!("open {} 0 0", encode_all(&exports)));
        assert!(opened.ends_with(&format!(" {}", whole.len)), "one range: {opened}");
        assert_eq!(peer.ask("whole"), "true");
        assert_eq!(peer.ask("close"), "ok ");
        // The failed open left nothing behind: the handle can be opened again.
        let opened = peer.ask(&format!("open {} 0 0", encode_all(&exports)));
        assert!(opened.starts_with("ok "), "{opened}");
        assert_eq!(peer.ask("close"), "ok ");
        peer.finish();
        for exported in exports {
            backend.unexport(exported).expect("it goes back");
        }
    });
}

#[test]
fn wrong_stated_size_is_rejected_and_undone() {
    scene!("devices=1").play(IMPORTER, |scene| {
        let backend = backend();
        let exported = share(&backend, ZERO, 2 * HUGE, SHAREABLE);
        let mut peer = scene.peer("importer");
        backend.authorize(&exported, &unhex(&peer.ask("id"))).expect("the importer is listed");
        let number = &exported.bytes.as_slice()[..8];
        for size in [1, HUGE, 4 * HUGE, u64::MAX] {
            let bytes = [number, &size.to_le_bytes()].concat();
            let refused = peer.ask(&format!("open 2:{}:{size} 0 0", hex(&bytes)));
            assert!(refused.starts_with("err "), "{size}: {refused}");
        }
        let opened = peer.ask(&format!("open {} 0 0", encode(&exported)));
        assert!(opened.starts_with("ok "), "the failed open left nothing behind: {opened}");
        assert_eq!(peer.ask("close"), "ok ");
        peer.finish();
    });
}

#[test]
fn default_kind_shareable_applies_to_all_allocations() {
    const SHARE: &[(&str, &str)] = &[("DEVICE_IPC_ASCEND_ALLOCATE", "shareable")];
    scene!("devices=1").environment(SHARE).play(&[], |_| {
        let backend = backend();
        assert_eq!(backend.handle_kinds()[0].kind, SHAREABLE);
        let range = backend.allocate(ZERO, 1).expect("memory");
        let exported = backend.export(&extent_of(&backend, range), None).expect("a handle");
        assert_eq!(exported.kind, SHAREABLE);
        let error = LoadOptions::new().allocates(HandleKind(7)).load().unwrap_err();
        assert!(matches!(error, Unavailable::Failed { .. }), "{error:?}");
    });
}
