//! The interface between the library and a vendor: the traits [`DeviceIpc`], [`DeviceMemory`], [`DeviceEvent`] and
//! [`DeviceTimelines`], and the contract that they share.
//!
//! [`DeviceIpc`] is what sharing needs. [`DeviceMemory`] is plain memory and streams: for the examples, the program, the
//! benchmarks and the conformance suite, and for staged copies; users bring their own allocator. [`DeviceEvent`] and
//! [`DeviceTimelines`] order the streams of two processes. [`TestKernels`] are not part of the contract; only the
//! conformance suite, the program and the benchmarks need them.
//!
//! This page, with the documentation of the methods, is all that a backend has to obey. "The library" is this crate, the
//! caller of a backend. The conformance suite (`device-ipc-conformance`) calls the backend without the library in
//! between, and tests both sides of the contract.
//!
//! # Division of labour
//!
//! **A backend has no policy.** It sees whole allocations and their first addresses. Interior pointers and offsets, regions
//! over several allocations, reference counts, leases, the cache of open mappings, placement, comparison of generations
//! and opening in the exporting process itself are in the library.
//!
//! # Who checks what
//!
//! The library checks before it calls a backend: that a region has at least one byte and does not begin at null; that the
//! owner of a region and a stream name this backend; that memory is not its own import; that a received handle has the
//! number of descriptors, the size and the generation that the descriptor states; that the export permits the access;
//! [`peer_access`](DeviceIpc::peer_access), where the home device is visible. It checks afterwards that the extents lie one
//! behind the other and cover the region, and that the region lies in [`Opened::range`].
//!
//! The backend checks the rest, and those of the above that it could not survive: other callers exist.
//!
//! | input | error |
//! |---|---|
//! | an ordinal that is not below the number of [`devices`](DeviceIpc::devices), in any call | [`Error::NoSuchDevice`](crate::Error::NoSuchDevice) |
//! | a stream whose [`backend`](crate::BorrowedStream::backend) is another one, in any call | [`Error::WrongBackend`](crate::Error::WrongBackend), before the stream's number is used |
//! | a stream of a device that the call cannot use | [`Error::WrongStream`](crate::Error::WrongStream) |
//! | null, host memory, an address that the vendor does not know | [`Error::NotDeviceMemory`](crate::Error::NotDeviceMemory) |
//! | a range that leaves its allocation; one whose `device` is not that of its memory; a wrong stated allocation; two lengths that differ; floats that are not whole or not aligned to 4 bytes; an allocation of 0 bytes | [`Error::InvalidRegion`](crate::Error::InvalidRegion) |
//! | an allocation that is larger than the device, or than what is free | [`Error::OutOfMemory`](crate::Error::OutOfMemory), also where rounding up overflows |
//! | memory that has no handle, or none of the kind asked for | [`Error::NotShareable`](crate::Error::NotShareable), with the remedy |
//! | memory that was opened from another process | [`Error::SharedOn`](crate::Error::SharedOn), or `NotShareable` where the vendor cannot tell the reason |
//! | an unknown kind of handle; an access, a number of handles or a capability that the backend does not have | [`Error::Unsupported`](crate::Error::Unsupported) |
//! | a received handle with a wrong number of descriptors, or bytes in a form that is not the backend's own | [`Error::Protocol`](crate::Error::Protocol) |
//! | a device without access to the memory's home device | [`Error::NoPeerAccess`](crate::Error::NoPeerAccess) |
//! | a stream in capture, in a call that must not be captured | [`Error::StreamCapturing`](crate::Error::StreamCapturing), and the capture goes on |
//! | anything else that the driver refuses | [`Error::Vendor`](crate::Error::Vendor) with the call and the status |
//!
//! Bytes and descriptors of a received handle, its size and the bytes of an event come from another process and are
//! hostile: whatever they are, the answer is an error or a correct mapping, never a panic or memory of a third process.
//! No method panics for what a driver answers. A status number that is not known is an error like any other
//! ([`VendorStatus`](crate::VendorStatus) is a number, not an enum).
//!
//! # Ranges and sizes
//!
//! The address of a [`DeviceRange`] says which memory it is; its `device` is the device in whose address
//! space the address is valid: the home device of an allocation, the device that memory was opened on. In
//! [`extents_of`](DeviceIpc::extents_of) another `device` is an error. Copies and kernels run on the device of the *stream*
//! and may ignore `range.device`.
//!
//! [`allocate`](DeviceMemory::allocate) may round up, and the range that it returns has the length that was asked for. The
//! allocation in an [`Extent`], the handle and [`Opened::range`] have the rounded length. A stated allocation
//! has the first address of the vendor's allocation and at most its length, as an owner does not know the rounding.
//!
//! Copies, fills, writes, reads and kernels of 0 bytes succeed and do nothing, except that the stream is checked and that
//! [`read`](DeviceMemory::read) waits. [`extents_of`](DeviceIpc::extents_of) is not called for 0 bytes.
//!
//! # Lifetimes
//!
//! - An exported allocation stays allocated until [`unexport`](DeviceIpc::unexport) has returned, also on every error path.
//! - Each [`Exported`] is passed to `unexport` once, after the last importer has closed or has died. Several exports of one
//!   allocation may exist at a time: of several instances of the backend, of several kinds, and for kinds with
//!   [`one_open_per_process`](HandleKindInfo::one_open_per_process). Each is taken back alone.
//! - [`open`](DeviceIpc::open) is not called for a handle that this process exported. It may be called for a handle that
//!   **is open in this process already**: with the other access (where the kind has [`read_only`](HandleKindInfo::read_only)),
//!   for another device (except where the kind has `one_open_per_process`: the exporter makes a further handle then), among
//!   other handles of one range, and by another instance of the backend. Each is a mapping of its own and is closed alone.
//!   The same handles, in the same order, with the same access and device, are open once for each instance.
//! - Each [`Opened`] is passed to [`close`](DeviceIpc::close) once, after all device work of this process that uses the range
//!   has finished.
//! - [`free`](DeviceMemory::free) is called while submitted work may still use the memory; the backend waits or defers.
//! - Ranges, [`Extent`]s and [`BorrowedStream`](crate::BorrowedStream)s are plain values and keep nothing alive.
//!
//! # Threads, waiting and processes
//!
//! - Any method may be called from any thread and from several at once, also from a thread that has no context, or another
//!   device's. The caller's current context or device is the same after the call.
//! - [`info`](DeviceIpc::info), [`devices`](DeviceIpc::devices) and [`peer_access`](DeviceIpc::peer_access) create no context on
//!   a device and start no thread.
//! - **Streams are asynchronous.** Submitting work does not wait for work that was submitted before, on this stream or on
//!   another: a stream may be waiting for what this very thread does next. These methods may wait: `free`, `close`,
//!   `unpin_host`, `unregister`, `read`, a `write` of more bytes than the backend can set aside, `synchronize`,
//!   `synchronize_device`, and the first kernel on a device.
//! - `devices`, `capabilities` and `handle_kinds` give the same answer each time.
//! - In a child of `fork` nothing is called. A call there may return [`Error::Forked`](crate::Error::Forked).
//!
//! Undefined is only what the `# Safety` sections of the unsafe methods name.
//!
//! # Access and trust
//!
//! [`export`](DeviceIpc::export) does not learn which access the share permits, because no vendor has a handle that is
//! read-only: `cuMemExportToShareableHandle`, `cuIpcGetMemHandle`, `cuMemPoolExportPointer`, `aclrtIpcMemGetExportKey` and
//! `aclrtMemExportToShareableHandle` take no access. Read-only is a property of the importer's mapping: `open` with
//! [`Access::ReadOnly`] has to make a mapping that the hardware protects, or to fail. It protects against errors in the
//! importer, not against an importer that is hostile: a process that has received the handle of a read-only share can pass
//! it to the driver itself and map it read-write. Memory that a recipient must not be able to change has to be copied for it
//! ([`ShareBuilder::exposure`](crate::ShareBuilder::exposure), [`Ipc::share_copy`](crate::Ipc::share_copy)).
//!
//! # Ordering
//!
//! "Opened" says nothing about whether data has been written. A wait for a [`DeviceEvent`] takes the record that was
//! submitted last at the time of the call, and an event that has never been recorded counts as complete (both as in
//! `cudaStreamWaitEvent` and `aclrtStreamWaitEvent`).

