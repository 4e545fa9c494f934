//! Descriptors of a process that does not exist, for tests and fuzz targets.

use std::sync::Arc;

use super::descriptor::{
    BackendName, Contents, DescribedExtent, DescribedRegion, Descriptor, ExportId, Memory, Part, PartRegions,
    Tensors,
};
#[cfg(test)]
use super::ring::RingSlots;
use super::{BrokerAddress, Token};
use crate::backend::Access;
use crate::model::device::{DeviceIdentity, HostId};
use crate::model::one_or_many::OneOrMany;
use crate::model::tensor::{Dtype, TensorLayout, TensorTable};
use crate::os::process::ProcessIdentity;

/// Returns the identity of a process that does not exist.
pub(crate) const SOMEBODY: ProcessIdentity = ProcessIdentity {
    host: HostId::from_bytes([0x11; 16]),
    boot: [0x22; 16],
    pid_namespace: 0x0eff_fffc,
    net_namespace: 0xf000_0000,
    pid: 4711,
    start_time: 987_654,
};

/// Returns the contents of [`plain_descriptor`].
pub(crate) fn plain_contents() -> Contents {
    Contents {
        backend: BackendName::new("mock").expect("it is short"),
        exporter: SOMEBODY,
        broker: BrokerAddress::Abstract(b"device-ipc-4711-0123456789abcdef"[..].into()),
        access: Access::ReadWrite,
        parts: OneOrMany::One(Part {
            home: DeviceIdentity::Uuid([0x33; 16]),
            export: ExportId(1),
            token: Token::from_bytes(std::array::from_fn(|index| 0xa0 + index as u8)),
            ready: false,
            regions: PartRegions::One(vec![DescribedExtent { size: 1 << 20, generation: 0 }]),
        }),
        memory: Memory::Region(DescribedRegion { offset: 0, len: 4096, layout: None }),
        ring: None,
        network: Box::default(),
    }
}

/// Returns a descriptor of 4096 bytes at the start of an allocation of 1 MiB.
pub(crate) fn plain_descriptor() -> Descriptor {
    Descriptor::new(plain_contents())
}

/// Returns the descriptor of a ring of three slots in 4096 bytes.
#[cfg(test)]
pub(crate) fn plain_ring() -> Descriptor {
    plain_descriptor().with(|contents| contents.ring = RingSlots::new(3, 1280, 4096))
}

/// Returns a descriptor of three tensors in two allocations of one device and two adjacent ones of another.
pub(crate) fn plain_tensors() -> Descriptor {
    let extent = DescribedExtent { size: 1 << 20, generation: 7 };
    let part = |export: u64, regions: &[&[DescribedExtent]]| Part {
        home: DeviceIdentity::Uuid([0x33 + export as u8; 16]),
        export: ExportId(export),
        token: Token::from_bytes(std::array::from_fn(|index| 0xa0 + (16 * export) as u8 + index as u8)),
        ready: export == 1,
        regions: PartRegions::Many(Arc::new(regions.iter().map(|region| region.iter().copied()).collect())),
    };
    let layout = |dtype, shape: &[u64]| TensorLayout::contiguous(dtype, shape).expect("a seed is a layout");
    let tensors = [
        ("embed.weight", 256, layout(Dtype::BF16, &[128, 64])),
        ("layers.0.bias", 0, layout(Dtype::F32, &[64])),
        ("head", (1 << 20) - 512, layout(Dtype::F8_E4M3FN, &[2, 2048])),
    ];
    let parts = [part(1, &[&[extent], &[extent]]), part(2, &[&[extent; 2]])];
    Descriptor::new(Contents {
        parts: parts.into_iter().collect(),
        memory: Memory::Tensors(listed(tensors, vec![0, 1, 2])),
        ..plain_contents()
    })
}

pub(crate) fn listed<N: AsRef<str>>(
    tensors: impl IntoIterator<Item = (N, u64, TensorLayout)>,
    regions: Vec<u32>,
) -> Arc<Tensors> {
    Arc::new(Tensors::new(TensorTable::new(tensors).expect("a seed is a table"), regions))
}
