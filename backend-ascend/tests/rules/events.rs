//! Interprocess events.

use device_ipc_core::Error;
use device_ipc_core::backend::DeviceIpc;

use super::memory::{ZERO, backend};
use super::support::scene;

#[test]
fn ipc_events_are_reported_only_after_a_trial() {
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
        scene!(machine).play(&[], |scene| {
            let backend = backend();
            let claimed = backend.capabilities(ZERO).expect("capabilities").ipc_events;
            let works = ["soc=910b;devices=1", "soc=910_93;devices=1"].contains(&scene.machine);
            assert_eq!(claimed, works, "{}", scene.machine);
            if !works && !scene.machine.contains("soc=950;") {
                let error = backend.create_event(ZERO).unwrap_err();
                assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
                assert!(error.to_string().contains("synchronise on the host"), "{error}");
            }
        });
    }
}

#[test]
fn event_handle_is_64_bytes_padded_with_zeros() {
    scene!("devices=1").play(&[], |_| {
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
    });
}
