//! What is sent.

use std::borrow::Cow;
use std::fmt;

use crate::backend::stream::{AsStream, BorrowedStream};
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

/// An export that a message carries.
#[derive(Clone, Copy)]
pub(super) enum Part<'a> {
    /// With grants: it can be opened though the export has been dropped.
    Export(&'a Export),
    /// Of any process, as it is.
    Descriptor(&'a Descriptor),
}

impl<'a> Part<'a> {
    pub(super) fn descriptor(&self) -> &'a Descriptor {
        match self {
            Self::Export(export) => export.descriptor(),
            Self::Descriptor(descriptor) => descriptor,
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

    /// Adds memory that this process shares: one region, or any number of named tensors. The export may be dropped as soon as
    /// the message has been sent: the message holds grants, which keep the memory until the receiver has opened it, discarded
    /// it, or died.
    pub fn export(mut self, export: &'a Export) -> Self {
        self.parts.push(Part::Export(export));
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
