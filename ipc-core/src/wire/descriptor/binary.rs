//! The binary form. `docs/spec/descriptor.md` is its specification; the two change together.

use std::os::unix::ffi::OsStringExt;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{
    CHECKSUM_BYTES, DescribedExtent, Descriptor, DescriptorError, ExportId, Form, FormatVersion, Preamble,
    close,
};
use crate::backend::Access;
use crate::model::device::{DeviceIdentity, HostId};
use crate::model::tensor::{Dtype, MAX_DIMENSIONS, TensorLayout};
use crate::os::process::ProcessIdentity;
use crate::wire::{BrokerAddress, MAX_ADDRESS_BYTES, Token};

/// The largest descriptor in bytes.
pub const MAX_DESCRIPTOR_BYTES: usize = 64 * 1024;

/// The most allocations that a region may lie in.
pub const MAX_EXTENTS: usize = 2048;

/// The format that this library writes.
pub const FORMAT_VERSION: FormatVersion = FormatVersion { major: 1, minor: 1 };

const FORM: Form = Form {
    magic: *b"DIPC",
    version: FORMAT_VERSION,
    what: "descriptor",
    most_bytes: MAX_DESCRIPTOR_BYTES,
    known_flags: FLAG_READ_ONLY | FLAG_READY | FLAG_TENSOR | FLAG_TENSOR_OFFSET,
    otherwise: DescriptorError::BadMagic,
};
const MAX_BACKEND_BYTES: usize = 32;

const FLAG_READ_ONLY: u16 = 1 << 0;
const FLAG_READY: u16 = 1 << 1;
const FLAG_TENSOR: u16 = 1 << 2;
/// Minor version 1. Among those that a reader must know: an older one would take the region's first elements.
const FLAG_TENSOR_OFFSET: u16 = 1 << 3;

const HOME_UUID: u8 = 1;
const HOME_HOST_PHYSICAL: u8 = 2;
const ADDRESS_ABSTRACT: u8 = 1;
const ADDRESS_PATH: u8 = 2;

/// The part of fixed size. `IntoBytes` and `Unaligned` prove at compile time that no byte of it is padding.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Head {
    preamble: Preamble,
    home_kind: u8,
    home: [u8; 16],
    home_physical: U32,
    host: [u8; 16],
    boot: [u8; 16],
    pid_namespace: U64,
    net_namespace: U64,
    pid: U32,
    start_time: U64,
    export: U64,
    token: [u8; 16],
    offset: U64,
    len: U64,
    extents: U16,
    backend_bytes: u8,
    address_kind: u8,
    address_bytes: u8,
    dtype: u8,
    storage_format: u8,
    dimensions: u8,
}

/// An allocation of the region.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
pub(crate) struct ExtentEntry {
    size: U64,
    generation: U64,
}

impl ExtentEntry {
    pub(crate) fn new(extent: &DescribedExtent) -> Self {
        Self { size: U64::new(extent.size), generation: U64::new(extent.generation) }
    }
}

impl Descriptor {
    /// The binary form.
    pub fn to_bytes(&self) -> Vec<u8> {
        let (home_kind, home, home_physical) = home_fields(self.home);
        let mut flags = 0;
        flags |= if self.access.is_writable() { 0 } else { FLAG_READ_ONLY };
        flags |= if self.ready { FLAG_READY } else { 0 };
        flags |= if self.layout.is_some() { FLAG_TENSOR } else { 0 };
        let offset = self.tensor_offset();
        flags |= if offset.is_some() { FLAG_TENSOR_OFFSET } else { 0 };
        let address = self.broker.bytes();
        let dimensions = self.dimensions();
        let total = self.encoded_len();
        let head = Head {
            preamble: FORM.preamble(flags, total),
            home_kind,
            home,
            home_physical: U32::new(home_physical),
            host: *self.exporter.host.as_bytes(),
            boot: self.exporter.boot,
            pid_namespace: U64::new(self.exporter.pid_namespace),
            net_namespace: U64::new(self.exporter.net_namespace),
            pid: U32::new(self.exporter.pid),
            start_time: U64::new(self.exporter.start_time),
            export: U64::new(self.export.0),
            token: self.token.to_bytes(),
            offset: U64::new(self.offset),
            len: U64::new(self.len),
            extents: U16::new(self.extents.len() as u16),
            backend_bytes: self.backend.len() as u8,
            address_kind: address_kind(&self.broker),
            address_bytes: address.len() as u8,
            dtype: self.layout.as_ref().map_or(0, |layout| layout.dtype().code()),
            storage_format: 0,
            dimensions: dimensions as u8,
        };
        let mut bytes = Vec::with_capacity(total);
        bytes.extend_from_slice(head.as_bytes());
        bytes.extend_from_slice(self.backend.as_bytes());
        bytes.extend_from_slice(address);
        for extent in &self.extents {
            bytes.extend_from_slice(ExtentEntry::new(extent).as_bytes());
        }
        if let Some(layout) = &self.layout {
            for number in layout.shape().iter().chain(layout.strides()) {
                bytes.extend_from_slice(&number.to_le_bytes());
            }
        }
        if let Some(offset) = offset {
            bytes.extend_from_slice(&offset.to_le_bytes());
        }
        close(&mut bytes);
        debug_assert_eq!(bytes.len(), total);
        bytes
    }

