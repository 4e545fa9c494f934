//! The text form of the backend's configuration.

use device_ipc_core::backend::Unavailable;
use device_ipc_mock_engine::{Lifetime, MachineConfig};

use crate::profile::{Kinds, Vendor};

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
    pub(crate) kinds: Kinds,
    /// `timelines=on|off`: whether streams can write and wait for words. Default: on, with `like=ascend` off.
    pub(crate) timelines: bool,
    /// `pinned=on|off`: whether streams can copy to and from registered host memory. Default: on.
    pub(crate) pinned: bool,
}

/// The keys of the backend; the engine has the others.
const KEYS: [&str; 5] = ["like", "handles", "neighbours", "timelines", "pinned"];

/// The keys that determine the kinds of memory, as `like` does.
const KEYS_OF_KINDS: [&str; 3] = ["handles", "neighbours", "lifetime"];

/// Parses the keys of the backend, and passes the others to the engine.
pub(crate) fn parse(spec: &str) -> Result<Parsed, Unavailable> {
    let (mut form, mut neighbours, mut vendor) = (HandleForm::default(), false, None);
    let (mut timelines, mut pinned) = (None, true);
    let (mut rest, mut of_kinds) = (Vec::new(), None);
    for entry in spec.split(';').map(str::trim).filter(|entry| !entry.is_empty()) {
        let Some((key, value)) = entry.split_once('=') else {
            return Err(invalid(format!(
                "'{entry}' is not of the form key=value; the keys are {}",
                all_keys()
            )));
        };
        let (key, value) = (key.trim(), value.trim());
        if KEYS_OF_KINDS.contains(&key) {
            of_kinds = Some(entry);
        }
        match (key, value) {
            ("like", "cuda") => vendor = Some(Vendor::Cuda),
            ("like", "ascend") => vendor = Some(Vendor::Ascend),
            ("like", other) => return Err(bad_value(key, other, "'cuda' or 'ascend'")),
            ("handles", "bytes") => form = HandleForm::Bytes,
            ("handles", "fds") => form = HandleForm::Fds,
            ("handles", other) => return Err(bad_value(key, other, "'bytes' or 'fds'")),
            ("timelines", value) => timelines = Some(switch(key, value)?),
            ("neighbours", value) => neighbours = switch(key, value)?,
            ("pinned", value) => pinned = switch(key, value)?,
            (key, _) if MachineConfig::KEYS.contains(&key) => rest.push(entry),
            (key, _) => return Err(invalid(format!("unknown key '{key}': expected one of {}", all_keys()))),
        }
    }
    if let (Some(_), Some(entry)) = (vendor, of_kinds) {
        return Err(invalid(format!(
            "'{entry}' cannot be combined with 'like', which determines the kinds of memory"
        )));
    }
    if vendor == Some(Vendor::Ascend) {
        // A later entry replaces an earlier one.
        rest.insert(0, "generations=off");
    }
    let config = MachineConfig::from_spec(&rest.join(";")).map_err(|error| invalid(error.to_string()))?;
    let kinds = match vendor {
        Some(vendor) => Kinds::like(vendor),
        None => Kinds::own(form, config.lifetime == Lifetime::Revoking, neighbours),
    };
    // Streams of Ascend devices write and wait for words only where a probe has shown that they do.
    let timelines = timelines.unwrap_or(vendor != Some(Vendor::Ascend));
    Ok(Parsed { config, kinds, timelines, pinned })
}

/// Returns the names of all keys, for errors.
fn all_keys() -> String {
    [&KEYS, MachineConfig::KEYS].concat().join(", ")
}

fn bad_value(key: &str, value: &str, accepted: &str) -> Unavailable {
    invalid(format!("invalid value '{value}' for '{key}': expected {accepted}"))
}

fn switch(key: &str, value: &str) -> Result<bool, Unavailable> {
    match value {
        "on" => Ok(true),
        "off" => Ok(false),
        other => Err(bad_value(key, other, "'on' or 'off'")),
    }
}

fn invalid(detail: String) -> Unavailable {
    Unavailable::Failed { detail: format!("invalid machine description in {MACHINE_VARIABLE}: {detail}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(parsed: &Parsed) -> Vec<&'static str> {
        parsed.kinds.all().iter().map(|kind| kind.info.name).collect()
    }

    #[test]
    fn backend_keys_are_parsed_and_others_passed_to_engine() {
        let parsed =
            parse("devices=3; handles = fds ;events=off;timelines=off;neighbours=on;pinned=off").unwrap();
        assert_eq!((parsed.config.devices.len(), parsed.config.events), (3, false));
        assert_eq!(names(&parsed), ["file descriptor"]);
        assert!(parsed.kinds.first().neighbours);
        assert_eq!((parsed.timelines, parsed.pinned), (false, false));
        let plain = parse("").unwrap();
        assert_eq!((names(&plain), plain.timelines, plain.pinned), (vec!["bytes"], true, true));
        assert!(!plain.kinds.first().neighbours);
    }

    #[test]
    fn profiles_have_the_kinds_of_their_vendor() {
        let mut cuda = names(&parse("like=cuda;devices=1").unwrap());
        // The first one depends on the pid namespace.
        cuda.sort_unstable();
        assert_eq!(cuda, ["fabric", "legacy", "pool", "virtual-memory"]);
        let ascend = parse("devices=2;like=ascend").unwrap();
        assert_eq!(names(&ascend), ["key", "shareable handle"]);
        assert!(!ascend.config.generations && !ascend.timelines);
        assert!(parse("like=ascend;timelines=on").unwrap().timelines);
        assert!(parse("like=ascend;generations=on").unwrap().config.generations);
    }

    #[test]
    fn invalid_description_error_names_variable() {
        for spec in [
            "handles=none",
            "timelines=maybe",
            "neighbours=2",
            "pinned=no",
            "colour=red",
            "devices=many",
            "like=rocm",
        ] {
            let error = parse(spec).unwrap_err().to_string();
            let value = spec.split_once('=').unwrap();
            assert!(error.contains(MACHINE_VARIABLE) && error.contains(value.0), "{error}");
        }
    }

    #[test]
    fn unknown_key_error_lists_all_keys() {
        for spec in ["colour=red", "devices"] {
            let error = parse(spec).unwrap_err().to_string();
            for key in KEYS.iter().chain(MachineConfig::KEYS) {
                assert!(error.contains(key), "{key} is missing: {error}");
            }
        }
    }

    #[test]
    fn profile_with_other_kinds_is_rejected() {
        for spec in ["like=cuda;handles=fds", "neighbours=on;like=ascend", "like=ascend;lifetime=pinning"] {
            let error = parse(spec).unwrap_err().to_string();
            assert!(error.contains("cannot be combined with 'like'"), "{error}");
        }
    }
}
