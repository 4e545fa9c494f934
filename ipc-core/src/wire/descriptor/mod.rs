//! The descriptor: plain bytes, or one line of text, that name an export.
//!
//! It travels by any road the user has and opens nothing by itself: the vendor's handle is not in it, but comes from
//! the exporter's broker, together with a lease. The layout is specified in `docs/spec/descriptor.md`.
//!
//! Every reader treats it as hostile: nothing is allocated from a length that was not checked, and all offsets and
//! lengths are checked against each other here and against the driver's answer after the open.

mod binary;
mod envelope;
#[cfg(test)]
pub(crate) mod properties;
mod regions;
mod text;
mod view;

use std::fmt;

use crate::backend::Access;
use crate::model::address::Extent;
use crate::model::device::DeviceIdentity;
use crate::model::tensor::TensorLayout;
use crate::os::process::ProcessIdentity;
use crate::wire::{BrokerAddress, Token};

pub use crate::model::error::{DescriptorError, FormatVersion};
pub(crate) use binary::{
    ExtentEntry, address_kind, bad, home_fields, read_address, read_backend, read_extents, read_home, take,
};
pub use binary::{FORMAT_VERSION, MAX_DESCRIPTOR_BYTES, MAX_EXTENTS};
pub(crate) use envelope::{CHECKSUM_BYTES, Form, Preamble, close};
pub(crate) use regions::{DescribedRegions, Regions};
pub use text::TEXT_PREFIX;
pub(crate) use text::text_and_serde;
pub use view::DescriptorView;
pub(crate) use view::{AllocationView, ExporterView};

/// Names an export. Get one from [`Export::descriptor`](crate::Export::descriptor), send it by any road, and give it to
/// [`Ipc::open`](crate::Ipc::open).
///
/// `Display` and `FromStr` are the text form; it holds a secret, so it belongs where passwords may go. `Debug` and
/// [`view`](Self::view) do not show the secret.
#[derive(Clone, PartialEq, Eq)]
pub struct Descriptor {
    pub(crate) backend: String,
    pub(crate) home: DeviceIdentity,
    pub(crate) exporter: ProcessIdentity,
    pub(crate) broker: BrokerAddress,
    pub(crate) export: ExportId,
    pub(crate) token: Token,
    pub(crate) access: Access,
    pub(crate) ready: bool,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) extents: Vec<DescribedExtent>,
    pub(crate) layout: Option<TensorLayout>,
}

/// One allocation of the region, as the descriptor states it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DescribedExtent {
    /// Size of the whole allocation in bytes.
    pub(crate) size: u64,
    /// The vendor's number of it, 0 where there is none.
    pub(crate) generation: u64,
}

impl DescribedExtent {
    pub(crate) fn of(extent: &Extent) -> Self {
        let generation = extent.generation.map_or(0, |generation| generation.0);
        Self { size: extent.allocation.len, generation }
    }
}

/// What opening needs of whatever names an export: a descriptor, or a part of a bundle.
#[derive(Clone, Copy)]
pub(crate) struct NamedExport<'a> {
    pub(crate) backend: &'a str,
    pub(crate) home: DeviceIdentity,
    pub(crate) exporter: &'a ProcessIdentity,
    pub(crate) broker: &'a BrokerAddress,
    pub(crate) export: ExportId,
    pub(crate) token: Token,
    pub(crate) access: Access,
    /// The allocations of each region; a region is opened as one range.
    pub(crate) regions: Regions<'a>,
}

impl<'a> NamedExport<'a> {
    /// The exporter, and where its broker is.
    pub(crate) const fn broker(&self) -> (&'a ProcessIdentity, &'a BrokerAddress) {
        (self.exporter, self.broker)
    }
}

/// The number of an export in its process; never given twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct ExportId(pub(crate) u64);

impl fmt::Display for ExportId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Descriptor {
    /// The name of the backend that can open it.
    pub fn backend(&self) -> &str {
        &self.backend
    }

    /// The device where the bytes live.
    pub const fn home(&self) -> DeviceIdentity {
        self.home
    }

    /// The exporting process.
    pub const fn exporter(&self) -> &ProcessIdentity {
        &self.exporter
    }

    /// The number of the export in that process.
    pub const fn export(&self) -> ExportId {
        self.export
    }

    /// Length of the region in bytes.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Never true: a region has at least one byte.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What the exporter permits.
    pub const fn access(&self) -> Access {
        self.access
    }

    /// Element type, shape and strides, where the exporter stated them.
    pub const fn layout(&self) -> Option<&TensorLayout> {
        self.layout.as_ref()
    }

    pub(crate) fn named(&self) -> NamedExport<'_> {
        NamedExport {
            backend: &self.backend,
            home: self.home,
            exporter: &self.exporter,
            broker: &self.broker,
            export: self.export,
            token: self.token,
            access: self.access,
            regions: Regions::one(&self.extents),
        }
    }

    /// For people: everything but the secret, ready for JSON.
    pub fn view(&self) -> DescriptorView<'_> {
        DescriptorView::new(self)
    }
}

impl fmt::Debug for Descriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.view().fmt(f)
    }
}
