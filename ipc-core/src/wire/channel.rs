//! The messages of a channel. `docs/spec/channel.md` specifies them; change both together.
//!
//! A packet is a [`Frame`], followed by the head and the bytes of a message, or accompanied by a memory file that contains
//! them.

use std::borrow::Cow;
use std::io;
use std::marker::PhantomData;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use serde::de::{Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::model::error::{Error, Result};
use crate::model::one_or_many::OneOrMany;
use crate::os::received_file;
use crate::wire::Token;
use crate::wire::descriptor::{Descriptor, ExportId, MAX_REGIONS_SECTIONS};

/// Maximum number of exports of a message.
pub const MAX_MESSAGE_TENSORS: usize = 1024;

/// Maximum size of a packet in bytes. A longer message is sent in a memory file.
pub(crate) const MAX_PACKET_BYTES: usize = 64 * 1024;

/// Maximum number of ended grants that wait to be reported to one exporter, and that one message reports.
pub(crate) const MAX_ENDED_GRANTS: usize = 64;

/// The file descriptors that arrive with a packet. Unclaimed ones are closed on drop.
pub(crate) trait PacketFiles {
    fn len(&self) -> usize;
    fn first(&self) -> Option<&OwnedFd>;
    /// Claims the first of them.
    fn take_first(self) -> Option<OwnedFd>;
}

/// The head of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Frame {
    /// The message follows.
    Whole,
    /// The memory file of the packet contains the message, which has this many bytes.
    InFile { bytes: u64 },
    /// The sender sends no further messages.
    End,
    /// A message is in the inbox: wakes an end that went to sleep meanwhile.
    Look,
    /// The file descriptor of the packet is a file that the sender hands over: a listening socket, or a table of claims.
    File,
}

/// The head of a message, followed by its bytes. A sender borrows the descriptors.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Head<'a> {
    /// Whether this is a reply, which uses the inverse of the device map of the message that it answers.
    pub(crate) reply: bool,
    /// The value of the sender's counter at which the tensors are ready; 0 if they are ready now.
    pub(crate) ready: u64,
    /// Ended grants of the receiver's exports.
    #[serde(with = "at_most_waiting")]
    pub(crate) ended: Vec<(ExportId, Token)>,
    #[serde(with = "at_most_tensors")]
    pub(crate) items: Vec<Item<'a>>,
}

/// An export of a message: its descriptor, and a grant for each of its parts if the sender is the exporter.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Item<'a> {
    pub(crate) descriptor: DescriptorBytes<'a>,
    pub(crate) grants: GrantTokens,
}

/// A descriptor in its binary form.
#[derive(Debug)]
pub(crate) struct DescriptorBytes<'a>(pub(crate) Cow<'a, Descriptor>);

impl Serialize for DescriptorBytes<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0.to_bytes())
    }
}

impl<'de> Deserialize<'de> for DescriptorBytes<'_> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let bytes = <&[u8]>::deserialize(deserializer)?;
        let read = Descriptor::from_bytes(bytes);
        read.map(|descriptor| Self(Cow::Owned(descriptor))).map_err(D::Error::custom)
    }
}

/// A token for each part of an export, or none.
#[derive(Debug)]
pub(crate) struct GrantTokens(pub(crate) OneOrMany<Token>);

impl Serialize for GrantTokens {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for GrantTokens {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let read = AtMost::<Token, OneOrMany<Token>>(MAX_REGIONS_SECTIONS, PhantomData);
        deserializer.deserialize_seq(read).map(Self)
    }
}

/// A list whose length is checked while it is decoded.
macro_rules! bounded {
    ($name:ident, $most:expr) => {
        pub(crate) mod $name {
            use super::*;

            pub(crate) fn serialize<S: Serializer, T: Serialize>(
                list: &Vec<T>,
                serializer: S,
            ) -> std::result::Result<S::Ok, S::Error> {
                list.serialize(serializer)
            }

            pub(crate) fn deserialize<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
                deserializer: D,
            ) -> std::result::Result<Vec<T>, D::Error> {
                deserializer.deserialize_seq(AtMost::<T, Vec<T>>($most, PhantomData))
            }
        }
    };
}

bounded!(at_most_waiting, MAX_ENDED_GRANTS);
bounded!(at_most_tensors, MAX_MESSAGE_TENSORS);

struct AtMost<T, L>(usize, PhantomData<(T, L)>);

impl<'de, T: Deserialize<'de>, L: FromIterator<T>> Visitor<'de> for AtMost<T, L> {
    type Value = L;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "at most {} elements", self.0)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> std::result::Result<L, A::Error> {
        let mut read = 0;
        let elements = std::iter::from_fn(|| {
            let element = list.next_element().transpose()?;
            read += 1;
            Some(element.and_then(|element| {
                if read > self.0 { Err(A::Error::invalid_length(read, &self)) } else { Ok(element) }
            }))
        });
        elements.collect()
    }
}

