//! What the receiver tells the sender, a line of JSON each.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::output::line;

#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "snake_case")]
pub(super) enum Message {
    /// The tensor is open here.
    Received { shape: Vec<u64>, device: u32, at_home: bool, mean: f32 },
    /// One has been added to every element, and the device has done it.
    Added { mean: f32 },
}

impl Message {
    pub(super) fn parse(line: &str) -> Result<Self> {
        serde_json::from_str(line).with_context(|| format!("the receiver said {line:?}"))
    }

    pub(super) fn say(&self) -> Result<()> {
        line(serde_json::to_string(self)?)
    }
}
