//! A tensor of another process, opened.

use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::{Result, bail};
use device_ipc::{Access, Descriptor, Dtype, Error, Ipc, Mapping, Stream, TensorLayout};

use super::{DeviceBytes, Summary, add_to_bytes, element_bytes};
use crate::choose::check_device;

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
}

impl Place {
    pub(crate) fn patience(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }
}

/// A mapping with a stream of its device, and whether its exporter is still there.
pub(crate) struct Opened {
    mapping: Mapping,
    stream: Stream,
    gone: Arc<OnceLock<String>>,
    ended: Receiver<()>,
    backend: &'static str,
}

impl Opened {
    pub(crate) fn open(descriptor: &Descriptor, place: &Place) -> Result<Self> {
        let ipc = Ipc::named(place.backend.as_deref().unwrap_or(descriptor.backend()))?;
        let home =
            || ipc.devices().map(|devices| devices.iter().find(|one| one.identity == descriptor.home()));
        let device = match place.device {
            Some(device) => {
                check_device(&ipc, "--device", device)?;
                device.into()
            }
            None => match home()? {
                Some(home) => home.ordinal,
                // The library says which device it is and what to set.
                None => match ipc.open(descriptor).timeout(place.patience()).at_home() {
                    Ok(mapping) => mapping.device(),
                    Err(error) => return Err(error.into()),
                },
            },
        };
        let stream = ipc.create_stream(device)?;
        let mapping = ipc.open(descriptor).timeout(place.patience()).on(&stream)?;
        let gone = Arc::new(OnceLock::new());
        let (end, ended) = channel();
        let seen = Arc::clone(&gone);
        mapping.on_gone(move |why| {
            let _ = seen.set(why.to_string());
            let _ = end.send(());
        });
        Ok(Self { mapping, stream, gone, ended, backend: ipc.backend().info().name })
    }

    pub(crate) fn layout(&self) -> Option<&TensorLayout> {
        self.mapping.layout()
    }

    pub(crate) fn is_at_home(&self) -> bool {
        self.mapping.is_at_home()
    }

    pub(crate) fn device(&self) -> u32 {
        self.mapping.device().get()
    }

    /// The bytes of the region, unless their exporter has ended: what is there then is nobody's promise.
    pub(crate) fn bytes(&self) -> Result<DeviceBytes<'_>> {
        self.check()?;
        // SAFETY: the mapping keeps its range mapped, on the device that the stream is of.
        Ok(unsafe { DeviceBytes::new(self.mapping.range(), &self.stream) })
    }

    fn writable(&self) -> Result<DeviceBytes<'_>> {
        let granted = self.mapping.access();
        if !granted.is_writable() {
            return Err(Error::AccessDenied { wanted: Access::ReadWrite, granted }.into());
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
        let bytes = self.writable()?;
        let dtype = self.layout().map_or(Dtype::U8, TensorLayout::dtype);
        if dtype == Dtype::F32 {
            let Ok(summand) = summand.parse() else { bail!("{summand:?} is no number") };
            self.mapping.view_mut::<f32, _>(&self.stream)?.add(summand)?;
            self.stream.synchronize()?;
            self.check()?;
            return Ok("on the device");
        }
        let elements = match self.layout() {
            None => bytes,
            Some(layout) => match element_bytes(layout)? {
                Some(elements) => bytes.part(elements.start, elements.end - elements.start)?,
                None => bail!(
                    "the tensor has gaps between its elements (shape {:?}, strides {:?}); share it contiguous",
                    layout.shape(),
                    layout.strides()
                ),
            },
        };
        elements.change(|piece| add_to_bytes(dtype, piece, summand))?;
        self.check()?;
        Ok("through the host")
    }

    /// Sets every byte of the region.
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
        Ok(self.mapping.release(&self.stream).map_err(Error::from)?)
    }

    /// For people: `shape=[4, 5] dtype=float32 device=mock:0 (its home)`.
    pub(crate) fn place(&self) -> String {
        let tensor = match self.layout() {
            Some(layout) => format!("shape={:?} dtype={}", layout.shape(), layout.dtype()),
            None => format!("{} bytes", self.mapping.len()),
        };
        let place = if self.is_at_home() { "its home" } else { "across cards" };
        format!("{tensor} device={}:{} ({place})", self.backend, self.device())
    }
}
