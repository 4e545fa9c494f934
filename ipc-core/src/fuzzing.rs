//! What the fuzz targets in `fuzz/` call: the readers of everything that comes from another process.
//!
//! Behind the feature `fuzzing`, for the project's own use: nothing of it is part of the interface. Each function panics
//! where the bytes are handled otherwise than `docs/spec/descriptor.md`, `docs/spec/bundle.md`, `docs/spec/ring.md` and `docs/spec/protocol.md` say.

use std::sync::Arc;

use data_encoding::BASE64URL_NOPAD;

use crate::backend::Access;
use crate::model::device::{DeviceIdentity, HostId};
use crate::model::tensor::{Dtype, TensorLayout, TensorTable};
use crate::os::process::ProcessIdentity;
use crate::wire::bundle::{BundleDescriptor, Contents, Part, Tensors};
use crate::wire::descriptor::{DescribedExtent, Descriptor, ExportId, FORMAT_VERSION, TEXT_PREFIX};
use crate::wire::ring::RingDescriptor;
use crate::wire::{BrokerAddress, Token};

pub use crate::transport::fuzzing::{Exporter, ForeignHandle, HostileExporter, Importer, reply, request};

/// Bytes that a target starts from, under a name.
pub type Seed = (&'static str, Vec<u8>);

/// The binary form of a descriptor; what can be read is written so that it reads the same.
pub fn descriptor(bytes: &[u8]) {
    // The checksum keeps chance away from what stands behind it, so it is set right for a second try.
    read_descriptor(bytes);
    read_descriptor(&repaired(bytes));
}

/// The same bytes with the checksum that they ought to have.
fn repaired(bytes: &[u8]) -> Vec<u8> {
    let mut repaired = bytes.to_vec();
    if let Some((covered, checksum)) = repaired.split_last_chunk_mut::<4>() {
        *checksum = crc32fast::hash(covered).to_le_bytes();
    }
    repaired
}

fn read_descriptor(bytes: &[u8]) {
    let Ok(read) = Descriptor::from_bytes(bytes) else { return };
    let written = read.to_bytes();
    assert!(written.len() <= bytes.len(), "a later minor version may be longer, never shorter");
    assert_eq!(Descriptor::from_bytes(&written).as_ref(), Ok(&read));
    assert_eq!(read.to_string().parse::<Descriptor>().expect("it was just written"), read);
    show(&read);
}

/// Everything that a receiver might ask of a descriptor before it opens it.
fn show(read: &Descriptor) {
    let token = data_encoding::HEXLOWER.encode(&read.token.to_bytes());
    let shown = format!("{read:?}");
    let others = [
        data_encoding::HEXLOWER.encode(read.exporter.host.as_bytes()),
        data_encoding::HEXLOWER.encode(&read.exporter.boot),
        read.backend.clone(),
        read.broker.to_string(),
    ];
    assert!(
        !shown.contains(&token) || others.iter().any(|other| other.contains(&token)),
        "the token is shown"
    );
    if let Some(layout) = read.layout() {
        assert!(layout.check_fits(read.len()).is_ok());
        let _ = (layout.elements(), layout.is_contiguous(), layout.start_bytes());
    }
    let _ = read.broker.to_socket_address();
}

/// The text form of a descriptor.
pub fn descriptor_text(text: &str) {
    let Ok(read) = text.parse::<Descriptor>() else { return };
    let version =
        BASE64URL_NOPAD.decode(&text.trim().as_bytes()[TEXT_PREFIX.len()..]).expect("it was just read");
    if version[5] == FORMAT_VERSION.minor {
        assert_eq!(
            read.to_string(),
            text.trim(),
            "there is one text for each descriptor of this minor version"
        );
    }
    assert_eq!(Descriptor::from_bytes(&read.to_bytes()).as_ref(), Ok(&read));
}

/// What an end of a channel reads: what the other end says first, and its messages.
pub fn channel(bytes: &[u8]) {
    crate::patterns::channel::fuzzing::greeting(bytes);
    crate::patterns::channel::fuzzing::packet(bytes);
}

/// Seeds of [`channel`].
pub fn channel_seeds() -> Vec<Seed> {
    crate::patterns::channel::fuzzing::seeds()
}

/// Seeds of [`descriptor`].
pub fn descriptor_seeds() -> Vec<Seed> {
    described().into_iter().map(|(name, descriptor)| (name, descriptor.to_bytes())).collect()
}

/// Seeds of [`descriptor_text`].
pub fn descriptor_text_seeds() -> Vec<Seed> {
    described().into_iter().map(|(name, descriptor)| (name, descriptor.to_string().into_bytes())).collect()
}

/// Seeds of [`Exporter::serve`].
pub fn request_seeds() -> Vec<Seed> {
    crate::transport::fuzzing::request_seeds()
}

/// Seeds of [`Importer::open`].
pub fn reply_seeds() -> Vec<Seed> {
    crate::transport::fuzzing::reply_seeds()
}

/// Seeds of [`HostileExporter::run`].
pub fn page_seeds() -> Vec<Seed> {
    crate::transport::fuzzing::page_seeds()
}

/// A process that does not exist.
pub(crate) const SOMEBODY: ProcessIdentity = ProcessIdentity {
    host: HostId::from_bytes([0x11; 16]),
    boot: [0x22; 16],
    pid_namespace: 0x0eff_fffc,
    net_namespace: 0xf000_0000,
    pid: 4711,
    start_time: 987_654,
};

/// A descriptor of 4096 bytes at the start of an allocation of 1 MiB.
pub(crate) fn plain_descriptor() -> Descriptor {
    Descriptor {
        backend: "mock".into(),
        home: DeviceIdentity::Uuid([0x33; 16]),
        exporter: SOMEBODY,
        broker: BrokerAddress::Abstract(b"device-ipc-4711-0123456789abcdef".to_vec()),
        export: ExportId(1),
        token: Token::from_bytes(std::array::from_fn(|index| 0xa0 + index as u8)),
        access: Access::ReadWrite,
        ready: false,
        offset: 0,
        len: 4096,
        extents: vec![DescribedExtent { size: 1 << 20, generation: 0 }],
        layout: None,
    }
}

/// A bundle of 3 tensors in 2 allocations of one device and 2 neighbours of another.
pub(crate) fn plain_bundle() -> BundleDescriptor {
    let extent = DescribedExtent { size: 1 << 20, generation: 7 };
    let part = |export: u64, regions: &[&[DescribedExtent]]| Part {
        home: DeviceIdentity::Uuid([0x33 + export as u8; 16]),
        export: ExportId(export),
        token: Token::from_bytes(std::array::from_fn(|index| 0xa0 + (16 * export) as u8 + index as u8)),
        ready: export == 1,
        regions: Arc::new(regions.iter().map(|region| region.iter().copied()).collect()),
    };
    let layout = |dtype, shape: &[u64]| TensorLayout::contiguous(dtype, shape).expect("a seed is a layout");
    let tensors = [
        ("embed.weight", 256, layout(Dtype::BF16, &[128, 64])),
        ("layers.0.bias", 0, layout(Dtype::F32, &[64])),
        ("head", (1 << 20) - 512, layout(Dtype::F8_E4M3FN, &[2, 2048])),
    ];
    let plain = plain_descriptor();
    BundleDescriptor::new(Contents {
        backend: plain.backend,
        exporter: SOMEBODY,
        broker: plain.broker,
        access: Access::ReadWrite,
        parts: vec![part(1, &[&[extent], &[extent]]), part(2, &[&[extent; 2]])],
        tensors: listed(tensors, vec![0, 1, 2]),
    })
}

fn listed<N: AsRef<str>>(
    tensors: impl IntoIterator<Item = (N, u64, TensorLayout)>,
    regions: Vec<u32>,
) -> Arc<Tensors> {
    Arc::new(Tensors::new(TensorTable::new(tensors).expect("a seed is a table"), regions))
}

/// The binary form of a bundle; what can be read is written so that it reads the same.
pub fn bundle(bytes: &[u8]) {
    read_bundle(bytes);
    read_bundle(&repaired(bytes));
}

fn read_bundle(bytes: &[u8]) {
    let Ok(read) = BundleDescriptor::from_bytes(bytes) else { return };
    let written = read.to_bytes();
    assert!(written.len() <= bytes.len(), "a later minor version may be longer, never shorter");
    assert_eq!(BundleDescriptor::from_bytes(&written).as_ref(), Ok(&read));
    assert_eq!(read.to_string().parse::<BundleDescriptor>().expect("it was just written"), read);
    show_bundle(&read);
}

/// Everything that a receiver might ask of a bundle before it opens it.
pub(crate) fn show_bundle(read: &BundleDescriptor) {
    assert!(!read.is_empty() && read.allocations() >= read.homes().len());
    for (name, layout) in read.tensors() {
        assert_eq!(read.layout(name), Some(layout));
        assert!(read.home(name).is_some());
        let _ = (layout.elements(), layout.is_contiguous(), layout.span_bytes());
    }
    let _ = (format!("{read:?}"), read.view());
}

/// The text form of a bundle.
pub fn bundle_text(text: &str) {
    let Ok(read) = text.parse::<BundleDescriptor>() else { return };
    assert_eq!(BundleDescriptor::from_bytes(&read.to_bytes()).as_ref(), Ok(&read));
    show_bundle(&read);
}

/// The binary form of a ring's descriptor.
pub fn ring(bytes: &[u8]) {
    for bytes in [bytes, &repaired(bytes)] {
        let Ok(read) = RingDescriptor::from_bytes(bytes) else { continue };
        let written = read.to_bytes();
        assert!(written.len() <= bytes.len(), "a later minor version may be longer, never shorter");
        assert_eq!(RingDescriptor::from_bytes(&written).as_ref(), Ok(&read));
        assert!(u128::from(read.slots()) * u128::from(read.slot_bytes()) <= u128::from(read.memory().len()));
        show(read.memory());
    }
}

/// The text form of a ring's descriptor.
pub fn ring_text(text: &str) {
    let Ok(read) = text.parse::<RingDescriptor>() else { return };
    assert_eq!(RingDescriptor::from_bytes(&read.to_bytes()).as_ref(), Ok(&read));
    assert_eq!(read.to_string().parse::<RingDescriptor>().expect("it was just written"), read);
}

/// Seeds of [`ring`].
pub fn ring_seeds() -> Vec<Seed> {
    rings().into_iter().map(|(name, ring)| (name, ring.to_bytes())).collect()
}

/// Seeds of [`ring_text`].
pub fn ring_text_seeds() -> Vec<Seed> {
    rings().into_iter().map(|(name, ring)| (name, ring.to_string().into_bytes())).collect()
}

/// One for each descriptor of memory that is large enough, and one with as many slots as lie in it.
fn rings() -> Vec<(&'static str, RingDescriptor)> {
    let slot = |memory: &Descriptor| memory.len() / 256 * 256;
    let mut rings: Vec<_> = described()
        .into_iter()
        .filter_map(|(name, memory)| Some((name, RingDescriptor::new(memory.clone(), 1, slot(&memory))?)))
        .collect();
    let memory = large_enough_for_slots();
    rings.extend(RingDescriptor::new(memory, 16, 256).map(|ring| ("sixteen-slots", ring)));
    rings
}

fn large_enough_for_slots() -> Descriptor {
    let extents = vec![DescribedExtent { size: 8192, generation: 0 }];
    Descriptor { len: 4096, offset: 0, extents, layout: None, ..plain_descriptor() }
}

/// The binary form of a table of tensors.
pub fn tensor_table(bytes: &[u8]) {
    for bytes in [bytes, &repaired(bytes)] {
        let Ok(read) = TensorTable::from_bytes(bytes) else { continue };
        assert_eq!(TensorTable::from_bytes(&read.to_bytes()).as_ref(), Ok(&read));
        assert!(read.check_fits(read.region_bytes()).is_ok());
        assert!(read.iter().all(|(name, offset, layout)| read.get(name) == Some((offset, layout))));
    }
}

/// Seeds of [`bundle`].
pub fn bundle_seeds() -> Vec<Seed> {
    bundles().into_iter().map(|(name, bundle)| (name, bundle.to_bytes())).collect()
}

/// Seeds of [`bundle_text`].
pub fn bundle_text_seeds() -> Vec<Seed> {
    bundles().into_iter().map(|(name, bundle)| (name, bundle.to_string().into_bytes())).collect()
}

/// Seeds of [`tensor_table`].
pub fn tensor_table_seeds() -> Vec<Seed> {
    let table = |bundle: &BundleDescriptor| bundle.contents().table().to_bytes();
    let mut seeds: Vec<Seed> = bundles().iter().map(|(name, bundle)| (*name, table(bundle))).collect();
    seeds.push(("empty", TensorTable::default().to_bytes()));
    seeds
}

fn bundles() -> Vec<(&'static str, BundleDescriptor)> {
    let plain = plain_bundle();
    let contents = plain.contents();
    let one = Contents { parts: contents.parts[..1].to_vec(), ..contents.clone() };
    let tensors: Vec<_> = contents.table().iter().collect();
    let first = |regions| {
        listed(tensors[..2].iter().map(|(name, at, layout)| (name, *at, (*layout).clone())), regions)
    };
    let layouts =
        described().into_iter().filter_map(|(name, descriptor)| Some((name, 64, descriptor.layout?)));
    let layouts: Vec<_> = layouts.collect();
    let extent = DescribedExtent { size: 1 << 20, generation: 7 };
    let many =
        Part { regions: Arc::new(vec![[extent]; 40].into_iter().collect()), ..contents.parts[0].clone() };
    let bundle = BundleDescriptor::new;
    vec![
        ("one-device", bundle(Contents { tensors: first(vec![0, 1]), ..one.clone() })),
        (
            "every-layout",
            bundle(Contents { tensors: listed(layouts.clone(), vec![1; layouts.len()]), ..one.clone() }),
        ),
        ("read-only", bundle(Contents { access: Access::ReadOnly, ..contents.clone() })),
        (
            "many-regions",
            bundle(Contents { parts: vec![many], tensors: first(vec![0, 39]), ..contents.clone() }),
        ),
        ("plain", plain),
    ]
}

fn described() -> Vec<(&'static str, Descriptor)> {
    let plain = plain_descriptor();
    let layout = |dtype, shape: &[u64], strides: &[u64]| {
        Some(TensorLayout::strided(dtype, shape, strides).expect("a seed is a layout"))
    };
    let extents = |count| vec![DescribedExtent { size: 1 << 21, generation: 77 }; count];
    vec![
        (
            "several-allocations",
            Descriptor { offset: 4096, len: 3 << 21, extents: extents(4), ..plain.clone() },
        ),
        ("many-allocations", Descriptor { len: 40 << 21, extents: extents(40), ..plain.clone() }),
        ("read-only-with-event", Descriptor { access: Access::ReadOnly, ready: true, ..plain.clone() }),
        (
            "host-and-physical-id",
            Descriptor {
                backend: "ascend".into(),
                home: DeviceIdentity::HostPhysical { host: SOMEBODY.host, physical: 3 },
                ..plain.clone()
            },
        ),
        (
            "socket-in-a-directory",
            Descriptor { broker: BrokerAddress::Path("/run/device-ipc/4711".into()), ..plain.clone() },
        ),
        ("tensor", Descriptor { layout: layout(Dtype::F32, &[4, 8, 32], &[256, 32, 1]), ..plain.clone() }),
        (
            "tensor-transposed",
            Descriptor { layout: layout(Dtype::BF16, &[32, 64], &[1, 32]), ..plain.clone() },
        ),
        (
            "tensor-with-offset",
            Descriptor {
                layout: layout(Dtype::F32, &[4, 8], &[32, 1]).and_then(|layout| layout.with_offset(7).ok()),
                ..plain.clone()
            },
        ),
        (
            "tensor-float4",
            Descriptor { layout: layout(Dtype::F4_E2M1FN_X2, &[64, 32], &[32, 1]), ..plain.clone() },
        ),
        ("tensor-empty", Descriptor { layout: layout(Dtype::U8, &[3, 0, 5], &[0, 5, 1]), ..plain.clone() }),
        ("tensor-scalar", Descriptor { layout: layout(Dtype::F64, &[], &[]), len: 8, ..plain.clone() }),
        ("tensor-64", Descriptor { layout: layout(Dtype::I8, &[1; 64], &[7; 64]), ..plain.clone() }),
        ("plain", plain),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_seed_of_a_descriptor_is_one() {
        for (name, bytes) in descriptor_seeds() {
            Descriptor::from_bytes(&bytes).unwrap_or_else(|error| panic!("{name}: {error}"));
            descriptor(&bytes);
        }
        for (name, text) in descriptor_text_seeds() {
            let text = str::from_utf8(&text).unwrap();
            text.parse::<Descriptor>().unwrap_or_else(|error| panic!("{name}: {error}"));
            descriptor_text(text);
        }
    }

    #[test]
    fn every_seed_of_a_bundle_or_a_table_is_one() {
        for (name, bytes) in bundle_seeds() {
            BundleDescriptor::from_bytes(&bytes).unwrap_or_else(|error| panic!("{name}: {error}"));
            bundle(&bytes);
        }
        for (name, text) in bundle_text_seeds() {
            let text = str::from_utf8(&text).unwrap();
            text.parse::<BundleDescriptor>().unwrap_or_else(|error| panic!("{name}: {error}"));
            bundle_text(text);
        }
        for (name, bytes) in tensor_table_seeds() {
            TensorTable::from_bytes(&bytes).unwrap_or_else(|error| panic!("{name}: {error}"));
            tensor_table(&bytes);
        }
    }

    #[test]
    fn every_seed_of_a_ring_is_one() {
        assert!(ring_seeds().iter().any(|(name, _)| *name == "sixteen-slots"));
        assert!(ring_seeds().len() > 1, "there is memory that is large enough");
        for (name, bytes) in ring_seeds() {
            RingDescriptor::from_bytes(&bytes).unwrap_or_else(|error| panic!("{name}: {error}"));
            ring(&bytes);
        }
        for (name, text) in ring_text_seeds() {
            let text = str::from_utf8(&text).unwrap();
            text.parse::<RingDescriptor>().unwrap_or_else(|error| panic!("{name}: {error}"));
            ring_text(text);
        }
    }
}