mod bound;
mod buffer;
mod capabilities;
mod event;
pub(crate) mod interop;
pub mod library;
mod memory;
pub mod select;
pub(crate) mod stream;
mod test_kernels;
mod timeline;

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

pub use crate::model::access::Access;
pub(crate) use bound::DeviceBound;
pub use buffer::{Buffer, BufferSlice, Stream, View, ViewMut};
pub use capabilities::{Capabilities, HandleKind, HandleKindInfo, Lifetime};
pub use event::DeviceEvent;
pub use memory::{DeviceMemory, DeviceStream, MemoryInfo};
pub use test_kernels::TestKernels;
pub use timeline::DeviceTimelines;

use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::model::address::{DeviceRange, Extent, Generation};
use crate::model::device::{DeviceInfo, DeviceOrdinal};
use crate::model::error::Result;
use crate::os::process::ProcessIdentity;

/// A vendor's device IPC. See the [module documentation](self) for the contract.
pub trait DeviceIpc: fmt::Debug + Send + Sync {
    /// Returns the name, the versions and the vendor's library. Touches no device.
    ///
    /// The name is part of descriptors: 1 to 32 ASCII letters, digits, `-` and `_`.
    fn info(&self) -> &BackendInfo;

    /// Returns the devices that this process sees, in its numbering: the ordinal is the position. Creates no context.
    ///
    /// The identity of a device is the same in every process of the host, also where devices are hidden or renumbered.
    /// There is at least one device; a backend without one is [`Unavailable`](crate::Unavailable) when it is made.
    ///
    /// # Errors
    ///
    /// [`Error::Vendor`](crate::Error::Vendor) with the call that failed.
    fn devices(&self) -> Result<Vec<DeviceInfo>>;

