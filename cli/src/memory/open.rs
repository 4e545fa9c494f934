//! Opening a tensor of another process.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use device_ipc::{
    Access, CopyPolicy, CopyProgress, Descriptor, DeviceOrdinal, DeviceRange, Dtype, Error, Ipc, Mapping,
    OpenBuilder, Stream, Tensor, TensorLayout,
};
use serde_json::{Value, json};

use super::{DeviceBytes, Summary, add_to_bytes};
use crate::arguments::{AllowArguments, positive_duration};
use crate::output::UsageError;
use crate::progress;
use crate::selection::{Selection, builder, check_device, select_backend};
use crate::transport::descriptor::AnyDescriptor;

/// Options for opening a tensor.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct OpenArguments {
    /// Backend to use; default: the one that the descriptor names
    #[arg(long, value_name = "NAME", value_parser = crate::arguments::backend(), global = true)]
    backend: Option<String>,
    /// Ordinal of the device to open on; default: the tensor's home device
    #[arg(long, value_name = "N", global = true, value_parser = crate::arguments::device)]
    device: Option<u32>,
    /// Timeout for the sender to appear, to answer and to have the data ready
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = positive_duration, global = true)]
    pub(crate) timeout: Duration,
    #[command(flatten)]
    pub(crate) allow: AllowArguments,
    /// When to open a copy: never; staged-if-needed, through the host, if the device cannot access the tensor's memory;
    /// pulled-if-needed, over the network by NIXL, if the sender is on another host ('send --remote') or the memory cannot be opened
    /// otherwise; if-needed, either of them; or in any case: staged, pulled, always (staged, or else pulled). The copy is on device
    /// 0 if the tensor's home device is not visible to this process and --device is not given. On trusted networks only: UCX, which
    /// NIXL uses, listens on every interface without authentication, and every process that reaches its port can read and write
    /// the memory of this one
    #[arg(long, value_name = "WHEN", default_value_t, global = true)]
    copy: CopyPolicy,
}

impl OpenArguments {
    /// Returns the entry point of the library on the backend of an option or of the descriptor.
    fn ipc(&self, descriptor: &Descriptor) -> Result<Ipc> {
        let name = self.backend.as_deref().unwrap_or(descriptor.backend());
        Ok(builder(self.allow.list())?.named(name)?)
    }

    /// Asks the keeper of this name for its present export.
    pub(crate) fn find_kept(&self, name: &str) -> Result<AnyDescriptor> {
        let Selection { ipc, .. } = select_backend(self.backend.as_deref(), self.allow.list())?;
        let found = ipc.find(name, self.timeout);
        Ok(AnyDescriptor::of(found.map_err(suggest_option)?.descriptor().clone()))
    }

    fn builder<'a>(
        &self,
        ipc: &'a Ipc,
        descriptor: &'a Descriptor,
        report: &'a dyn Fn(CopyProgress),
    ) -> OpenBuilder<'a> {
        ipc.open(descriptor).timeout(self.timeout).copy(self.copy).on_progress(report)
    }
}

/// An open tensor with a stream of its device.
pub(crate) struct OpenTensor {
    mapping: Mapping,
    /// The name of the tensor in a bundle; empty for a single export.
    name: String,
    stream: Stream,
    /// Why the exporter is gone.
    gone: Arc<OnceLock<String>>,
    /// Receives a message when the exporter is gone.
    gone_receiver: Receiver<()>,
    /// Keeps the channel connected: a copy drops its callback unused, as it does not depend on the exporter.
    _gone_sender: Sender<()>,
    backend: &'static str,
}

impl OpenTensor {
    pub(crate) fn open(descriptor: &Descriptor, arguments: &OpenArguments) -> Result<Self> {
        let ipc = arguments.ipc(descriptor)?;
        let report = progress::of_copy();
        let open = || arguments.builder(&ipc, descriptor, &report);
        let home =
            || ipc.devices().map(|devices| devices.iter().find(|one| one.identity == descriptor.home()));
        let device = match arguments.device {
            Some(device) => {
                check_device(&ipc, "--device", device)?;
                device.into()
            }
            None => match home()? {
                Some(home) => home.ordinal,
                // A copy can be placed on any device.
                None if arguments.copy != CopyPolicy::Never => DeviceOrdinal::new(0),
                // The error of the library names the device and the variable to set.
                None => open().at_home().map_err(suggest_option)?.device(),
            },
        };
        let stream = ipc.create_stream(device)?;
        Ok(Self::new(&ipc, open().on(&stream).map_err(suggest_option)?, "", stream))
    }

