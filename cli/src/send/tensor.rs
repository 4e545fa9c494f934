//! What is sent.

use std::fs::File;
use std::io::Read;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use device_ipc::{Buffer, Dtype, Error, Export, Ipc, Stream, TensorLayout};
use indicatif::HumanBytes;

use crate::memory::{DeviceBytes, Summary, bytes_of_value, dtype_of_name};
use crate::road::input;

#[derive(clap::Args)]
pub(super) struct TensorArguments {
    /// The size of each dimension; 4,5 unless given, or one dimension with all that the file of --in holds.
    #[arg(long, value_name = "N,N,…", value_delimiter = ',')]
    shape: Option<Vec<u64>>,
    /// The type of the elements, as PyTorch writes it; float32 unless given, and uint8 with --in.
    #[arg(long, value_name = "NAME", value_parser = dtype_of_name)]
    dtype: Option<Dtype>,
    /// The value of every element; 1 unless given.
    #[arg(long, value_name = "X", conflicts_with = "input", allow_hyphen_values = true)]
    value: Option<String>,
    /// The elements' bytes, as they lie in memory, in this file.
    #[arg(long = "in", id = "input", value_name = "FILE")]
    input: Option<PathBuf>,
}

/// A tensor of this process.
pub(super) struct SentTensor {
    buffer: Arc<Buffer>,
    stream: Stream,
    layout: TensorLayout,
    backend: &'static str,
}

/// Where the elements come from.
enum Source {
    File(File, PathBuf),
    /// One element, over and over.
    Element(Vec<u8>),
}

impl TensorArguments {
    fn layout_and_source(&self) -> Result<(TensorLayout, Source)> {
        let Some(path) = &self.input else {
            let dtype = self.dtype.unwrap_or(Dtype::F32);
            let shape = self.shape.clone().unwrap_or_else(|| vec![4, 5]);
            let element = bytes_of_value(dtype, self.value.as_deref().unwrap_or("1"))?;
            return Ok((TensorLayout::contiguous(dtype, shape)?, Source::Element(element)));
        };
        let shown = path.display();
        let file = input::open(path).with_context(|| format!("opening {shown}"))?;
        let metadata = file.metadata().with_context(|| format!("looking at {shown}"))?;
        ensure!(metadata.is_file(), "{shown} is no regular file, so nobody knows how long it is");
        let dtype = self.dtype.unwrap_or(Dtype::U8);
        let element = dtype.bytes().context("an element type that this version does not know")?;
        let shape = self.shape.clone().unwrap_or_else(|| vec![metadata.len() / element]);
        let layout = TensorLayout::contiguous(dtype, shape)?;
        let needed = layout.span_bytes()?;
        if needed != metadata.len() {
            bail!(
                "{shown} holds {} bytes, and {dtype} of shape {:?} has {needed}; change --shape or --dtype",
                metadata.len(),
                layout.shape()
            );
        }
        Ok((layout, Source::File(file, path.clone())))
    }
}

impl SentTensor {
    /// Allocates the tensor and fills it.
    pub(super) fn make(ipc: &Ipc, device: u32, arguments: &TensorArguments) -> Result<Self> {
        let (layout, source) = arguments.layout_and_source()?;
        let bytes = layout.span_bytes()?;
        ensure!(bytes > 0, "a tensor of shape {:?} has no elements to share", layout.shape());
        let stream = ipc.create_stream(device)?;
        let buffer = Arc::new(ipc.allocate(device, bytes)?);
        let tensor = Self { buffer, stream, layout, backend: ipc.backend().info().name };
        tensor.fill(source)?;
        Ok(tensor)
    }

    fn bytes(&self) -> DeviceBytes<'_> {
        // SAFETY: the buffer keeps its range allocated, on the device that the stream is of.
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
            Source::File(mut file, path) => self
                .bytes()
                .write(|piece| file.read_exact(piece).with_context(|| format!("reading {}", path.display()))),
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

    /// For people: `shape=[4, 5] dtype=float32 device=mock:0, 80 B`.
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
