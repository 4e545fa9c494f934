//! The kernel that copies blocks of tensors.
//!
//! Its table is a parameter, so a launch needs neither memory of the device nor a copy to it, and may be captured. Blocks that lie side
//! by side in both caches are one entry, as engines allocate most blocks so. A launch has 4352 B of parameters, and 32,764 B since PTX
//! 8.1 on devices from compute capability 7.0 on ("Kernel Function Parameters" of the PTX ISA manual): there are two forms of the
//! kernel, which differ in the size of the table. The larger one takes most copies of scattered blocks at once, and is for drivers that
//! accept it (CUDA 12.1 or later). Larger copies take several launches.

use std::sync::PoisonError;

use device_ipc_core::backend::BlockedTensors;
use device_ipc_core::{DeviceOrdinal, Result};

use crate::bindings::api::Stream;
use crate::objects::driver::Driver;
use crate::objects::kernel::{Kernel, Source, ptx};

/// Returns the kernel with a table of a number of bytes.
macro_rules! source {
    ($version:literal, $target:literal, $table_bytes:literal) => {
        Source {
            ptx: ptx(concat!(
                ".version ",
                $version,
                "\n.target ",
                $target,
                "\n.address_size 64\n\n.visible .entry device_ipc_copy_blocks(\n\t.param .align 8 .b8 device_ipc_copy_blocks_table[",
                $table_bytes,
                "],\n",
                include_str!("copy_blocks.ptx"),
                "\0"
            )),
            entry: c"device_ipc_copy_blocks",
        }
    };
}

pub(super) const SOURCE: Source = source!("6.0", "sm_50", 4064);
pub(super) const LARGE_SOURCE: Source = source!("8.1", "sm_70", 32752);
/// The words of the kernel's table: a row for each tensor, then the runs.
const TABLE_WORDS: usize = 1016;
/// The same of the larger kernel.
const LARGE_TABLE_WORDS: usize = 8188;
const TENSOR_WORDS: usize = 8;
const RUN_WORDS: usize = 3;
/// The most tensors of one launch, which leave room for 168 runs, and for 2558 in the larger table.
const TENSORS: usize = 64;
/// The largest size of a grid in its second dimension.
const BLOCKS: u32 = 65_535;
/// The bytes of a block that one block of threads copies.
const PIECE_BYTES: u64 = 16 << 10;

/// The kernel's first parameter.
#[repr(C, align(8))]
struct Table<const WORDS: usize>([u32; WORDS]);

/// Returns the runs that a table has room for beside the tensors.
const fn capacity(words: usize, tensors: usize) -> usize {
    (words - tensors * TENSOR_WORDS) / RUN_WORDS
}

/// Blocks at consecutive numbers in the source and in the destination.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Run {
    source: u32,
    destination: u32,
    len: u32,
}

/// Returns the blocks as runs of at most [`BLOCKS`], in the order of their first ones.
///
/// Numbers that descend on both sides are a run too, since a copy has no order: engines free the blocks of a request from its last
/// one to its first one, and allocate them so again.
fn runs<'a>(sources: &'a [u32], destinations: &'a [u32]) -> impl Iterator<Item = Run> + 'a {
    let mut blocks = sources.iter().copied().zip(destinations.iter().copied()).peekable();
    std::iter::from_fn(move || {
        let (source, destination) = blocks.next()?;
        let mut run = Run { source, destination, len: 1 };
        let above = |run: &Run| (source.checked_add(run.len), destination.checked_add(run.len));
        while run.len < BLOCKS
            && blocks.next_if(|&(from, to)| above(&run) == (Some(from), Some(to))).is_some()
        {
            run.len += 1;
        }
        if run.len > 1 {
            return Some(run);
        }
        let below = |run: &Run| (run.source.checked_sub(1), run.destination.checked_sub(1));
        while run.len < BLOCKS
            && let Some((source, destination)) =
                blocks.next_if(|&(from, to)| below(&run) == (Some(from), Some(to)))
        {
            run = Run { source, destination, len: run.len + 1 };
        }
        Some(run)
    })
}

