//! The binary form. `docs/spec/bundle.md` is its specification; the two change together.

use std::collections::HashSet;
use std::sync::Arc;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::descriptor::{BundleDescriptor, Contents, Part};
use super::tensors::Tensors;
use crate::backend::Access;
use crate::model::device::HostId;
use crate::model::tensor::MAX_TABLE_BYTES;
use crate::os::process::ProcessIdentity;
use crate::wire::descriptor::{
    CHECKSUM_BYTES, DescribedRegions, DescriptorError, ExportId, ExtentEntry, Form, FormatVersion, Preamble,
    address_kind, bad, close, home_fields, read_address, read_backend, read_extents, read_home, take,
};
use crate::wire::{BrokerAddress, MAX_HANDLES, Token};

/// The most home devices of a bundle.
pub const MAX_BUNDLE_PARTS: usize = 64;

/// The most allocations of a bundle.
pub const MAX_BUNDLE_ALLOCATIONS: usize = MAX_HANDLES;

const FORM: Form = Form {
    magic: *b"DIPB",
    version: FormatVersion { major: 1, minor: 0 },
    what: "bundle",
    most_bytes: MAX_TABLE_BYTES,
    known_flags: FLAG_READ_ONLY,
    otherwise: DescriptorError::NotBundle,
};

const FLAG_READ_ONLY: u16 = 1 << 0;
const PART_READY: u8 = 1 << 0;

/// The part of fixed size. `IntoBytes` and `Unaligned` prove at compile time that no byte of it is padding.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Head {
    preamble: Preamble,
    host: [u8; 16],
    boot: [u8; 16],
    pid_namespace: U64,
    net_namespace: U64,
    pid: U32,
    start_time: U64,
    parts: U16,
    backend_bytes: u8,
    address_kind: u8,
    address_bytes: u8,
    tensors: U32,
}

/// What lies on one device.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct PartHead {
    home_kind: u8,
    home: [u8; 16],
    home_physical: U32,
    export: U64,
    token: [u8; 16],
    flags: u8,
    regions: U32,
}

impl BundleDescriptor {
    /// The binary form.
    pub fn to_bytes(&self) -> Vec<u8> {
        let contents = self.contents();
        let Contents { backend, broker, parts, tensors, .. } = contents;
        let total = encoded_bytes(backend, broker, parts, tensors.bytes().len());
        let mut bytes = Vec::with_capacity(total);
        bytes.extend_from_slice(head(contents, total).as_bytes());
        bytes.extend_from_slice(backend.as_bytes());
        bytes.extend_from_slice(broker.bytes());
        for part in parts {
            write_part(part, &mut bytes);
        }
        bytes.extend_from_slice(tensors.bytes());
        close(&mut bytes);
        debug_assert_eq!(bytes.len(), total);
        bytes
    }

    /// Reads the binary form. The bytes may come from anybody.
    ///
    /// # Errors
    ///
    /// [`DescriptorError`] with what is wrong.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, DescriptorError> {
        let (head, mut body) = FORM.checked_parts::<Head>(bytes)?;
        let backend = read_backend(take(&mut body, usize::from(head.backend_bytes))?)?;
        let broker = read_address(head.address_kind, take(&mut body, usize::from(head.address_bytes))?)?;
        let parts = read_parts(usize::from(head.parts.get()), &mut body)?;
        let tensors = read_tensors(head.tensors.get() as usize, &parts, &mut body)?;
        let read_only = head.preamble.flags.get() & FLAG_READ_ONLY != 0;
        Ok(Self::new(Contents {
            backend,
            exporter: ProcessIdentity {
                host: HostId::from_bytes(head.host),
                boot: head.boot,
                pid_namespace: head.pid_namespace.get(),
                net_namespace: head.net_namespace.get(),
                pid: head.pid.get(),
                start_time: head.start_time.get(),
            },
            broker,
            access: if read_only { Access::ReadOnly } else { Access::ReadWrite },
            parts,
            tensors,
        }))
    }
}

/// How many bytes the binary form has, with so many of the tensors.
pub(crate) fn encoded_bytes(backend: &str, broker: &BrokerAddress, parts: &[Part], tensors: usize) -> usize {
    let part = |part: &Part| {
        let (regions, allocations) = (part.regions.len(), part.regions.allocations());
        size_of::<PartHead>() + regions * size_of::<U32>() + allocations * size_of::<ExtentEntry>()
    };
    let parts: usize = parts.iter().map(part).sum();
    size_of::<Head>() + backend.len() + broker.bytes().len() + parts + tensors + CHECKSUM_BYTES
}

