//! The text form of a machine's configuration, and its errors.

use std::time::Duration;

use device_ipc_mock_engine::{ConfigError, Fault, Lifetime, Machine, MachineConfig, Operation, PeerMatrix};

#[test]
fn every_key_is_parsed() {
    let config = MachineConfig::from_spec(
        " devices=3; memory=64MiB; visible=2,0; peers=0>1,1>0; lifetime=revoking; generations=off; \
         check_generation=on; events=off; latency=1ms; fault=open:3,close:1:-7; ",
    )
    .unwrap();
    assert_eq!(config.devices.len(), 3);
    assert_eq!(config.devices[2].memory_bytes, 64 << 20);
    assert_eq!(config.visible, Some(vec![2, 0]));
    assert_eq!(config.peers, PeerMatrix::Pairs(vec![(0, 1), (1, 0)]));
    assert_eq!(config.lifetime, Lifetime::Revoking);
    assert_eq!((config.generations, config.check_generation, config.events), (false, true, false));
    assert_eq!(config.latency, Duration::from_millis(1));
    let faults = [
        Fault { operation: Operation::Open, after: 3, code: 1 },
        Fault { operation: Operation::Close, after: 1, code: -7 },
    ];
    assert_eq!(config.faults, faults);
    assert_eq!(MachineConfig::from_spec(""), Ok(MachineConfig::default()));
    assert_eq!(MachineConfig::from_spec("peers=none").unwrap().peers, PeerMatrix::None);
}

#[test]
fn invalid_value_error_names_key_value_and_expected() {
    for (key, value, accepted) in [
        ("devices", "many", "from 0 to 64"),
        ("devices", "65", "from 0 to 64"),
        ("memory", "12 apples", "KiB, MiB, GiB or TiB"),
        ("memory", "0", "at least 1"),
        ("memory", "99999999TiB", "bytes"),
        ("visible", "2", "below 2"),
        ("visible", "1,1", "at most once"),
        ("visible", "x", "separated by commas"),
        ("peers", "0-1", "0>1,1>0"),
        ("peers", "0>2", "below 2"),
        ("lifetime", "eternal", "'pinning' or 'revoking'"),
        ("generations", "yes", "'on' or 'off'"),
        ("check_generation", "", "'on' or 'off'"),
        ("events", "1", "'on' or 'off'"),
        ("latency", "5", "with its unit"),
        ("fault", "open", "operation:n"),
        ("fault", "open:0", "n from 1"),
        ("fault", "warp:1", "synchronize_event"),
        ("fault", "open:1:2:3", "operation:n:code"),
    ] {
        let text = MachineConfig::from_spec(&format!("{key}={value}")).unwrap_err().to_string();
        for part in [format!("'{key}'"), format!("'{value}'"), accepted.to_owned()] {
            assert!(text.contains(&part), "{text} does not name {part}");
        }
    }
}

#[test]
fn unknown_key_and_missing_value_are_rejected() {
    let unknown = MachineConfig::from_spec("device=2").unwrap_err();
    assert_eq!(unknown, ConfigError::UnknownKey { key: "device".into() });
    assert!(unknown.to_string().contains("'device'") && unknown.to_string().contains("devices, memory"));
    let no_pair = MachineConfig::from_spec("events").unwrap_err();
    assert!(no_pair.to_string().contains("'events'"));
}

#[test]
fn device_identity_is_stable_and_unique() {
    let [one, two] = [MachineConfig::default(), MachineConfig::from_spec("devices=2;visible=1").unwrap()];
    let (one, two) = (Machine::new(one).devices(), Machine::new(two).devices());
    assert_ne!(one[0].uuid, one[1].uuid);
    assert_eq!((two[0].ordinal, two[0].physical), (0, 1));
    assert_eq!(two[0].uuid, one[1].uuid);
    assert!(Machine::new(MachineConfig::from_spec("devices=0").unwrap()).devices().is_empty());
}
