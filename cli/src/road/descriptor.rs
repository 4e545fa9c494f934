//! What a descriptor's text may name: an export, a bundle or a ring. What it begins with tells.

use anyhow::{Context, Result, bail};
use device_ipc::descriptor::MAX_DESCRIPTOR_BYTES;
use device_ipc::tensor::MAX_TABLE_BYTES;
use device_ipc::{
    BUNDLE_TEXT_PREFIX, BundleDescriptor, Descriptor, ProcessIdentity, RING_TEXT_PREFIX, RingDescriptor,
};
use serde_json::Value;

/// A descriptor of any kind.
#[derive(Debug)]
pub(crate) enum AnyDescriptor {
    Export(Box<Descriptor>),
    Bundle(BundleDescriptor),
    Ring(Box<RingDescriptor>),
}

impl AnyDescriptor {
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let text = text.trim();
        Ok(if text.starts_with(BUNDLE_TEXT_PREFIX) {
            Self::Bundle(text.parse().context("that is no descriptor of a bundle")?)
        } else if text.starts_with(RING_TEXT_PREFIX) {
            Self::Ring(Box::new(text.parse().context("that is no descriptor of a ring")?))
        } else {
            let hint = "that is no descriptor (it begins with 'dipc.', 'dipcb.' or 'dipcr.'); write @FILE for the descriptor in \
                        a file";
            Self::Export(Box::new(text.parse().context(hint)?))
        })
    }

    /// The export that one tensor lies in; who has a bundle or a ring is told what to do with it.
    pub(crate) fn of_one_tensor(self) -> Result<Descriptor> {
        match self {
            Self::Export(descriptor) => Ok(*descriptor),
            Self::Bundle(bundle) => bail!(
                "this descriptor is a bundle's, of {} tensors: see them with 'device-ipc attach @FILE info', and read one with \
                 'device-ipc attach @FILE read --tensor NAME'",
                bundle.len()
            ),
            Self::Ring(_) => bail!("{RING_IS_JOINED}"),
        }
    }

    /// Everything but the secrets.
    pub(crate) fn view(&self) -> Result<Value> {
        Ok(match self {
            Self::Export(descriptor) => serde_json::to_value(descriptor.view())?,
            Self::Bundle(bundle) => serde_json::to_value(bundle.view())?,
            Self::Ring(ring) => serde_json::to_value(ring.view())?,
        })
    }

    pub(crate) const fn kind(&self) -> &'static str {
        match self {
            Self::Export(_) => "export",
            Self::Bundle(_) => "bundle",
            Self::Ring(_) => "ring",
        }
    }

    pub(crate) fn exporter(&self) -> &ProcessIdentity {
        match self {
            Self::Export(descriptor) => descriptor.exporter(),
            Self::Bundle(bundle) => bundle.exporter(),
            Self::Ring(ring) => ring.writer(),
        }
    }
}

/// Why a ring is described and not read.
pub(crate) const RING_IS_JOINED: &str = "this descriptor is a ring's, whose slots hold something only between a publication \
     and its acknowledgement: see it with 'device-ipc attach @FILE info'; a program reads it by Ipc::open_ring";

/// The longest text of the descriptor that begins so: Base64, and white space around it.
pub(super) fn longest(beginning: &[u8]) -> u64 {
    let bundle = beginning.trim_ascii_start().starts_with(BUNDLE_TEXT_PREFIX.as_bytes());
    2 * if bundle { MAX_TABLE_BYTES } else { MAX_DESCRIPTOR_BYTES } as u64
}