fn encoded<T: Serialize>(value: &T) -> Result<Vec<u8>> {
    postcard::to_stdvec(value).map_err(unwritten)
}

fn unwritten(error: postcard::Error) -> Error {
    Error::Protocol(error.to_string())
}

/// An encoded message: a packet, and the memory file that accompanies it.
#[derive(Debug)]
pub(crate) struct OutgoingPacket {
    pub(crate) packet: Vec<u8>,
    pub(crate) file: Option<OwnedFd>,
    /// The offset of the message in the packet, unless it is in the file.
    start: usize,
}

impl OutgoingPacket {
    /// Encodes the end of the channel.
    pub(crate) fn end() -> Result<Self> {
        Self::alone(Frame::End)
    }

    /// Encodes a wake-up for a message in the inbox.
    pub(crate) fn look() -> Result<Self> {
        Self::alone(Frame::Look)
    }

    /// Encodes the packet that a file accompanies which the sender hands over.
    pub(crate) fn handed_over() -> Result<Self> {
        Self::alone(Frame::File)
    }

    fn alone(frame: Frame) -> Result<Self> {
        let packet = encoded(&frame)?;
        Ok(Self { start: packet.len(), packet, file: None })
    }

    /// Returns the encoded message if the packet contains it.
    pub(crate) fn message(&self) -> Option<&[u8]> {
        if self.file.is_some() { None } else { Some(&self.packet[self.start..]) }
    }

    /// Encodes a message of at most `limit` bytes in `buffer`, whose previous contents are discarded.
    pub(crate) fn of(head: &Head<'_>, bytes: &[u8], limit: u64, mut buffer: Vec<u8>) -> Result<Self> {
        buffer.clear();
        let mut packet = postcard::to_extend(&Frame::Whole, buffer).map_err(unwritten)?;
        let frame = packet.len();
        packet = postcard::to_extend(head, packet).map_err(unwritten)?;
        let size = (packet.len() - frame) as u64 + bytes.len() as u64;
        if size > limit {
            return Err(Error::MessageTooLarge { of: "bytes", size, limit });
        }
        if frame as u64 + size <= MAX_PACKET_BYTES as u64 {
            packet.extend_from_slice(bytes);
            return Ok(Self { packet, file: None, start: frame });
        }
        let file = write_file(&packet[frame..], bytes)
            .map_err(|error| Error::io("writing a message's memory file", error))?;
        let packet = encoded(&Frame::InFile { bytes: size })?;
        Ok(Self { start: packet.len(), packet, file: Some(file) })
    }
}

impl OutgoingPacket {
    /// Encodes a message of a relay, whose header and bytes these are. A message above `most` bytes is sent in a memory file.
    pub(crate) fn relayed(message: &[u8], most: usize) -> Result<Self> {
        if message.len() > most {
            return Self::raw_file(message);
        }
        let mut packet = encoded(&Frame::Whole)?;
        let start = packet.len();
        packet.extend_from_slice(message);
        Ok(Self { packet, file: None, start })
    }

    /// Returns a packet with these bytes in a memory file.
    pub(crate) fn raw_file(bytes: &[u8]) -> Result<Self> {
        let file =
            write_file(&[], bytes).map_err(|error| Error::io("writing a message's memory file", error))?;
        let packet = encoded(&Frame::InFile { bytes: bytes.len() as u64 })?;
        Ok(Self { start: packet.len(), packet, file: Some(file) })
    }
}

fn write_file(head: &[u8], bytes: &[u8]) -> io::Result<OwnedFd> {
    let file = memfd_create("device-ipc-message", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let file = std::fs::File::from(file);
    file.write_all_at(head, 0)?;
    file.write_all_at(bytes, head.len() as u64)?;
    fcntl_add_seals(&file, SEALS | SealFlags::SEAL)?;
    Ok(file.into())
}

/// The seals that keep a memory file unchanged while it is read.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::WRITE);

/// The message of a packet of this process, for a relay.
#[derive(Debug)]
pub(crate) enum PacketMessage<'a> {
    Whole(&'a [u8]),
    InFile(std::fs::File, u64),
    /// The packet is a wake-up.
    None,
}

/// Returns the message of a packet of this process.
///
/// # Errors
///
/// [`Error::Io`] if the file was not received because this process has no file descriptors left.
pub(crate) fn message_of(packet: &[u8], fds: impl PacketFiles) -> Result<PacketMessage<'_>> {
    let (frame, rest) = postcard::take_from_bytes::<Frame>(packet).map_err(unwritten)?;
    Ok(match frame {
        Frame::Whole => PacketMessage::Whole(rest),
        Frame::InFile { bytes } => PacketMessage::InFile(file_of(fds)?.into(), bytes),
        Frame::End | Frame::Look | Frame::File => PacketMessage::None,
    })
}

