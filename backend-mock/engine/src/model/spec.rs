//! The text form of a machine's configuration, which tests pass to other processes by an environment variable.

use std::time::Duration;

use super::config::{DeviceConfig, Lifetime, MachineConfig};
use super::operation::{Fault, Operation};
use super::peers::PeerMatrix;

/// An error in the text form of a configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The key is unknown.
    #[error("unknown key '{key}' in the description of the machine: expected one of {}", MachineConfig::KEYS.join(", "))]
    UnknownKey {
        /// The key.
        key: String,
    },
    /// The entry is not a pair of key and value.
    #[error("'{entry}' is not of the form key=value")]
    NotAPair {
        /// The text between two semicolons.
        entry: String,
    },
    /// The value is invalid for the key.
    #[error("invalid value '{value}' for '{key}': expected {accepted}")]
    BadValue {
        /// The key.
        key: String,
        /// The value.
        value: String,
        /// The accepted values.
        accepted: String,
    },
}

impl MachineConfig {
    /// The keys of [`from_spec`](Self::from_spec).
    pub const KEYS: &[&str] = &[
        "devices",
        "memory",
        "visible",
        "peers",
        "lifetime",
        "generations",
        "check_generation",
        "events",
        "latency",
        "fault",
    ];

    /// Parses a description such as
    /// `devices=2;memory=64MiB;visible=1,0;peers=0>1,1>0;lifetime=revoking;generations=off;events=off;latency=1ms;fault=open:3`.
    ///
    /// Omitted keys keep their defaults, spaces around keys and values are ignored, and a later entry replaces an
    /// earlier one. `fault` takes `operation:n` or `operation:n:code`, several separated by commas.
    ///
    /// # Errors
    /// [`ConfigError`] with the key, the value and the accepted values.
    pub fn from_spec(spec: &str) -> Result<Self, ConfigError> {
        let mut config = Self::default();
        let mut devices = config.devices.len();
        let mut memory = config.devices[0].memory_bytes;
        let mut pairs: Option<(String, Vec<(usize, usize)>)> = None;
        let mut visible = String::new();
        for entry in spec.split(';').map(str::trim).filter(|entry| !entry.is_empty()) {
            let (key, value) =
                entry.split_once('=').ok_or_else(|| ConfigError::NotAPair { entry: entry.to_owned() })?;
            let (key, value) = (key.trim(), value.trim());
            let bad = |accepted: &str| bad_value(key, value, accepted);
            match key {
                "devices" => {
                    let count = value.parse().ok().filter(|count| *count <= 64);
                    devices = count.ok_or_else(|| bad("a number of devices from 0 to 64"))?;
                }
                "memory" => {
                    memory = bytes(value)
                        .ok_or_else(|| bad("bytes as a number, or with KiB, MiB, GiB or TiB, at least 1"))?;
                }
                "visible" => {
                    let parse = |text: &str| text.trim().parse::<usize>().ok();
                    config.visible = match value {
                        "all" => None,
                        "" => Some(Vec::new()),
                        list => Some(list.split(',').map(parse).collect::<Option<_>>().ok_or_else(|| {
                            bad("'all', or physical device numbers separated by commas, such as 1,0")
                        })?),
                    };
                    value.clone_into(&mut visible);
                }
                "peers" => match value {
                    "all" => (config.peers, pairs) = (PeerMatrix::All, None),
                    "none" => (config.peers, pairs) = (PeerMatrix::None, None),
                    list => {
                        let list: Option<Vec<_>> = list.split(',').map(pair).collect();
                        let list = list.ok_or_else(|| {
                            bad("'all', 'none', or directed pairs of physical devices such as 0>1,1>0")
                        })?;
                        pairs = Some((value.to_owned(), list));
                    }
                },
                "lifetime" => {
                    config.lifetime = match value {
                        "pinning" => Lifetime::Pinning,
                        "revoking" => Lifetime::Revoking,
                        _ => return Err(bad("'pinning' or 'revoking'")),
                    }
                }
                "generations" => config.generations = switch(key, value)?,
                "check_generation" => config.check_generation = switch(key, value)?,
                "events" => config.events = switch(key, value)?,
                "latency" => {
                    config.latency = duration(value)
                        .ok_or_else(|| bad("a time with its unit, such as 200us, 1ms or 2s"))?;
                }
                "fault" => {
                    let faults: Option<Vec<_>> = value.split(',').map(fault).collect();
                    config.faults = faults.ok_or_else(|| {
                        let names: Vec<_> = Operation::ALL.iter().map(|operation| operation.name()).collect();
                        let names = names.join(", ");
                        bad(&format!(
                            "operation:n or operation:n:code, n from 1, with an operation of {names}"
                        ))
                    })?;
                }
                _ => return Err(ConfigError::UnknownKey { key: key.to_owned() }),
            }
        }
        config.devices = (0..devices).map(|physical| DeviceConfig::numbered(physical, memory)).collect();
        let last = || format!("a physical device below {devices}, each at most once");
        if let Some(list) = &config.visible {
            let twice = list.iter().enumerate().any(|(at, physical)| list[..at].contains(physical));
            if twice || list.iter().any(|&physical| physical >= devices) {
                return Err(bad_value("visible", &visible, &last()));
            }
        }
        if let Some((value, list)) = pairs {
            if list.iter().any(|&(from, to)| from >= devices || to >= devices) {
                return Err(bad_value(
                    "peers",
                    &value,
                    &format!("pairs of physical devices below {devices}"),
                ));
            }
            config.peers = PeerMatrix::Pairs(list);
        }
        Ok(config)
    }
}

fn bad_value(key: &str, value: &str, accepted: &str) -> ConfigError {
    ConfigError::BadValue { key: key.to_owned(), value: value.to_owned(), accepted: accepted.to_owned() }
}

fn switch(key: &str, value: &str) -> Result<bool, ConfigError> {
    match value {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(bad_value(key, value, "'on' or 'off'")),
    }
}

fn bytes(text: &str) -> Option<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor: u64 = match unit.trim() {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "TiB" => 1 << 40,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(factor).filter(|&bytes| bytes > 0)
}

fn duration(text: &str) -> Option<Duration> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().ok()?;
    match unit.trim() {
        "ns" => Some(Duration::from_nanos(number)),
        "us" | "µs" => Some(Duration::from_micros(number)),
        "ms" => Some(Duration::from_millis(number)),
        "s" => Some(Duration::from_secs(number)),
        "" if number == 0 => Some(Duration::ZERO),
        _ => None,
    }
}

fn pair(text: &str) -> Option<(usize, usize)> {
    let (from, to) = text.split_once('>')?;
    Some((from.trim().parse().ok()?, to.trim().parse().ok()?))
}

fn fault(text: &str) -> Option<Fault> {
    let mut fields = text.split(':').map(str::trim);
    let operation = fields.next()?.parse().ok()?;
    let after = fields.next()?.parse().ok().filter(|&after| after > 0)?;
    let code = fields.next().map_or(Some(1), |code| code.parse().ok())?;
    fields.next().is_none().then_some(Fault { operation, after, code })
}
