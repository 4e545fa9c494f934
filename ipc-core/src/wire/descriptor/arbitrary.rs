//! Arbitrary descriptors, for the tests of all of them.

use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use proptest::sample::Index;

use super::*;
use crate::model::device::HostId;
use crate::model::one_or_many::OneOrMany;
use crate::model::tensor::{Dtype, MAX_DIMENSIONS, TensorTable};
use crate::wire::{BrokerAddress, Token};

pub(crate) fn identity() -> impl Strategy<Value = ProcessIdentity> {
    (any::<[u8; 16]>(), any::<[u8; 16]>(), any::<(u64, u64, u32, u64)>()).prop_map(
        |(host, boot, (pid_namespace, net_namespace, pid, start_time))| ProcessIdentity {
            host: HostId::from_bytes(host),
            boot,
            pid_namespace,
            net_namespace,
            pid,
            start_time,
        },
    )
}

fn home() -> impl Strategy<Value = DeviceIdentity> {
    prop_oneof![
        any::<[u8; 16]>().prop_map(DeviceIdentity::Uuid),
        any::<([u8; 16], u32)>().prop_map(|(host, physical)| DeviceIdentity::HostPhysical {
            host: HostId::from_bytes(host),
            physical,
        }),
    ]
}

fn broker() -> impl Strategy<Value = BrokerAddress> {
    prop_oneof![
        vec(any::<u8>(), 1..=107).prop_map(|name| BrokerAddress::Abstract(name.into())),
        vec(1_u8.., 0..=106).prop_map(|mut name| {
            name.insert(0, b'/');
            BrokerAddress::Path(PathBuf::from(OsString::from_vec(name)).into())
        }),
    ]
}

/// One to a few allocations, and the offset and length of a region in them.
fn region() -> impl Strategy<Value = (Vec<DescribedExtent>, u64, u64)> {
    let extent = (1_u64..1 << 48, any::<u64>());
    vec(extent, 1..=5).prop_flat_map(|extents| {
        let extents: Vec<_> =
            extents.into_iter().map(|(size, generation)| DescribedExtent { size, generation }).collect();
        let all: u64 = extents.iter().map(|extent| extent.size).sum();
        (0..extents[0].size).prop_flat_map(move |offset| {
            (Just(extents.clone()), Just(offset), prop_oneof![1..=all - offset, Just(all - offset)])
        })
    })
}

/// A tensor that may not fit its region.
pub(super) fn layout() -> impl Strategy<Value = TensorLayout> {
    let dtype = proptest::sample::select(Dtype::ALL);
    let dimensions = vec((0_u64..6, 0_u64..50), 0..=5);
    let many = vec((Just(1_u64), any::<u64>()), MAX_DIMENSIONS);
    let dimensions = prop_oneof![9 => dimensions.boxed(), 1 => many.boxed()];
    (dtype, dimensions, prop_oneof![Just(0), 0_u64..300]).prop_map(|(dtype, dimensions, offset)| {
        let (shape, strides): (Vec<u64>, Vec<u64>) = dimensions.into_iter().unzip();
        let layout = TensorLayout::strided(dtype, shape, strides).expect("its sizes are small");
        layout.with_element_offset(offset).expect("it is small too")
    })
}

fn part() -> impl Strategy<Value = Part> {
    let extent = (1_u64..1 << 40, any::<u64>());
    let extent = extent.prop_map(|(size, generation)| DescribedExtent { size, generation });
    let regions = vec(vec(extent, 1..=3), 1..=4);
    let regions = regions.prop_map(|regions| Arc::new(regions.into_iter().collect::<DescribedRegions>()));
    (home(), any::<([u8; 16], bool)>(), regions).prop_map(|(home, (token, ready), regions)| Part {
        home,
        export: ExportId(0),
        token: Token::from_bytes(token),
        ready,
        regions: PartRegions::Many(regions),
    })
}

