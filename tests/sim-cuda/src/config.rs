//! The configuration of the machine and the driver, from `DEVICE_IPC_SIM_CUDA` and `CUDA_VISIBLE_DEVICES`.

use std::env;

use device_ipc_mock_engine::MachineConfig;

use crate::VARIABLE;

const OWN_KEYS: &str = "driver, fault, imex, mps";
const MACHINE_KEYS: [&str; 4] = ["devices", "memory", "peers", "latency"];

/// The reported version unless configured: CUDA 13.0.
const DEFAULT_VERSION: i32 = 13_000;

/// A call that fails.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fault {
    /// The name of the function, with or without the suffix of its version.
    pub(crate) function: String,
    /// The number of the call that fails, from 1 on.
    pub(crate) call: u64,
    pub(crate) status: i32,
}

#[derive(Debug, Clone)]
pub(crate) struct Config {
    pub(crate) machine: MachineConfig,
    pub(crate) version: i32,
    pub(crate) faults: Vec<Fault>,
    /// Whether an IMEX channel exists. Without one, fabric handles are rejected.
    pub(crate) imex: bool,
    /// Whether the devices are reported as used through MPS. Faults stay isolated all the same.
    pub(crate) mps: bool,
}

impl Config {
    /// Reads the configuration from the environment.
    pub(crate) fn from_environment() -> Result<Self, String> {
        let spec = env::var(VARIABLE).unwrap_or_default();
        let mut config = Self::parse(&spec).map_err(|why| format!("{VARIABLE}: {why}"))?;
        if let Ok(visible) = env::var("CUDA_VISIBLE_DEVICES") {
            config.machine.visible = Some(visible_devices(&visible, &config.machine));
        }
        Ok(config)
    }

    fn parse(spec: &str) -> Result<Self, String> {
        let mut machine = String::from("latency=50us");
        let (mut version, mut faults, mut imex, mut mps) = (DEFAULT_VERSION, Vec::new(), false, false);
        for entry in spec.split(';').map(str::trim).filter(|entry| !entry.is_empty()) {
            let (key, value) = entry.split_once('=').unwrap_or((entry, ""));
            let (key, value) = (key.trim(), value.trim());
            match key {
                "driver" => {
                    let number = value.parse().ok().filter(|number| *number >= 1000);
                    version = number.ok_or(format!(
                        "invalid driver version '{value}': expected a number such as 12020"
                    ))?;
                }
                "fault" => {
                    let parsed: Option<Vec<_>> = value.split(',').map(fault).collect();
                    faults = parsed.ok_or(format!(
                        "invalid faults '{value}': expected a list such as cuIpcOpenMemHandle:2:304 (the second call fails with 304)"
                    ))?;
                }
                "imex" if value.is_empty() || value == "on" => imex = true,
                "imex" if value == "off" => imex = false,
                "mps" if value.is_empty() || value == "on" => mps = true,
                "mps" if value == "off" => mps = false,
                key if MACHINE_KEYS.contains(&key) => machine = format!("{machine};{entry}"),
                _ => {
                    return Err(format!(
                        "unknown '{entry}'; known are {}, {OWN_KEYS}",
                        MACHINE_KEYS.join(", ")
                    ));
                }
            }
        }
        let mut machine = MachineConfig::from_spec(&machine).map_err(|error| error.to_string())?;
        for (physical, device) in machine.devices.iter_mut().enumerate() {
            device.name = format!("Simulated GPU {physical}");
            device.uuid[..8].copy_from_slice(&(physical as u64).wrapping_add(0x5151_c0da).to_be_bytes());
            // The first four bytes are unique, so that a short prefix of the UUID selects a device.
            device.uuid.rotate_left(4);
        }
        Ok(Self { machine, version, faults, imex, mps })
    }
}

/// Parses ordinals or UUID prefixes in the order of the CUDA C++ Programming Guide: an entry that selects no
/// device, or a device twice, ends the list.
fn visible_devices(text: &str, machine: &MachineConfig) -> Vec<usize> {
    let mut visible = Vec::new();
    for word in text.split(',').map(str::trim) {
        let named = word.parse().ok().filter(|ordinal| *ordinal < machine.devices.len());
        let by_uuid = || {
            let matches = |physical: &usize| uuid_text(&machine.devices[*physical].uuid).starts_with(word);
            let mut found = (0..machine.devices.len()).filter(matches);
            let only = found.next().filter(|_| word.starts_with("GPU-"));
            // A prefix of several devices selects none.
            only.filter(|_| found.next().is_none())
        };
        match named.or_else(by_uuid) {
            Some(physical) if !visible.contains(&physical) => visible.push(physical),
            _ => break,
        }
    }
    visible
}

/// Formats a UUID as `nvidia-smi -L` does.
fn uuid_text(uuid: &[u8; 16]) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

fn fault(text: &str) -> Option<Fault> {
    let mut fields = text.split(':').map(str::trim);
    let function = fields.next().filter(|name| name.starts_with("cu"))?.to_owned();
    let call = fields.next()?.parse().ok().filter(|call| *call > 0)?;
    let status = fields.next()?.parse().ok()?;
    fields.next().is_none().then_some(Fault { function, call, status })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn description_is_parsed_and_errors_name_entry() {
        let config = Config::parse(
            "devices=3; driver=12020; imex; mps; fault=cuMemFree:1:4242,cuInit:2:3; peers=none",
        )
        .expect("a valid description");
        assert_eq!((config.machine.devices.len(), config.version), (3, 12_020));
        assert!(config.imex && config.mps);
        assert_eq!(config.faults[0], Fault { function: "cuMemFree".into(), call: 1, status: 4242 });
        assert!(!config.machine.peers.allows(0, 1));
        for wrong in
            ["device=2", "driver=new", "fault=open:1:1", "fault=cuInit:0:1", "devices=x", "lifetime=revoking"]
        {
            assert!(Config::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn visible_devices_end_at_first_unknown_entry() {
        let machine = Config::parse("devices=3").expect("a valid description").machine;
        let uuid = uuid_text(&machine.devices[2].uuid);
        let visible = |text: &str| visible_devices(text, &machine);
        assert_eq!(visible("2,0"), [2, 0]);
        assert_eq!(visible(&format!("{uuid},0")), [2, 0]);
        assert_eq!(visible(&uuid[..12]), [2]);
        assert_eq!(visible("GPU-"), []);
        assert_eq!(visible("1,7,0"), [1]);
        assert_eq!(visible("1,1,0"), [1]);
        assert_eq!(visible("-1"), []);
        assert_eq!(visible(""), []);
    }
}
