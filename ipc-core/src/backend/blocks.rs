//! Blocks of tensors, such as KV caches, that are copied by their numbers.

use crate::model::address::{DevicePtr, DeviceRange};
use crate::model::error::{Error, Result};

/// Two tensors of [`DeviceMemory::copy_blocks`](super::DeviceMemory::copy_blocks), whose blocks lie at equal distances.
#[derive(Clone, Copy, Debug)]
pub struct BlockedTensors {
    /// The tensor that is written.
    pub dst: DeviceRange,
    /// The bytes from one block of it to the next.
    pub dst_stride: u64,
    /// The tensor that is read.
    pub src: DeviceRange,
    /// The bytes from one block of it to the next.
    pub src_stride: u64,
}

/// Checks that there are as many sources as destinations, that blocks have bytes, that every tensor has all blocks, and that no
/// block is a destination twice.
///
/// # Errors
///
/// [`Error::InvalidRegion`] with the first block that a tensor lacks, or that is a destination twice.
pub fn check_blocks(
    tensors: &[BlockedTensors],
    block_bytes: u64,
    sources: &[u32],
    destinations: &[u32],
) -> Result<()> {
    if sources.len() != destinations.len() {
        return Err(Error::InvalidRegion(format!(
            "{} source blocks and {} destination blocks: pass as many of each",
            sources.len(),
            destinations.len()
        )));
    }
    if block_bytes == 0 && !sources.is_empty() {
        return Err(Error::InvalidRegion("blocks of 0 bytes: state the size of a block".into()));
    }
    for (what, numbers) in [("source", sources), ("destination", destinations)] {
        let Some(&largest) = numbers.iter().max() else { continue };
        for (position, tensor) in tensors.iter().enumerate() {
            let (range, stride) = match what {
                "source" => (tensor.src, tensor.src_stride),
                _ => (tensor.dst, tensor.dst_stride),
            };
            let end = u64::from(largest).checked_mul(stride).and_then(|start| start.checked_add(block_bytes));
            if end.is_none_or(|end| end > range.len) {
                return Err(Error::InvalidRegion(format!(
                    "{what} block {largest} of tensor {position} does not lie in its {} bytes: blocks of {block_bytes} bytes at \
                     distances of {stride} bytes",
                    range.len
                )));
            }
        }
    }
    if tensors.is_empty() {
        return Ok(());
    }
    if let Some(tensor) = tensors.iter().position(|tensor| tensor.dst_stride < block_bytes)
        && destinations.len() > 1
    {
        return Err(Error::InvalidRegion(format!(
            "the destination blocks of tensor {tensor} overlap: blocks of {block_bytes} bytes at distances of {} bytes",
            tensors[tensor].dst_stride
        )));
    }
    match repeated(destinations) {
        None => Ok(()),
        Some(block) => Err(Error::InvalidRegion(format!(
            "block {block} is named as a destination twice: a copy writes each block once; name it once"
        ))),
    }
}

/// Returns the first number that occurs a second time.
fn repeated(numbers: &[u32]) -> Option<u32> {
    let largest = numbers.iter().max()?;
    let mut seen = vec![0u64; *largest as usize / 64 + 1];
    numbers.iter().copied().find(|&number| {
        let (word, bit) = (&mut seen[number as usize / 64], 1 << (number % 64));
        let again = *word & bit != 0;
        *word |= bit;
        again
    })
}

/// Returns the destination and the source of every block.
pub(super) fn single_copies<'a>(
    tensors: &'a [BlockedTensors],
    block_bytes: u64,
    sources: &'a [u32],
    destinations: &'a [u32],
) -> impl Iterator<Item = (DeviceRange, DeviceRange)> + 'a {
    let block = move |range: DeviceRange, stride: u64, number: u32| {
        let first = range.ptr.get() + u64::from(number) * stride;
        DeviceRange::new(range.device, DevicePtr::new(first), block_bytes)
    };
    let numbers = move || sources.iter().zip(destinations);
    tensors.iter().flat_map(move |tensor| {
        numbers().map(move |(&from, &to)| {
            (block(tensor.dst, tensor.dst_stride, to), block(tensor.src, tensor.src_stride, from))
        })
    })
}

#[cfg(test)]
mod tests;