    /// Opens one tensor of a bundle; the library opens the bundle as a whole.
    pub(crate) fn open_in_bundle(bundle: &Descriptor, name: &str, arguments: &OpenArguments) -> Result<Self> {
        let ipc = arguments.ipc(bundle)?;
        let report = progress::of_copy();
        let open = arguments.builder(&ipc, bundle, &report);
        let mapping = match arguments.device {
            Some(device) => {
                check_device(&ipc, "--device", device)?;
                open.on_device(device)
            }
            None => open.at_home(),
        };
        let mapping = mapping.map_err(suggest_option)?;
        let stream = ipc.create_stream(mapping.get(name)?.device())?;
        Ok(Self::new(&ipc, mapping, name, stream))
    }

    fn new(ipc: &Ipc, mapping: Mapping, name: &str, stream: Stream) -> Self {
        let gone = Arc::new(OnceLock::new());
        let (gone_sender, gone_receiver) = channel();
        let (reason, sender) = (Arc::clone(&gone), gone_sender.clone());
        mapping.on_gone(move |error| {
            let _ = reason.set(error.to_string());
            let _ = sender.send(());
        });
        Self {
            mapping,
            name: name.to_owned(),
            stream,
            gone,
            gone_receiver,
            _gone_sender: gone_sender,
            backend: ipc.backend().info().name,
        }
    }

    pub(crate) fn layout(&self) -> Option<&TensorLayout> {
        self.mapping.descriptor().layout_of(&self.name)
    }

    pub(crate) fn is_copy(&self) -> bool {
        self.mapping.is_copy()
    }

