//! A tensor of another process, opened.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use device_ipc::{
    Access, BundleDescriptor, BundleMapping, Descriptor, DeviceOrdinal, DeviceRange, Dtype, Error, Ipc,
    Mapping, Stream, Tensor, TensorLayout,
};

use super::{DeviceBytes, Summary, add_to_bytes};
use device_ipc_cli::selection::check_device;

/// Where to open.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Place {
    /// This backend; the one that the descriptor names unless given.
    #[arg(long, value_name = "NAME")]
    pub(crate) backend: Option<String>,
    /// This process's device to open on; the one that the bytes live on unless given.
    #[arg(long, value_name = "N")]
    pub(crate) device: Option<u32>,
    /// How long the sender may take: to come, to answer, to have the bytes ready; in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) timeout: u64,
    /// Take a copy where the device cannot reach the tensor; it is said that it is one. On device 0 where the tensor's own is
    /// hidden here and --device is not given.
    #[arg(long, conflicts_with = "staged")]
    pub(crate) or_staged: bool,
    /// Take a copy in any case.
    #[arg(long)]
    pub(crate) staged: bool,
}

impl Place {
    pub(crate) fn patience(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }
}

/// An opened tensor with a stream of its device, and whether its exporter is still there.
pub(crate) struct Opened {
    memory: Memory,
    stream: Stream,
    gone: Arc<OnceLock<String>>,
    ended: Receiver<()>,
    /// A copy hears of no end; nor has it one.
    _end: Sender<()>,
    backend: &'static str,
}

/// What the tensor lies in.
enum Memory {
    Export(Mapping),
    /// The tensor of this name in a bundle.
    Bundle(BundleMapping, String),
}

impl Opened {
    pub(crate) fn open(descriptor: &Descriptor, place: &Place) -> Result<Self> {
        let ipc = Ipc::named(place.backend.as_deref().unwrap_or(descriptor.backend()))?;
        let open = || {
            let open = ipc.open(descriptor).timeout(place.patience());
            match (place.staged, place.or_staged) {
                (true, _) => open.staged(),
                (false, true) => open.or_staged(),
                (false, false) => open,
            }
        };
        let home =
            || ipc.devices().map(|devices| devices.iter().find(|one| one.identity == descriptor.home()));
        let device = match place.device {
            Some(device) => {
                check_device(&ipc, "--device", device)?;
                device.into()
            }
            None => match home()? {
                Some(home) => home.ordinal,
                // A copy can lie anywhere.
                None if place.staged || place.or_staged => DeviceOrdinal::new(0),
                // The library says which device it is and what to set.
                None => open().at_home().map_err(with_option)?.device(),
            },
        };
        let stream = ipc.create_stream(device)?;
        Ok(Self::new(&ipc, Memory::Export(open().on(&stream).map_err(with_option)?), stream))
    }

    /// One tensor of a bundle. All of the bundle is opened, as it is opened by every program.
    pub(crate) fn open_in(bundle: &BundleDescriptor, name: &str, place: &Place) -> Result<Self> {
        if place.staged || place.or_staged {
            bail!("a bundle is not copied; leave --staged and --or-staged away, or share the tensor alone");
        }
        let ipc = Ipc::named(place.backend.as_deref().unwrap_or(bundle.backend()))?;
        let open = ipc.open_bundle(bundle).timeout(place.patience());
        let mapping = match place.device {
            Some(device) => {
                check_device(&ipc, "--device", device)?;
                open.on_device(device)?
            }
            None => open.at_home()?,
        };
        let stream = ipc.create_stream(mapping.tensor(name)?.device())?;
        Ok(Self::new(&ipc, Memory::Bundle(mapping, name.to_owned()), stream))
    }

    fn new(ipc: &Ipc, memory: Memory, stream: Stream) -> Self {
        let gone = Arc::new(OnceLock::new());
        let (end, ended) = channel();
        let (seen, tell) = (Arc::clone(&gone), end.clone());
        memory.on_gone(move |why| {
            let _ = seen.set(why.to_string());
            let _ = tell.send(());
        });
        Self { memory, stream, gone, ended, _end: end, backend: ipc.backend().info().name }
    }

    pub(crate) fn layout(&self) -> Option<&TensorLayout> {
        match &self.memory {
            Memory::Export(mapping) => mapping.layout(),
            Memory::Bundle(mapping, name) => mapping.descriptor().layout(name),
        }
    }

    pub(crate) fn is_copy(&self) -> bool {
        matches!(&self.memory, Memory::Export(mapping) if mapping.is_copy())
    }

