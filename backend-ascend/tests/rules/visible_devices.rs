//! Two processes with different visible devices, by `ASCEND_RT_VISIBLE_DEVICES`: a position is another card in each of
//! them, and descriptors identify cards by their identity. The vendor requires the variable's entries in ascending
//! order.

use std::sync::Arc;

use super::support::{Role, Scene, scene};
use device_ipc_ascend::{AscendBackend, KEY, SHAREABLE};
use device_ipc_core::backend::DeviceIpc;
use device_ipc_core::{Descriptor, Error, Ipc};
use device_ipc_test_process::serve;

const BYTES: usize = 100_003;

fn ipc() -> Ipc {
    Ipc::with_backend(AscendBackend::load().expect("the simulator is available") as Arc<dyn DeviceIpc>)
}

fn pattern() -> Vec<u8> {
    (0..BYTES as u32).map(|index| (index.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

/// Opens descriptors on their home device or on a stated one. Reports its ordinal of the device, and the bytes.
fn importer() {
    let ipc = ipc();
    serve(|place, descriptor| {
        let descriptor: Descriptor = descriptor.parse().expect("a descriptor");
        let opened = match place {
            "home" => ipc.open(&descriptor).at_home(),
            device => ipc.open(&descriptor).on_device(device.parse::<u32>().expect("a number")),
        };
        match opened {
            Ok(mapping) => {
                let stream = ipc.create_stream(mapping.device()).expect("a stream");
                let bytes = mapping.view::<u8, _>(&stream).expect("a view").to_vec().expect("the bytes");
                mapping.view_mut::<u8, _>(&stream).expect("a view").fill_bytes(9).expect("a fill");
                stream.synchronize().expect("it is done");
                format!("device {} right {}", mapping.device(), bytes == pattern())
            }
            Err(Error::HomeNotVisible { .. }) => "HomeNotVisible".to_owned(),
            Err(error) => format!("{error:?}"),
        }
    });
}

const RECEIVER: &[Role] = &[("importer", importer)];

/// Shares memory of `device`, of either kind, with an importer that sees `visible`, and checks the importer's writes.
fn share(scene: &Scene, device: u32, visible: &str, place: &str, expected: &str) {
    let ipc = ipc();
    for kind in [KEY, SHAREABLE] {
        let buffer = Arc::new(ipc.allocate_for(device, BYTES as u64, kind).expect("memory"));
        let stream = ipc.create_stream(device).expect("a stream");
        buffer.view_mut::<u8, _>(&stream).expect("a view").copy_from(&pattern()).expect("a copy");
        stream.synchronize().expect("it is done");
        let share = ipc.share(Arc::clone(&buffer)).start().expect("an export");
        let mut peer = scene.peer_with_visible("importer", visible);
        let answer = peer.ask(&format!("{place} {}", share.descriptor()));
        assert!(answer.contains(expected), "kind {}: {answer}", kind.0);
        if expected.starts_with("device") {
            let bytes = buffer.view::<u8, _>(&stream).expect("a view").to_vec().expect("the bytes");
            assert!(bytes.iter().all(|byte| *byte == 9), "the bytes that the importer wrote");
        }
        peer.finish();
    }
}

#[test]
fn home_is_found_at_another_position() {
    for machine in ["soc=910b;devices=4", "soc=310p;devices=4"] {
        scene!(machine).play(RECEIVER, |scene| share(scene, 3, "1,3", "home", "device 1 right true"));
    }
}

#[test]
fn device_position_is_the_importers() {
    scene!("devices=4").play(RECEIVER, |scene| share(scene, 3, "1,3", "0", "device 0 right true"));
}

#[test]
fn home_is_found_if_exporter_sees_fewer_devices() {
    scene!("devices=4").environment(&[("ASCEND_RT_VISIBLE_DEVICES", "2,3")]).play(RECEIVER, |scene| {
        // Position 1 here is card 3, which is position 3 in the importer.
        share(scene, 1, "0,1,2,3", "home", "device 3 right true");
    });
}

#[test]
fn hidden_home_error_names_the_variable() {
    scene!("devices=4").play(RECEIVER, |scene| share(scene, 0, "1,3", "home", "HomeNotVisible"));
}

#[test]
fn hidden_die_of_same_chip_error_names_the_die() {
    scene!("soc=910_93;devices=4").play(RECEIVER, |scene| {
        let ipc = ipc();
        let buffer = Arc::new(ipc.allocate_for(0, BYTES as u64, KEY).expect("memory"));
        let share = ipc.share(buffer).start().expect("an export");
        let mut peer = scene.peer_with_visible("importer", "1");
        let answer = peer.ask(&format!("0 {}", share.descriptor()));
        assert!(answer.contains("507899") && answer.contains("the other die of this chip"), "{answer}");
        peer.finish();
    });
}

#[test]
fn hidden_home_opens_on_another_device_or_explains() {
    scene!("devices=4").play(RECEIVER, |scene| {
        let ipc = ipc();
        for (kind, expected) in [(KEY, "device 0 right true"), (SHAREABLE, "ASCEND_RT_VISIBLE_DEVICES")] {
            let buffer = Arc::new(ipc.allocate_for(0, BYTES as u64, kind).expect("memory"));
            let stream = ipc.create_stream(0).expect("a stream");
            buffer.view_mut::<u8, _>(&stream).expect("a view").copy_from(&pattern()).expect("a copy");
            stream.synchronize().expect("it is done");
            let share = ipc.share(buffer).start().expect("an export");
            let mut peer = scene.peer_with_visible("importer", "1,3");
            let answer = peer.ask(&format!("0 {}", share.descriptor()));
            assert!(answer.contains(expected), "kind {}: {answer}", kind.0);
            peer.finish();
        }
    });
}
