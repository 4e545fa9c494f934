//! Shareable handles, of physical memory.

use device_ipc_ascend::{KEY, LoadOptions, SHAREABLE};
use device_ipc_core::{DeviceIpc, DeviceMemory, DeviceRange, Error, Exported, HandleKind, Unavailable};

use crate::importer::{IMPORTER, hand_over, hex, let_go, told, told_all, unhex};
use crate::memory::{HUGE, ZERO, backend, extent_of, memory, pattern, range, share, write};
use crate::support::{Raw, Scene};

#[test]
fn physical_memory_has_one_shareable_handle() {
    Scene::on("shareable::physical_memory_has_one_shareable_handle", "devices=2").play(
        |scene| {
            let (backend, raw) = (backend(), Raw::open());
            let range = memory(&backend, ZERO, HUGE, SHAREABLE);
            let extent = extent_of(&backend, range);
            let [first, second] = [(); 2].map(|()| backend.export(&extent, None).expect("a handle"));
            assert_eq!(first.bytes, second.bytes);
            assert_eq!(raw.calls("aclrtMemExportToShareableHandle"), 1, "the driver makes no second one");
            let mut peer = scene.peer("importer");
            backend.unexport(second).expect("it goes back");
            let home = hand_over(&backend, &first, &mut peer, 0);
            // A further device of the same process has an import and a mapping of its own, and each device one.
            let away = hand_over(&backend, &first, &mut peer, 1);
            assert!(home.starts_with("ok ") && away.starts_with("ok ") && home != away, "{home} {away}");
            assert_eq!(hand_over(&backend, &first, &mut peer, 1), away);
            assert_eq!(peer.ask("calls aclrtMemImportFromShareableHandle"), "2");
            assert_eq!(
                peer.ask("calls aclrtMemSetAccess"),
                "0",
                "imported memory is let to no further device"
            );
            assert_eq!(peer.ask("close"), "ok ");
            assert_eq!(peer.ask("whole"), "true");
            assert_eq!(peer.ask("close"), "ok ");
            assert_eq!(peer.ask("whole"), "true");
            let_go(&backend, first, peer);
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
    Scene::on("shareable::each_memory_has_the_handle_that_fits_it", "devices=1").play(
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
    Scene::on("shareable::foreign_physical_memory_is_found_and_shared_over_several_blocks", "devices=1")
        .play(
            |scene| {
                let (backend, raw) = (backend(), Raw::open());
                raw.own_device(0);
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
    Scene::on("shareable::a_size_that_is_not_the_physical_memorys_is_refused_and_undone", "devices=1").play(
        |scene| {
            let backend = backend();
            let exported = share(&backend, ZERO, 2 * HUGE, SHAREABLE);
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

#[test]
fn memory_can_be_allocated_for_shareable_handles_throughout() {
    const SHARE: &[(&str, &str)] = &[("DEVICE_IPC_ASCEND_ALLOCATE", "shareable")];
    Scene::on("shareable::memory_can_be_allocated_for_shareable_handles_throughout", "devices=1")
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
