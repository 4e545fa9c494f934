//! What a vendor has to provide: the trait [`DeviceIpc`] and its companion [`DeviceMemory`].
//!
//! # Why two traits
//!
//! [`DeviceIpc`] is what sharing needs. [`DeviceMemory`] is plain memory and streams, so that the conformance
//! suite, the program and the benchmarks are written once; users of the library bring their own allocator.
//!
//! # The contract
//!
//! **A backend has no policy.** It sees allocation bases only. Interior pointers and offsets, regions over
//! several allocations, the table of opened handles, reference counts, leases, placement, generation checks and
//! opening in one's own process all stand once, above the backend. In return:
//!
//! *What the caller guarantees.*
//! - [`export`](DeviceIpc::export) gets an [`Extent`] that [`extents_of`](DeviceIpc::extents_of) gave, whose memory
//!   the caller keeps allocated until [`unexport`](DeviceIpc::unexport) has returned.
//! - [`unexport`](DeviceIpc::unexport) comes once for each export, after the last importer has closed.
//! - [`open`](DeviceIpc::open) is not called for a handle of this very process, nor for a handle that is open on
//!   the same device already.
//! - [`close`](DeviceIpc::close) comes once for each open, after all device work that uses the range has finished.
//! - Ordinals are below the number of [`devices`](DeviceIpc::devices) or the call fails with
//!   [`Error::NoSuchDevice`](crate::Error::NoSuchDevice).
//!
//! *What the backend guarantees.*
//! - Any method may be called from any thread, also from one that has no context or another device's; the
//!   caller's current context or device is the same after the call.
//! - [`info`](DeviceIpc::info), [`devices`](DeviceIpc::devices) and [`peer_access`](DeviceIpc::peer_access) create
//!   no context on a device and start no thread.
//! - No method panics for what a driver answers. A status number that nobody knows yet is an error like any other
//!   ([`VendorStatus`](crate::VendorStatus) is a number, not an enum).
//! - Bytes of a handle that came from another process are hostile: a bad handle is an error.
//! - [`open`](DeviceIpc::open) tells the size that the driver mapped, not the one the handle claimed.
//! - A backend that cannot do a thing answers [`Error::Unsupported`](crate::Error::Unsupported), and its
//!   [`Capabilities`] say so beforehand. Capabilities fail closed: what was not seen to work is absent.
//!
//! *Ordering.* "Opened" says nothing about whether data has been written. [`DeviceEvent`]s order streams of two
//! processes: a wait takes the record that was submitted last at the time of the call, and an event that has never
//! been recorded counts as complete (both as in `cudaStreamWaitEvent` and `aclrtStreamWaitEvent`).

mod capabilities;
mod event;
pub mod library;
mod memory;
mod timeline;

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

pub use capabilities::{Access, Capabilities, HandleKind, HandleKindInfo, Lifetime};
pub use event::DeviceEvent;
pub use memory::{DeviceMemory, DeviceStream, MemoryInfo};
pub use timeline::DeviceTimelines;

use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::address::{DeviceRange, Extent, Generation};
use crate::device::{DeviceInfo, DeviceOrdinal};
use crate::error::Result;
use crate::process::ProcessIdentity;

/// A vendor's device IPC. See the [module documentation](self) for the contract.
pub trait DeviceIpc: fmt::Debug + Send + Sync {
    /// Name, versions and where the vendor's library was found. Touches no device.
    fn info(&self) -> &BackendInfo;

    /// The devices that this process sees, in its numbering. Creates no context.
    ///
    /// # Errors
    ///
    /// [`Error::Vendor`](crate::Error::Vendor) with the call that failed.
    fn devices(&self) -> Result<Vec<DeviceInfo>>;

    /// The environment variable by which the vendor hides devices from a process, for error messages.
    fn visible_devices_variable(&self) -> &'static str;

    /// Can `from` read and write the memory of `to`? True for a device and itself.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchDevice`](crate::Error::NoSuchDevice), or the vendor's error.
    fn peer_access(&self, from: DeviceOrdinal, to: DeviceOrdinal) -> Result<bool>;

    /// What `device` can do. May probe by trying, once.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchDevice`](crate::Error::NoSuchDevice), or the vendor's error.
    fn capabilities(&self, device: DeviceOrdinal) -> Result<Capabilities>;

