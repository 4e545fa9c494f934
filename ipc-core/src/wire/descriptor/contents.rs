//! The checked contents of a descriptor: what each of its readers and writers agrees on.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use super::backend_name::BackendName;
use super::regions::{PartRegions, Regions};
use super::tensors::Tensors;
use crate::backend::Access;
use crate::model::device::DeviceIdentity;
use crate::model::one_or_many::OneOrMany;
use crate::model::tensor::{NamedTensor, TensorLayout, TensorTable};
use crate::os::process::ProcessIdentity;
use crate::wire::ring::RingSlots;
use crate::wire::{BrokerAddress, Token};

/// The checked contents of a descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Contents {
    pub(crate) backend: BackendName,
    pub(crate) exporter: ProcessIdentity,
    pub(crate) broker: BrokerAddress,
    pub(crate) access: Access,
    /// One for each home device; at least one.
    pub(crate) parts: OneOrMany<Part>,
    pub(crate) memory: Memory,
    /// Present only with [`Memory::Region`].
    pub(crate) ring: Option<RingSlots>,
    /// The addresses at which importers of other hosts reach the exporter, the preferred one first; at most 8.
    pub(crate) network: Box<[SocketAddr]>,
}

/// The memory that importers open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    /// A range of the only region of the only part.
    Region(DescribedRegion),
    /// Named tensors in the regions of all parts.
    Tensors(Arc<Tensors>),
}

/// A range of a region, and the tensor that it holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DescribedRegion {
    /// Offset from the start of the first allocation, in bytes.
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) layout: Option<TensorLayout>,
}

/// The memory on one device: an export of the broker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) home: DeviceIdentity,
    pub(crate) export: ExportId,
    pub(crate) token: Token,
    pub(crate) ready: bool,
    /// The allocations of each region; a region is opened as one range.
    pub(crate) regions: PartRegions,
}

impl Contents {
    pub(crate) fn first(&self) -> &Part {
        &self.parts[0]
    }

    /// Returns the unnamed region.
    pub(crate) fn region(&self) -> Option<&DescribedRegion> {
        match &self.memory {
            Memory::Region(region) => Some(region),
            Memory::Tensors(_) => None,
        }
    }

    pub(crate) fn named_tensors(&self) -> Option<&Arc<Tensors>> {
        match &self.memory {
            Memory::Region(_) => None,
            Memory::Tensors(tensors) => Some(tensors),
        }
    }

    pub(crate) fn table(&self) -> Option<&TensorTable> {
        self.named_tensors().map(|tensors| tensors.table())
    }

    /// Returns the number of tensors.
    pub(crate) fn tensors(&self) -> usize {
        match &self.memory {
            Memory::Region(region) => usize::from(region.layout.is_some()),
            Memory::Tensors(tensors) => tensors.table().len(),
        }
    }

    /// Returns the tensor at a position less than [`tensors`](Self::tensors). Its offset counts from the start of its region.
    pub(crate) fn tensor(&self, position: usize) -> NamedTensor<'_> {
        match &self.memory {
            Memory::Tensors(tensors) => tensors.table().at(position),
            Memory::Region(region) => {
                let layout = region.layout.as_ref().expect("it is one of the tensors");
                NamedTensor { name: "", offset: region.offset, layout }
            }
        }
    }

    /// Returns the position of the tensor of this name.
    pub(crate) fn position(&self, name: &str) -> Option<usize> {
        match &self.memory {
            Memory::Tensors(tensors) => tensors.table().position(name),
            Memory::Region(region) => (name.is_empty() && region.layout.is_some()).then_some(0),
        }
    }

    /// Returns the part of a tensor, and the region in the part.
    pub(crate) fn place(&self, tensor: usize) -> (usize, usize) {
        let Memory::Tensors(tensors) = &self.memory else { return (0, 0) };
        let mut region = tensors.regions()[tensor] as usize;
        for (index, part) in self.parts.iter().enumerate() {
            let regions = part.regions.as_regions().len();
            if region < regions {
                return (index, region);
            }
            region -= regions;
        }
        unreachable!("checked when the descriptor was read or made")
    }

    /// Returns the first named tensor of a region, or of the part if there is none in the region; for errors.
    pub(crate) fn first_tensor(&self, part: usize, region: Option<usize>) -> Option<NamedTensor<'_>> {
        let table = self.table()?;
        let lies_there = |position: &usize| {
            let place = self.place(*position);
            place.0 == part && region.is_none_or(|region| place.1 == region)
        };
        let found = (0..table.len()).find(lies_there).map(|position| table.at(position));
        found.or_else(|| region.and_then(|_| self.first_tensor(part, None)))
    }

    pub(crate) fn named(&self, part: usize) -> NamedExport<'_> {
        NamedExport { contents: self, part: &self.parts[part] }
    }
}

/// A part of a descriptor, and the contents that all parts share: the data that opening the part needs.
#[derive(Clone, Copy)]
pub(crate) struct NamedExport<'a> {
    pub(crate) contents: &'a Contents,
    pub(crate) part: &'a Part,
}

impl<'a> NamedExport<'a> {
    pub(crate) const fn exporter(&self) -> &'a ProcessIdentity {
        &self.contents.exporter
    }

    /// Returns the allocations of each region; a region is opened as one range.
    pub(crate) fn regions(&self) -> Regions<'a> {
        self.part.regions.as_regions()
    }

    /// The exporter, and where its broker is.
    pub(crate) const fn broker(&self) -> (&'a ProcessIdentity, &'a BrokerAddress) {
        (&self.contents.exporter, &self.contents.broker)
    }
}

/// The number of an export in its process. Numbers are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct ExportId(pub(crate) u64);

impl fmt::Display for ExportId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
