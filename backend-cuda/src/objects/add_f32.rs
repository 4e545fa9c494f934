//! The addition kernel of the conformance suite and the examples.

use device_ipc_core::{DeviceOrdinal, DeviceRange, Error, Result};

use crate::bindings::api::Stream;
use crate::objects::driver::Driver;
use crate::objects::kernel::{Kernel, Source, THREADS_PER_BLOCK, ptx};

pub(super) const SOURCE: Source =
    Source { ptx: ptx(concat!(include_str!("add_f32.ptx"), "\0")), entry: c"device_ipc_add_f32" };
/// Enough blocks to fill any device; the kernel loops over the rest.
const MAX_BLOCKS: u64 = 4096;

impl Driver {
    /// Adds `value` to every float of `range`, on a stream of `device`.
    ///
    /// # Safety
    ///
    /// The stream is of `device`, which can access the range; the range stays mapped until the kernel has finished.
    pub(crate) unsafe fn launch_add_f32(
        &self,
        range: DeviceRange,
        mut value: f32,
        device: DeviceOrdinal,
        stream: Stream,
    ) -> Result<()> {
        if !range.len.is_multiple_of(4) || !range.ptr.get().is_multiple_of(4) {
            return Err(Error::InvalidRegion(format!(
                "{} bytes at {} are not whole, aligned 32-bit floats",
                range.len, range.ptr
            )));
        }
        let (mut ptr, mut count) = (range.ptr.get(), range.len / 4);
        if count == 0 {
            return Ok(());
        }
        let _current = self.enter(device)?;
        let kernel = self.add_f32_kernel(device)?;
        let blocks = count.div_ceil(u64::from(THREADS_PER_BLOCK)).min(MAX_BLOCKS) as u32;
        let arguments = [(&raw mut ptr).cast(), (&raw mut count).cast(), (&raw mut value).cast()];
        // SAFETY: the kernel is of the device's context, which is current, and takes an address, a count and a float; stream and
        // range are as the caller promised.
        unsafe { kernel.launch(self, [blocks, 1, 1], arguments, stream) }
    }

    /// Loads the kernel on a device.
    pub(crate) fn load_add_f32(&self, device: DeviceOrdinal) -> Result<()> {
        let _current = self.enter(device)?;
        self.add_f32_kernel(device).map(drop)
    }

    fn add_f32_kernel(&self, device: DeviceOrdinal) -> Result<&Kernel> {
        self.kernel(device, &SOURCE, |device| &device.add_f32)
    }
}