fn file_of(fds: impl PacketFiles) -> Result<OwnedFd> {
    fds.take_first().ok_or_else(|| {
        let what = "receiving a message's memory file (the message is lost; this process may have no file descriptors \
                    left: raise its limit, ulimit -n)";
        Error::io(what, rustix::io::Errno::MFILE)
    })
}

/// A decoded packet.
#[derive(Debug)]
pub(crate) enum IncomingPacket {
    Message {
        head: Head<'static>,
        bytes: Payload,
    },
    End,
    Look,
    /// A file that the sender hands over; `None` if it was lost because this process had no file descriptors left.
    File(Option<OwnedFd>),
}

/// The bytes of a message in the buffer that they were received in.
#[derive(Debug)]
pub(crate) struct Payload {
    received: Vec<u8>,
    start: usize,
}

impl Payload {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.received[self.start..]
    }
}

/// Decodes a packet of at most `limit` bytes, or the memory file that accompanies it.
///
/// # Errors
///
/// [`Error::Protocol`] for an invalid message; [`Error::Io`] if the file was not received because this process has no file
/// descriptors left.
pub(crate) fn read(packet: Vec<u8>, fds: impl PacketFiles, limit: u64) -> Result<IncomingPacket> {
    let garbage = |error: postcard::Error| Error::Protocol(format!("its packet cannot be decoded: {error}"));
    let misfit = |why: &str| Err(Error::Protocol(why.to_owned()));
    let (frame, rest) = postcard::take_from_bytes::<Frame>(&packet).map_err(garbage)?;
    let start = packet.len() - rest.len();
    match frame {
        Frame::End if !rest.is_empty() => misfit("bytes follow its end of the channel"),
        Frame::Look if !rest.is_empty() => misfit("bytes follow its wake-up"),
        Frame::File if !rest.is_empty() || fds.len() > 1 => misfit("its packet contains more than a file"),
        Frame::File => Ok(IncomingPacket::File(fds.take_first())),
        Frame::Whole | Frame::End | Frame::Look if fds.len() > 0 => {
            misfit("it sent file descriptors that its packet does not mention")
        }
        Frame::End => Ok(IncomingPacket::End),
        Frame::Look => Ok(IncomingPacket::Look),
        Frame::Whole if packet.len() > MAX_PACKET_BYTES => misfit("its packet exceeds the maximum size"),
        Frame::Whole => parse(packet, start),
        Frame::InFile { .. } if !rest.is_empty() => misfit("bytes follow the size of its memory file"),
        Frame::InFile { bytes } if bytes > limit => {
            misfit(&format!("its message has {bytes} B, the agreed limit is {limit} B"))
        }
        Frame::InFile { bytes } => parse(read_file(fds, bytes)?, 0),
    }
}

fn read_file(fds: impl PacketFiles, bytes: u64) -> Result<Vec<u8>> {
    if fds.len() > 1 {
        return Err(Error::Protocol(format!("it sent {} file descriptors for one memory file", fds.len())));
    }
    // A refused file is closed on another thread: the file system's server decides how long the close takes.
    if let Some(file) = fds.first()
        && received_file::check(file, SEALS, bytes, "the file of its message")? != bytes
    {
        return Err(Error::Protocol(format!("the size of its memory file is not the stated {bytes} B")));
    }
    let file = file_of(fds)?;
    let failed = |error: io::Error| Error::io("reading a message's memory file", error);
    let size = usize::try_from(bytes).map_err(|error| failed(io::Error::other(error)))?;
    let mut read = vec![0; size];
    std::fs::File::from(file).read_exact_at(&mut read, 0).map_err(failed)?;
    Ok(read)
}

/// Decodes a message of the inbox.
pub(crate) fn read_message(message: Vec<u8>) -> Result<IncomingPacket> {
    parse(message, 0)
}

fn parse(received: Vec<u8>, start: usize) -> Result<IncomingPacket> {
    let read = postcard::take_from_bytes::<Head<'_>>(&received[start..]);
    let (head, rest) =
        read.map_err(|error| Error::Protocol(format!("the head of its message cannot be decoded: {error}")))?;
    let start = received.len() - rest.len();
    Ok(IncomingPacket::Message { head, bytes: Payload { received, start } })
}
