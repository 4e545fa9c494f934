//! The tensor that `send` shares.

use std::fs::File;
use std::io::Read;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use device_ipc::{Buffer, Dtype, Error, Export, Ipc, Stream, TensorLayout};
use indicatif::HumanBytes;
use serde_json::{Value, json};

use crate::memory::{DeviceBytes, Summary, bytes_of_value};
use crate::output::{UsageError, as_usage};
use crate::transport::input;

#[derive(clap::Args)]
pub(super) struct TensorArguments {
    /// Size of each dimension; default: 4,5, or with --in one dimension with all elements of the file
    #[arg(long, value_name = "N,N,…", value_delimiter = ',', value_parser = crate::arguments::dimension)]
    shape: Option<Vec<u64>>,
    /// Element type by its PyTorch name or its short name (f32, bf16); default: float32, or uint8 with --in
    #[arg(long, value_name = "NAME", value_parser = crate::arguments::dtype())]
    dtype: Option<Dtype>,
    /// Value of every element; default: 1
    #[arg(long, value_name = "X", conflicts_with = "input", allow_hyphen_values = true)]
    value: Option<String>,
    /// File with the bytes of the elements, in memory order
    #[arg(long = "in", id = "input", value_name = "FILE")]
    input: Option<PathBuf>,
}

/// A tensor of this process.
pub(super) struct SharedTensor {
    buffer: Arc<Buffer>,
    stream: Stream,
    layout: TensorLayout,
    backend: &'static str,
}

/// The source of the elements.
enum Source {
    File(File, PathBuf),
    /// The bytes of one element, repeated.
    Element(Vec<u8>),
}

impl TensorArguments {
    fn layout_and_source(&self) -> Result<(TensorLayout, Source)> {
        let Some(path) = &self.input else {
            let dtype = self.dtype.unwrap_or(Dtype::F32);
            let shape = self.shape.clone().unwrap_or_else(|| vec![4, 5]);
            let element = bytes_of_value(dtype, self.value.as_deref().unwrap_or("1")).map_err(as_usage)?;
            return Ok((TensorLayout::contiguous(dtype, shape).map_err(as_usage)?, Source::Element(element)));
        };
        let shown = path.display();
        let file = input::open(path).with_context(|| format!("cannot open {shown}"))?;
        let metadata = file.metadata().with_context(|| format!("cannot read {shown}"))?;
        ensure!(
            metadata.is_file(),
            "{shown} is not a regular file, so its length is unknown; copy the bytes to a file first"
        );
        let dtype = self.dtype.unwrap_or(Dtype::U8);
        let element = dtype.bytes().context("element type not supported by this version")?;
        let shape = self.shape.clone().unwrap_or_else(|| vec![metadata.len() / element]);
        let layout = TensorLayout::contiguous(dtype, shape).map_err(as_usage)?;
        let needed = layout.span_bytes();
        if needed != metadata.len() {
            bail!(
                "{shown} has {} B, but {dtype} of shape {:?} requires {needed} B; change --shape or --dtype",
                metadata.len(),
                layout.shape()
            );
        }
        Ok((layout, Source::File(file, path.clone())))
    }
}

impl SharedTensor {
    /// Allocates the tensor and fills it.
    pub(super) fn make(ipc: &Ipc, device: u32, arguments: &TensorArguments) -> Result<Self> {
        let (layout, source) = arguments.layout_and_source()?;
        let bytes = layout.span_bytes();
        if bytes == 0 {
            let shape = layout.shape();
            let why = format!("a tensor of shape {shape:?} has no elements to share; choose another --shape");
            bail!(UsageError(why));
        }
        let stream = ipc.create_stream(device)?;
        let buffer = Arc::new(ipc.allocate(device, bytes)?);
        let tensor = Self { buffer, stream, layout, backend: ipc.backend().info().name };
        tensor.fill(source)?;
        Ok(tensor)
    }

    fn bytes(&self) -> DeviceBytes<'_> {
        // SAFETY: `self` keeps the range allocated, and the stream belongs to its device.
        unsafe { DeviceBytes::new(self.buffer.range(), &self.stream) }
    }

    fn fill(&self, source: Source) -> Result<()> {
        match source {
            Source::Element(element) if element.iter().all(|byte| *byte == element[0]) => {
                self.bytes().fill(element[0])
            }
            Source::Element(element) => self.bytes().write(|piece| {
                piece.chunks_exact_mut(element.len()).for_each(|one| one.copy_from_slice(&element));
                Ok(())
            }),
            Source::File(mut file, path) => self.bytes().write(|piece| {
                file.read_exact(piece).with_context(|| format!("cannot read {}", path.display()))
            }),
        }
    }

    pub(super) fn summary(&self) -> Result<Summary> {
        self.stream.synchronize()?;
        Summary::of(&self.bytes(), Some(&self.layout))
    }

    pub(super) fn share(&self, ipc: &Ipc) -> Result<Export> {
        let share = ipc.share(Arc::clone(&self.buffer)).dtype(self.layout.dtype());
        Ok(share.shape(self.layout.shape()).ready_on(&self.stream).start().map_err(Error::from)?)
    }

    /// Returns the same as [`place`](Self::place) for programs.
    pub(super) fn report(&self) -> Value {
        let range = self.buffer.range();
        json!({
            "pid": std::process::id(),
            "shape": self.layout.shape(),
            "dtype": self.layout.dtype().to_string(),
            "backend": self.backend,
            "device": range.device.get(),
            "bytes": range.len,
        })
    }

    /// Returns a description for the transcript: `shape=[4, 5] dtype=float32 device=mock:0, 80 B`.
    pub(super) fn place(&self) -> String {
        let range = self.buffer.range();
        format!(
            "shape={:?} dtype={} device={}:{}, {}",
            self.layout.shape(),
            self.layout.dtype(),
            self.backend,
            range.device,
            HumanBytes(range.len)
        )
    }
}
