//! Which device each tensor is loaded to.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use serde_json::Value;

use super::files::Shard;
use crate::output::warning;
use crate::transport::input;

/// A map from the names of modules to devices, as the `device_map` of Hugging Face Accelerate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct DeviceMap(BTreeMap<String, u32>);

impl DeviceMap {
    /// Parses `MODULE=N,MODULE=N`, or reads a JSON object from `@FILE`.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        match text.strip_prefix('@') {
            Some(path) => {
                let failed = |error: std::io::Error| format!("cannot read {path}: {error}");
                let file = input::open(path.as_ref()).map_err(failed)?;
                if !file.metadata().map_err(failed)?.is_file() {
                    return Err(format!("cannot read {path}: it is not a regular file"));
                }
                let json = std::io::read_to_string(file).map_err(failed)?;
                Self::from_json(&json).map_err(|error| format!("{path}: {error:#}"))
            }
            None => text.split(',').map(Self::entry).collect::<Result<_, _>>().map(Self),
        }
    }

    fn entry(text: &str) -> Result<(String, u32), String> {
        let entry = text
            .rsplit_once('=')
            .and_then(|(module, device)| Some((module.trim().to_owned(), device.trim().parse().ok()?)));
        entry.ok_or_else(|| {
            format!("{text:?} is not MODULE=N, for example model.layers.16=1, or @FILE for a JSON object")
        })
    }

    fn from_json(json: &str) -> Result<Self> {
        let object: BTreeMap<String, Value> =
            serde_json::from_str(json).context("it is not a JSON object of modules and devices")?;
        let device = |(module, device): (String, Value)| {
            let ordinal = device.as_u64().and_then(|device| u32::try_from(device).ok());
            let ordinal = ordinal.with_context(|| {
                format!("{module:?} is mapped to {device}, which is not the number of a device")
            })?;
            Ok((module, ordinal))
        };
        object.into_iter().map(device).collect::<Result<_>>().map(Self)
    }

    /// Returns the device of the longest module name that the tensor's name begins with.
    pub(super) fn device_of(&self, tensor: &str) -> Option<u32> {
        let below = |module: &&String| {
            module.is_empty()
                || tensor
                    .strip_prefix(module.as_str())
                    .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        let modules = self.0.keys().filter(below);
        modules.max_by_key(|module| module.len()).map(|module| self.0[module])
    }

    /// Returns the devices that it names.
    pub(super) fn devices(&self) -> impl Iterator<Item = u32> {
        self.0.values().copied()
    }

    /// Warns of modules that no tensor belongs to: the name may be misspelled.
    pub(super) fn warn_of_unused(&self, shards: &[Shard]) {
        let names = || shards.iter().flat_map(|shard| &shard.tensors).map(|tensor| tensor.name.as_str());
        for module in self.0.keys().filter(|module| !module.is_empty()) {
            let one = Self(BTreeMap::from([(module.clone(), 0)]));
            if names().all(|name| one.device_of(name).is_none()) {
                warning(format_args!("--device-map: no tensor belongs to {module:?}"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longest_module_name_determines_the_device() {
        let map = DeviceMap::parse("model=0,model.layers.1=1,lm_head.weight=2").unwrap();
        for (tensor, device) in [
            ("model.embed.weight", Some(0)),
            ("model.layers.1.weight", Some(1)),
            ("model.layers.10.weight", Some(0)),
            ("lm_head.weight", Some(2)),
            ("other", None),
        ] {
            assert_eq!(map.device_of(tensor), device, "{tensor}");
        }
        assert_eq!(DeviceMap::from_json(r#"{"": 3}"#).unwrap().device_of("any"), Some(3));
    }

    #[test]
    fn invalid_map_is_rejected_with_an_example() {
        for text in ["model", "model=x", "model=1,,"] {
            assert!(DeviceMap::parse(text).unwrap_err().contains("model.layers.16=1"), "{text}");
        }
        let error = DeviceMap::from_json(r#"{"lm_head": "cpu"}"#).unwrap_err().to_string();
        assert!(error.contains("lm_head") && error.contains("cpu"), "{error}");
    }
}
