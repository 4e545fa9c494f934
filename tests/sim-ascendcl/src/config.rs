//! The configuration of the machine, in the variable `DEVICE_IPC_SIM_ASCEND`.

use std::collections::HashMap;

use device_ipc_mock_engine::{Lifetime, MachineConfig};

use crate::cann::Cann;
use crate::soc::Soc;

/// The environment variable that describes the machine.
pub const MACHINE_VARIABLE: &str = "DEVICE_IPC_SIM_ASCEND";

/// The environment variable that selects visible devices, as with the vendor's library.
pub const VISIBLE_VARIABLE: &str = "ASCEND_RT_VISIBLE_DEVICES";

/// An error in the description of the machine.
#[derive(Debug, thiserror::Error)]
#[error("{MACHINE_VARIABLE}: {0}")]
pub struct ConfigError(String);

/// The configuration of the machine and of the library's behavior.
#[derive(Debug, Clone, Default)]
pub(crate) struct Config {
    pub(crate) machine: MachineConfig,
    /// Physical devices of the container, by logic id.
    pub(crate) container: Vec<usize>,
    /// Logic ids by user id: those that `ASCEND_RT_VISIBLE_DEVICES` selects.
    pub(crate) visible: Vec<usize>,
    pub(crate) soc: Soc,
    pub(crate) cann: Cann,
    pub(crate) stub: bool,
    pub(crate) no_driver: bool,
    pub(crate) old_driver: bool,
    /// Whether streams also write and wait for words in registered host memory.
    pub(crate) host_words: bool,
    pub(crate) page_size: usize,
    /// Whether each die of a chip with two dies has a separate PCIe link.
    pub(crate) two_links: bool,
    /// The name under which processes share their counts of peer access.
    pub(crate) shared_peers: Option<String>,
    /// Whether small allocations of `aclrtMalloc` begin inside a page.
    pub(crate) unaligned: bool,
    /// Faults by call: the number of the call, from 1 on, and the status.
    pub(crate) faults: HashMap<String, Vec<(u64, i32)>>,
}

/// Keys that the engine parses.
const ENGINE_KEYS: [&str; 5] = ["devices", "memory", "visible", "peers", "latency"];

impl Config {
    pub(crate) fn from_environment() -> Result<Self, ConfigError> {
        let text = |name| std::env::var(name).ok();
        Self::parse(&text(MACHINE_VARIABLE).unwrap_or_default(), text(VISIBLE_VARIABLE).as_deref())
    }

    pub(crate) fn parse(spec: &str, visible: Option<&str>) -> Result<Self, ConfigError> {
        let mut config = Self { page_size: 4096, ..Self::default() };
        let mut engine = Vec::new();
        for entry in spec.split(';').map(str::trim).filter(|entry| !entry.is_empty()) {
            let (key, value) = entry.split_once('=').unwrap_or((entry, ""));
            let (key, value) = (key.trim(), value.trim());
            let bad = |accepted: &str| {
                ConfigError(format!("invalid value '{value}' for '{key}': expected {accepted}"))
            };
            match key {
                "soc" => config.soc = Soc::from_name(value).ok_or_else(|| bad(Soc::NAMES))?,
                "cann" => config.cann = Cann::from_name(value).ok_or_else(|| bad(Cann::NAMES))?,
                "stub" | "no-driver" | "old-driver" | "host-words" | "two-links" | "unaligned" => {
                    let on = match value {
                        "" | "on" => true,
                        "off" => false,
                        _ => return Err(bad("nothing, 'on' or 'off'")),
                    };
                    match key {
                        "stub" => config.stub = on,
                        "no-driver" => config.no_driver = on,
                        "host-words" => config.host_words = on,
                        "two-links" => config.two_links = on,
                        "unaligned" => config.unaligned = on,
                        _ => config.old_driver = on,
                    }
                }
                "shared-peers" => {
                    let is_name = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_alphanumeric());
                    config.shared_peers =
                        Some(is_name.then(|| value.to_owned()).ok_or_else(|| bad("a name"))?);
                }
                "page-size" => {
                    let size = value.parse().ok().filter(|size: &usize| size.is_power_of_two());
                    config.page_size = size.ok_or_else(|| bad("a power of two, in bytes"))?;
                }
                "fault" => {
                    for fault in value.split(',') {
                        let (call, at, status) =
                            parse_fault(fault).ok_or_else(|| bad("call:n:status, n from 1"))?;
                        config.faults.entry(call).or_default().push((at, status));
                    }
                }
                _ if ENGINE_KEYS.contains(&key) => engine.push(entry),
                _ => {
                    let known = "soc, cann, stub, no-driver, old-driver, host-words, two-links, shared-peers, unaligned, page-size, fault";
                    let engine = ENGINE_KEYS.join(", ");
                    return Err(ConfigError(format!("unknown key '{key}'; known are {known}, {engine}")));
                }
            }
        }
        config.machine =
            MachineConfig::from_spec(&engine.join(";")).map_err(|error| ConfigError(error.to_string()))?;
        config.machine.lifetime = Lifetime::Revoking;
        config.machine.own_handles = true;
        let all = || (0..config.machine.devices.len()).collect();
        config.container = config.machine.visible.take().unwrap_or_else(all);
        config.visible = visible_ids(visible, config.container.len());
        let physical = config.visible.iter().map(|&logic| config.container[logic]).collect();
        config.machine.visible = Some(physical);
        Ok(config)
    }
}

