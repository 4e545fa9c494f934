//! Descriptors: plain bytes, or one line of text, that name an export: one region of memory, a ring, or any number of named
//! tensors.
//!
//! A descriptor travels over any transport and opens nothing by itself: it contains no vendor handle; the exporter's broker
//! sends the handle with a lease. `docs/spec/descriptor.md` specifies the format.
//!
//! Every reader treats a descriptor as hostile: the checksum is verified first, no memory is allocated from a length that was
//! not checked, and all offsets and lengths are checked against each other here and against the driver's answer after the open.

#[cfg(test)]
pub(crate) mod arbitrary;
mod backend_name;
mod binary;
mod contents;
mod envelope;
mod exporter;
mod network;
#[cfg(test)]
mod properties;
mod regions;
mod section;
mod tensors;
mod text;
mod view;

use std::borrow::Cow;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use serde::Serialize;

use crate::backend::Access;
use crate::model::device::DeviceIdentity;
use crate::model::tensor::TensorLayout;
use crate::os::process::ProcessIdentity;
use crate::wire::ring::RingSlots;

pub use crate::model::error::{DescriptorError, FormatVersion};
pub(crate) use backend_name::BackendName;
pub(crate) use binary::encoded_bytes;
pub use binary::{MAX_EXTENTS, MAX_REGIONS_ALLOCATIONS, MAX_REGIONS_SECTIONS};
pub use contents::ExportId;
pub(crate) use contents::{Contents, DescribedRegion, Memory, NamedExport, Part};
pub use envelope::{FORMAT_VERSION, MAX_DESCRIPTOR_BYTES};
#[cfg(test)]
pub(crate) use network::MAX_ADDRESSES;
pub(crate) use network::is_reachable;
pub(crate) use regions::{DescribedExtent, DescribedRegions, PartRegions, Regions};
pub(crate) use tensors::{MOST_REMEMBERED_BYTES, Tensors, encoded_bytes as encoded_tensor_bytes};
pub use text::TEXT_PREFIX;
use view::DescriptorView;

/// The name of an export, for importers. [`Export::descriptor`](crate::Export::descriptor) returns it; send it over any
/// transport, and pass it to [`Ipc::open`](crate::Ipc::open), or that of a ring to [`Ipc::open_ring`](crate::Ipc::open_ring).
/// Clones share their contents.
///
/// `Display` and `FromStr` are the text form. It contains secrets, so treat it as a password. `Debug` and [`view`](Self::view)
/// do not show the secrets.
#[derive(Clone, PartialEq, Eq)]
pub struct Descriptor {
    contents: Arc<Contents>,
}

impl<'a> From<&'a Descriptor> for Cow<'a, Descriptor> {
    fn from(descriptor: &'a Descriptor) -> Self {
        Self::Borrowed(descriptor)
    }
}

impl From<Descriptor> for Cow<'_, Descriptor> {
    fn from(descriptor: Descriptor) -> Self {
        Self::Owned(descriptor)
    }
}

impl Descriptor {
    pub(crate) fn new(contents: Contents) -> Self {
        Self { contents: Arc::new(contents) }
    }

    pub(crate) fn contents(&self) -> &Contents {
        &self.contents
    }

    /// Returns the descriptor with other contents.
    pub(crate) fn with(&self, change: impl FnOnce(&mut Contents)) -> Self {
        let mut contents = Contents::clone(&self.contents);
        change(&mut contents);
        Self::new(contents)
    }

    /// Returns the name of the backend that can open the memory.
    pub fn backend(&self) -> &str {
        self.contents.backend.as_str()
    }

    /// Returns the exporting process.
    pub fn exporter(&self) -> &ProcessIdentity {
        &self.contents.exporter
    }

    /// Returns the access that the exporter permits.
    pub fn access(&self) -> Access {
        self.contents.access
    }

    /// Returns the home device, the first of several.
    pub fn home(&self) -> DeviceIdentity {
        self.contents.first().home
    }

    /// Returns the home devices.
    pub fn homes(&self) -> impl ExactSizeIterator<Item = DeviceIdentity> {
        self.contents.parts.iter().map(|part| part.home)
    }

    /// Returns the number of the export, the first of several.
    pub fn export(&self) -> ExportId {
        self.contents.first().export
    }

    /// Returns the number of the export on each home device.
    pub fn exports(&self) -> impl ExactSizeIterator<Item = ExportId> {
        self.contents.parts.iter().map(|part| part.export)
    }

    /// Returns the length in bytes: of the region, or of all allocations of the named tensors.
    pub fn len(&self) -> u64 {
        match &self.contents.memory {
            Memory::Region(region) => region.len,
            Memory::Tensors(_) => {
                let regions = self.contents.parts.iter().flat_map(|part| part.regions.as_regions().iter());
                regions.flatten().map(|extent| extent.size).fold(0, u64::saturating_add)
            }
        }
    }

    /// Returns `false`: shared memory has at least one byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of allocations; an importer opens each once.
    pub fn allocations(&self) -> usize {
        self.contents.parts.iter().map(|part| part.regions.as_regions().allocations()).sum()
    }

    /// Returns whether the tensors have names.
    pub fn is_named(&self) -> bool {
        matches!(self.contents.memory, Memory::Tensors(_))
    }

    /// Returns the layout of the unnamed region, if the exporter stated one.
    pub fn layout(&self) -> Option<&TensorLayout> {
        self.contents.region()?.layout.as_ref()
    }

    /// Returns the name and the layout of every tensor, in the order in which the exporter added them. An unnamed region with a
    /// layout is one tensor with an empty name.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = (&str, &TensorLayout)> {
        (0..self.contents.tensors()).map(|position| {
            let tensor = self.contents.tensor(position);
            (tensor.name, tensor.layout)
        })
    }

    /// Returns the layout of the tensor of this name.
    pub fn layout_of(&self, name: &str) -> Option<&TensorLayout> {
        Some(self.contents.tensor(self.contents.position(name)?).layout)
    }

    /// Returns the home device of the tensor of this name.
    pub fn home_of(&self, name: &str) -> Option<DeviceIdentity> {
        let position = self.contents.position(name)?;
        Some(self.contents.parts[self.contents.place(position).0].home)
    }

    /// Returns the addresses at which importers of other hosts reach the exporter; none if it does not offer copies to them.
    pub fn network_addresses(&self) -> &[SocketAddr] {
        &self.contents.network
    }

    /// Returns the slots of a ring, or `None` for other memory.
    pub fn ring(&self) -> Option<RingSlots> {
        self.contents.ring
    }

    /// Returns everything but the secrets, for display; it serialises to JSON.
    pub fn view(&self) -> impl Serialize + fmt::Debug + '_ {
        DescriptorView::new(&self.contents)
    }
}

impl fmt::Debug for Descriptor {
    /// A summary without the secrets; [`view`](Self::view) is complete.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Descriptor");
        shown
            .field("backend", &self.contents.backend)
            .field("exporter", &self.contents.exporter.pid)
            .field("access", &self.contents.access)
            .field("homes", &self.homes().collect::<Vec<_>>())
            .field("exports", &self.exports().collect::<Vec<_>>())
            .field("allocations", &self.allocations());
        match &self.contents.memory {
            Memory::Region(region) => shown.field("region", region),
            Memory::Tensors(tensors) => shown.field("tensors", &tensors.table().len()),
        };
        if let Some(ring) = &self.contents.ring {
            shown.field("ring", ring);
        }
        shown.finish_non_exhaustive()
    }
}