fn head(contents: &Contents, total: usize) -> Head {
    let exporter = &contents.exporter;
    Head {
        preamble: FORM.preamble(if contents.access.is_writable() { 0 } else { FLAG_READ_ONLY }, total),
        host: *exporter.host.as_bytes(),
        boot: exporter.boot,
        pid_namespace: U64::new(exporter.pid_namespace),
        net_namespace: U64::new(exporter.net_namespace),
        pid: U32::new(exporter.pid),
        start_time: U64::new(exporter.start_time),
        parts: U16::new(contents.parts.len() as u16),
        backend_bytes: contents.backend.len() as u8,
        address_kind: address_kind(&contents.broker),
        address_bytes: contents.broker.bytes().len() as u8,
        tensors: U32::new(contents.table().len() as u32),
    }
}

fn write_part(part: &Part, bytes: &mut Vec<u8>) {
    let (home_kind, home, physical) = home_fields(part.home);
    let head = PartHead {
        home_kind,
        home,
        home_physical: U32::new(physical),
        export: U64::new(part.export.0),
        token: part.token.to_bytes(),
        flags: if part.ready { PART_READY } else { 0 },
        regions: U32::new(part.regions.len() as u32),
    };
    bytes.extend_from_slice(head.as_bytes());
    for region in part.regions.iter() {
        bytes.extend_from_slice(&(region.len() as u32).to_le_bytes());
        for extent in region {
            bytes.extend_from_slice(ExtentEntry::new(extent).as_bytes());
        }
    }
}

fn read_parts(count: usize, body: &mut &[u8]) -> Result<Vec<Part>, DescriptorError> {
    if count == 0 || count > MAX_BUNDLE_PARTS {
        return Err(bad("parts", &format!("there are {count}, not 1 to {MAX_BUNDLE_PARTS}")));
    }
    let mut allocations_left = MAX_BUNDLE_ALLOCATIONS;
    let parts: Vec<_> =
        (0..count).map(|_| read_part(&mut allocations_left, body)).collect::<Result<_, _>>()?;
    let exports: HashSet<_> = parts.iter().map(|part| part.export).collect();
    if exports.len() < parts.len() {
        return Err(bad("parts", "two of them are the same export"));
    }
    Ok(parts)
}

fn read_part(allocations_left: &mut usize, body: &mut &[u8]) -> Result<Part, DescriptorError> {
    let head = take(body, size_of::<PartHead>())?;
    let head = PartHead::ref_from_bytes(head).map_err(|_| bad("parts", "one is cut off"))?;
    if head.flags & !PART_READY != 0 {
        return Err(DescriptorError::UnknownFeatures { flags: u16::from(head.flags) });
    }
    let count = head.regions.get() as usize;
    if count == 0 {
        return Err(bad("parts", "one has no memory"));
    }
    let mut regions = DescribedRegions::default();
    for _ in 0..count {
        let extents = take(body, size_of::<U32>())?;
        let extents =
            U32::ref_from_bytes(extents).map_err(|_| bad("regions", "one is cut off"))?.get() as usize;
        *allocations_left = allocations_left
            .checked_sub(extents)
            .ok_or_else(|| bad("allocations", &format!("there are more than {MAX_BUNDLE_ALLOCATIONS}")))?;
        regions.add(|all| read_extents(extents, body, all))?;
    }
    Ok(Part {
        home: read_home(head.home_kind, head.home, head.home_physical.get())?,
        export: ExportId(head.export.get()),
        token: Token::from_bytes(head.token),
        ready: head.flags & PART_READY != 0,
        regions: Arc::new(regions),
    })
}

fn read_tensors(count: usize, parts: &[Part], body: &mut &[u8]) -> Result<Arc<Tensors>, DescriptorError> {
    let mut region_bytes = Vec::with_capacity(parts.iter().map(|part| part.regions.len()).sum());
    for region in parts.iter().flat_map(|part| part.regions.iter()) {
        let bytes = region.iter().try_fold(0_u64, |sum, extent| sum.checked_add(extent.size));
        region_bytes.push(bytes.ok_or_else(|| bad("region", "its allocations do not fit 64 bits"))?);
    }
    if count == 0 {
        return Err(bad("tensors", "there are none"));
    }
    Tensors::read(count, region_bytes, body)
}
