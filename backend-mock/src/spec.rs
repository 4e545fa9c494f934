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

/// What the text describes.
#[derive(Debug)]
pub(crate) struct Parsed {
    pub(crate) config: MachineConfig,
    pub(crate) form: HandleForm,
    /// `timelines=on|off`: can streams write and wait on words? On unless said otherwise.
    pub(crate) timelines: bool,
    /// `neighbours=on|off`: may a region lie in several allocations, as with virtual memory management? Off unless said
    /// otherwise.
    pub(crate) neighbours: bool,
    /// `pinned=on|off`: can streams copy to and from host memory that others allocated? On unless said otherwise.
    pub(crate) pinned: bool,
}

/// Takes out what is the backend's and leaves the rest to the engine.
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
                    "'{other}' is no value for 'handles': accepted is 'bytes' or 'fds'"
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
        other => Err(invalid(format!("'{other}' is no value for '{key}': accepted is 'on' or 'off'"))),
    }
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
    fn a_bad_description_is_told_with_the_variable() {
        for spec in
            ["handles=none", "timelines=maybe", "neighbours=2", "pinned=no", "colour=red", "devices=many"]
        {
            let error = parse(spec).unwrap_err().to_string();
            let value = spec.split_once('=').unwrap();
            assert!(error.contains(MACHINE_VARIABLE) && error.contains(value.0), "{error}");
        }
    }
}
