//! Allocation functions for `torch.cuda.MemPool`.
//!
//! PyTorch's caching allocator asks for segments: 2 MiB for small tensors, 20 MiB or multiples of 2 MiB for larger ones. A handle
//! for each of them would cost an importer one open each, one after the other. So the segments lie in large blocks of virtual
//! memory, each of which an importer opens by one file descriptor, read-only if the exporter wants, also in another container.
//!
//! The functions are called by PyTorch without the interpreter lock or with it, on any thread, under the lock of its allocator. They
//! call no Python. The library enters the context of the device in each call, and restores the caller's.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use device_ipc::{Buffer, DeviceOrdinal, Error, Ipc, MemoryUse};
use pyo3::prelude::*;

use crate::error::OrRaise as _;
use crate::session::ipc;
use crate::tensor::device_name;

/// The segments of PyTorch are multiples of this length, as are blocks of virtual memory on current GPUs.
const UNIT: u64 = 2 << 20;

/// Memory that importers can open by file descriptor, restricted to reading, and without reaching neighbouring memory.
const USE: MemoryUse =
    MemoryUse::new().read_only_importers().isolated().across_pid_namespaces().outlives_exporter();

static POOL: Mutex<Pool> = Mutex::new(Pool { block_bytes: 512 << 20, blocks: BTreeMap::new() });

/// The memory of all pools of the process: PyTorch passes no pool to the functions.
struct Pool {
    /// The length of new blocks, unless a segment needs more.
    block_bytes: u64,
    /// By address.
    blocks: BTreeMap<u64, Block>,
}

/// A block of virtual memory with the segments that lie in it.
struct Block {
    memory: Buffer,
    /// Lengths of the segments, by offset.
    used: BTreeMap<u64, u64>,
    /// Lengths of the gaps, by offset. No two are adjacent.
    free: BTreeMap<u64, u64>,
}

impl Block {
    fn new(memory: Buffer) -> Self {
        let free = BTreeMap::from([(0, memory.range().len)]);
        Self { memory, used: BTreeMap::new(), free }
    }

    /// Returns the offset and the length of the smallest gap of at least this length.
    fn gap(&self, bytes: u64) -> Option<(u64, u64)> {
        let gaps = self.free.iter().filter(|(_, len)| **len >= bytes);
        gaps.min_by_key(|(_, len)| **len).map(|(offset, len)| (*offset, *len))
    }

    /// Takes a segment from the start of a gap, and returns its address.
    fn take(&mut self, (offset, len): (u64, u64), bytes: u64) -> u64 {
        self.free.remove(&offset);
        if len > bytes {
            self.free.insert(offset + bytes, len - bytes);
        }
        self.used.insert(offset, bytes);
        self.memory.range().ptr.get() + offset
    }

    /// Gives a segment back, and merges the gaps at both ends of it.
    fn give(&mut self, mut offset: u64) {
        let Some(mut bytes) = self.used.remove(&offset) else { return };
        if let Some(behind) = self.free.remove(&(offset + bytes)) {
            bytes += behind;
        }
        if let Some((&before, &len)) = self.free.range(..offset).next_back()
            && before + len == offset
        {
            (offset, bytes) = (before, bytes + len);
        }
        self.free.insert(offset, bytes);
    }
}

impl Pool {
    fn lock() -> MutexGuard<'static, Self> {
        POOL.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a segment from the smallest gap that has room for it, to keep large gaps whole.
    fn take(&mut self, device: DeviceOrdinal, bytes: u64) -> Option<u64> {
        let blocks = self.blocks.values_mut().filter(|block| block.memory.range().device == device);
        let with_gaps = blocks.filter_map(|block| block.gap(bytes).map(|gap| (gap, block)));
        let (gap, block) = with_gaps.min_by_key(|((_, len), _)| *len)?;
        Some(block.take(gap, bytes))
    }

    /// Gives a segment back. Returns its block if no other segment lies in it.
    fn give(&mut self, ptr: u64) -> Option<Block> {
        let (&base, block) = self.blocks.range_mut(..=ptr).next_back()?;
        block.give(ptr - base);
        if block.used.is_empty() { self.blocks.remove(&base) } else { None }
    }
}

