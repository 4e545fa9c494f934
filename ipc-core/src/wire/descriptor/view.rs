//! The contents of a descriptor for display.

use serde::Serialize;

use super::contents::{Contents, ExportId, Memory, Part};
use super::regions::DescribedExtent;
use crate::model::tensor::TensorLayout;
use crate::wire::ring::RingSlots;

/// The contents of a descriptor without its secrets. It serialises to JSON.
#[derive(Clone, Debug, Serialize)]
pub(super) struct DescriptorView<'a> {
    backend: &'a str,
    access: String,
    exporter: ExporterView,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    region: Option<RegionView<'a>>,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    named: Option<NamedView<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ring: Option<RingSlots>,
}

/// The region of a descriptor without named tensors.
#[derive(Clone, Debug, Serialize)]
struct RegionView<'a> {
    home: String,
    byte_offset: u64,
    length_bytes: u64,
    carries_ready_event: bool,
    allocations: Vec<AllocationView>,
    tensor: Option<&'a TensorLayout>,
}

/// The named tensors and their parts.
#[derive(Clone, Debug, Serialize)]
struct NamedView<'a> {
    parts: Vec<PartView>,
    tensors: Vec<TensorView<'a>>,
}

#[derive(Clone, Debug, Serialize)]
struct PartView {
    home: String,
    export: u64,
    carries_ready_event: bool,
    /// The size of each region.
    allocations: Vec<Vec<AllocationView>>,
}

#[derive(Clone, Debug, Serialize)]
struct TensorView<'a> {
    name: &'a str,
    part: usize,
    region: usize,
    byte_offset: u64,
    #[serde(flatten)]
    layout: &'a TensorLayout,
}

#[derive(Clone, Debug, Serialize)]
struct AllocationView {
    size_bytes: u64,
    generation: Option<u64>,
}

#[derive(Clone, Debug, Serialize)]
struct ExporterView {
    pid: u32,
    start_time_ticks: u64,
    pid_namespace: u64,
    net_namespace: u64,
    host: String,
    boot: String,
    socket: String,
    /// Present with copies over the network only.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    network: Vec<String>,
    /// Present with a region only.
    #[serde(skip_serializing_if = "Option::is_none")]
    export: Option<u64>,
}

impl AllocationView {
    fn new(extent: &DescribedExtent) -> Self {
        let generation = Some(extent.generation).filter(|generation| *generation != 0);
        Self { size_bytes: extent.size, generation }
    }
}

impl ExporterView {
    fn new(contents: &Contents, export: Option<ExportId>) -> Self {
        let Contents { exporter, broker, network, .. } = contents;
        Self {
            pid: exporter.pid,
            start_time_ticks: exporter.start_time,
            pid_namespace: exporter.pid_namespace,
            net_namespace: exporter.net_namespace,
            host: exporter.host.to_string(),
            boot: crate::model::device::HostId::from_bytes(exporter.boot).to_string(),
            socket: broker.to_string(),
            network: network.iter().map(ToString::to_string).collect(),
            export: export.map(|export| export.0),
        }
    }
}

impl<'a> DescriptorView<'a> {
    pub(super) fn new(contents: &'a Contents) -> Self {
        let first = contents.first();
        let (region, named, export) = match &contents.memory {
            Memory::Region(region) => {
                let extents = first.regions.as_regions().iter().flatten();
                let view = RegionView {
                    home: first.home.to_string(),
                    byte_offset: region.offset,
                    length_bytes: region.len,
                    carries_ready_event: first.ready,
                    allocations: extents.map(AllocationView::new).collect(),
                    tensor: region.layout.as_ref(),
                };
                (Some(view), None, Some(first.export))
            }
            Memory::Tensors(_) => {
                let tensors = (0..contents.tensors()).map(|position| TensorView::new(contents, position));
                let parts = contents.parts.iter().map(PartView::new);
                (None, Some(NamedView { parts: parts.collect(), tensors: tensors.collect() }), None)
            }
        };
        Self {
            backend: contents.backend.as_str(),
            access: contents.access.to_string(),
            exporter: ExporterView::new(contents, export),
            region,
            named,
            ring: contents.ring,
        }
    }
}

impl<'a> TensorView<'a> {
    fn new(contents: &'a Contents, position: usize) -> Self {
        let ((part, region), tensor) = (contents.place(position), contents.tensor(position));
        Self { name: tensor.name, part, region, byte_offset: tensor.offset, layout: tensor.layout }
    }
}

impl PartView {
    fn new(part: &Part) -> Self {
        let regions = part.regions.as_regions().iter();
        Self {
            home: part.home.to_string(),
            export: part.export.0,
            carries_ready_event: part.ready,
            allocations: regions.map(|region| region.iter().map(AllocationView::new).collect()).collect(),
        }
    }
}
