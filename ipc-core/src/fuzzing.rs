//! Entry points of the fuzz targets in `fuzz/`: the decoders of all data from other processes.
//!
//! Compiled with the feature `fuzzing`, which is not part of the public interface. Each function panics if the data is not
//! handled as `docs/spec/` specifies.

use std::sync::Arc;

use crate::backend::Access;
use crate::model::device::{DeviceIdentity, HostId};
use crate::model::one_or_many::OneOrMany;
use crate::model::tensor::{Dtype, TensorLayout, TensorTable};
use crate::os::process::ProcessIdentity;
use crate::wire::descriptor::{
    BackendName, Contents, DescribedExtent, DescribedRegion, Descriptor, ExportId, Memory, Part, PartRegions,
    TEXT_PREFIX, Tensors,
};
use crate::wire::protocol::encode;
use crate::wire::relay::{Relayed, RelayedState};
use crate::wire::remote::{RemoteOpen, RemoteRefusal, RemoteReply, RemoteRequest, RingEnd};
use crate::wire::ring::RingSlots;
use crate::wire::{BrokerAddress, Grant, Token};

pub use crate::sharing::fuzzing::{Exporter, ForeignHandle, HostileExporter, Importer, reply, request};

/// A named input from which a target starts.
pub type Seed = (&'static str, Vec<u8>);

/// Descriptors, tables of tensors and grants, in binary and as text; what can be read is written so that it reads the same.
pub fn descriptor(bytes: &[u8]) {
    // Random bytes rarely have a correct checksum, so it is corrected for a second try.
    for bytes in [bytes, &repaired(bytes)] {
        read_binary(bytes);
        read_table(bytes);
        read_grant(bytes);
    }
    if let Ok(text) = str::from_utf8(bytes) {
        read_text(text);
        read_text(&format!("{TEXT_PREFIX}{text}"));
    }
}

/// Returns the bytes with a correct checksum.
fn repaired(bytes: &[u8]) -> Vec<u8> {
    let mut repaired = bytes.to_vec();
    if let Some((covered, checksum)) = repaired.split_last_chunk_mut::<4>() {
        *checksum = crc32fast::hash(covered).to_le_bytes();
    }
    repaired
}

fn read_binary(bytes: &[u8]) {
    let Ok(read) = Descriptor::from_bytes(bytes) else { return };
    let written = read.to_bytes();
    assert!(written.len() <= bytes.len(), "sections of a later version may be skipped, and none is added");
    assert_eq!(Descriptor::from_bytes(&written).as_ref(), Ok(&read));
    assert_eq!(read.to_string().parse::<Descriptor>().expect("it was just written"), read);
    show(&read);
}

fn read_table(bytes: &[u8]) {
    let Ok(read) = TensorTable::from_bytes(bytes) else { return };
    assert_eq!(TensorTable::from_bytes(&read.to_bytes()).as_ref(), Ok(&read));
    assert!(read.check_fits(read.region_bytes()).is_ok());
    assert!(read.iter().all(|(name, offset, layout)| read.get(name) == Some((offset, layout))));
}

fn read_grant(bytes: &[u8]) {
    let Ok(read) = Grant::from_bytes(bytes) else { return };
    assert_eq!(read.to_bytes(), bytes);
    for (_, token) in read.parts() {
        let token = data_encoding::HEXLOWER.encode(&token.to_bytes());
        assert!(!format!("{read:?}").contains(&token), "the token is shown");
    }
}

fn read_text(text: &str) {
    if let Ok(read) = text.parse::<Grant>() {
        read_grant(&read.to_bytes());
    }
    let Ok(read) = text.parse::<Descriptor>() else { return };
    assert_eq!(Descriptor::from_bytes(&read.to_bytes()).as_ref(), Ok(&read));
    show(&read);
}

/// Calls every method that an importer may call before it opens the descriptor.
pub(crate) fn show(read: &Descriptor) {
    let contents = read.contents();
    let shown = format!("{read:?}");
    let others = [
        data_encoding::HEXLOWER.encode(read.exporter().host.as_bytes()),
        data_encoding::HEXLOWER.encode(&read.exporter().boot),
        read.backend().to_owned(),
        contents.broker.to_string(),
    ];
    for part in contents.parts.iter() {
        let token = data_encoding::HEXLOWER.encode(&part.token.to_bytes());
        assert!(
            !shown.contains(&token) || others.iter().any(|other| other.contains(&token)),
            "the token is shown"
        );
    }
    if let Some(layout) = read.layout() {
        let room = read.ring().map_or(read.len(), |ring| ring.slot_bytes());
        assert!(layout.check_fits(room).is_ok());
    }
    if let Some(ring) = read.ring() {
        assert!(u128::from(ring.slots()) * u128::from(ring.slot_bytes()) <= u128::from(read.len()));
    }
    assert!(!read.is_empty() && read.allocations() >= read.homes().len());
    for (name, layout) in read.tensors() {
        assert_eq!(read.layout_of(name), Some(layout));
        assert!(read.home_of(name).is_some());
        let _ = (layout.elements(), layout.is_contiguous(), layout.start_bytes(), layout.span_bytes());
    }
    let _ = (contents.broker.to_socket_address(), read.view());
}

/// Decodes the data that an end of a channel receives: the peer's hello, and its messages, also from another host.
pub fn channel(bytes: &[u8]) {
    crate::patterns::channel::fuzzing::greeting(bytes);
    crate::patterns::channel::fuzzing::packet(bytes);
    relay(bytes);
}

/// Decodes the messages by which a channel passes between two hosts.
pub(crate) fn relay(bytes: &[u8]) {
    if let Ok(read) = Relayed::decode(bytes) {
        let written = encode(&read).expect("it was decoded");
        assert_eq!(Relayed::decode(&written).as_ref(), Ok(&read));
    }
}

/// Returns seeds of [`relay`].
pub(crate) fn relay_seeds() -> Vec<Seed> {
    let state = RelayedState { received: 300, discarded: 1, settled: 2, closed: 1, seen: 3 };
    let grants = vec![(ExportId(1), Token::from_bytes([1; 16])), (ExportId(2), Token::from_bytes([2; 16]))];
    let seeds = [
        ("relayed-part", Relayed::Part(b"a part")),
        ("relayed-last", Relayed::Last(b"the last part")),
        ("relayed-state", Relayed::State(state)),
        ("relayed-ended", Relayed::Ended(grants)),
    ];
    seeds.into_iter().map(|(name, seed)| (name, encode(&seed).expect("a seed is encodable"))).collect()
}

/// Decodes the messages of copies between hosts, in both directions.
pub fn remote(bytes: &[u8]) {
    if let Ok(request) = RemoteRequest::decode(bytes) {
        let written = encode(&request).expect("it was decoded");
        assert_eq!(RemoteRequest::decode(&written).as_ref(), Ok(&request));
    }
    if let Ok(reply) = RemoteReply::decode(bytes) {
        let written = encode(&reply).expect("it was decoded");
        assert_eq!(RemoteReply::decode(&written).as_ref(), Ok(&reply));
    }
}

/// Returns the seeds of [`remote`].
pub fn remote_seeds() -> Vec<Seed> {
    fn message(message: &impl serde::Serialize) -> Vec<u8> {
        encode(message).expect("a seed is encodable")
    }
    let open = RemoteOpen {
        engine: "nixl".into(),
        wait_ms: 27_000,
        limit_ms: 30_000,
        host: SOMEBODY.host,
        pid: SOMEBODY.pid,
        program: "trainer".into(),
    };
    let refused = |refusal| message(&RemoteReply::Refused(refusal));
    vec![
        ("open", message(&RemoteRequest::Open(open.clone()))),
        ("join", message(&RemoteRequest::Join(open))),
        ("acknowledge", message(&RemoteRequest::Acknowledge { sequence: 70_000 })),
        ("ping", message(&RemoteRequest::Ping)),
        ("release", message(&RemoteRequest::Release)),
        ("leave", message(&RemoteRequest::Leave)),
        ("granted", message(&RemoteReply::Granted { regions: 3 })),
        ("regions", message(&RemoteReply::Regions { metadata: vec![vec![1; 40], vec![], vec![2; 200]] })),
        ("pong", message(&RemoteReply::Pong)),
        ("joined", message(&RemoteReply::Joined { sequence: 70_000 })),
        ("published", message(&RemoteReply::Published { sequence: 70_000 })),
        ("confirmed", message(&RemoteReply::Confirmed { sequence: 70_000 })),
        ("closed", message(&RemoteReply::Ended(RingEnd::Closed))),
        ("dismissed", message(&RemoteReply::Ended(RingEnd::Dismissed))),
        ("dropped", refused(RemoteRefusal::Dropped)),
        ("other-engine", refused(RemoteRefusal::OtherEngine { engine: "mooncake".into() })),
        ("not-ready", refused(RemoteRefusal::NotReady)),
        ("stale", refused(RemoteRefusal::Stale { detail: "number 2, not 1".into() })),
        ("failed", refused(RemoteRefusal::Failed { detail: "out of memory".into() })),
        ("no-ring", refused(RemoteRefusal::NoRing)),
    ]
}

/// Returns the seeds of [`channel`].
pub fn channel_seeds() -> Vec<Seed> {
    let mut seeds = crate::patterns::channel::fuzzing::seeds();
    seeds.extend(relay_seeds());
    seeds
}

/// Returns the seeds of [`descriptor`].
pub fn descriptor_seeds() -> Vec<(String, Vec<u8>)> {
    let mut seeds = Vec::new();
    let kinds = [("region", regions()), ("ring", rings()), ("tensors", named())];
    for (kind, (name, descriptor)) in
        kinds.into_iter().flat_map(|(kind, all)| all.into_iter().map(move |one| (kind, one)))
    {
        seeds.push((format!("{kind}-{name}"), descriptor.to_bytes()));
        seeds.push((format!("{kind}-{name}-text"), descriptor.to_string().into_bytes()));
    }
    for (name, descriptor) in named() {
        let table = descriptor.contents().table().expect("its tensors have names");
        seeds.push((format!("table-{name}"), table.to_bytes()));
    }
    seeds.push(("table-empty".into(), TensorTable::default().to_bytes()));
    for (name, count) in [("grant", 1), ("grant-of-two-parts", 2)] {
        let parts = (1..=count).map(|part| (ExportId(part), Token::from_bytes([part as u8; 16])));
        seeds.push((name.into(), Grant::new(&SOMEBODY, parts.collect()).to_bytes()));
    }
    seeds
}

/// Returns the seeds of [`Exporter::serve`].
pub fn request_seeds() -> Vec<Seed> {
    crate::sharing::fuzzing::request_seeds()
}

/// Returns the seeds of [`Importer::open`].
pub fn reply_seeds() -> Vec<Seed> {
    crate::sharing::fuzzing::reply_seeds()
}

/// Returns the seeds of [`HostileExporter::run`].
pub fn page_seeds() -> Vec<Seed> {
    crate::sharing::fuzzing::page_seeds()
}

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
        broker: BrokerAddress::Abstract(b"device-ipc-4711-0123456789abcdef".to_vec()),
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
        network: Vec::new(),
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

/// Returns a ring of one slot in the region, and one with the maximum number of slots.
fn rings() -> Vec<(&'static str, Descriptor)> {
    let ring = |memory: &Descriptor, slots, each| {
        let slots = RingSlots::new(slots, each, memory.len())?;
        Some(memory.with(|contents| contents.ring = Some(slots)))
    };
    let mut rings: Vec<_> = regions()
        .into_iter()
        .filter_map(|(name, memory)| Some((name, ring(&memory, 1, memory.len() / 256 * 256)?)))
        .collect();
    rings.extend(ring(&plain_descriptor(), 16, 256).map(|ring| ("sixteen-slots", ring)));
    rings
}

fn named() -> Vec<(&'static str, Descriptor)> {
    let plain = plain_tensors();
    let (contents, table) = (plain.contents(), plain.contents().table().expect("its tensors have names"));
    let tensors: Vec<_> = table.iter().collect();
    let first = |regions| {
        listed(tensors[..2].iter().map(|(name, at, layout)| (name, *at, (*layout).clone())), regions)
    };
    let layouts = regions().into_iter().filter_map(|(name, one)| Some((name, 64, one.layout()?.clone())));
    let layouts: Vec<_> = layouts.collect();
    let extent = DescribedExtent { size: 1 << 20, generation: 7 };
    let many = PartRegions::Many(Arc::new(vec![[extent]; 40].into_iter().collect()));
    let with = |parts: Vec<Part>, tensors| {
        plain.with(|contents| {
            contents.parts = parts.into_iter().collect();
            contents.memory = Memory::Tensors(tensors);
        })
    };
    let one = contents.parts[..1].to_vec();
    vec![
        ("one-device", with(one.clone(), first(vec![0, 1]))),
        ("every-layout", with(one, listed(layouts.clone(), vec![1; layouts.len()]))),
        ("read-only", plain.with(|contents| contents.access = Access::ReadOnly)),
        ("many-regions", with(vec![Part { regions: many, ..contents.parts[0].clone() }], first(vec![0, 39]))),
        ("plain", plain),
    ]
}

fn regions() -> Vec<(&'static str, Descriptor)> {
    let plain = plain_descriptor();
    let layout = |dtype, shape: &[u64], strides: &[u64]| {
        TensorLayout::strided(dtype, shape, strides).expect("a seed is a layout")
    };
    let region = |offset, len, extents: usize| {
        plain.with(|contents| {
            let extent = DescribedExtent { size: 1 << 21, generation: 77 };
            contents.parts[0].regions = PartRegions::One(vec![extent; extents]);
            contents.memory = Memory::Region(DescribedRegion { offset, len, layout: None });
        })
    };
    let tensor = |len, layout: TensorLayout| {
        plain.with(|contents| {
            contents.memory = Memory::Region(DescribedRegion { offset: 0, len, layout: Some(layout) });
        })
    };
    vec![
        ("several-allocations", region(4096, 3 << 21, 4)),
        ("many-allocations", region(0, 40 << 21, 40)),
        (
            "read-only-with-event",
            plain.with(|contents| {
                contents.access = Access::ReadOnly;
                contents.parts[0].ready = true;
            }),
        ),
        (
            "host-and-physical-id",
            plain.with(|contents| {
                contents.backend = BackendName::new("acme").expect("it is short");
                contents.parts[0].home = DeviceIdentity::HostPhysical { host: SOMEBODY.host, physical: 3 };
            }),
        ),
        (
            "socket-in-a-directory",
            plain.with(|contents| contents.broker = BrokerAddress::Path("/run/device-ipc/4711".into())),
        ),
        (
            "network-addresses",
            plain.with(|contents| {
                let addresses = [([10, 0, 0, 1], 4711).into(), ([0xfd00, 0, 0, 0, 0, 0, 0, 7], 4711).into()];
                contents.network = addresses.into();
            }),
        ),
        ("tensor", tensor(4096, layout(Dtype::F32, &[4, 8, 32], &[256, 32, 1]))),
        ("tensor-transposed", tensor(4096, layout(Dtype::BF16, &[32, 64], &[1, 32]))),
        (
            "tensor-with-offset",
            tensor(4096, layout(Dtype::F32, &[4, 8], &[32, 1]).with_element_offset(7).expect("it is small")),
        ),
        ("tensor-float4", tensor(4096, layout(Dtype::F4_E2M1FN_X2, &[64, 32], &[32, 1]))),
        ("tensor-empty", tensor(4096, layout(Dtype::U8, &[3, 0, 5], &[0, 5, 1]))),
        ("tensor-scalar", tensor(8, layout(Dtype::F64, &[], &[]))),
        ("tensor-64", tensor(4096, layout(Dtype::I8, &[1; 64], &[7; 64]))),
        ("plain", plain),
    ]
}

#[cfg(test)]
mod tests;
