//! What a bundle's descriptor says, for people.

use serde::Serialize;

use super::descriptor::{Contents, Part};
use crate::model::tensor::TensorLayout;
use crate::wire::descriptor::{AllocationView, ExporterView};

/// Everything in a bundle's descriptor but its secrets. Serialise it as JSON to read it.
#[derive(Clone, Debug, Serialize)]
pub struct BundleView<'a> {
    backend: &'a str,
    access: String,
    exporter: ExporterView,
    parts: Vec<PartView>,
    tensors: Vec<TensorView<'a>>,
}

#[derive(Clone, Debug, Serialize)]
struct PartView {
    home: String,
    export: u64,
    carries_ready_event: bool,
    /// Of each region.
    allocations: Vec<Vec<AllocationView>>,
}

#[derive(Clone, Debug, Serialize)]
struct TensorView<'a> {
    name: &'a str,
    part: usize,
    region: usize,
    offset_bytes: u64,
    #[serde(flatten)]
    layout: &'a TensorLayout,
}

impl<'a> BundleView<'a> {
    pub(crate) fn new(contents: &'a Contents) -> Self {
        let tensor = |(position, (name, offset_bytes, layout))| {
            let (part, region) = contents.place(position);
            TensorView { name, part, region, offset_bytes, layout }
        };
        Self {
            backend: &contents.backend,
            access: contents.access.to_string(),
            exporter: ExporterView::new(&contents.exporter, &contents.broker, None),
            parts: contents.parts.iter().map(PartView::new).collect(),
            tensors: contents.table().iter().enumerate().map(tensor).collect(),
        }
    }
}

impl PartView {
    fn new(part: &Part) -> Self {
        let allocations =
            part.regions.iter().map(|region| region.iter().map(AllocationView::new).collect()).collect();
        Self {
            home: part.home.to_string(),
            export: part.export.0,
            carries_ready_event: part.ready,
            allocations,
        }
    }
}