    /// The kinds of handle that this backend can make, the preferred first.
    fn handle_kinds(&self) -> Vec<HandleKindInfo>;

    /// The allocations that `range` lies in, in the order of their addresses.
    ///
    /// `stated_base` is the allocation as the caller knows it, for vendors that cannot tell it (CANN before 9.0);
    /// where the vendor can, it is checked against the vendor's answer.
    ///
    /// # Errors
    ///
    /// [`Error::NotDeviceMemory`](crate::Error::NotDeviceMemory) for host memory and for addresses the vendor does
    /// not know; [`Error::NotShareable`](crate::Error::NotShareable) for memory that no handle can be made of, with
    /// the remedy; [`Error::InvalidRegion`](crate::Error::InvalidRegion) where the range leaves its allocation.
    fn extents_of(&self, range: DeviceRange, stated_base: Option<DeviceRange>) -> Result<Vec<Extent>>;

    /// Makes a handle of one allocation, of the given kind or of the one that fits the memory.
    ///
    /// # Errors
    ///
    /// [`Error::NotShareable`](crate::Error::NotShareable) where this memory has no such handle, else the vendor's.
    fn export(&self, extent: &Extent, kind: Option<HandleKind>) -> Result<Exported>;

    /// Makes calls of this backend one after the other, all on this thread and mostly for `device`: what a backend has to put
    /// in place around each of them, it may put in place once.
    fn together(&self, device: DeviceOrdinal, calls: &mut dyn FnMut()) {
        let _ = device;
        calls();
    }

    /// Takes a handle back. A vendor that counts no exports does nothing.
    ///
    /// # Errors
    ///
    /// The vendor's error; the export counts as ended all the same.
    fn unexport(&self, exported: Exported) -> Result<()>;

    /// What the device work of an importer can reach of this process's memory once it has the handle open: the
    /// allocation itself for most kinds, more where the vendor maps whole pages and other blocks lie in them. `None`
    /// where that cannot be told.
    fn reach(&self, exported: &Exported) -> Option<DeviceRange> {
        Some(exported.extent.allocation)
    }

    /// Permits the process that is known to the vendor as `peer` (its [`local_peer_id`](Self::local_peer_id)) to
    /// open the handle. Vendors without a whitelist do nothing.
    ///
    /// # Errors
    ///
    /// The vendor's error.
    fn authorize(&self, exported: &Exported, peer: &[u8]) -> Result<()> {
        let _ = (exported, peer);
        Ok(())
    }

    /// How the vendor knows this process on a whitelist; empty for vendors without one.
    ///
    /// # Errors
    ///
    /// The vendor's error.
    fn local_peer_id(&self, on: DeviceOrdinal) -> Result<Vec<u8>> {
        let _ = on;
        Ok(Vec::new())
    }

    /// Opens the handles of one or more allocations as one contiguous range in the address space of `on`. What they
    /// have in common (a pool) is opened with the first of them and closed after the last.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`](crate::Error::Unsupported) for a kind, an access or a number of handles that the
    /// backend cannot open; [`Error::NoPeerAccess`](crate::Error::NoPeerAccess); else the vendor's.
    fn open(&self, handles: Vec<ReceivedHandle>, on: DeviceOrdinal, access: Access) -> Result<Opened>;

    /// Closes what [`open`](Self::open) opened.
    ///
    /// # Errors
    ///
    /// The vendor's error; the range counts as closed all the same.
    fn close(&self, opened: Opened) -> Result<()>;

    /// Creates an event on `device` that can be exported.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`](crate::Error::Unsupported) where [`Capabilities::ipc_events`] is false.
    fn create_event(&self, device: DeviceOrdinal) -> Result<Box<dyn DeviceEvent>>;

    /// Opens an event of another process by the bytes of its handle, for use with streams of `on`.
    ///
    /// # Errors
    ///
    /// As [`create_event`](Self::create_event); the vendor's error for a bad handle.
    fn open_event(&self, handle: &[u8], on: DeviceOrdinal) -> Result<Box<dyn DeviceEvent>>;

    /// Waits on the host until all work that was submitted to `device` by this process has finished.
    ///
    /// # Errors
    ///
    /// The vendor's error.
    fn synchronize_device(&self, device: DeviceOrdinal) -> Result<()>;

    /// Plain memory and streams of the same vendor.
    fn memory(&self) -> &dyn DeviceMemory;