impl Config {
    /// Returns whether pairs of devices are dies of one chip behind one PCIe link.
    pub(crate) fn dies_share_a_link(&self) -> bool {
        self.soc.dies() > 1 && !self.two_links
    }
}

/// Parses logic ids in ascending order; the list ends at the first invalid one.
fn visible_ids(list: Option<&str>, devices: usize) -> Vec<usize> {
    let Some(list) = list.filter(|list| !list.is_empty()) else { return (0..devices).collect() };
    let mut visible_ids: Vec<usize> = Vec::new();
    for word in list.split(',') {
        let digits = !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit());
        match word.parse() {
            Ok(id) if digits && id < devices && visible_ids.last().is_none_or(|&last| last < id) => {
                visible_ids.push(id)
            }
            _ => break,
        }
    }
    visible_ids
}

fn parse_fault(text: &str) -> Option<(String, u64, i32)> {
    let mut fields = text.split(':').map(str::trim);
    let call = fields.next().filter(|call| !call.is_empty())?.to_owned();
    let at = fields.next()?.parse().ok().filter(|&at| at > 0)?;
    let status = fields.next()?.parse().ok()?;
    fields.next().is_none().then_some((call, at, status))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn description_is_parsed() {
        let spec =
            "devices=4; soc=910_93;cann=8.5.0;old-driver;fault=aclrtMalloc:2:207001,aclInit:1:4242;latency=0";
        let config = Config::parse(spec, None).expect("a valid description");
        assert_eq!((config.soc, config.cann), (Soc::A910_93, Cann::V8_5));
        assert!(config.old_driver && !config.stub && !config.no_driver);
        assert_eq!(config.faults["aclrtMalloc"], [(2, 207_001)]);
        assert_eq!(config.faults["aclInit"], [(1, 4242)]);
        assert_eq!(config.visible, [0, 1, 2, 3]);
    }

    #[test]
    fn devices_have_three_numbers() {
        let config = Config::parse("devices=8;visible=4,5,6,7", Some("1,3")).expect("a valid description");
        assert_eq!(config.container, [4, 5, 6, 7]);
        assert_eq!(config.visible, [1, 3]);
        assert_eq!(config.machine.visible, Some(vec![5, 7]));
    }

    #[test]
    fn visible_devices_end_at_first_invalid_id() {
        for (list, expected) in [
            ("1,2,3", &[1, 2, 3][..]),
            ("1, 2,3", &[1]),
            ("1,3,8", &[1, 3]),
            ("3,1", &[3]),
            ("x", &[]),
            ("", &[0, 1, 2, 3, 4, 5, 6, 7]),
        ] {
            assert_eq!(visible_ids(Some(list), 8), expected, "{list}");
        }
    }

    #[test]
    fn invalid_description_error_names_variable_and_key() {
        for spec in
            ["soc=911", "cann=7", "page-size=3", "fault=x", "colour=red", "devices=many", "stub=maybe"]
        {
            let error = Config::parse(spec, None).expect_err("an invalid description").to_string();
            let key = spec.split('=').next().expect("a key");
            assert!(error.contains(MACHINE_VARIABLE) && error.contains(key), "{error}");
        }
    }
}
