//! The answers of an agent.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use device_ipc_core::{Access, Descriptor, DeviceIdentity};
use serde::{Deserialize, Serialize};

use crate::check::Refusal;
use crate::usage::Usage;

/// The result of a command that succeeded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Answer {
    /// Nothing more to say.
    Done,
    /// Devices.
    Devices(Vec<DeviceIdentity>),
    /// The descriptor of an export.
    Descriptor(Box<Descriptor>),
    /// A mapping.
    Mapping(Mapped),
    /// Bytes.
    Bytes(#[serde(with = "super::text")] Vec<u8>),
    /// Floats.
    Floats(Vec<f32>),
    /// A number.
    Number(u64),
    /// Yes or no.
    Truth(bool),
    /// Text.
    Text(String),
    /// The counters of a process, by name.
    Counters(BTreeMap<String, u64>),
    /// A message of a channel.
    Received {
        /// Its bytes.
        bytes: Vec<u8>,
        /// The number of its exports.
        items: usize,
    },
    /// A range that the bare backend opened and closed.
    BareOpened {
        /// Its length in bytes.
        len: u64,
        /// The number of its extents, or the backend's error.
        extents: Result<usize, Refusal>,
    },
    /// Mappings and file descriptors.
    Usage(Usage),
}

/// Converts an answer to the value of its variant; an answer of another variant is the error.
macro_rules! values {
    ($($variant:ident($value:ty),)*) => {
        $(impl TryFrom<Answer> for $value {
            type Error = Answer;

            fn try_from(answer: Answer) -> Result<Self, Answer> {
                match answer {
                    Answer::$variant(value) => Ok(value),
                    other => Err(other),
                }
            }
        })*
    };
}

values! {
    Devices(Vec<DeviceIdentity>),
    Mapping(Mapped),
    Bytes(Vec<u8>),
    Floats(Vec<f32>),
    Number(u64),
    Truth(bool),
    Counters(BTreeMap<String, u64>),
    Usage(Usage),
}

impl TryFrom<Answer> for Descriptor {
    type Error = Answer;

    fn try_from(answer: Answer) -> Result<Self, Answer> {
        match answer {
            Answer::Descriptor(descriptor) => Ok(*descriptor),
            other => Err(other),
        }
    }
}

/// Answers as tests that write commands in words read them: values separated by spaces.
impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done => Ok(()),
            Self::Descriptor(descriptor) => descriptor.fmt(f),
            Self::Mapping(Mapped { tensors: Some(tensors), .. }) => tensors.fmt(f),
            Self::Mapping(mapped) => write!(f, "{:#x} {}", mapped.address, mapped.len),
            Self::Number(number) => number.fmt(f),
            Self::Truth(truth) => truth.fmt(f),
            Self::Text(text) => f.write_str(text),
            Self::Counters(counters) => {
                counters.iter().try_for_each(|(name, value)| write!(f, "{name}={value} "))
            }
            Self::Received { bytes, items } => write!(f, "{} {items}", bytes.len()),
            Self::Devices(_)
            | Self::Bytes(_)
            | Self::Floats(_)
            | Self::BareOpened { .. }
            | Self::Usage(_) => write!(f, "{self:?}"),
        }
    }
}

/// A mapping of an agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mapped {
    /// Its address in the agent; 0 for named tensors.
    pub address: u64,
    /// Its length in bytes.
    pub len: u64,
    /// The ordinal of its device.
    pub device: u32,
    /// The home device.
    pub home: DeviceIdentity,
    /// Whether the mapping is on the home device.
    pub at_home: bool,
    /// The access of the agent.
    pub access: Access,
    /// The tensor's element type and shape, if it is a tensor.
    pub tensor: Option<(String, Vec<u64>)>,
    /// The number of named tensors.
    pub tensors: Option<usize>,
    /// Whether it is a copy.
    pub is_copy: bool,
}

/// The reply to a command.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Reply {
    /// The time that the agent took.
    pub took: Duration,
    /// The answer, or the library's error.
    pub result: Result<Answer, Refusal>,
}