fn cuda() -> Result<&'static Ipc, Error> {
    static CUDA: OnceLock<Ipc> = OnceLock::new();
    if let Some(known) = CUDA.get() {
        return Ok(known);
    }
    let loaded = Ipc::named("cuda")?;
    Ok(CUDA.get_or_init(|| loaded))
}

fn allocate(bytes: u64, device: DeviceOrdinal) -> Result<u64, Error> {
    let ipc = cuda()?;
    let block_bytes = {
        let mut pool = Pool::lock();
        if let Some(ptr) = pool.take(device, bytes) {
            return Ok(ptr);
        }
        pool.block_bytes.max(bytes)
    };
    // Without the lock: the driver takes long, and other devices and threads need not wait for it.
    let memory = match ipc.allocate_for(device, block_bytes, USE) {
        // There may be room for what is needed now.
        Err(Error::OutOfMemory { .. }) if block_bytes > bytes => ipc.allocate_for(device, bytes, USE)?,
        other => other?,
    };
    let mut block = Block::new(memory);
    let ptr = block.take((0, block.memory.range().len), bytes);
    Pool::lock().blocks.insert(ptr, block);
    Ok(ptr)
}

/// Allocates a segment for PyTorch. Returns null where there is no memory, which PyTorch reports as `OutOfMemoryError` after it has
/// freed what it keeps in reserve.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn device_ipc_torch_alloc(
    size: isize,
    device: c_int,
    _stream: *mut c_void,
) -> *mut c_void {
    let (Ok(bytes), Ok(device)) = (u64::try_from(size), u32::try_from(device)) else {
        return ptr::null_mut();
    };
    let Some(bytes) = bytes.max(1).checked_next_multiple_of(UNIT) else { return ptr::null_mut() };
    allocate(bytes, device.into()).map_or(ptr::null_mut(), |address| address as *mut c_void)
}

/// Frees a segment of [`device_ipc_torch_alloc`] when the work of the device has finished, as `cudaFree` does. The driver gets the
/// memory back with the last segment of a block.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn device_ipc_torch_free(
    segment: *mut c_void,
    _size: isize,
    device: c_int,
    _stream: *mut c_void,
) {
    let (Ok(ipc), Ok(device)) = (cuda(), u32::try_from(device)) else { return };
    // The next segment at this address may be for another stream. After an error of the device nothing can be waited for.
    let _ = ipc.backend().synchronize_device(device.into());
    let unused = Pool::lock().give(segment as u64);
    // Without the lock: the driver waits for the streams of all devices.
    drop(unused);
}

/// Sets the length of new blocks, and checks that the device supports such memory.
#[pyfunction]
pub(crate) fn _pool_prepare(py: Python<'_>, device: u32, block_bytes: u64) -> PyResult<()> {
    static CHECKED: Mutex<Vec<u32>> = Mutex::new(Vec::new());
    let checked = || CHECKED.lock().unwrap_or_else(PoisonError::into_inner);
    let block_bytes = block_bytes.max(1).checked_next_multiple_of(UNIT).unwrap_or(u64::MAX / UNIT * UNIT);
    if !checked().contains(&device) {
        let ipc = ipc(py, Some("cuda"))?;
        py.detach(|| ipc.allocate_for(device, UNIT, USE).map(drop)).or_raise(py)?;
        checked().push(device);
    }
    Pool::lock().block_bytes = block_bytes;
    Ok(())
}

/// Returns the blocks: device, address, length in bytes, and the bytes of it that PyTorch has.
#[pyfunction]
pub(crate) fn _pool_blocks() -> Vec<(String, u64, u64, u64)> {
    let of = |block: &Block| {
        let range = block.memory.range();
        let device = device_name("cuda", range.device.get());
        (device, range.ptr.get(), range.len, block.used.values().sum())
    };
    Pool::lock().blocks.values().map(of).collect()
}
