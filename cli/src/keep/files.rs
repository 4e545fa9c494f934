//! Safetensors files: their headers, checked against the length of the file before any device memory is allocated.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::transport::input;
use anyhow::{Context, Result, bail};
use device_ipc::{Dtype, TensorLayout};
use safetensors::tensor::{Metadata, TensorInfo};

/// Maximum length of a header in bytes: about 100,000 tensors. The decoded header needs up to 16 times as much host memory.
const MAX_HEADER_BYTES: u64 = 16 << 20;

/// The bytes of a file before its header: the header's length.
const PREFIX_BYTES: u64 = 8;

/// A file whose header has been read.
#[derive(Debug)]
pub(super) struct Shard {
    pub(super) path: PathBuf,
    /// Kept open, so that a file of the same name that is written meanwhile is not mixed with this one. Its position is the first
    /// byte of the first tensor.
    pub(super) file: File,
    /// In the order of their bytes, which have no gaps between them.
    pub(super) tensors: Vec<StoredTensor>,
}

/// A tensor in a file.
#[derive(Clone, Debug)]
pub(super) struct StoredTensor {
    pub(super) name: String,
    pub(super) layout: TensorLayout,
    pub(super) bytes: u64,
}

/// Reads the headers of files, and of all files `*.safetensors` of directories.
pub(super) fn read_headers(paths: &[PathBuf]) -> Result<Vec<Shard>> {
    let mut shards = Vec::new();
    for path in paths {
        if path.is_dir() {
            for file in files_in(path)? {
                shards.push(read_header(file)?);
            }
        } else {
            shards.push(read_header(path.clone())?);
        }
    }
    check_names(&shards)?;
    if shards.iter().all(|shard| shard.tensors.is_empty()) {
        bail!("the files contain no tensor; check that they are those of the model");
    }
    Ok(shards)
}

fn files_in(directory: &Path) -> Result<Vec<PathBuf>> {
    let shown = directory.display();
    let entries = std::fs::read_dir(directory).with_context(|| format!("cannot read {shown}"))?;
    let mut files = Vec::new();
    for entry in entries {
        let path = entry.with_context(|| format!("cannot read {shown}"))?.path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            files.push(path);
        }
    }
    if files.is_empty() {
        bail!("{shown} contains no file *.safetensors");
    }
    files.sort();
    Ok(files)
}

fn read_header(path: PathBuf) -> Result<Shard> {
    let context = format!("cannot read {}", path.display());
    let invalid = || format!("{} is not a valid safetensors file", path.display());
    // A pipe is opened without a wait for its writer, and refused.
    let mut file = input::open(&path).with_context(|| context.clone())?;
    let metadata = file.metadata().with_context(|| context.clone())?;
    if !metadata.is_file() {
        bail!("{context}: it is not a regular file");
    }
    let found = metadata.len();
    let mut prefix = [0; PREFIX_BYTES as usize];
    if found < PREFIX_BYTES {
        bail!("{}: it has {found} B, less than the length of a header; download it again", invalid());
    }
    file.read_exact(&mut prefix).with_context(|| context.clone())?;
    let length = u64::from_le_bytes(prefix);
    if (MAX_HEADER_BYTES + 1..=found - PREFIX_BYTES).contains(&length) {
        bail!(
            "{context}: its header has {length} B, and the maximum is {MAX_HEADER_BYTES} B; divide the file into several"
        );
    }
    if length > MAX_HEADER_BYTES || length > found - PREFIX_BYTES {
        bail!(
            "{}: it states a header of {length} B, and has {found} B; it is truncated, or of another format",
            invalid()
        );
    }
    let mut header = vec![0; length as usize];
    file.read_exact(&mut header).with_context(|| context.clone())?;
    // Checks that the tensors cover the data without gaps, and that each has the bytes of its shape.
    let header: Metadata = serde_json::from_slice(&header).with_context(invalid)?;
    let expected = PREFIX_BYTES + length + header.data_len() as u64;
    if expected != found {
        bail!(
            "{}: its header describes {expected} B, and it has {found} B; {}",
            invalid(),
            if found < expected { "it is truncated, download it again" } else { "download it again" }
        );
    }
    let stored = |name: String| -> Result<StoredTensor> {
        let info = header.info(&name).with_context(invalid)?;
        let bytes = (info.data_offsets.1 - info.data_offsets.0) as u64;
        let layout = layout_of(info).with_context(|| format!("{}: tensor {name:?}", path.display()))?;
        Ok(StoredTensor { name, layout, bytes })
    };
    let tensors = header.offset_keys().into_iter().map(stored).collect::<Result<_>>()?;
    Ok(Shard { path, file, tensors })
}

fn layout_of(info: &TensorInfo) -> Result<TensorLayout> {
    use safetensors::Dtype as Stored;

    let mut shape: Vec<u64> = info.shape.iter().map(|length| *length as u64).collect();
    let dtype = match info.dtype {
        Stored::BOOL => Dtype::BOOL,
        Stored::F4 => {
            // The file counts elements of 4 bits, PyTorch's type has two of them in a byte.
            let last = shape.last_mut().filter(|last| last.is_multiple_of(2));
            *last.context(
                "it has an odd number of 4-bit elements in its last dimension, which is not supported",
            )? /= 2;
            Dtype::F4_E2M1FN_X2
        }
        Stored::U8 => Dtype::U8,
        Stored::I8 => Dtype::I8,
        Stored::F8_E5M2 => Dtype::F8_E5M2,
        Stored::F8_E4M3 => Dtype::F8_E4M3FN,
        Stored::F8_E8M0 => Dtype::F8_E8M0FNU,
        Stored::F8_E4M3FNUZ => Dtype::F8_E4M3FNUZ,
        Stored::F8_E5M2FNUZ => Dtype::F8_E5M2FNUZ,
        Stored::I16 => Dtype::I16,
        Stored::U16 => Dtype::U16,
        Stored::F16 => Dtype::F16,
        Stored::BF16 => Dtype::BF16,
        Stored::I32 => Dtype::I32,
        Stored::U32 => Dtype::U32,
        Stored::F32 => Dtype::F32,
        Stored::C64 => Dtype::COMPLEX64,
        Stored::F64 => Dtype::F64,
        Stored::I64 => Dtype::I64,
        Stored::U64 => Dtype::U64,
        other => bail!("its element type {other:?} is not supported; convert it"),
    };
    Ok(TensorLayout::contiguous(dtype, shape)?)
}

/// Checks that no two files have a tensor of one name.
fn check_names(shards: &[Shard]) -> Result<()> {
    let mut known: HashMap<&str, &Path> = HashMap::new();
    for shard in shards {
        for tensor in &shard.tensors {
            if let Some(other) = known.insert(&tensor.name, &shard.path) {
                bail!(
                    "tensor {:?} is in {} and in {}; name the files of one model, each once",
                    tensor.name,
                    other.display(),
                    shard.path.display()
                );
            }
        }
    }
    Ok(())
}
