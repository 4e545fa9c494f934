//! Handles of memory for other processes, and what they open.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::capabilities::HandleKind;
use crate::model::address::{DeviceRange, Extent, Generation};
use crate::model::device::{DeviceIdentity, DeviceOrdinal};
use crate::os::process::ProcessIdentity;

/// A handle of one of this process's allocations.
#[derive(Debug)]
pub struct Exported {
    /// The allocation.
    pub extent: Extent,
    /// The kind of the handle.
    pub kind: HandleKind,
    /// The vendor's bytes. A process that has them may be able to open the memory: the library sends them only with a lease.
    pub bytes: HandleBytes,
    /// The file descriptors of the handle; not empty if and only if the kind has
    /// [`carries_fds`](super::HandleKindInfo::carries_fds). Importers receive duplicates; `unexport` closes these.
    pub fds: Vec<OwnedFd>,
}

/// A handle received from the exporting process. Every field is a claim of the peer.
#[derive(Debug)]
pub struct ReceivedHandle {
    /// The kind of the handle.
    pub kind: HandleKind,
    /// The vendor's bytes.
    pub bytes: HandleBytes,
    /// The file descriptors of the handle.
    pub fds: Vec<OwnedFd>,
    /// The size of the allocation in bytes as the exporter states it; it may be wrong.
    pub size: u64,
    /// The generation of the allocation as the exporter states it. The library has compared it with the descriptor.
    pub generation: Option<Generation>,
    /// The home device, if it is visible to this process.
    pub home: Option<DeviceOrdinal>,
    /// The identity of the home device as the descriptor states it, for errors; `None` if it is unknown.
    pub home_identity: Option<DeviceIdentity>,
    /// The exporting process as the descriptor states it.
    pub exporter: ProcessIdentity,
}

/// A range that [`DeviceIpc::open`](super::DeviceIpc::open) opened; [`DeviceIpc::close`](super::DeviceIpc::close) closes it.
#[derive(Debug)]
pub struct Opened {
    /// The whole range that the driver mapped, on the device that it was opened on.
    pub range: DeviceRange,
    /// The backend's key for closing the range, opaque to the library.
    pub cookie: u64,
}

/// The bytes of a vendor's handle. `Debug` hides them: they may be enough to open the memory.
#[derive(Clone, PartialEq, Eq)]
pub struct HandleBytes(Arc<[u8]>);

impl HandleBytes {
    /// Wraps the vendor's bytes.
    pub fn new(bytes: impl Into<Arc<[u8]>>) -> Self {
        Self(bytes.into())
    }

    /// Returns the bytes.
    pub fn as_slice(&self) -> &[u8] {
        &self.0
    }
}

/// Serializes the bytes at once; a sequence would be serialized byte by byte.
impl Serialize for HandleBytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for HandleBytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_byte_buf(BytesVisitor)
    }
}

struct BytesVisitor;

impl<'de> Visitor<'de> for BytesVisitor {
    type Value = HandleBytes;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the bytes of a handle")
    }

    fn visit_bytes<E: serde::de::Error>(self, bytes: &[u8]) -> Result<HandleBytes, E> {
        Ok(HandleBytes::new(bytes))
    }

    fn visit_byte_buf<E: serde::de::Error>(self, bytes: Vec<u8>) -> Result<HandleBytes, E> {
        Ok(HandleBytes::new(bytes))
    }

    /// Accepts a sequence, for formats without byte strings such as JSON.
    fn visit_seq<A: SeqAccess<'de>>(self, mut listed: A) -> Result<HandleBytes, A::Error> {
        let mut bytes = Vec::new();
        while let Some(byte) = listed.next_element::<u8>()? {
            bytes.push(byte);
        }
        Ok(HandleBytes::new(bytes))
    }
}

impl fmt::Debug for HandleBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HandleBytes({} bytes)", self.0.len())
    }
}

#[cfg(test)]
mod tests;
