//! What names a bundle.

use std::fmt;
use std::sync::Arc;

use super::tensors::Tensors;
use super::view::BundleView;
use crate::backend::Access;
use crate::model::device::DeviceIdentity;
use crate::model::tensor::{MAX_TABLE_BYTES, NamedTensor, TensorLayout, TensorTable};
use crate::os::process::ProcessIdentity;
use crate::wire::descriptor::{DescribedRegions, DescriptorError, ExportId, NamedExport, text_and_serde};
use crate::wire::{BrokerAddress, Token};

/// What the text form begins with; the rest is the binary form in URL-safe Base64 without padding (RFC 4648 §5).
pub const BUNDLE_TEXT_PREFIX: &str = "dipcb.";

/// Names a bundle. Get one from [`BundleExport::descriptor`](crate::BundleExport::descriptor), send it by any road, and
/// give it to [`Ipc::open_bundle`](crate::Ipc::open_bundle). Clones share what they say.
///
/// `Display` and `FromStr` are the text form; it holds secrets, so it belongs where passwords may go. `Debug` and
/// [`view`](Self::view) do not show them. The layout is specified in `docs/spec/bundle.md`.
#[derive(Clone, PartialEq, Eq)]
pub struct BundleDescriptor {
    contents: Arc<Contents>,
}

/// What a bundle's descriptor says, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Contents {
    pub(crate) backend: String,
    pub(crate) exporter: ProcessIdentity,
    pub(crate) broker: BrokerAddress,
    pub(crate) access: Access,
    /// One for each home device.
    pub(crate) parts: Vec<Part>,
    pub(crate) tensors: Arc<Tensors>,
}

/// What lies on one device: an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) home: DeviceIdentity,
    pub(crate) export: ExportId,
    pub(crate) token: Token,
    pub(crate) ready: bool,
    /// The allocations of each region; a region is opened as one range, and all of it can be reached.
    pub(crate) regions: Arc<DescribedRegions>,
}

impl BundleDescriptor {
    pub(crate) fn new(contents: Contents) -> Self {
        Self { contents: Arc::new(contents) }
    }

    pub(crate) fn contents(&self) -> &Contents {
        &self.contents
    }

    /// The name of the backend that can open it.
    pub fn backend(&self) -> &str {
        &self.contents.backend
    }

    /// The exporting process.
    pub fn exporter(&self) -> &ProcessIdentity {
        &self.contents.exporter
    }

    /// What the exporter permits.
    pub fn access(&self) -> Access {
        self.contents.access
    }

    /// The devices where the bytes live.
    pub fn homes(&self) -> impl ExactSizeIterator<Item = DeviceIdentity> {
        self.contents.parts.iter().map(|part| part.home)
    }

    /// The number in the exporting process of the export on each of those devices.
    pub fn exports(&self) -> impl ExactSizeIterator<Item = ExportId> {
        self.contents.parts.iter().map(|part| part.export)
    }

    /// How many allocations the tensors lie in; each is opened once.
    pub fn allocations(&self) -> usize {
        self.contents.parts.iter().map(|part| part.regions.allocations()).sum()
    }

    /// How many tensors there are.
    pub fn len(&self) -> usize {
        self.contents.table().len()
    }

    /// Never true: a bundle has at least one tensor.
    pub fn is_empty(&self) -> bool {
        self.contents.table().is_empty()
    }

    /// The name and the layout of every tensor, in the order in which they were put in.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = (&str, &TensorLayout)> {
        self.contents.table().iter().map(|(name, _, layout)| (name, layout))
    }

    /// The layout of the tensor of this name.
    pub fn layout(&self, name: &str) -> Option<&TensorLayout> {
        self.contents.table().get(name).map(|(_, layout)| layout)
    }

    /// The device where the tensor of this name lives.
    pub fn home(&self, name: &str) -> Option<DeviceIdentity> {
        let position = self.contents.table().position(name)?;
        Some(self.contents.parts[self.contents.place(position).0].home)
    }

    /// For people: everything but the secrets, ready for JSON.
    pub fn view(&self) -> BundleView<'_> {
        BundleView::new(&self.contents)
    }
}

impl Contents {
    pub(crate) fn table(&self) -> &TensorTable {
        self.tensors.table()
    }

    /// The part of a tensor, and the region in it.
    pub(crate) fn place(&self, tensor: usize) -> (usize, usize) {
        let mut region = self.tensors.regions()[tensor] as usize;
        for (index, part) in self.parts.iter().enumerate() {
            if region < part.regions.len() {
                return (index, region);
            }
            region -= part.regions.len();
        }
        unreachable!("checked when the descriptor was read or made")
    }

    /// The first tensor of a region, or of the part where the region has none; for errors.
    pub(crate) fn first_tensor(&self, part: usize, region: Option<usize>) -> Option<NamedTensor<'_>> {
        let lies_there = |position: &usize| {
            let place = self.place(*position);
            place.0 == part && region.is_none_or(|region| place.1 == region)
        };
        let found = (0..self.table().len()).find(lies_there);
        let found = found.map(|position| self.table().at(position));
        found.or_else(|| region.and_then(|_| self.first_tensor(part, None)))
    }

    pub(crate) fn named(&self, part: usize) -> NamedExport<'_> {
        let part = &self.parts[part];
        NamedExport {
            backend: &self.backend,
            home: part.home,
            exporter: &self.exporter,
            broker: &self.broker,
            export: part.export,
            token: part.token,
            access: self.access,
            regions: part.regions.as_regions(),
        }
    }
}

impl fmt::Debug for BundleDescriptor {
    /// In few words, and without the secrets; [`view`](Self::view) says all.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BundleDescriptor")
            .field("backend", &self.contents.backend)
            .field("exporter", &self.contents.exporter.pid)
            .field("homes", &self.homes().collect::<Vec<_>>())
            .field("allocations", &self.allocations())
            .field("tensors", &self.len())
            .finish_non_exhaustive()
    }
}

text_and_serde!(
    BundleDescriptor,
    prefix: BUNDLE_TEXT_PREFIX,
    most_bytes: MAX_TABLE_BYTES,
    otherwise: DescriptorError::NotBundle,
    called: "a device-ipc bundle"
);
