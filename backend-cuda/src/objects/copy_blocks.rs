//! The kernel that copies blocks of tensors.
//!
//! Its table is a parameter; a launch has 4 KiB of them ("Kernel Function Parameters" of the PTX ISA manual). So a launch needs
//! neither memory of the device nor a copy to it, and may be captured. Blocks that lie side by side in both caches are one entry, as
//! engines allocate most blocks so. Larger copies take several launches.

use device_ipc_core::backend::BlockedTensors;
use device_ipc_core::{DeviceOrdinal, Result};

use crate::bindings::api::Stream;
use crate::objects::driver::Driver;
use crate::objects::kernel::{Source, ptx};

pub(super) const SOURCE: Source =
    Source { ptx: ptx(concat!(include_str!("copy_blocks.ptx"), "\0")), entry: c"device_ipc_copy_blocks" };
/// The words of the kernel's table: a row for each tensor, then the runs.
const TABLE_WORDS: usize = 1016;
const TENSOR_WORDS: usize = 8;
const RUN_WORDS: usize = 3;
/// The most tensors of one launch, which leave room for 168 runs.
const TENSORS: usize = 64;
/// The largest size of a grid in its second dimension.
const BLOCKS: u32 = 65_535;
/// The bytes of a block that one block of threads copies.
const PIECE_BYTES: u64 = 16 << 10;

/// The kernel's first parameter.
#[repr(C, align(8))]
struct Table([u32; TABLE_WORDS]);

/// Blocks at consecutive numbers in the source and in the destination.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Run {
    source: u32,
    destination: u32,
    len: u32,
}

/// Returns the blocks as runs of at most [`BLOCKS`], in their order.
fn runs<'a>(sources: &'a [u32], destinations: &'a [u32]) -> impl Iterator<Item = Run> + 'a {
    let mut blocks = sources.iter().copied().zip(destinations.iter().copied()).peekable();
    std::iter::from_fn(move || {
        let (source, destination) = blocks.next()?;
        let mut run = Run { source, destination, len: 1 };
        let next = |run: &Run| (source.checked_add(run.len), destination.checked_add(run.len));
        while run.len < BLOCKS && blocks.next_if(|&(from, to)| next(&run) == (Some(from), Some(to))).is_some()
        {
            run.len += 1;
        }
        Some(run)
    })
}

impl Driver {
    /// Copies blocks of tensors, on a stream of `device`. Without blocks, loads the kernel.
    ///
    /// # Safety
    ///
    /// The stream is of `device`, which can access the blocks; they lie in memory that stays mapped until the kernel has finished.
    pub(crate) unsafe fn launch_copy_blocks(
        &self,
        tensors: &[BlockedTensors],
        block_bytes: u64,
        sources: &[u32],
        destinations: &[u32],
        device: DeviceOrdinal,
        stream: Stream,
    ) -> Result<()> {
        let _current = self.enter(device)?;
        let kernel = self.kernel(device, &SOURCE, |device| &device.copy_blocks)?;
        let pieces = u32::try_from(block_bytes.div_ceil(PIECE_BYTES)).unwrap_or(u32::MAX);
        if pieces == 0 {
            return Ok(());
        }
        for tensors in tensors.chunks(TENSORS) {
            let mut table = Table([0; TABLE_WORDS]);
            for (row, of) in table.0.chunks_exact_mut(TENSOR_WORDS).zip(tensors) {
                let values = [of.dst.ptr.get(), of.dst_stride, of.src.ptr.get(), of.src_stride];
                for (words, value) in row.chunks_exact_mut(2).zip(values) {
                    words.copy_from_slice(&[value as u32, (value >> 32) as u32]);
                }
            }
            let mut left = runs(sources, destinations).peekable();
            while left.peek().is_some() {
                let (mut blocks, mut entries) = (0, 0u32);
                let rows = tensors.len() * TENSOR_WORDS;
                for entry in table.0[rows..].chunks_exact_mut(RUN_WORDS) {
                    let Some(run) = left.next_if(|run| blocks + run.len <= BLOCKS) else { break };
                    entry.copy_from_slice(&[blocks, run.source, run.destination]);
                    blocks += run.len;
                    entries += 1;
                }
                let mut bytes = block_bytes;
                let grid = [pieces, blocks, tensors.len() as u32];
                let arguments = [(&raw mut table).cast(), (&raw mut bytes).cast(), (&raw mut entries).cast()];
                // SAFETY: the kernel is of the device's context, which is current, and takes the table, a length and a number; stream
                // and memory are as the caller promised.
                unsafe { kernel.launch(self, grid, arguments, stream) }?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_consecutive_on_both_sides() {
        let found = |sources: &[u32], destinations: &[u32]| {
            runs(sources, destinations).map(|run| (run.source, run.destination, run.len)).collect::<Vec<_>>()
        };
        assert_eq!(found(&[], &[]), []);
        assert_eq!(found(&[4, 5, 6], &[1, 2, 3]), [(4, 1, 3)]);
        assert_eq!(found(&[4, 5, 6], &[3, 2, 1]), [(4, 3, 1), (5, 2, 1), (6, 1, 1)]);
        assert_eq!(found(&[4, 5, 7, 8], &[1, 2, 3, 4]), [(4, 1, 2), (7, 3, 2)]);
        assert_eq!(found(&[4, 5, 6, 7], &[1, 2, 9, 10]), [(4, 1, 2), (6, 9, 2)]);
        let all: Vec<u32> = (0..=BLOCKS).collect();
        assert_eq!(found(&all, &all), [(0, 0, BLOCKS), (BLOCKS, BLOCKS, 1)]);
    }
}
