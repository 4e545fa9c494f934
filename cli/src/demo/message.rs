//! Messages from the receiver to the sender, one line of JSON each.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::output::line;

/// A message from the receiver to the sender.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "snake_case")]
pub(super) enum Message {
    /// The receiver has opened the tensor.
    Received { shape: Vec<u64>, device: u32, at_home: bool, mean: f32 },
    /// The device has added 1 to every element.
    Added { mean: f32 },
}

impl Message {
    pub(super) fn parse(line: &str) -> Result<Self> {
        serde_json::from_str(line).with_context(|| format!("protocol violation: the receiver wrote {line:?}"))
    }

    pub(super) fn send(&self) -> Result<()> {
        line(serde_json::to_string(self)?)
    }
}
