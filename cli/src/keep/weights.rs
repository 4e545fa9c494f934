//! Weights in device memory: one block for each device, shared as one bundle.

use std::collections::BTreeMap;
use std::io::Read;

use anyhow::{Context, Result, anyhow};
use device_ipc::{
    Access, Buffer, DeviceOrdinal, DeviceRange, Error, Export, Ipc, Mapping, MemoryUse, Stream, TensorLayout,
};

use super::files::Shard;
use super::placement::DeviceMap;
use crate::memory::DeviceBytes;
use crate::progress::Progress;

/// Alignment of each tensor in its block in bytes: that of the CUDA allocator.
const ALIGNMENT: u64 = 256;

/// The length of a block is a multiple of this many bytes: the granularity of CUDA's virtual memory, so that no byte of a page
/// is left as an earlier process wrote it.
const GRANULARITY: u64 = 2 * 1024 * 1024;

/// Number of bytes that are read from a file at a time.
const PIECE: usize = 16 * 1024 * 1024;

/// Where weights come from is independent of where they are placed: a tensor of this name and layout, on this device.
struct Placed {
    name: String,
    layout: TensorLayout,
    device: DeviceOrdinal,
    /// From the start of the block of its device, in bytes.
    offset: u64,
}

/// The blocks of weights that are being loaded.
struct Blocks {
    access: Access,
    tensors: Vec<Placed>,
    blocks: BTreeMap<DeviceOrdinal, (Buffer, Stream)>,
}

impl Blocks {
    /// Allocates a block for each device, for tensors of these names, layouts, devices and lengths in bytes.
    fn allocate(
        ipc: &Ipc,
        access: Access,
        tensors: impl Iterator<Item = (String, TensorLayout, DeviceOrdinal, u64)>,
    ) -> Result<Self> {
        let mut ends: BTreeMap<DeviceOrdinal, u64> = BTreeMap::new();
        let mut placed = Vec::new();
        for (name, layout, device, bytes) in tensors {
            let end = ends.entry(device).or_default();
            let offset = *end;
            *end = (offset + bytes).next_multiple_of(ALIGNMENT);
            placed.push(Placed { name, layout, device, offset });
        }
        let mut blocks = BTreeMap::new();
        for (device, end) in ends {
            let bytes = end.max(1).next_multiple_of(GRANULARITY);
            let wanted = match access {
                Access::ReadOnly => MemoryUse::new().read_only_importers(),
                Access::ReadWrite => MemoryUse::new(),
            };
            let block = ipc.allocate_for(device, bytes, wanted).map_err(|error| explain(error, access))?;
            let stream = ipc.create_stream(device)?;
            // The bytes between the tensors are readable too.
            block.view_mut::<u8, _>(&stream)?.fill_bytes(0)?;
            blocks.insert(device, (block, stream));
        }
        Ok(Self { access, tensors: placed, blocks })
    }

    /// Returns a part of the block of a device.
    fn bytes(&self, device: DeviceOrdinal, offset: u64, len: u64) -> Result<DeviceBytes<'_>> {
        let (block, stream) = self.blocks.get(&device).context("the device has no block")?;
        let range: DeviceRange =
            block.range().slice(offset, len).context("out of range: beyond the block")?;
        // SAFETY: the block is allocated for the lifetime of `self`, for the device of its stream.
        Ok(unsafe { DeviceBytes::new(range, stream) })
    }

    fn share(self, ipc: &Ipc) -> Result<Export> {
        for (_, stream) in self.blocks.values() {
            stream.synchronize()?;
        }
        let mut set = ipc.tensors();
        let memories: BTreeMap<_, _> =
            self.blocks.into_iter().map(|(device, (block, _))| (device, set.memory(block))).collect();
        for tensor in self.tensors {
            set.tensor(&tensor.name, memories[&tensor.device], tensor.offset, tensor.layout)?;
        }
        let export = ipc.share_all(set).access(self.access).start().map_err(Error::from);
        export.map_err(|error| explain(error, self.access))
    }
}

/// Loads the tensors of files, each to the device of the map or else to the default device.
pub(super) fn load(
    ipc: &Ipc,
    shards: &mut [Shard],
    (default, map): (u32, &DeviceMap),
    access: Access,
) -> Result<Export> {
    let device = |name: &str| DeviceOrdinal::new(map.device_of(name).unwrap_or(default));
    let tensors = shards.iter().flat_map(|shard| &shard.tensors);
    let total = tensors.clone().map(|tensor| tensor.bytes).sum();
    let placed = tensors
        .map(|tensor| (tensor.name.clone(), tensor.layout.clone(), device(&tensor.name), tensor.bytes));
    let blocks = Blocks::allocate(ipc, access, placed)?;
    let progress = Progress::of_bytes("loading", total, PIECE as u64);
    let mut host = Vec::new();
    let mut places = blocks.tensors.iter();
    for Shard { path, file, tensors } in shards {
        for (tensor, place) in tensors.iter().zip(places.by_ref()) {
            let mut done = 0;
            while done < tensor.bytes {
                let piece = (tensor.bytes - done).min(PIECE as u64);
                host.resize(piece as usize, 0);
                file.read_exact(&mut host).with_context(|| {
                    format!(
                        "cannot read tensor {:?} of {}; the file has changed meanwhile",
                        tensor.name,
                        path.display()
                    )
                })?;
                blocks.bytes(place.device, place.offset + done, piece)?.overwrite(&host)?;
                done += piece;
                progress.advance(piece);
            }
        }
    }
    drop(progress);
    blocks.share(ipc)
}

/// Copies the tensors of a mapping, each on its device.
pub(super) fn copy(ipc: &Ipc, mapping: &Mapping) -> Result<Export> {
    let tensors = mapping.tensors().map(|(name, tensor)| {
        let layout = TensorLayout::strided(tensor.dtype(), tensor.shape(), tensor.layout().strides())?;
        Ok((name.to_owned(), layout, tensor.device(), tensor.range().len))
    });
    let tensors = tensors.collect::<Result<Vec<_>>>()?;
    let blocks = Blocks::allocate(ipc, mapping.access(), tensors.into_iter())?;
    for ((_, tensor), place) in mapping.tensors().zip(&blocks.tensors) {
        if tensor.range().len > 0 {
            let (_, stream) = blocks.blocks.get(&place.device).context("the device has no block")?;
            let source = tensor.view_bytes(stream)?;
            blocks.bytes(place.device, place.offset, tensor.range().len)?.copy_from(&source)?;
        }
    }
    blocks.share(ipc)
}

/// Adds what to do on the command line to an error of the library.
fn explain(error: Error, access: Access) -> anyhow::Error {
    match error {
        Error::Unsupported { .. } if access == Access::ReadOnly => anyhow!(
            "{error} (with --writable the weights are shared read-write: any process that opens them can then change them for all)"
        ),
        Error::OutOfMemory { .. } => anyhow!(
            "{error} (the weights of a device are one block; a new version is loaded beside the present one, and the memory of the \
             present one is freed when its last reader has released it)"
        ),
        error => error.into(),
    }
}