    /// How many bytes the binary form has.
    pub(crate) fn encoded_len(&self) -> usize {
        let body = self.backend.len()
            + self.broker.bytes().len()
            + self.extents.len() * size_of::<ExtentEntry>()
            + self.dimensions() * 16
            + self.tensor_offset().map_or(0, |_| size_of::<u64>());
        size_of::<Head>() + body + CHECKSUM_BYTES
    }

    fn dimensions(&self) -> usize {
        self.layout.as_ref().map_or(0, |layout| layout.shape().len())
    }

    /// Where the tensor does not begin with the region.
    fn tensor_offset(&self) -> Option<u64> {
        self.layout.as_ref().map(TensorLayout::offset).filter(|offset| *offset != 0)
    }

    /// Reads the binary form. The bytes may come from anybody.
    ///
    /// # Errors
    ///
    /// [`DescriptorError`] with what is wrong.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, DescriptorError> {
        let (head, mut body) = FORM.checked_parts::<Head>(bytes)?;
        let backend = read_backend(take(&mut body, usize::from(head.backend_bytes))?)?;
        let address = take(&mut body, usize::from(head.address_bytes))?;
        let broker = read_address(head.address_kind, address)?;
        let mut extents = Vec::new();
        read_extents(usize::from(head.extents.get()), &mut body, &mut extents)?;
        let layout = read_layout(head, &mut body)?;
        let region_end = head.offset.get().checked_add(head.len.get());
        let allocated = extents.iter().try_fold(0_u64, |sum, extent| sum.checked_add(extent.size));
        let (Some(region_end), Some(allocated)) = (region_end, allocated) else {
            return Err(bad("region", "its offset, length or allocations do not fit 64 bits"));
        };
        if head.len.get() == 0 || region_end > allocated || head.offset.get() >= extents[0].size {
            let region = format!("{} bytes at offset {} in {allocated}", head.len, head.offset);
            return Err(bad("region", &region));
        }
        if let Some(layout) = &layout {
            layout.check_fits(head.len.get())?;
        }
        let flags = head.preamble.flags.get();
        Ok(Self {
            backend,
            home: read_home(head.home_kind, head.home, head.home_physical.get())?,
            exporter: ProcessIdentity {
                host: HostId::from_bytes(head.host),
                boot: head.boot,
                pid_namespace: head.pid_namespace.get(),
                net_namespace: head.net_namespace.get(),
                pid: head.pid.get(),
                start_time: head.start_time.get(),
            },
            broker,
            export: ExportId(head.export.get()),
            token: Token::from_bytes(head.token),
            access: if flags & FLAG_READ_ONLY == 0 { Access::ReadWrite } else { Access::ReadOnly },
            ready: flags & FLAG_READY != 0,
            offset: head.offset.get(),
            len: head.len.get(),
            extents,
            layout,
        })
    }
}

pub(crate) fn take<'a>(body: &mut &'a [u8], bytes: usize) -> Result<&'a [u8], DescriptorError> {
    let (taken, rest) = body
        .split_at_checked(bytes)
        .ok_or_else(|| bad("length", "its fields need more bytes than there are"))?;
    *body = rest;
    Ok(taken)
}

/// The kind, the identity and the physical id.
pub(crate) fn home_fields(home: DeviceIdentity) -> (u8, [u8; 16], u32) {
    match home {
        DeviceIdentity::Uuid(uuid) => (HOME_UUID, uuid, 0),
        DeviceIdentity::HostPhysical { host, physical } => (HOME_HOST_PHYSICAL, *host.as_bytes(), physical),
    }
}

pub(crate) fn read_home(kind: u8, home: [u8; 16], physical: u32) -> Result<DeviceIdentity, DescriptorError> {
    match kind {
        HOME_UUID => Ok(DeviceIdentity::Uuid(home)),
        HOME_HOST_PHYSICAL => Ok(DeviceIdentity::HostPhysical { host: HostId::from_bytes(home), physical }),
        other => Err(bad("home device", &format!("kind {other} of identity is not known"))),
    }
}

