//! What a descriptor says, for people.

use serde::Serialize;

use super::Descriptor;
use crate::tensor::TensorLayout;

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
    export: u64,
}

impl<'a> DescriptorView<'a> {
    pub(super) fn new(descriptor: &'a Descriptor) -> Self {
        let exporter = &descriptor.exporter;
        Self {
            backend: &descriptor.backend,
            home: descriptor.home.to_string(),
            offset_bytes: descriptor.offset,
            length_bytes: descriptor.len,
            access: descriptor.access.to_string(),
            carries_ready_event: descriptor.ready,
            allocations: descriptor
                .extents
                .iter()
                .map(|extent| AllocationView {
                    size_bytes: extent.size,
                    generation: Some(extent.generation).filter(|generation| *generation != 0),
                })
                .collect(),
            tensor: descriptor.layout.as_ref(),
            exporter: ExporterView {
                pid: exporter.pid,
                start_time_ticks: exporter.start_time,
                pid_namespace: exporter.pid_namespace,
                net_namespace: exporter.net_namespace,
                host: exporter.host.to_string(),
                boot: crate::device::HostId::from_bytes(exporter.boot).to_string(),
                socket: descriptor.broker.to_string(),
                export: descriptor.export.0,
            },
        }
    }
}
