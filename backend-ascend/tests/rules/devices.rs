//! Devices: by what they are known, and that they can be listed without a context.

use std::sync::Arc;

use device_ipc_ascend::AscendBackend;
use device_ipc_core::{DeviceIdentity, DeviceIpc, HostId, Ipc};

use crate::memory::{ONE, ZERO, backend};
use crate::support::{Raw, Scene};

#[test]
fn a_chip_without_a_uuid_is_known_by_host_and_physical_id() {
    Scene::on("devices::a_chip_without_a_uuid_is_known_by_host_and_physical_id", "soc=310p;devices=4").play(
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
    Scene::on("devices::listing_devices_takes_no_context", "devices=2").play(
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