    /// Returns the bytes of the tensor, or of the whole region if no tensor is stated. Fails if the exporter is gone,
    /// because the contents are undefined then.
    pub(crate) fn bytes(&self) -> Result<DeviceBytes<'_>> {
        self.check()?;
        // SAFETY: `self` keeps the range mapped, and the stream belongs to its device.
        Ok(unsafe { DeviceBytes::new(self.range()?, &self.stream) })
    }

    /// Returns the bytes for writing. Fails for a tensor with gaps, as other data may be between its elements.
    fn writable(&self) -> Result<DeviceBytes<'_>> {
        let granted = self.mapping.access();
        if !granted.is_writable() {
            return Err(Error::AccessDenied { wanted: Access::ReadWrite, granted }.into());
        }
        if let Some(layout) = self.layout().filter(|layout| !layout.is_contiguous()) {
            bail!(
                "writing to a tensor with gaps between its elements is not supported (shape {:?}, strides {:?}); share it contiguous",
                layout.shape(),
                layout.strides()
            );
        }
        self.bytes()
    }

    /// Returns an error if the exporter is gone.
    pub(crate) fn check(&self) -> Result<()> {
        match self.gone.get() {
            Some(reason) => bail!("{reason}"),
            None => Ok(()),
        }
    }

    pub(crate) fn summary(&self) -> Result<Summary> {
        let summary = Summary::of(&self.bytes()?, self.layout())?;
        self.check()?;
        Ok(summary)
    }

    /// Returns the tensor, if one is stated.
    fn tensor(&self) -> Result<Option<Tensor<'_>>> {
        Ok(if self.layout().is_some() { Some(self.mapping.get(&self.name)?) } else { None })
    }

    /// Returns the bytes of the tensor, or of the whole region if no tensor is stated.
    fn range(&self) -> Result<DeviceRange> {
        Ok(self.tensor()?.map_or_else(|| self.mapping.range(), |tensor| tensor.range()))
    }

    /// Adds to every element: `float32` by a kernel of the backend, other types through host memory. Bytes without a layout
    /// are treated as `uint8`. Returns a phrase for the path taken.
    pub(crate) fn add(&self, summand: &str) -> Result<&'static str> {
        let elements = self.writable()?;
        let dtype = self.layout().map_or(Dtype::U8, TensorLayout::dtype);
        let path = if let (Dtype::F32, Some(tensor), 1..) = (dtype, self.tensor()?, elements.len()) {
            let parsed = summand.parse();
            let parsed: f32 = parsed.map_err(|_| UsageError(format!("{summand:?} is not a number")))?;
            tensor.view_mut::<f32, _>(&self.stream)?.add(parsed)?;
            self.stream.synchronize()?;
            "on the device"
        } else {
            elements.modify(|piece| add_to_bytes(dtype, piece, summand))?;
            "through the host"
        };
        self.check()?;
        Ok(path)
    }

    /// Sets every byte of the tensor, or of the whole region if no tensor is stated.
    pub(crate) fn fill(&self, byte: u8) -> Result<()> {
        self.writable()?.fill(byte)?;
        self.check()
    }

    /// Keeps the tensor open for this time. Fails if the exporter is gone before.
    pub(crate) fn hold(&self, time: Duration) -> Result<()> {
        match self.gone_receiver.recv_timeout(time) {
            Err(RecvTimeoutError::Timeout) => Ok(()),
            Ok(()) | Err(RecvTimeoutError::Disconnected) => self.check(),
        }
    }

    /// Releases the tensor after the stream has completed.
    pub(crate) fn release(self) -> Result<()> {
        self.stream.synchronize()?;
        Ok(self.mapping.release(&self.stream).map_err(Error::from)?)
    }

    /// Returns the same as [`place`](Self::place) for programs.
    pub(crate) fn report(&self) -> Result<Value> {
        let mut report = json!({
            "backend": self.backend,
            "device": self.stream.device().get(),
            "bytes": self.range()?.len,
            "at_home": self.mapping.is_at_home(),
            "copy": self.is_copy(),
        });
        if let Some(layout) = self.layout() {
            report["shape"] = json!(layout.shape());
            report["dtype"] = json!(layout.dtype().to_string());
        }
        Ok(report)
    }

    /// Returns a description for the transcript: `shape=[4, 5] dtype=float32 device=mock:0 (its home)`.
    pub(crate) fn place(&self) -> String {
        let tensor = match self.layout() {
            Some(layout) => format!("shape={:?} dtype={}", layout.shape(), layout.dtype()),
            None => format!("{} bytes", self.mapping.range().len),
        };
        let place = match (self.is_copy(), self.mapping.is_at_home()) {
            (true, _) => "a copy: what is written to it stays here",
            (false, true) => "its home",
            (false, false) => "across cards",
        };
        format!("{tensor} device={}:{} ({place})", self.backend, self.stream.device())
    }
}

/// Adds what to do on the command line to an error of the library.
fn suggest_option(error: Error) -> anyhow::Error {
    match error {
        Error::NoPeerAccess { .. } | Error::HomeNotVisible { .. } => {
            anyhow!("{error} (--copy staged-if-needed opens a copy)")
        }
        #[cfg(feature = "nixl")]
        Error::OtherHost { listens: true, .. } => anyhow!("{error} (--copy pulled-if-needed opens a copy)"),
        #[cfg(feature = "nixl")]
        error if error.to_string().contains("Remote::listen") => {
            anyhow!("{error} (device-ipc send --remote)")
        }
        Error::ExporterGone { .. } | Error::ExportDropped { .. } => {
            anyhow!("{error}; share the memory again, and use the new descriptor")
        }
        Error::NoListener { name, after, .. } if name.starts_with("keeper.") => {
            let name = name.trim_start_matches("keeper.");
            anyhow!(
                "no keeper of {name:?} was found within {}: check the name and the user with 'device-ipc keep --list', or start one \
                 with 'device-ipc keep FILES --name {name}'",
                crate::arguments::shown(after)
            )
        }
        error => error.into(),
    }
}