pub(crate) const fn address_kind(address: &BrokerAddress) -> u8 {
    match address {
        BrokerAddress::Abstract(_) => ADDRESS_ABSTRACT,
        BrokerAddress::Path(_) => ADDRESS_PATH,
    }
}

pub(crate) fn read_backend(bytes: &[u8]) -> Result<String, DescriptorError> {
    let name = str::from_utf8(bytes).ok().filter(|name| is_backend_name(name));
    let name = name.ok_or_else(|| bad("backend", "a name is 1 to 32 letters, digits, '-' or '_'"))?;
    Ok(name.to_owned())
}

pub(crate) fn read_address(kind: u8, bytes: &[u8]) -> Result<BrokerAddress, DescriptorError> {
    if bytes.is_empty() || bytes.len() > MAX_ADDRESS_BYTES {
        return Err(bad(
            "socket address",
            &format!("it has {} bytes, not 1 to {MAX_ADDRESS_BYTES}", bytes.len()),
        ));
    }
    match kind {
        ADDRESS_ABSTRACT => Ok(BrokerAddress::Abstract(bytes.to_vec())),
        ADDRESS_PATH if bytes[0] == b'/' && !bytes.contains(&0) => {
            Ok(BrokerAddress::Path(std::ffi::OsString::from_vec(bytes.to_vec()).into()))
        }
        ADDRESS_PATH => Err(bad("socket address", "it is no absolute path")),
        other => Err(bad("socket address", &format!("kind {other} is not known"))),
    }
}

/// The allocations of a region.
pub(crate) fn read_extents(
    count: usize,
    body: &mut &[u8],
    extents: &mut Vec<DescribedExtent>,
) -> Result<(), DescriptorError> {
    if count == 0 || count > MAX_EXTENTS {
        return Err(bad("allocations", &format!("there are {count}, not 1 to {MAX_EXTENTS}")));
    }
    let bytes = take(body, count * size_of::<ExtentEntry>())?;
    let entries =
        <[ExtentEntry]>::ref_from_bytes(bytes).map_err(|_| bad("allocations", "they are cut off"))?;
    if entries.iter().any(|entry| entry.size.get() == 0) {
        return Err(bad("allocations", "one has no bytes"));
    }
    extents.extend(
        entries
            .iter()
            .map(|entry| DescribedExtent { size: entry.size.get(), generation: entry.generation.get() }),
    );
    Ok(())
}

fn read_layout(head: &Head, body: &mut &[u8]) -> Result<Option<TensorLayout>, DescriptorError> {
    let has_offset = head.preamble.flags.get() & FLAG_TENSOR_OFFSET != 0;
    if head.preamble.flags.get() & FLAG_TENSOR == 0 {
        return if has_offset { Err(bad("flags", "a tensor's offset without a tensor")) } else { Ok(None) };
    }
    let dimensions = usize::from(head.dimensions);
    if dimensions > MAX_DIMENSIONS {
        return Err(crate::model::tensor::LayoutError::TooManyDimensions(dimensions).into());
    }
    if head.storage_format != 0 {
        return Err(bad("storage format", &format!("format {} is not known", head.storage_format)));
    }
    let bytes = take(body, dimensions * 16)?;
    let numbers = <[U64]>::ref_from_bytes(bytes).map_err(|_| bad("tensor", "it is cut off"))?;
    let mut numbers = numbers.iter().map(|number| number.get());
    let shape: Vec<u64> = numbers.by_ref().take(dimensions).collect();
    let strides: Vec<u64> = numbers.collect();
    let layout = TensorLayout::strided(Dtype::from_code(head.dtype), shape, strides)?;
    Ok(Some(if has_offset { layout.with_offset(read_offset(body)?)? } else { layout }))
}

/// One that is 0 is not written, so that there is one form of each descriptor, which older readers understand.
fn read_offset(body: &mut &[u8]) -> Result<u64, DescriptorError> {
    let bytes = take(body, size_of::<U64>())?;
    let offset = U64::ref_from_bytes(bytes).map_err(|_| bad("tensor", "its offset is cut off"))?.get();
    if offset == 0 { Err(bad("tensor", "an offset of 0 is not written")) } else { Ok(offset) }
}

pub(crate) fn is_backend_name(name: &str) -> bool {
    let good = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    (1..=MAX_BACKEND_BYTES).contains(&name.len()) && name.bytes().all(good)
}

pub(crate) fn bad(field: &'static str, why: &str) -> DescriptorError {
    DescriptorError::BadField { field, why: why.to_owned() }
}
