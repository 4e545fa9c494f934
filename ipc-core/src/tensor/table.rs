//! Which tensors lie where in one region: what a sender says of a bucket that it fills again and again.

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::name::{Name, NameIndex};
use super::record::{LEAST_RECORD_BYTES, check_name, read_names};
use super::{LayoutError, MAX_TABLE_BYTES, MAX_TENSORS, NamedTensor, TensorLayout};
use crate::descriptor::{DescriptorError, FormatVersion};
use crate::error::{Error, Result};

const MAGIC: [u8; 4] = *b"DIPT";
const CHECKSUM_BYTES: usize = 4;
/// Bits that a reader must know; those above it may pass over. There are none yet.
const MANDATORY_FLAGS: u16 = 0x00ff;

/// The format that this library writes.
const TABLE_VERSION: FormatVersion = FormatVersion { major: 1, minor: 0 };

/// The part of fixed size. `IntoBytes` and `Unaligned` prove at compile time that no byte of it is padding.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Head {
    magic: [u8; 4],
    major: u8,
    minor: u8,
    flags: U16,
    total_bytes: U32,
    tensors: U32,
}

/// Named tensors in one region: for each its place in bytes from the region's start, and its layout from there on.
///
/// A table holds no address and no secret, and opens nothing. It travels by any road beside the region that it speaks of:
/// a [`Mapping`](crate::Mapping::tensor_in), or a buffer that is shared once and then filled again and again, with a table
/// for each filling.
#[derive(Clone, Debug, Default)]
pub struct TensorTable {
    tensors: Vec<NamedTensor>,
    names: NameIndex,
}

impl PartialEq for TensorTable {
    fn eq(&self, other: &Self) -> bool {
        self.tensors == other.tensors
    }
}

impl Eq for TensorTable {}

impl TensorTable {
    /// A table of tensors under their names, each with its place in bytes. They may overlap.
    ///
    /// # Errors
    ///
    /// [`Error::Descriptor`] that names the tensor: a name that is empty, longer than 1024 bytes or given twice, an end that
    /// does not fit 64 bits; or that says what a table has at most.
    pub fn new<N: Into<String>>(tensors: impl IntoIterator<Item = (N, u64, TensorLayout)>) -> Result<Self> {
        let named =
            |(name, offset, layout): (N, _, _)| NamedTensor { name: Name::Own(name.into()), offset, layout };
        Ok(Self::checked(tensors.into_iter().map(named).collect())?)
    }

    /// A table that lays tensors one behind the other, each at a multiple of `align` bytes, in the order in which they come.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new); and [`Error::InvalidRegion`] for an alignment that is no power of two.
    pub fn packed<N: Into<String>>(
        align: u64,
        tensors: impl IntoIterator<Item = (N, TensorLayout)>,
    ) -> Result<Self> {
        if !align.is_power_of_two() {
            return Err(Error::InvalidRegion(format!("an alignment of {align} bytes is no power of two")));
        }
        let mut end: u64 = 0;
        let mut packed = Vec::new();
        for (name, layout) in tensors {
            let name = name.into();
            let Some(offset) = end.checked_next_multiple_of(align) else {
                return Err(DescriptorError::Tensor { name, source: LayoutError::Overflow }.into());
            };
            let tensor = NamedTensor { name: name.into(), offset, layout };
            end = tensor.end().map_err(|source| tensor.senseless(source))?;
            packed.push(tensor);
        }
        Ok(Self::checked(packed)?)
    }

    pub(crate) fn checked(tensors: Vec<NamedTensor>) -> Result<Self, DescriptorError> {
        if tensors.len() > MAX_TENSORS {
            let why = format!("there are {}, at most {MAX_TENSORS}", tensors.len());
            return Err(DescriptorError::BadField { field: "tensors", why });
        }
        let mut bytes = size_of::<Head>() + CHECKSUM_BYTES;
        for tensor in &tensors {
            check_name(&tensor.name)?;
            tensor.end().map_err(|source| tensor.senseless(source))?;
            bytes += tensor.record_bytes();
        }
        if bytes > MAX_TABLE_BYTES {
            return Err(DescriptorError::TooLarge { found: bytes });
        }
        let mut names = NameIndex::with_room_for(tensors.len());
        let name_at = |position: u32| &*tensors[position as usize].name;
        if let Some(twice) = (0..tensors.len() as u32).find(|position| !names.insert(*position, name_at)) {
            let name = name_at(twice).to_owned();
            return Err(DescriptorError::TensorName { name, why: "another tensor is called so" });
        }
        Ok(Self { tensors, names })
    }

    /// What has been checked already: these tensors, and their names in this order.
    pub(crate) const fn with_names(tensors: Vec<NamedTensor>, names: NameIndex) -> Self {
        Self { tensors, names }
    }

