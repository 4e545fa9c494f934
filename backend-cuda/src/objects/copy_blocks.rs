//! The kernel that copies blocks of tensors.
//!
//! Its tables are parameters, of which a launch has 4 KiB ("Kernel Function Parameters" of the PTX ISA manual). So a launch needs
//! neither memory of the device nor a copy to it, and may be captured. Larger copies take several launches.

use device_ipc_core::backend::BlockedTensors;
use device_ipc_core::{DeviceOrdinal, Result};

use crate::bindings::api::Stream;
use crate::objects::driver::Driver;
use crate::objects::kernel::{Source, ptx};

pub(super) const SOURCE: Source =
    Source { ptx: ptx(concat!(include_str!("copy_blocks.ptx"), "\0")), entry: c"device_ipc_copy_blocks" };
/// The lengths of the tables in the kernel's parameters.
const TENSORS: usize = 64;
const NUMBERS: usize = 250;
/// The bytes of a block that one block of threads copies.
const PIECE_BYTES: u64 = 16 << 10;

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
            let mut rows = [[0u64; 4]; TENSORS];
            for (row, of) in rows.iter_mut().zip(tensors) {
                *row = [of.dst.ptr.get(), of.dst_stride, of.src.ptr.get(), of.src_stride];
            }
            for (sources, destinations) in sources.chunks(NUMBERS).zip(destinations.chunks(NUMBERS)) {
                let mut pairs = [[0u32; 2]; NUMBERS];
                for (pair, (&from, &to)) in pairs.iter_mut().zip(sources.iter().zip(destinations)) {
                    *pair = [from, to];
                }
                let mut bytes = block_bytes;
                let blocks = [pieces, sources.len() as u32, tensors.len() as u32];
                let arguments = [(&raw mut rows).cast(), (&raw mut pairs).cast(), (&raw mut bytes).cast()];
                // SAFETY: the kernel is of the device's context, which is current, and takes the two tables and a length; stream and
                // memory are as the caller promised.
                unsafe { kernel.launch(self, blocks, arguments, stream) }?;
            }
        }
        Ok(())
    }
}
