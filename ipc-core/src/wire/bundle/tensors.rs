//! The tensors of a bundle, as its descriptor lists them.

use std::sync::Arc;

use zerocopy::FromBytes as _;
use zerocopy::little_endian::U32;

use crate::model::tensor::TensorTable;
use crate::os::Recent;
use crate::wire::descriptor::{DescriptorError, bad, take};
use crate::wire::tensors::checked_count;

/// Larger lists are not remembered.
pub(crate) const MOST_REMEMBERED_BYTES: usize = 1 << 20;

/// Every tensor, and the region that it lies in.
#[derive(Clone, Debug)]
pub(crate) struct Tensors {
    /// Each tensor's place counts from the start of the first allocation of its region.
    table: TensorTable,
    /// The region of each, counted through all parts.
    regions: Vec<u32>,
    /// All of that in the binary form, which is what is compared and sent.
    bytes: Vec<u8>,
}

/// A list that has been read, and the sizes of the regions that its tensors were found to lie in.
struct Read {
    tensors: Arc<Tensors>,
    region_bytes: Vec<u64>,
}

/// What was read last. The lists hold no secrets, and who compares all of their bytes need not read them once more.
static READ: Recent<Read> = Recent::new();

impl Tensors {
    pub(crate) fn new(table: TensorTable, regions: Vec<u32>) -> Self {
        let mut bytes = Vec::with_capacity(encoded_bytes(&table));
        for (tensor, region) in table.tensors().zip(&regions) {
            bytes.extend_from_slice(&region.to_le_bytes());
            tensor.write(&mut bytes);
        }
        Self { table, regions, bytes }
    }

    pub(crate) const fn table(&self) -> &TensorTable {
        &self.table
    }

    /// The region of each tensor, counted through all parts.
    pub(crate) fn regions(&self) -> &[u32] {
        &self.regions
    }

    /// The binary form.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Reads so many, which lie in regions of these sizes. The bytes may come from anybody.
    pub(crate) fn read(
        count: usize,
        region_bytes: Vec<u64>,
        body: &mut &[u8],
    ) -> Result<Arc<Self>, DescriptorError> {
        Self::read_or_find(&READ, count, region_bytes, body)
    }

    fn read_or_find(
        recent: &Recent<Read>,
        count: usize,
        region_bytes: Vec<u64>,
        body: &mut &[u8],
    ) -> Result<Arc<Self>, DescriptorError> {
        let is_it = |known: &Read| {
            known.tensors.regions.len() == count
                && body.starts_with(&known.tensors.bytes)
                && known.region_bytes == region_bytes
        };
        if let Some(known) = recent.find(is_it) {
            *body = &body[known.tensors.bytes.len()..];
            return Ok(Arc::clone(&known.tensors));
        }
        let tensors = Arc::new(Self::read_anew(count, &region_bytes, body)?);
        if tensors.bytes.len() <= MOST_REMEMBERED_BYTES {
            recent.remember(Arc::new(Read { tensors: Arc::clone(&tensors), region_bytes }), |_| false);
        }
        Ok(tensors)
    }

    fn read_anew(count: usize, region_bytes: &[u64], body: &mut &[u8]) -> Result<Self, DescriptorError> {
        let begin = *body;
        let count = checked_count(count, body)?;
        let (mut table, mut regions) = (TensorTable::with_room_for(count), Vec::with_capacity(count));
        for _ in 0..count {
            let region = take(body, size_of::<U32>())?;
            let region = U32::ref_from_bytes(region).map_err(|_| bad("tensors", "one is cut off"))?.get();
            let tensor = table.read_one(body)?;
            let bytes = *region_bytes.get(region as usize).ok_or_else(|| {
                bad("tensors", &format!("one lies in region {region} of {}", region_bytes.len()))
            })?;
            tensor.check_fits(bytes)?;
            regions.push(region);
        }
        Ok(Self { table, regions, bytes: begin[..begin.len() - body.len()].to_vec() })
    }
}

/// How many bytes the binary form of these tensors has.
pub(crate) fn encoded_bytes(table: &TensorTable) -> usize {
    table.tensors().map(|tensor| size_of::<U32>() + tensor.record_bytes()).sum()
}

/// What is written is what they are.
impl PartialEq for Tensors {
    fn eq(&self, other: &Self) -> bool {
        self.bytes == other.bytes
    }
}

impl Eq for Tensors {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::tensor::{Dtype, TensorLayout};

    fn tensors() -> Tensors {
        let layout = TensorLayout::contiguous(Dtype::U8, [16]).unwrap();
        let table = TensorTable::new([("a", 0, layout.clone()), ("b", 16, layout)]).unwrap();
        Tensors::new(table, vec![0, 1])
    }

    fn read(
        recent: &Recent<Read>,
        region_bytes: [u64; 2],
        bytes: &[u8],
    ) -> Result<Arc<Tensors>, DescriptorError> {
        let mut body = bytes;
        let read = Tensors::read_or_find(recent, 2, region_bytes.into(), &mut body)?;
        assert!(body.is_empty(), "it was passed over");
        Ok(read)
    }

    #[test]
    fn the_same_bytes_in_regions_of_the_same_sizes_are_read_once() {
        let (recent, written) = (Recent::new(), tensors());
        let first = read(&recent, [16, 32], written.bytes()).unwrap();
        assert_eq!(*first, written);
        assert_eq!((first.table(), first.regions()), (written.table(), written.regions()));
        let again = read(&recent, [16, 32], written.bytes()).unwrap();
        assert!(Arc::ptr_eq(&first, &again));
    }

    #[test]
    fn what_was_read_before_is_checked_against_other_regions() {
        let (recent, written) = (Recent::new(), tensors());
        read(&recent, [16, 32], written.bytes()).unwrap();
        let smaller = read(&recent, [16, 31], written.bytes());
        assert!(matches!(smaller, Err(DescriptorError::Tensor { name, .. }) if name == "b"));
        let larger = read(&recent, [16, 64], written.bytes()).unwrap();
        assert_eq!(*larger, written);
    }

    #[test]
    fn one_byte_makes_another_list() {
        let (recent, written) = (Recent::new(), tensors());
        let first = read(&recent, [64, 64], written.bytes()).unwrap();
        for at in 0..written.bytes().len() {
            let mut changed = written.bytes().to_vec();
            changed[at] ^= 1;
            let mut body = changed.as_slice();
            if let Ok(read) = Tensors::read_or_find(&recent, 2, vec![64, 64], &mut body) {
                assert!(!Arc::ptr_eq(&read, &first) && *read != *first, "byte {at}");
            }
        }
        let mut one = written.bytes();
        let fewer = Tensors::read_or_find(&recent, 1, vec![64, 64], &mut one).unwrap();
        assert_eq!((fewer.table().len(), one.is_empty()), (1, false), "fewer tensors of the same bytes");
    }
}
