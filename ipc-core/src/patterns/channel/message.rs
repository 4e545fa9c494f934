//! Messages to be sent.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::stream::{AsStream, BorrowedStream};
use crate::model::error::Error;
use crate::sharing::export::Export;
use crate::wire::descriptor::Descriptor;

/// A builder for a message: bytes, and memory that the receiver may open.
///
/// A message borrows its contents or owns them; a message without borrows is a `Message<'static>`, which can be moved to
/// another thread or task. It holds no grants before it is sent. Clone it to retry a send after a timeout;
/// [`ChannelSender::try_send`](crate::ChannelSender::try_send) returns it.
///
/// # Examples
///
/// ```no_run
/// # use device_ipc_core::{Channel, Export, Message, Result};
/// # fn send(channel: &Channel, export: &Export, stream: &device_ipc_core::Stream) -> Result<()> {
/// let message = Message::new().bytes(b"layer 3").export(export).ready_on(stream);
/// channel.send(message, std::time::Duration::from_secs(10))?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Default)]
#[must_use = "nothing is sent before Channel::send"]
pub struct Message<'a> {
    bytes: Cow<'a, [u8]>,
    pub(super) parts: Vec<MessagePart<'a>>,
    pub(super) ready: Vec<BorrowedStream<'a>>,
}

/// An export that a message carries.
#[derive(Clone)]
pub(super) enum MessagePart<'a> {
    /// With grants: it can be opened although the export has been dropped.
    Export(MessageExport<'a>),
    /// Of any process, without a grant.
    Descriptor(Cow<'a, Descriptor>),
}

impl MessagePart<'_> {
    pub(super) fn descriptor(&self) -> &Descriptor {
        match self {
            Self::Export(export) => export.get().descriptor(),
            Self::Descriptor(descriptor) => descriptor,
        }
    }
}

/// An export as the content of a [`Message`]: borrowed, shared, or owned.
///
/// A message that owns its export drops the export after the send; the grants keep the memory for the receiver.
#[derive(Clone, Debug)]
pub struct MessageExport<'a>(ExportRef<'a>);

#[derive(Clone, Debug)]
enum ExportRef<'a> {
    Borrowed(&'a Export),
    Shared(Arc<Export>),
}

impl MessageExport<'_> {
    fn get(&self) -> &Export {
        match &self.0 {
            ExportRef::Borrowed(export) => export,
            ExportRef::Shared(export) => export,
        }
    }
}

impl<'a> From<&'a Export> for MessageExport<'a> {
    fn from(export: &'a Export) -> Self {
        Self(ExportRef::Borrowed(export))
    }
}

impl From<Arc<Export>> for MessageExport<'_> {
    fn from(export: Arc<Export>) -> Self {
        Self(ExportRef::Shared(export))
    }
}

impl From<Export> for MessageExport<'_> {
    fn from(export: Export) -> Self {
        Self(ExportRef::Shared(Arc::new(export)))
    }
}

/// The error of a send that does not wait.
#[derive(Debug)]
pub enum TrySendError<'a> {
    /// The messages in flight leave no room. Nothing of the message has been sent.
    Full(Message<'a>),
    /// The message cannot be sent; see [`Channel::send`](crate::Channel::send).
    Failed(Error),
}

impl fmt::Display for TrySendError<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full(_) => f.write_str(
                "the channel is full: the receiver must receive earlier messages first; wait for the sender's descriptor",
            ),
            Self::Failed(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for TrySendError<'_> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Full(_) => None,
            Self::Failed(error) => error.source(),
        }
    }
}

impl From<TrySendError<'_>> for Error {
    /// A full channel becomes [`Error::Timeout`] after 0 s.
    fn from(error: TrySendError<'_>) -> Self {
        let detail = format!("; {error}");
        match error {
            TrySendError::Full(_) => {
                Self::Timeout { what: "the sending of a message".into(), after: Duration::ZERO, detail }
            }
            TrySendError::Failed(error) => error,
        }
    }
}

impl<'a> Message<'a> {
    /// Creates an empty message.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the bytes, for example a name or a header. A second call replaces them.
    pub fn bytes(mut self, bytes: impl Into<Cow<'a, [u8]>>) -> Self {
        self.bytes = bytes.into();
        self
    }

    /// Adds memory that this process shares: one region, or any number of named tensors. Accepts `&Export`, `Arc<Export>` or
    /// `Export`.
    ///
    /// The export may be dropped as soon as the message has been sent: the message contains grants, which keep the memory
    /// until the receiver has opened or discarded it, or has terminated.
    pub fn export(mut self, export: impl Into<MessageExport<'a>>) -> Self {
        self.parts.push(MessagePart::Export(export.into()));
        self
    }

    /// Adds memory that any process shares, as a plain descriptor without a grant: its exporter must keep it.
    pub fn descriptor(mut self, descriptor: impl Into<Cow<'a, Descriptor>>) -> Self {
        self.parts.push(MessagePart::Descriptor(descriptor.into()));
        self
    }

    /// Adds a stream that writes the tensors: they are ready when the work that was submitted to it before the send is complete.
    ///
    /// The receiver's stream waits for that on the device; with several streams, for all of them. Each signal waits for the
    /// signals that the channel submitted before it, so a stream that makes no progress delays the tensors of later messages
    /// too. If the stream's device has no timelines, [`Channel::send`](crate::Channel::send) waits for the stream on the host
    /// instead.
    pub fn ready_on<M>(mut self, stream: &'a impl AsStream<M>) -> Self {
        self.ready.push(stream.as_stream());
        self
    }

    /// Returns the bytes that count as in flight: the payload, and the memory that the grants keep allocated.
    pub(super) fn bytes_in_flight(&self) -> u64 {
        let granted = self.parts.iter().filter(|part| matches!(part, MessagePart::Export(_)));
        granted.fold(self.bytes.len() as u64, |sum, part| sum.saturating_add(part.descriptor().len()))
    }

    /// Returns the bytes.
    pub fn payload(&self) -> &[u8] {
        &self.bytes
    }
}

impl fmt::Debug for Message<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Message({} bytes, {} tensors)", self.bytes.len(), self.parts.len())
    }
}