    /// Words that streams write and wait on, where the vendor has them
    /// ([`Capabilities::timelines`] says for which devices).
    fn timelines(&self) -> Option<&dyn DeviceTimelines> {
        None
    }
}

/// Makes calls [together](DeviceIpc::together), once, and gives what comes of them.
pub(crate) fn together<T>(backend: &dyn DeviceIpc, device: DeviceOrdinal, calls: impl FnOnce() -> T) -> T {
    let (mut calls, mut result) = (Some(calls), None);
    backend.together(device, &mut || {
        if let Some(calls) = calls.take() {
            result = Some(calls());
        }
    });
    match (result, calls) {
        (Some(result), _) => result,
        // One that does not make the calls has put nothing in place for them either.
        (None, Some(calls)) => calls(),
        (None, None) => unreachable!("they were made, or are still there"),
    }
}

/// What a backend is, for people and logs.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BackendInfo {
    /// The backend's name, as in descriptors and in `DEVICE_IPC_BACKEND`.
    pub name: &'static str,
    /// The vendor's versions, in words: `driver 580.159, CUDA 13.0`.
    pub version: String,
    /// The vendor's library, as it was loaded; `None` for a backend without one.
    pub library: Option<String>,
}

impl BackendInfo {
    /// Describes a backend.
    pub fn new(name: &'static str, version: impl Into<String>, library: Option<String>) -> Self {
        Self { name, version: version.into(), library }
    }
}

/// A handle that this process has made of one of its allocations.
#[derive(Debug)]
pub struct Exported {
    /// The allocation.
    pub extent: Extent,
    /// The kind of the handle.
    pub kind: HandleKind,
    /// The vendor's bytes. Who has them may be able to open the memory: they are handed out with a lease only.
    pub bytes: HandleBytes,
    /// The file descriptors that belong to the handle.
    pub fds: Vec<OwnedFd>,
}

/// A handle as it arrived from the exporting process, all of it claimed by the peer.
#[derive(Debug)]
pub struct ReceivedHandle {
    /// The kind of the handle.
    pub kind: HandleKind,
    /// The vendor's bytes.
    pub bytes: HandleBytes,
    /// The file descriptors that belong to the handle.
    pub fds: Vec<OwnedFd>,
    /// The size of the allocation in bytes, as the exporter states it.
    pub size: u64,
    /// The vendor's number of the allocation, as the exporter states it.
    pub generation: Option<Generation>,
    /// The home device, where this process can see it.
    pub home: Option<DeviceOrdinal>,
    /// The exporting process, as the descriptor names it.
    pub exporter: ProcessIdentity,
}

/// A range that [`DeviceIpc::open`] opened; it goes back by [`DeviceIpc::close`].
#[derive(Debug)]
pub struct Opened {
    /// The whole range as the driver mapped it.
    pub range: DeviceRange,
    /// Whatever the backend needs to close it again.
    pub cookie: u64,
}

/// The bytes of a vendor's handle. Not shown by `Debug`: who reads them may open the memory.
#[derive(Clone, PartialEq, Eq)]
pub struct HandleBytes(Arc<[u8]>);

impl HandleBytes {
    /// Wraps the vendor's bytes.
    pub fn new(bytes: impl Into<Arc<[u8]>>) -> Self {
        Self(bytes.into())
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        &self.0
    }
}

/// All at once: the bytes of a list would be taken one by one.
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

    /// Formats without bytes, as JSON, list them.
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
mod tests {
    use super::*;

    #[test]
    fn the_bytes_of_a_handle_are_read_back_and_written_as_a_list_is() {
        for length in [0_usize, 1, 64, 300] {
            let bytes: Vec<u8> = (0..length).map(|index| index as u8).collect();
            let handle = HandleBytes::new(bytes.clone());
            let packed = postcard::to_stdvec(&handle).unwrap();
            assert_eq!(packed, postcard::to_stdvec(&bytes).unwrap(), "{length} bytes");
            assert_eq!(postcard::from_bytes::<HandleBytes>(&packed).unwrap(), handle);
            assert!(postcard::from_bytes::<HandleBytes>(&packed[..length.min(packed.len() - 1)]).is_err());
            let text = serde_json::to_string(&handle).unwrap();
            assert_eq!(text, serde_json::to_string(&bytes).unwrap());
            assert_eq!(serde_json::from_str::<HandleBytes>(&text).unwrap(), handle);
        }
    }
}
