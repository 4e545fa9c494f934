//! The sections of a descriptor. `docs/spec/descriptor.md` specifies them; change both together.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::Arc;

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::envelope::{self, ENVELOPE_BYTES, checked_sections, close};
use super::exporter::{self, Exporter};
use super::section::{self, SECTION_HEAD_BYTES, Section, bad, check_end, take, take_head};
use super::{
    Contents, DescribedExtent, DescribedRegion, DescribedRegions, Descriptor, DescriptorError, ExportId,
    Memory, Part, PartRegions, Tensors, network,
};
use crate::model::device::{DeviceIdentity, HostId};
use crate::model::layout::{Dtype, LayoutError, MAX_DIMENSIONS, TensorLayout};
use crate::model::one_or_many::OneOrMany;
use crate::wire::ring::RingSlots;
use crate::wire::{MAX_HANDLES, Token};

/// Maximum number of adjacent allocations of a region.
pub const MAX_EXTENTS: usize = 2048;

/// Maximum number of home devices of a descriptor.
pub const MAX_REGIONS_SECTIONS: usize = 64;

/// Maximum number of allocations of a descriptor.
pub const MAX_REGIONS_ALLOCATIONS: usize = MAX_HANDLES;

const HOME_UUID: u8 = 1;
const HOME_HOST_PHYSICAL: u8 = 2;
const REGIONS_READY: u8 = 1 << 0;