    /// How many tensors there are.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Are there none?
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// Every tensor in the order of the table: its name, its place in bytes, its layout from there on.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, u64, &TensorLayout)> {
        self.tensors.iter().map(|tensor| (&*tensor.name, tensor.offset, &tensor.layout))
    }

    /// The place in bytes and the layout of the tensor of this name.
    pub fn get(&self, name: &str) -> Option<(u64, &TensorLayout)> {
        let tensor = &self.tensors[self.position(name)?];
        Some((tensor.offset, &tensor.layout))
    }

    /// How many bytes a region needs to hold all of them.
    pub fn region_bytes(&self) -> u64 {
        self.tensors.iter().filter_map(|tensor| tensor.end().ok()).max().unwrap_or(0)
    }

    /// Checks that all of them lie in a region of so many bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Descriptor`] that names the first that does not.
    pub fn check_fits(&self, region_bytes: u64) -> Result<()> {
        Ok(self.tensors.iter().try_for_each(|tensor| tensor.check_fits(region_bytes))?)
    }

    pub(crate) fn position(&self, name: &str) -> Option<usize> {
        let found = self.names.find(name, |position| &*self.tensors[position as usize].name)?;
        Some(found as usize)
    }

    /// As [`position`](Self::position), with an error for those who asked.
    pub(crate) fn find(&self, name: &str) -> Result<usize> {
        self.position(name).ok_or_else(|| {
            let known = match self.tensors.as_slice() {
                [] => "there are none".into(),
                [first, ..] => format!("there are {}, the first is {:?}", self.len(), first.name),
            };
            Error::NoSuchTensor { name: name.to_owned(), known }
        })
    }

    pub(crate) fn tensors(&self) -> &[NamedTensor] {
        &self.tensors
    }

    /// The binary form; `docs/bundle.md` specifies it.
    pub fn to_bytes(&self) -> Vec<u8> {
        let records: usize = self.tensors.iter().map(NamedTensor::record_bytes).sum();
        let total = size_of::<Head>() + records + CHECKSUM_BYTES;
        let mut bytes = Vec::with_capacity(total);
        let head = Head {
            magic: MAGIC,
            major: TABLE_VERSION.major,
            minor: TABLE_VERSION.minor,
            flags: U16::new(0),
            total_bytes: U32::new(total as u32),
            tensors: U32::new(self.tensors.len() as u32),
        };
        bytes.extend_from_slice(head.as_bytes());
        self.tensors.iter().for_each(|tensor| tensor.write(&mut bytes));
        bytes.extend_from_slice(&crc32fast::hash(&bytes).to_le_bytes());
        bytes
    }

    /// Reads the binary form. The bytes may come from anybody.
    ///
    /// # Errors
    ///
    /// [`DescriptorError`] with what is wrong.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, DescriptorError> {
        let found = bytes.len();
        if found > MAX_TABLE_BYTES {
            return Err(DescriptorError::TooLarge { found });
        }
        if !bytes.starts_with(&MAGIC[..found.min(MAGIC.len())]) {
            return Err(DescriptorError::NotTable);
        }
        let least = size_of::<Head>() + CHECKSUM_BYTES;
        let truncated = |expected| DescriptorError::Truncated { found, expected };
        let (Some(&major), Some(&minor)) = (bytes.get(4), bytes.get(5)) else { return Err(truncated(least)) };
        if major != TABLE_VERSION.major {
            let found = FormatVersion { major, minor };
            return Err(DescriptorError::Version {
                what: "table of tensors",
                found,
                readable: TABLE_VERSION,
            });
        }
        let (head, _) = Head::ref_from_prefix(bytes).map_err(|_| truncated(least))?;
        let covered = checked_total(bytes, head.total_bytes.get(), least)?;
        let unknown = head.flags.get() & MANDATORY_FLAGS;
        if unknown != 0 {
            return Err(DescriptorError::UnknownFeatures { flags: unknown });
        }
        let mut body = &covered[size_of::<Head>()..];
        let count = head.tensors.get() as usize;
        let mut tensors = Vec::with_capacity(checked_count(count, body)?);
        let (names, mut at) = (read_names(count, 0, body)?, 0);
        for _ in 0..count {
            tensors.push(NamedTensor::read(&mut body, &names, &mut at)?);
        }
        Self::checked(tensors)
    }
}

/// The bytes that the checksum covers, once it and the total size have been checked.
pub(crate) fn checked_total(bytes: &[u8], total: u32, least: usize) -> Result<&[u8], DescriptorError> {
    let (found, total) = (bytes.len(), total as usize);
    if total < least {
        let why = "it is shorter than the fixed part".into();
        return Err(DescriptorError::BadField { field: "length", why });
    }
    if found < total {
        return Err(DescriptorError::Truncated { found, expected: total });
    }
    if found > total {
        return Err(DescriptorError::TrailingBytes { extra: found - total });
    }
    let (covered, checksum) = bytes.split_at(total - CHECKSUM_BYTES);
    if crc32fast::hash(covered).to_le_bytes() != checksum {
        return Err(DescriptorError::BadChecksum);
    }
    Ok(covered)
}

/// So many tensors, where there are bytes for them.
pub(crate) fn checked_count(count: usize, body: &[u8]) -> Result<usize, DescriptorError> {
    if count <= MAX_TENSORS && count <= body.len() / LEAST_RECORD_BYTES {
        return Ok(count);
    }
    let why = format!("{count} of them do not fit {} bytes, or are more than {MAX_TENSORS}", body.len());
    Err(DescriptorError::BadField { field: "tensors", why })
}