fn name() -> impl Strategy<Value = String> {
    prop_oneof![9 => "[a-z.0-9]{1,12}", 1 => ".{1,40}", 1 => Just("ü".repeat(512))]
}

type Memories = (OneOrMany<Part>, Memory, Option<RingSlots>);

/// Named tensors in the regions of one to three devices.
fn named() -> impl Strategy<Value = Memories> {
    let tensors = btree_map(name(), (any::<(Index, u64)>(), layout()), 1..=12);
    (any::<u64>(), vec(part(), 1..=3), tensors).prop_map(|(first, mut parts, named)| {
        for (index, part) in parts.iter_mut().enumerate() {
            part.export = ExportId(first.wrapping_add(index as u64));
        }
        let regions = parts.iter().flat_map(|part| part.regions.as_regions().iter());
        let bytes: Vec<u64> = regions.map(|region| region.iter().map(|extent| extent.size).sum()).collect();
        let mut regions = Vec::new();
        let mut tensors = Vec::new();
        for (name, ((region, at), layout)) in named {
            let region = region.index(bytes.len());
            // A tensor that does not fit becomes a scalar of one byte.
            let fits = layout.span_bytes() <= bytes[region];
            let layout = if fits { layout } else { TensorLayout::contiguous(Dtype::U8, []).unwrap() };
            let room = bytes[region] - layout.span_bytes();
            tensors.push((name, at.checked_rem(room + 1).unwrap(), layout));
            regions.push(region as u32);
        }
        let tensors = Arc::new(Tensors::new(TensorTable::new(tensors).unwrap(), regions));
        (parts.into_iter().collect(), Memory::Tensors(tensors), None)
    })
}

/// One region, with a tensor, a ring or neither.
fn unnamed() -> impl Strategy<Value = Memories> {
    let given = (home(), any::<(u64, [u8; 16], bool)>(), region());
    (given, proptest::option::of(layout()), any::<(bool, u16)>()).prop_map(
        |((home, (export, token, ready), (extents, offset, len)), layout, (is_ring, slots))| {
            let (export, token) = (ExportId(export), Token::from_bytes(token));
            let part = Part { home, export, token, ready, regions: PartRegions::One(extents) };
            let slots = u32::from(slots).max(1);
            let each = len / u64::from(slots) / 256 * 256;
            let ring = if is_ring { RingSlots::new(slots, each, len) } else { None };
            let room = ring.map_or(len, |ring| ring.slot_bytes());
            let layout = layout.filter(|layout| layout.check_fits(room).is_ok());
            let memory = Memory::Region(DescribedRegion { offset, len, layout });
            (OneOrMany::One(part), memory, ring)
        },
    )
}

/// Addresses of both families, or none.
fn network() -> impl Strategy<Value = Vec<SocketAddr>> {
    let address = (any::<IpAddr>(), 1_u16..).prop_map(|(ip, port)| SocketAddr::new(ip.to_canonical(), port));
    vec(address.prop_filter("a process has it", |address| is_reachable(*address)), 0..=MAX_ADDRESSES)
}

pub(crate) fn descriptor() -> impl Strategy<Value = Descriptor> {
    let given = ("[A-Za-z0-9_-]{1,32}", identity(), broker(), any::<bool>(), network());
    (given, prop_oneof![unnamed().boxed(), named().boxed()]).prop_map(
        |((backend, exporter, broker, writable, network), (parts, memory, ring))| {
            let access = if writable { Access::ReadWrite } else { Access::ReadOnly };
            let backend = BackendName::read(backend.as_bytes()).unwrap();
            let network = network.into();
            Descriptor::new(Contents { backend, exporter, broker, access, parts, memory, ring, network })
        },
    )
}

pub(super) fn tensors() -> impl Strategy<Value = Vec<(String, u64, TensorLayout)>> {
    btree_map(name(), (0_u64..1 << 40, layout()), 0..=12)
        .prop_map(|named| named.into_iter().map(|(name, (offset, layout))| (name, offset, layout)).collect())
}