/// The regions on one device. `IntoBytes` and `Unaligned` prove at compile time that this struct and the following ones have no
/// padding.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RegionsHead {
    export: U64,
    token: [u8; 16],
    home_kind: u8,
    home: [u8; 16],
    home_physical: U32,
    flags: u8,
    regions: U32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct ExtentEntry {
    size: U64,
    generation: U64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RegionBody {
    offset: U64,
    len: U64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct LayoutHead {
    dtype: u8,
    storage_format: u8,
    dimensions: u8,
    offset: U64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RingBody {
    slots: U32,
    slot_bytes: U64,
}

impl Descriptor {
    /// Returns the binary form.
    pub fn to_bytes(&self) -> Vec<u8> {
        let contents = self.contents();
        let total = encoded_bytes(contents, None);
        let mut bytes = envelope::begin(total);
        exporter::write(contents, &mut bytes);
        contents.parts.iter().for_each(|part| write_regions(part, &mut bytes));
        match &contents.memory {
            Memory::Region(region) => {
                section::begin(section::REGION, size_of::<RegionBody>(), &mut bytes);
                let body = RegionBody { offset: U64::new(region.offset), len: U64::new(region.len) };
                bytes.extend_from_slice(body.as_bytes());
                if let Some(layout) = &region.layout {
                    write_layout(layout, &mut bytes);
                }
            }
            Memory::Tensors(tensors) => tensors.write(&mut bytes),
        }
        if let Some(ring) = &contents.ring {
            section::begin(section::RING, size_of::<RingBody>(), &mut bytes);
            let body = RingBody { slots: U32::new(ring.slots()), slot_bytes: U64::new(ring.slot_bytes()) };
            bytes.extend_from_slice(body.as_bytes());
        }
        if !contents.network.is_empty() {
            network::write(&contents.network, &mut bytes);
        }
        close(&mut bytes);
        debug_assert_eq!(bytes.len(), total);
        bytes
    }

    /// Decodes the binary form. The bytes may come from any process.
    ///
    /// # Errors
    ///
    /// [`DescriptorError`] with the reason.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, DescriptorError> {
        let mut rest = checked_sections(bytes)?;
        let mut sections = Sections::default();
        let mut last = 0;
        while let Some(section) = Section::next(&mut rest)? {
            if !(section::EXPORTER..=section::NETWORK).contains(&section.kind) {
                section.skip()?;
                continue;
            }
            let repeats = section.kind == last && section.kind == section::REGIONS;
            if section.kind <= last && !repeats {
                return Err(bad("sections", "they are not in the order of their kinds, or one is repeated"));
            }
            last = section.kind;
            sections.read(&section)?;
        }
        sections.finish().map(Self::new)
    }
}

/// Returns the size of the binary form in bytes; `tensors` is the size of the named tensors, if they are not encoded yet.
pub(crate) fn encoded_bytes(contents: &Contents, tensors: Option<usize>) -> usize {
    let parts: usize = contents.parts.iter().map(|part| SECTION_HEAD_BYTES + regions_bytes(part)).sum();
    let memory = match &contents.memory {
        Memory::Region(DescribedRegion { layout, .. }) => {
            let layout = layout.as_ref().map_or(0, |layout| SECTION_HEAD_BYTES + layout_bytes(layout));
            size_of::<RegionBody>() + layout
        }
        Memory::Tensors(listed) => tensors.unwrap_or_else(|| listed.section_bytes()),
    };
    let ring = contents.ring.map_or(0, |_| SECTION_HEAD_BYTES + size_of::<RingBody>());
    let network = match &*contents.network {
        [] => 0,
        addresses => SECTION_HEAD_BYTES + network::body_bytes(addresses),
    };
    ENVELOPE_BYTES
        + SECTION_HEAD_BYTES
        + exporter::body_bytes(contents)
        + parts
        + SECTION_HEAD_BYTES
        + memory
        + ring
        + network
}

fn regions_bytes(part: &Part) -> usize {
    let regions = part.regions.as_regions();
    size_of::<RegionsHead>()
        + regions.len() * size_of::<U32>()
        + regions.allocations() * size_of::<ExtentEntry>()
}

fn layout_bytes(layout: &TensorLayout) -> usize {
    size_of::<LayoutHead>() + layout.shape().len() * 16
}

fn write_regions(part: &Part, bytes: &mut Vec<u8>) {
    let (home_kind, home, physical) = match part.home {
        DeviceIdentity::Uuid(uuid) => (HOME_UUID, uuid, 0),
        DeviceIdentity::HostPhysical { host, physical } => (HOME_HOST_PHYSICAL, *host.as_bytes(), physical),
    };
    let regions = part.regions.as_regions();
    let head = RegionsHead {
        export: U64::new(part.export.0),
        token: part.token.to_bytes(),
        home_kind,
        home,
        home_physical: U32::new(physical),
        flags: if part.ready { REGIONS_READY } else { 0 },
        regions: U32::new(regions.len() as u32),
    };
    section::begin(section::REGIONS, regions_bytes(part), bytes);
    bytes.extend_from_slice(head.as_bytes());
    for region in regions.iter() {
        bytes.extend_from_slice(&(region.len() as u32).to_le_bytes());
        for extent in region {
            let entry = ExtentEntry { size: U64::new(extent.size), generation: U64::new(extent.generation) };
            bytes.extend_from_slice(entry.as_bytes());
        }
    }
}

fn write_layout(layout: &TensorLayout, bytes: &mut Vec<u8>) {
    let head = LayoutHead {
        dtype: layout.dtype().code(),
        storage_format: 0,
        dimensions: layout.shape().len() as u8,
        offset: U64::new(layout.element_offset()),
    };
    section::begin(section::LAYOUT, layout_bytes(layout), bytes);
    bytes.extend_from_slice(head.as_bytes());
    for number in layout.shape().iter().chain(layout.strides()) {
        bytes.extend_from_slice(&number.to_le_bytes());
    }
}

/// The sections that were decoded so far.
#[derive(Default)]
struct Sections {
    exporter: Option<Exporter>,
    parts: Parts,
    region: Option<(u64, u64)>,
    layout: Option<TensorLayout>,
    tensors: Option<Arc<Tensors>>,
    ring: Option<(u32, u64)>,
    network: Vec<SocketAddr>,
}

struct Parts {
    list: OneOrMany<Part>,
    allocations_left: usize,
}

impl Default for Parts {
    fn default() -> Self {
        Self { list: OneOrMany::NONE, allocations_left: MAX_REGIONS_ALLOCATIONS }
    }
}

impl Sections {
    fn read(&mut self, section: &Section<'_>) -> Result<(), DescriptorError> {
        let mut body = section.body;
        match section.kind {
            section::EXPORTER => self.exporter = Some(exporter::read(&mut body)?),
            section::REGIONS => self.parts.read(&mut body)?,
            section::REGION => {
                let region = take_head::<RegionBody>(&mut body)?;
                self.region = Some((region.offset.get(), region.len.get()));
            }
            section::LAYOUT => self.layout = Some(read_layout(&mut body)?),
            section::TENSORS => self.tensors = Some(Tensors::read(self.parts.region_bytes()?, &mut body)?),
            section::RING => {
                let ring = take_head::<RingBody>(&mut body)?;
                self.ring = Some((ring.slots.get(), ring.slot_bytes.get()));
            }
            _ => self.network = network::read(&mut body)?,
        }
        check_end(body)
    }

    fn finish(self) -> Result<Contents, DescriptorError> {
        let missing = |what| bad("sections", what);
        let exporter = self.exporter.ok_or_else(|| missing("there is no exporter"))?;
        let parts = self.parts.list;
        if parts.is_empty() {
            return Err(missing("there are no regions"));
        }
        if parts.len() > 1 {
            check_exports(&parts)?;
        }
        let memory = match (self.region, self.tensors) {
            (Some(region), None) => Memory::Region(region_in(&parts, region, self.layout)?),
            (None, Some(tensors)) if self.layout.is_none() => {
                if tensors.table().is_empty() {
                    return Err(bad("tensors", "there are none"));
                }
                Memory::Tensors(tensors)
            }
            _ => return Err(missing("there is not one of a region and a table of tensors")),
        };
        let ring = match (self.ring, &memory) {
            (None, _) => None,
            (Some(_), Memory::Tensors(_)) => return Err(missing("a ring lies in a region")),
            (Some((slots, each)), Memory::Region(region)) => {
                if let Some(layout) = &region.layout {
                    layout.check_fits(each)?;
                }
                let ring = RingSlots::new(slots, each, region.len);
                Some(ring.ok_or_else(|| {
                    let len = region.len;
                    bad("slots", &format!("{slots} slots of {each} B in {len} B, 256 B or a multiple each"))
                })?)
            }
        };
        let Exporter { identity, access, backend, broker } = exporter;
        Ok(Contents {
            backend,
            exporter: identity,
            broker,
            access,
            parts,
            memory,
            ring,
            network: self.network.into(),
        })
    }
}

impl Parts {
    fn read(&mut self, body: &mut &[u8]) -> Result<(), DescriptorError> {
        if self.list.len() == MAX_REGIONS_SECTIONS {
            return Err(bad("regions", &format!("they are on more than {MAX_REGIONS_SECTIONS} devices")));
        }
        let head = take_head::<RegionsHead>(body)?;
        if head.flags & !REGIONS_READY != 0 {
            return Err(DescriptorError::UnknownFeatures { flags: u16::from(head.flags) });
        }
        let regions = match head.regions.get() {
            0 => return Err(bad("regions", "a device has none")),
            1 => {
                let mut extents = Vec::new();
                self.read_region(body, &mut extents)?;
                PartRegions::One(extents)
            }
            count => {
                let mut regions = DescribedRegions::default();
                (0..count).try_for_each(|_| regions.add(|all| self.read_region(body, all)))?;
                PartRegions::Many(Arc::new(regions))
            }
        };
        self.list.push(Part {
            home: read_home(head.home_kind, head.home, head.home_physical.get())?,
            export: ExportId(head.export.get()),
            token: Token::from_bytes(head.token),
            ready: head.flags & REGIONS_READY != 0,
            regions,
        });
        Ok(())
    }

    fn read_region(
        &mut self,
        body: &mut &[u8],
        extents: &mut Vec<DescribedExtent>,
    ) -> Result<(), DescriptorError> {
        let count = take_head::<U32>(body)?.get() as usize;
        if count == 0 || count > MAX_EXTENTS {
            return Err(bad("allocations", &format!("there are {count}, not 1 to {MAX_EXTENTS}")));
        }
        self.allocations_left = self
            .allocations_left
            .checked_sub(count)
            .ok_or_else(|| bad("allocations", &format!("there are more than {MAX_REGIONS_ALLOCATIONS}")))?;
        let bytes = take(body, count * size_of::<ExtentEntry>())?;
        let entries =
            <[ExtentEntry]>::ref_from_bytes(bytes).map_err(|_| bad("allocations", "they are cut off"))?;
        if entries.iter().any(|entry| entry.size.get() == 0) {
            return Err(bad("allocations", "one has no bytes"));
        }
        let described = |entry: &ExtentEntry| DescribedExtent {
            size: entry.size.get(),
            generation: entry.generation.get(),
        };
        extents.extend(entries.iter().map(described));
        Ok(())
    }

    /// Returns the size of each region in bytes, over all parts.
    fn region_bytes(&self) -> Result<Vec<u64>, DescriptorError> {
        let regions = self.list.iter().flat_map(|part| part.regions.as_regions().iter());
        regions.map(allocated_bytes).collect()
    }
}

fn allocated_bytes(region: &[DescribedExtent]) -> Result<u64, DescriptorError> {
    let bytes = region.iter().try_fold(0_u64, |sum, extent| sum.checked_add(extent.size));
    bytes.ok_or_else(|| bad("region", "its allocations do not fit 64 bits"))
}

/// Returns a checked range of the only region of the only part.
fn region_in(
    parts: &[Part],
    (offset, len): (u64, u64),
    layout: Option<TensorLayout>,
) -> Result<DescribedRegion, DescriptorError> {
    let [Part { regions, .. }] = parts else { return Err(bad("region", "it is on several devices")) };
    let mut regions = regions.as_regions().iter();
    let (Some(extents), None) = (regions.next(), regions.next()) else {
        return Err(bad("region", "there are several"));
    };
    let allocated = allocated_bytes(extents)?;
    let fits = offset.checked_add(len).is_some_and(|end| end <= allocated);
    if len == 0 || !fits || offset >= extents[0].size {
        return Err(bad("region", &format!("{len} bytes at offset {offset} in {allocated}")));
    }
    if let Some(layout) = &layout {
        layout.check_fits(len)?;
    }
    Ok(DescribedRegion { offset, len, layout })
}

fn read_home(kind: u8, home: [u8; 16], physical: u32) -> Result<DeviceIdentity, DescriptorError> {
    match kind {
        HOME_UUID if physical != 0 => Err(bad("home device", "a UUID has no physical number")),
        HOME_UUID => Ok(DeviceIdentity::Uuid(home)),
        HOME_HOST_PHYSICAL => Ok(DeviceIdentity::HostPhysical { host: HostId::from_bytes(home), physical }),
        other => Err(bad("home device", &format!("kind {other} of identity is not known"))),
    }
}

fn read_layout(body: &mut &[u8]) -> Result<TensorLayout, DescriptorError> {
    let head = take_head::<LayoutHead>(body)?;
    let dimensions = usize::from(head.dimensions);
    if dimensions > MAX_DIMENSIONS {
        return Err(LayoutError::TooManyDimensions(dimensions).into());
    }
    if head.storage_format != 0 {
        return Err(bad("storage format", &format!("format {} is not known", head.storage_format)));
    }
    let bytes = take(body, dimensions * 16)?;
    let numbers = <[U64]>::ref_from_bytes(bytes).map_err(|_| bad("tensor", "it is cut off"))?;
    let numbers = numbers.iter().map(|number| number.get());
    let dtype = Dtype::from_code(head.dtype);
    Ok(TensorLayout::from_numbers(dtype, dimensions, numbers, head.offset.get())?)
}

/// Refuses two parts that are the same export.
fn check_exports(parts: &[Part]) -> Result<(), DescriptorError> {
    let exports: HashSet<_> = parts.iter().map(|part| part.export).collect();
    if exports.len() < parts.len() {
        Err(bad("regions", "two of them are of the same export"))
    } else {
        Ok(())
    }
}