    /// Returns the name of the environment variable by which the vendor hides devices from a process. Errors name it.
    fn visible_devices_variable(&self) -> &'static str;

    /// Returns whether `from` can read and write the memory of `to`. True for a device and itself. Creates no context.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchDevice`](crate::Error::NoSuchDevice), or the vendor's error.
    fn peer_access(&self, from: DeviceOrdinal, to: DeviceOrdinal) -> Result<bool>;

    /// Returns the capabilities of `device`. May probe once, with a context.
    ///
    /// Capabilities fail closed: what was not seen to work is absent. A call that needs an absent one is
    /// [`Error::Unsupported`](crate::Error::Unsupported).
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchDevice`](crate::Error::NoSuchDevice), or the vendor's error.
    fn capabilities(&self, device: DeviceOrdinal) -> Result<Capabilities>;

    /// Returns the kinds of handle that this backend can make or open, the preferred one first.
    ///
    /// Memory of [`DeviceMemory::allocate`] is of the first kind. Kinds that some device cannot use may be listed:
    /// [`allocate_as`](DeviceMemory::allocate_as) refuses them there. The number of a kind is part of descriptors: it is never
    /// given to another kind.
    fn handle_kinds(&self) -> Vec<HandleKindInfo>;

    /// Returns the allocations that `range` lies in, in the order of their addresses.
    ///
    /// The extents are whole allocations that lie one behind the other without a gap; the first contains the first byte of
    /// the range and the last contains its last byte. Several are possible only where the vendor can map several
    /// allocations side by side (virtual memory). The address may be anywhere in an allocation, and the memory need not
    /// have been allocated by this backend.
    ///
    /// `stated_base` is the first allocation as its owner knows it. Where the vendor can tell the allocation of an address,
    /// it is compared with the vendor's answer: the same first address, and not more bytes. Where the vendor cannot
    /// (CANN before 9.0), it is believed as far as it can be checked; without it the call is an error there.
    ///
    /// # Errors
    ///
    /// [`Error::NotDeviceMemory`](crate::Error::NotDeviceMemory) for null, host memory and addresses that the vendor does not
    /// know; [`Error::InvalidRegion`](crate::Error::InvalidRegion) where the range leaves its allocation into nothing or
    /// leaves the address space, where `range.device` is not the memory's device, and where `stated_base` is wrong or
    /// missing; [`Error::SharedOn`](crate::Error::SharedOn) for memory that [`open`](Self::open) returned;
    /// [`Error::NotShareable`](crate::Error::NotShareable) for other memory that has no handle, with the remedy.
    fn extents_of(&self, range: DeviceRange, stated_base: Option<DeviceRange>) -> Result<Vec<Extent>>;

    /// Makes a handle of one allocation: of the kind `kind`, or of the one that fits the memory.
    ///
    /// `extent` is one that [`extents_of`](Self::extents_of) returned, and its memory has not been freed since. The library
    /// calls this once for an allocation, and again for kinds with
    /// [`one_open_per_process`](HandleKindInfo::one_open_per_process). It does not wait for work on the memory. The access that
    /// the share permits is not known here: see [Access and trust](self#access-and-trust).
    ///
    /// # Errors
    ///
    /// [`Error::NotShareable`](crate::Error::NotShareable) where this memory has no such handle, or
    /// [`Error::Unsupported`](crate::Error::Unsupported) where no memory has; else the vendor's error.
    fn export(&self, extent: &Extent, kind: Option<HandleKind>) -> Result<Exported>;

    /// Runs `body`, once and on this thread, with the context of `device` current as the driver itself reports it, and then
    /// makes the caller's own context current again. A context that the device does not have yet is created.
    ///
    /// The library drops owners of memory and runs callbacks in it, which may call the vendor's library by whatever way.
    /// Several calls of the backend for one device are made in it too, and share one entry. Captures of the calling thread
    /// stay intact. Where the context cannot be entered (the device was reset), `body` runs all the same.
    ///
    /// Backends without contexts just run `body`.
    fn with_device_context(&self, device: DeviceOrdinal, body: &mut dyn FnMut()) {
        let _ = device;
        body();
    }

    /// Takes a handle back, and everything that [`export`](Self::export) took for it: descriptors, references, entries in
    /// tables. The memory stays allocated. A vendor that counts no exports drops the descriptors.
    ///
    /// # Errors
    ///
    /// The vendor's error; the export counts as ended all the same.
    fn unexport(&self, exported: Exported) -> Result<()>;

    /// Returns what the device work of an importer can reach of this process's memory once it has the handle open: the
    /// allocation itself for most kinds, more where the vendor maps whole pages and other blocks lie in them. `None`
    /// where that cannot be told.
    fn reach(&self, exported: &Exported) -> Option<DeviceRange> {
        Some(exported.extent.allocation)
    }

    /// Permits the process that the vendor knows as `peer` (its [`local_peer_id`](Self::local_peer_id)) to open the handle.
    ///
    /// Called only for kinds with [`whitelist`](HandleKindInfo::whitelist), before the handle is sent, possibly several times
    /// for one peer. `peer` comes from the importing process and is hostile.
    ///
    /// # Errors
    ///
    /// [`Error::Protocol`](crate::Error::Protocol) for bytes that are no peer's; the vendor's error.
    fn authorize(&self, exported: &Exported, peer: &[u8]) -> Result<()> {
        let _ = (exported, peer);
        Ok(())
    }

    /// Returns the bytes by which the vendor knows this process on a whitelist; empty for vendors without one.
    ///
    /// # Errors
    ///
    /// The vendor's error.
    fn local_peer_id(&self, on: DeviceOrdinal) -> Result<Vec<u8>> {
        let _ = on;
        Ok(Vec::new())
    }

    /// Opens the handles of one or more allocations, one behind the other, as one contiguous range in the address space of
    /// `on`. What they have in common (a pool) is opened with the first of them and closed after the last.
    ///
    /// [`Opened::range`] has the device `on` and **the length that the driver mapped**: the library and the user's bounds
    /// checks rely on it. [`ReceivedHandle::size`] is a claim of the exporter; a backend whose driver cannot tell the length
    /// of a mapping passes the claim to a call of the driver that fails for a wrong one.
    ///
    /// A mapping with [`Access::ReadOnly`] is protected by the hardware: a write by device work fails and changes nothing.
    /// The backend owns the descriptors from here on and closes them, also on errors. It does not wait for work on the
    /// memory.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`](crate::Error::Unsupported) for a kind, an access or a number of handles (also 0) that the
    /// backend cannot open; [`Error::Protocol`](crate::Error::Protocol) for a wrong number of descriptors;
    /// [`Error::NoPeerAccess`](crate::Error::NoPeerAccess), where [`ReceivedHandle::home`] is known;
    /// [`Error::OverlapsInUse`](crate::Error::OverlapsInUse) where the driver refuses because memory that the exporter has
    /// freed since is still mapped here: the library closes its unused mappings and tries again; else the vendor's error.
    /// Nothing stays open after an error.
    fn open(&self, handles: Vec<ReceivedHandle>, on: DeviceOrdinal, access: Access) -> Result<Opened>;

    /// Closes one range that [`open`](Self::open) returned: unmaps it, and closes everything that `open` kept for it. The
    /// memory itself is free once its owner has freed it and the last importer has closed it.
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

    /// Opens an event of another process by the bytes of its handle, for use with streams of `on`. The bytes are hostile.
    ///
    /// # Errors
    ///
    /// As [`create_event`](Self::create_event); [`Error::Protocol`](crate::Error::Protocol) or the vendor's error for a bad
    /// handle.
    fn open_event(&self, handle: &[u8], on: DeviceOrdinal) -> Result<Box<dyn DeviceEvent>>;

    /// Waits on the host until all work that was submitted to streams of `device` by this process has finished, also to
    /// streams that this backend did not create.
    ///
    /// # Errors
    ///
    /// The vendor's error, also of the work itself.
    fn synchronize_device(&self, device: DeviceOrdinal) -> Result<()>;

    /// Returns plain memory and streams of the same vendor.
    fn memory(&self) -> &dyn DeviceMemory;

    /// Returns the operations of streams on words, where the vendor has them ([`Capabilities::timelines`] says for which
    /// devices).
    fn timelines(&self) -> Option<&dyn DeviceTimelines> {
        None
    }

    /// Returns the test kernels, where the backend has them. The conformance suite requires them; sharing does not use them.
    fn test_kernels(&self) -> Option<&dyn TestKernels> {
        None
    }
}

