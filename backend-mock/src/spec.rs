//! The text form of the backend's configuration.

use device_ipc_core::Unavailable;
use device_ipc_mock_engine::MachineConfig;

/// The environment variable that describes the machine of a backend that is selected by name.
pub const MACHINE_VARIABLE: &str = "DEVICE_IPC_MOCK";

/// The form of handles: `handles=bytes` or `handles=fds`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum HandleForm {
    /// Bytes only, like CUDA's legacy handles and Ascend's keys.
    #[default]
    Bytes,
    /// Bytes and a file descriptor, like the vendors' virtual memory management; importers pin the memory.
    Fds,
}

/// A parsed configuration.
#[derive(Debug)]
pub(crate) struct Parsed {
    pub(crate) config: MachineConfig,
    pub(crate) form: HandleForm,
    /// `timelines=on|off`: whether streams can write and wait for words. Default: on.
    pub(crate) timelines: bool,
    /// `neighbours=on|off`: whether a region may extend over several allocations, as with virtual memory management.
    /// Default: off.
    pub(crate) neighbours: bool,
    /// `pinned=on|off`: whether streams can copy to and from registered host memory. Default: on.
    pub(crate) pinned: bool,
}

/// Parses the keys of the backend, and passes the others to the engine.
pub(crate) fn parse(spec: &str) -> Result<Parsed, Unavailable> {
    let (mut form, mut timelines, mut neighbours) = (HandleForm::default(), true, false);
    let mut pinned = true;
    let mut rest = Vec::new();
    for entry in spec.split(';') {
        match entry.split_once('=').map(|(key, value)| (key.trim(), value.trim())) {
            Some(("handles", "bytes")) => form = HandleForm::Bytes,
            Some(("handles", "fds")) => form = HandleForm::Fds,
            Some(("handles", other)) => {
                return Err(invalid(format!(
                    "invalid value '{other}' for 'handles': expected 'bytes' or 'fds'"
                )));
            }
            Some(("timelines", value)) => timelines = switch("timelines", value)?,
            Some(("neighbours", value)) => neighbours = switch("neighbours", value)?,
            Some(("pinned", value)) => pinned = switch("pinned", value)?,
            _ => rest.push(entry),
        }
    }
    let config = MachineConfig::from_spec(&rest.join(";")).map_err(|error| invalid(error.to_string()))?;
    Ok(Parsed { config, form, timelines, neighbours, pinned })
}

fn switch(key: &str, value: &str) -> Result<bool, Unavailable> {
    match value {
        "on" => Ok(true),
        "off" => Ok(false),
        other => Err(invalid(format!("invalid value '{other}' for '{key}': expected 'on' or 'off'"))),
    }
}

fn invalid(detail: String) -> Unavailable {
    Unavailable::Failed { detail: format!("invalid machine description in {MACHINE_VARIABLE}: {detail}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backend_keys_are_parsed_and_others_passed_to_engine() {
        let parsed =
            parse("devices=3; handles = fds ;events=off;timelines=off;neighbours=on;pinned=off").unwrap();
        assert_eq!(
            (parsed.config.devices.len(), parsed.config.events, parsed.form),
            (3, false, HandleForm::Fds)
        );
        assert_eq!((parsed.timelines, parsed.neighbours, parsed.pinned), (false, true, false));
        let plain = parse("").unwrap();
        assert_eq!((plain.form, plain.timelines, plain.neighbours), (HandleForm::Bytes, true, false));
        assert!(plain.pinned);
    }

    #[test]
    fn invalid_description_error_names_variable() {
        for spec in
            ["handles=none", "timelines=maybe", "neighbours=2", "pinned=no", "colour=red", "devices=many"]
        {
            let error = parse(spec).unwrap_err().to_string();
            let value = spec.split_once('=').unwrap();
            assert!(error.contains(MACHINE_VARIABLE) && error.contains(value.0), "{error}");
        }
    }
}
