//! Descriptors of any kind: an export, a bundle or a ring, distinguished by their contents.

use anyhow::{Result, bail};
use device_ipc::limits::{MAX_DESCRIPTOR_BYTES, TEXT_PREFIX};
use device_ipc::{Descriptor, ProcessIdentity};
use serde_json::Value;

/// A descriptor of any kind.
#[derive(Debug)]
pub(crate) enum AnyDescriptor {
    Export(Descriptor),
    Bundle(Descriptor),
    Ring(Descriptor),
}

impl AnyDescriptor {
    pub(crate) fn parse(text: &str) -> Result<Self> {
        Ok(Self::of(text.parse()?))
    }

    pub(crate) fn of(descriptor: Descriptor) -> Self {
        if descriptor.is_named() {
            Self::Bundle(descriptor)
        } else if descriptor.ring().is_some() {
            Self::Ring(descriptor)
        } else {
            Self::Export(descriptor)
        }
    }

    /// Returns the descriptor of a single export; the error for a bundle or a ring names the command to use instead.
    pub(crate) fn into_single_tensor(self) -> Result<Descriptor> {
        match self {
            Self::Export(descriptor) => Ok(descriptor),
            Self::Bundle(bundle) => bail!(
                "this is the descriptor of a bundle of {} tensors: list them with 'device-ipc attach @FILE info', and read one \
                 with 'device-ipc attach @FILE read --tensor NAME'",
                bundle.tensors().len()
            ),
            Self::Ring(_) => bail!("{RING_IS_NOT_READABLE}"),
        }
    }

    /// Returns the contents without secrets.
    pub(crate) fn view(&self) -> Result<Value> {
        Ok(serde_json::to_value(self.descriptor().view())?)
    }

    pub(crate) const fn kind(&self) -> &'static str {
        match self {
            Self::Export(_) => "export",
            Self::Bundle(_) => "bundle",
            Self::Ring(_) => "ring",
        }
    }

    pub(crate) fn exporter(&self) -> &ProcessIdentity {
        self.descriptor().exporter()
    }

    pub(crate) const fn descriptor(&self) -> &Descriptor {
        match self {
            Self::Export(descriptor) | Self::Bundle(descriptor) | Self::Ring(descriptor) => descriptor,
        }
    }
}

/// Error text: a ring can be described, but not read.
pub(crate) const RING_IS_NOT_READABLE: &str = "reading is not supported for the descriptor of a ring, whose slots are valid only \
     between publication and acknowledgement: describe it with 'device-ipc attach @FILE info'; a program reads it with Ipc::open_ring";

/// Returns the maximum text length of a descriptor with this prefix: Base64 and surrounding white space.
pub(super) fn max_text_bytes(prefix: &[u8]) -> u64 {
    // A byte order mark or a quote may be before it.
    let is_one = prefix.windows(TEXT_PREFIX.len()).any(|part| part == TEXT_PREFIX.as_bytes());
    if is_one { 2 * MAX_DESCRIPTOR_BYTES as u64 } else { 128 * 1024 }
}