/// Runs `body` [in the context of a device](DeviceIpc::with_device_context), once, and returns its result.
pub(crate) fn with_device_context<T>(
    backend: &dyn DeviceIpc,
    device: DeviceOrdinal,
    body: impl FnOnce() -> T,
) -> T {
    let (mut body, mut result) = (Some(body), None);
    backend.with_device_context(device, &mut || {
        if let Some(body) = body.take() {
            result = Some(body());
        }
    });
    match (result, body) {
        (Some(result), _) => result,
        // A backend that does not run it has entered nothing either.
        (None, Some(body)) => body(),
        (None, None) => unreachable!("it has run, or is still there"),
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
    /// The vendor's bytes. A process that has them may be able to open the memory: they are sent with a lease only.
    pub bytes: HandleBytes,
    /// The file descriptors that belong to the handle; at least one exactly where the kind has
    /// [`carries_fds`](HandleKindInfo::carries_fds). Duplicates are sent to importers; these are closed by `unexport`.
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
    /// The size of the allocation in bytes, as the exporter states it; it may be wrong.
    pub size: u64,
    /// The vendor's number of the allocation, as the exporter states it. The library has compared it with the descriptor.
    pub generation: Option<Generation>,
    /// The home device, where this process can see it.
    pub home: Option<DeviceOrdinal>,
    /// The exporting process, as the descriptor names it.
    pub exporter: ProcessIdentity,
}

/// A range that [`DeviceIpc::open`] opened; it goes back by [`DeviceIpc::close`].
#[derive(Debug)]
pub struct Opened {
    /// The whole range as the driver mapped it, on the device that it was opened on.
    pub range: DeviceRange,
    /// The backend's key of what it needs to close the range. It has no meaning to the library.
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
