//! Diagnostics of the backend's assumptions.

use device_ipc_ascend::Observation;

use super::memory::backend;
use super::support::{Raw, scene};

fn of<'a>(observations: &'a [Observation], topic: &str) -> &'a Observation {
    observations
        .iter()
        .find(|one| one.topic == topic)
        .unwrap_or_else(|| panic!("no {topic}: {observations:?}"))
}

#[test]
fn observations_on_the_simulator_are_as_assumed() {
    for machine in ["soc=910b;devices=2", "soc=910_93;devices=4", "soc=950;devices=2", "soc=310p;devices=1"] {
        scene!(machine).play(&[], |_| {
            let observations = backend().observe().expect("observations");
            let other: Vec<_> = observations.iter().filter(|one| !one.as_assumed).collect();
            assert!(other.is_empty(), "{other:?}");
            let keys = of(&observations, "several keys of one block");
            assert!(keys.result.contains("[0, 0, 0, 0]"), "{keys:?}");
            assert!(of(&observations, "aclInit").result.contains("called first by this backend"));
        });
    }
}

#[test]
fn observations_report_differences() {
    // Streams that write words in host memory, and a driver that refuses the second key.
    const MACHINE: &str = "soc=910b;devices=2;host-words;fault=aclrtIpcMemGetExportKey:2:507899";
    scene!(MACHINE).play(&[], |_| {
        let (backend, raw) = (backend(), Raw::open());
        raw.own_device(0);
        let observations = backend.observe().expect("observations");
        let words = of(&observations, "words that streams write");
        assert!(!words.as_assumed && words.result.ends_with("host memory: written"), "{words:?}");
        let keys = of(&observations, "several keys of one block");
        assert!(!keys.as_assumed && keys.result.contains("[0, 507899, 0]"), "{keys:?}");
        let peers = of(&observations, "peer access");
        assert!(peers.result.contains("[Some(0), Some(0), Some(1)]"), "{peers:?}");
        assert!(of(&observations, "aclInit").result.contains("another owner"));
    });
}
