//! What machine to play, in one line of text.

use device_ipc_core::Unavailable;
use device_ipc_mock_engine::MachineConfig;

/// Describes the machine for a backend that is taken by name.
pub const MACHINE_VARIABLE: &str = "DEVICE_IPC_MOCK";

/// How handles travel: `handles=bytes` or `handles=fds`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HandleForm {
    /// As bytes alone, like CUDA's legacy handles and Ascend's keys.
    #[default]
    Bytes,
    /// With a file descriptor, like memory of the vendors' virtual memory management; importers pin it.
    Fds,
}

/// Takes `handles=` and `timelines=` out and leaves the rest to the engine. The last of the answer: are there timelines?
pub(crate) fn parse(spec: &str) -> Result<(MachineConfig, HandleForm, bool), Unavailable> {
    let mut form = HandleForm::default();
    let mut timelines = true;
    let mut rest = Vec::new();
    for entry in spec.split(';') {
        match entry.split_once('=').map(|(key, value)| (key.trim(), value.trim())) {
            Some(("handles", "bytes")) => form = HandleForm::Bytes,
            Some(("handles", "fds")) => form = HandleForm::Fds,
            Some(("handles", other)) => {
                return Err(invalid(format!(
                    "'{other}' is no value for 'handles': accepted is 'bytes' or 'fds'"
                )));
            }
            Some(("timelines", "on")) => timelines = true,
            Some(("timelines", "off")) => timelines = false,
            Some(("timelines", other)) => {
                return Err(invalid(format!(
                    "'{other}' is no value for 'timelines': accepted is 'on' or 'off'"
                )));
            }
            _ => rest.push(entry),
        }
    }
    let config = MachineConfig::from_spec(&rest.join(";")).map_err(|error| invalid(error.to_string()))?;
    Ok((config, form, timelines))
}

fn invalid(detail: String) -> Unavailable {
    Unavailable::Failed {
        detail: format!("the mock's machine cannot be made ({MACHINE_VARIABLE}): {detail}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_taken_out_and_the_rest_is_the_engines() {
        let (config, form, timelines) = parse("devices=3; handles = fds ;events=off;timelines=off").unwrap();
        assert_eq!(
            (config.devices.len(), config.events, form, timelines),
            (3, false, HandleForm::Fds, false)
        );
        assert_eq!(parse("").unwrap().1, HandleForm::Bytes);
    }

    #[test]
    fn a_bad_description_is_told_with_the_variable() {
        for spec in ["handles=none", "timelines=maybe", "colour=red", "devices=many"] {
            let error = parse(spec).unwrap_err().to_string();
            let value = spec.split_once('=').unwrap();
            assert!(error.contains(MACHINE_VARIABLE) && error.contains(value.0), "{error}");
        }
    }
}
