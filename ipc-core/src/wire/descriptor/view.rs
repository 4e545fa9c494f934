//! What a descriptor says, for people.

use serde::Serialize;

use super::{DescribedExtent, Descriptor, ExportId};
use crate::model::tensor::TensorLayout;
use crate::os::process::ProcessIdentity;
use crate::wire::BrokerAddress;

/// Everything in a descriptor but its secret. Serialise it as JSON to read it.
#[derive(Clone, Debug, Serialize)]
pub struct DescriptorView<'a> {
    backend: &'a str,
    home: String,
    offset_bytes: u64,
    length_bytes: u64,
    access: String,
    carries_ready_event: bool,
    allocations: Vec<AllocationView>,
    tensor: Option<&'a TensorLayout>,
    exporter: ExporterView,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct AllocationView {
    size_bytes: u64,
    generation: Option<u64>,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct ExporterView {
    pid: u32,
    start_time_ticks: u64,
    pid_namespace: u64,
    net_namespace: u64,
    host: String,
    boot: String,
    socket: String,
    /// Of a bundle each part has its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    export: Option<u64>,
}

impl AllocationView {
    pub(crate) fn new(extent: &DescribedExtent) -> Self {
        let generation = Some(extent.generation).filter(|generation| *generation != 0);
        Self { size_bytes: extent.size, generation }
    }
}

impl ExporterView {
    pub(crate) fn new(exporter: &ProcessIdentity, broker: &BrokerAddress, export: Option<ExportId>) -> Self {
        Self {
            pid: exporter.pid,
            start_time_ticks: exporter.start_time,
            pid_namespace: exporter.pid_namespace,
            net_namespace: exporter.net_namespace,
            host: exporter.host.to_string(),
            boot: crate::model::device::HostId::from_bytes(exporter.boot).to_string(),
            socket: broker.to_string(),
            export: export.map(|export| export.0),
        }
    }
}

impl<'a> DescriptorView<'a> {
    pub(crate) fn new(descriptor: &'a Descriptor) -> Self {
        Self {
            backend: &descriptor.backend,
            home: descriptor.home.to_string(),
            offset_bytes: descriptor.offset,
            length_bytes: descriptor.len,
            access: descriptor.access.to_string(),
            carries_ready_event: descriptor.ready,
            allocations: descriptor.extents.iter().map(AllocationView::new).collect(),
            tensor: descriptor.layout.as_ref(),
            exporter: ExporterView::new(&descriptor.exporter, &descriptor.broker, Some(descriptor.export)),
        }
    }
}
