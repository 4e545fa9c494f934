//! What is sent.

use std::borrow::Cow;
use std::fmt;

use crate::backend::stream::{AsStream, BorrowedStream};
use crate::model::device::DeviceIdentity;
use crate::os::process::ProcessIdentity;
use crate::sharing::bundle::BundleExport;
use crate::sharing::export::Export;
use crate::wire::descriptor::Descriptor;

/// A message in the making: bytes, and memory that the receiver may open.
///
/// It borrows what it is made of, and holds nothing once it has been sent. Clone it where a send that runs out of time is to
/// be tried again.
#[derive(Clone, Default)]
#[must_use = "nothing is sent before Channel::send"]
pub struct Message<'a> {
    bytes: Cow<'a, [u8]>,
    pub(super) parts: Vec<Part<'a>>,
    pub(super) ready: Vec<BorrowedStream<'a>>,
}

/// What a message carries beside its bytes.
#[derive(Clone, Copy)]
pub(super) enum Part<'a> {
    /// With a grant: it can be opened though the export has been dropped.
    Export(&'a Export),
    /// Of whatever process, as it is.
    Descriptor(&'a Descriptor),
    /// With a grant for each home device.
    Bundle(&'a BundleExport),
}

impl Part<'_> {
    /// The process that shares it.
    pub(super) fn exporter(&self) -> &ProcessIdentity {
        match self {
            Self::Export(export) => &export.descriptor().exporter,
            Self::Descriptor(descriptor) => &descriptor.exporter,
            Self::Bundle(bundle) => bundle.descriptor().exporter(),
        }
    }

    /// The first of the devices where its bytes live for which this holds.
    pub(super) fn first_home(&self, mut is_it: impl FnMut(DeviceIdentity) -> bool) -> Option<DeviceIdentity> {
        match self {
            Self::Export(export) => Some(export.descriptor().home()).filter(|home| is_it(*home)),
            Self::Descriptor(descriptor) => Some(descriptor.home()).filter(|home| is_it(*home)),
            Self::Bundle(bundle) => bundle.descriptor().homes().find(|home| is_it(*home)),
        }
    }
}

impl<'a> Message<'a> {
    /// A message with nothing in it.
    pub fn new() -> Self {
        Self::default()
    }

    /// The bytes: a name, a header, whatever the receiver understands. Said again, they replace what was said before.
    pub fn bytes(mut self, bytes: impl Into<Cow<'a, [u8]>>) -> Self {
        self.bytes = bytes.into();
        self
    }

    /// Adds memory that this process shares. The export may be dropped as soon as the message has been sent: the message
    /// holds a grant, which keeps the memory until the receiver has opened it, discarded it, or died.
    pub fn tensor(mut self, export: &'a Export) -> Self {
        self.parts.push(Part::Export(export));
        self
    }

    /// Adds a bundle that this process shares. It may be dropped as soon as the message has been sent, as with
    /// [`tensor`](Self::tensor). It counts as one tensor of the message, whatever it holds.
    pub fn bundle(mut self, bundle: &'a BundleExport) -> Self {
        self.parts.push(Part::Bundle(bundle));
        self
    }

    /// Adds memory that any process shares, as a plain descriptor: there is no grant, and whoever shares it keeps it.
    pub fn descriptor(mut self, descriptor: &'a Descriptor) -> Self {
        self.parts.push(Part::Descriptor(descriptor));
        self
    }

    /// The tensors are written by what has been submitted to this stream before the message is sent. The receiver's stream
    /// waits for that, on the device. With several streams it waits for all of them.
    ///
    /// Each signal waits for those that the channel submitted before it, so a stream that does not move on holds up the
    /// tensors of later messages too. Where the stream's device has no timelines, [`Channel::send`](crate::Channel::send)
    /// waits for the stream on the host instead.
    pub fn ready_on<M>(mut self, stream: &'a impl AsStream<M>) -> Self {
        self.ready.push(stream.as_stream());
        self
    }

    pub(super) fn payload(&self) -> &[u8] {
        &self.bytes
    }
}

impl fmt::Debug for Message<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Message({} bytes, {} tensors)", self.bytes.len(), self.parts.len())
    }
}