impl Driver {
    /// Copies blocks of tensors, on a stream of `device`. Without blocks, loads the kernels.
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
        if sources.is_empty() {
            return self.large_copy_blocks(device).map(drop);
        }
        let runs: Vec<Run> = runs(sources, destinations).collect();
        for tensors in tensors.chunks(TENSORS) {
            let is_small = runs.len() <= capacity(TABLE_WORDS, tensors.len());
            let large = if is_small { None } else { self.large_copy_blocks(device)? };
            let copy = Copy { driver: self, tensors, block_bytes, runs: &runs, stream };
            // SAFETY: the kernels are of the device's context, which is current, and each has a table of this size; stream and memory
            // are as the caller promised.
            unsafe {
                match large {
                    Some(large) => copy.launch::<LARGE_TABLE_WORDS>(large),
                    None => copy.launch::<TABLE_WORDS>(kernel),
                }
            }?;
        }
        Ok(())
    }

    /// Returns the kernel with the larger table, unless the driver or the device does not accept it. The device's context is current.
    fn large_copy_blocks(&self, device: DeviceOrdinal) -> Result<Option<&Kernel>> {
        let slot = &self.device(device)?.large_copy_blocks;
        if let Some(known) = slot.get() {
            return Ok(known.as_ref());
        }
        let _creating = self.creating.lock().unwrap_or_else(PoisonError::into_inner);
        let load = || {
            let loaded = Kernel::load(self, &LARGE_SOURCE);
            loaded.inspect_err(
                |error| tracing::debug!(target: crate::LOG, %error, "no larger tables of blocks"),
            )
        };
        Ok(slot.get_or_init(|| load().ok()).as_ref())
    }
}

/// A copy of blocks of at most [`TENSORS`] tensors.
struct Copy<'a> {
    driver: &'a Driver,
    tensors: &'a [BlockedTensors],
    block_bytes: u64,
    runs: &'a [Run],
    stream: Stream,
}

impl Copy<'_> {
    /// Launches a kernel whose table has this size, as often as the runs need.
    ///
    /// # Safety
    ///
    /// The kernel is of the current context, as is the stream, and has a table of `WORDS`. The device can access the blocks, which lie in
    /// memory that stays mapped until the kernel has finished.
    unsafe fn launch<const WORDS: usize>(&self, kernel: &Kernel) -> Result<()> {
        let pieces = u32::try_from(self.block_bytes.div_ceil(PIECE_BYTES)).unwrap_or(u32::MAX);
        if pieces == 0 {
            return Ok(());
        }
        let mut table = Table([0; WORDS]);
        for (row, of) in table.0.chunks_exact_mut(TENSOR_WORDS).zip(self.tensors) {
            let values = [of.dst.ptr.get(), of.dst_stride, of.src.ptr.get(), of.src_stride];
            for (words, value) in row.chunks_exact_mut(2).zip(values) {
                words.copy_from_slice(&[value as u32, (value >> 32) as u32]);
            }
        }
        let mut left = self.runs.iter().peekable();
        while left.peek().is_some() {
            let (mut blocks, mut entries) = (0, 0u32);
            let rows = self.tensors.len() * TENSOR_WORDS;
            for entry in table.0[rows..].chunks_exact_mut(RUN_WORDS) {
                let Some(run) = left.next_if(|run| blocks + run.len <= BLOCKS) else { break };
                entry.copy_from_slice(&[blocks, run.source, run.destination]);
                blocks += run.len;
                entries += 1;
            }
            let mut bytes = self.block_bytes;
            let grid = [pieces, blocks, self.tensors.len() as u32];
            let arguments = [(&raw mut table).cast(), (&raw mut bytes).cast(), (&raw mut entries).cast()];
            // SAFETY: the kernel takes a table of this size, a length and a number; everything else is as the caller promised.
            unsafe { kernel.launch(self.driver, grid, arguments, self.stream) }?;
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
        assert_eq!(found(&[6, 5, 4], &[3, 2, 1]), [(4, 1, 3)]);
        assert_eq!(found(&[2, 1, 0, 1], &[2, 1, 0, 4]), [(0, 0, 3), (1, 4, 1)]);
        assert_eq!(found(&[3, 2, 3, 4], &[8, 7, 8, 9]), [(2, 7, 2), (3, 8, 2)]);
        assert_eq!(found(&[4, 5, 7, 8], &[1, 2, 3, 4]), [(4, 1, 2), (7, 3, 2)]);
        assert_eq!(found(&[4, 5, 6, 7], &[1, 2, 9, 10]), [(4, 1, 2), (6, 9, 2)]);
        let all: Vec<u32> = (0..=BLOCKS).collect();
        assert_eq!(found(&all, &all), [(0, 0, BLOCKS), (BLOCKS, BLOCKS, 1)]);
        let all: Vec<u32> = all.into_iter().rev().collect();
        assert_eq!(found(&all, &all), [(1, 1, BLOCKS), (0, 0, 1)]);
    }
}