    /// The bytes of the tensor, or all of them where none is stated; unless their exporter has ended: what is there then is
    /// nobody's promise.
    pub(crate) fn bytes(&self) -> Result<DeviceBytes<'_>> {
        self.check()?;
        // SAFETY: the mapping keeps its range mapped, on the device that the stream is of.
        Ok(unsafe { DeviceBytes::new(self.memory.range()?, &self.stream) })
    }

    /// The bytes, to be written: those between the elements, which may be somebody else's, are not among them.
    fn writable(&self) -> Result<DeviceBytes<'_>> {
        let granted = self.memory.access();
        if !granted.is_writable() {
            return Err(Error::AccessDenied { wanted: Access::ReadWrite, granted }.into());
        }
        if let Some(layout) = self.layout().filter(|layout| !layout.is_contiguous()) {
            bail!(
                "the tensor has gaps between its elements (shape {:?}, strides {:?}); share it contiguous",
                layout.shape(),
                layout.strides()
            );
        }
        self.bytes()
    }

    /// Is the exporter still there?
    pub(crate) fn check(&self) -> Result<()> {
        match self.gone.get() {
            Some(why) => bail!("{why}"),
            None => Ok(()),
        }
    }

    pub(crate) fn summary(&self) -> Result<Summary> {
        let summary = Summary::of(&self.bytes()?, self.layout())?;
        self.check()?;
        Ok(summary)
    }

    /// Adds to every element: by a kernel of the backend to `float32`, through the host to others. Bytes without a layout
    /// are taken as `uint8`. Says which way it was.
    pub(crate) fn add(&self, summand: &str) -> Result<&'static str> {
        let elements = self.writable()?;
        let dtype = self.layout().map_or(Dtype::U8, TensorLayout::dtype);
        let way = if let (Dtype::F32, Some(tensor), 1..) = (dtype, self.memory.tensor()?, elements.len()) {
            let Ok(summand) = summand.parse() else { bail!("{summand:?} is no number") };
            tensor.view_mut::<f32, _>(&self.stream)?.add(summand)?;
            self.stream.synchronize()?;
            "on the device"
        } else {
            elements.change(|piece| add_to_bytes(dtype, piece, summand))?;
            "through the host"
        };
        self.check()?;
        Ok(way)
    }

    /// Sets every byte of the tensor, or of the region where none is stated.
    pub(crate) fn fill(&self, byte: u8) -> Result<()> {
        self.writable()?.fill(byte)?;
        self.check()
    }

    /// Keeps the memory open for so long; the exporter's end is an error.
    pub(crate) fn hold(&self, time: Duration) -> Result<()> {
        match self.ended.recv_timeout(time) {
            Err(RecvTimeoutError::Timeout) => Ok(()),
            Ok(()) | Err(RecvTimeoutError::Disconnected) => self.check(),
        }
    }

    /// Lets go when the device has finished.
    pub(crate) fn release(self) -> Result<()> {
        self.stream.synchronize()?;
        match self.memory {
            Memory::Export(mapping) => mapping.release(&self.stream).map_err(Error::from)?,
            Memory::Bundle(mapping, _) => mapping.release(&self.stream).map_err(Error::from)?,
        }
        Ok(())
    }

    /// For people: `shape=[4, 5] dtype=float32 device=mock:0 (its home)`.
    pub(crate) fn place(&self) -> String {
        let tensor = match self.layout() {
            Some(layout) => format!("shape={:?} dtype={}", layout.shape(), layout.dtype()),
            None => format!("{} bytes", self.memory.range().map_or(0, |range| range.len)),
        };
        let place = match (self.is_copy(), self.memory.is_at_home()) {
            (true, _) => "a copy: what is written to it stays here",
            (false, true) => "its home",
            (false, false) => "across cards",
        };
        format!("{tensor} device={}:{} ({place})", self.backend, self.stream.device())
    }
}

/// The library names its own call; here it is an option.
fn with_option(error: Error) -> anyhow::Error {
    match error {
        Error::NoPeerAccess { .. } | Error::HomeNotVisible { .. } => {
            anyhow!("{error} (--or-staged takes a copy)")
        }
        error => error.into(),
    }
}

impl Memory {
    /// The tensor, where one is stated.
    fn tensor(&self) -> Result<Option<Tensor<'_>>> {
        Ok(match self {
            Self::Export(mapping) if mapping.layout().is_none() => None,
            Self::Export(mapping) => Some(mapping.tensor()?),
            Self::Bundle(mapping, name) => Some(mapping.tensor(name)?),
        })
    }

    fn range(&self) -> Result<DeviceRange> {
        Ok(match (self.tensor()?, self) {
            (Some(tensor), _) => tensor.range(),
            (None, Self::Export(mapping)) => mapping.range(),
            (None, Self::Bundle(..)) => unreachable!("what is in a bundle is a tensor"),
        })
    }

    fn access(&self) -> Access {
        match self {
            Self::Export(mapping) => mapping.access(),
            Self::Bundle(mapping, _) => mapping.access(),
        }
    }

    fn is_at_home(&self) -> bool {
        match self {
            Self::Export(mapping) => mapping.is_at_home(),
            Self::Bundle(mapping, _) => mapping.is_at_home(),
        }
    }

    fn on_gone(&self, callback: impl FnOnce(&Error) + Send + 'static) {
        match self {
            Self::Export(mapping) => mapping.on_gone(callback),
            Self::Bundle(mapping, _) => mapping.on_gone(callback),
        }
    }
}
