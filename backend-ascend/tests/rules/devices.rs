//! Device identities, and listing devices without a context.

use std::sync::Arc;

use device_ipc_ascend::AscendBackend;
use device_ipc_core::backend::{DeviceIpc, HostId};
use device_ipc_core::{DeviceIdentity, Ipc};
use device_ipc_test_process::answer;

use super::memory::{ONE, ZERO, backend};
use super::support::{Raw, scene};

#[test]
fn chip_without_uuid_is_identified_by_host_and_id() {
    scene!("soc=310p;devices=4").play(
        &[("shower", || {
            let devices = backend().devices().expect("devices");
            answer(format!("{:?}", devices.iter().map(|device| device.identity).collect::<Vec<_>>()));
        })],
        |scene| {
            let physical = |physical| DeviceIdentity::HostPhysical { host: HostId::local(), physical };
            let identities = |backend: &AscendBackend| -> Vec<DeviceIdentity> {
                backend.devices().expect("devices").iter().map(|device| device.identity).collect()
            };
            assert_eq!(identities(&backend()), [physical(0), physical(1), physical(2), physical(3)]);
            let peer = scene.peer_with_visible("shower", "1,3");
            assert_eq!(peer.receive(), format!("{:?}", [physical(1), physical(3)]));
            peer.finish();
        },
    );
}

#[test]
fn listing_devices_creates_no_context() {
    scene!("devices=2").play(&[], |_| {
        let (backend, raw) = (backend(), Raw::open());
        assert_eq!(backend.devices().expect("devices").len(), 2);
        assert!(backend.peer_access(ZERO, ONE).expect("an answer"));
        drop(backend.handle_kinds());
        drop(Ipc::with_backend(backend as Arc<dyn DeviceIpc>));
        assert_eq!(raw.calls("aclrtSetDevice"), 0);
        assert_eq!(raw.context(), 0);
    });
}
