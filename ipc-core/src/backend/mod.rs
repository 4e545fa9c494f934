//! The interface between the library and a vendor: the traits [`DeviceIpc`], [`DeviceMemory`], [`DeviceEvent`],
//! [`DeviceTimelines`] and [`DeviceReservations`], and their common contract.
//!
//! [`DeviceIpc`] exports and opens memory. [`DeviceMemory`] provides plain memory and streams for the examples, the command
//! line, the benchmarks, the conformance suite and staged copies; programs usually bring their own allocator.
//! [`DeviceEvent`] and [`DeviceTimelines`] order the streams of two processes. [`DeviceReservations`] maps memory at addresses
//! that this process keeps. [`TestKernels`] are not part of the contract;
//! only the conformance suite, the command line and the benchmarks need them.
//!
//! This page and the documentation of the methods are the complete contract of a backend. "The library" is this crate, the
//! caller of a backend. The conformance suite (`device-ipc-conformance`) calls the backend directly and tests both sides of
//! the contract.
//!
//! # Division of labour
//!
//! **A backend has no policy.** It sees whole allocations and their first addresses. The library implements interior
//! pointers and offsets, regions over several allocations, reference counts, leases, the import cache, placement, comparison
//! of generations, and opening in the exporting process itself.
//!
//! # Checks
//!
//! Before it calls a backend, the library checks that
//!
//! - a region has at least one byte and does not begin at null;
//! - the owner of a region and a stream name this backend;
//! - the memory was not imported by this process;
//! - a received handle has the number of file descriptors, the size and the generation that the descriptor states;
//! - the export permits the access;
//! - [`peer_access`](DeviceIpc::peer_access) holds, if the home device is visible.
//!
//! After the call, the library checks that the extents are adjacent and cover the region, and that the region lies in
//! [`Opened::range`].
//!
//! The backend performs all other checks. It repeats a check of the library whose violation would be undefined behaviour in
//! the backend, because the library is not its only caller.
//!
//! | input | error |
//! |---|---|
//! | an ordinal that is not less than the number of [`devices`](DeviceIpc::devices), in any call | [`Error::NoSuchDevice`](crate::Error::NoSuchDevice) |
//! | a stream of another [`backend`](crate::BorrowedStream::backend), in any call | [`Error::WrongBackend`](crate::Error::WrongBackend), before the raw handle is used |
//! | a stream of a device that the call cannot use | [`Error::WrongStream`](crate::Error::WrongStream) |
//! | null, host memory, an address unknown to the vendor | [`Error::NotDeviceMemory`](crate::Error::NotDeviceMemory) |
//! | a range that exceeds its allocation; a range whose `device` is not the device of its memory; a wrong stated allocation; two different lengths; `f32` elements that are incomplete or not aligned to 4 B; an allocation of 0 B | [`Error::InvalidRegion`](crate::Error::InvalidRegion) |
//! | an allocation larger than the device or its free memory | [`Error::OutOfMemory`](crate::Error::OutOfMemory), also if rounding up overflows |
//! | memory without a handle, or without a handle of the requested kind | [`Error::NotShareable`](crate::Error::NotShareable), with the remedy |
//! | memory that was opened from another process | [`Error::SharedOn`](crate::Error::SharedOn), or `NotShareable` if the vendor does not report the reason |
//! | an unknown kind of handle; an access, a number of handles or a capability that the backend does not support | [`Error::Unsupported`](crate::Error::Unsupported) |
//! | a received handle with a wrong number of file descriptors, or bytes that are not in the backend's format | [`Error::Protocol`](crate::Error::Protocol) |
//! | a device without access to the memory's home device | [`Error::NoPeerAccess`](crate::Error::NoPeerAccess) |
//! | a stream in capture, in a call that must not be captured | [`Error::StreamCapturing`](crate::Error::StreamCapturing), and the capture stays valid |
//! | any other failure of the driver | [`Error::Vendor`](crate::Error::Vendor) with the call and the status |
//!
//! The bytes and file descriptors of a received handle, its size and the bytes of an event come from another process and are
//! hostile: for any input, the result is an error or a correct mapping, never a panic or memory of a third process. No
//! result of a driver makes a method panic. An unknown status code is an error like any other
//! ([`VendorStatus`] is a number, not an enum).
//!
//! # Ranges and sizes
//!
//! The address of a [`DeviceRange`] identifies the memory. Its `device` is the device in whose address space the address is
//! valid: the home device of an allocation, or the device that memory was opened on. Any other `device` is an error in
//! [`extents_of`](DeviceIpc::extents_of). Copies and kernels run on the device of the *stream* and may ignore `range.device`.
//!
//! [`allocate`](DeviceMemory::allocate) may round up; the range that it returns has the requested length. The allocation in
//! an [`Extent`], the handle and [`Opened::range`] have the rounded length. A stated allocation has the first address of the
//! vendor's allocation and at most its length, because its owner does not know the rounding.
//!
//! Copies, fills, writes, reads and kernels of 0 B succeed and do nothing, except that they check the stream and that
//! [`read`](DeviceMemory::read) waits. The library does not call [`extents_of`](DeviceIpc::extents_of) for 0 B.
//!
//! # Lifetimes
//!
//! - An exported allocation stays allocated until [`unexport`](DeviceIpc::unexport) has returned, also on every error path.
//! - The library passes each [`Exported`] to `unexport` once, after the last importer has closed the handle or has died.
//!   Several exports of one allocation may exist at the same time: of several instances of the backend, of several kinds, and
//!   of kinds with [`one_open_per_process`](HandleKindInfo::one_open_per_process). Each is unexported separately.
//! - The library does not call [`open`](DeviceIpc::open) for a handle that this process exported. It may call it for a handle
//!   that **is already open in this process**: with the other access (if the kind has
//!   [`read_only`](HandleKindInfo::read_only)), for another device (unless the kind has `one_open_per_process`; the exporter
//!   makes another handle then), among other handles of one range, and by another instance of the backend. Each is a separate
//!   mapping and is closed separately. An instance opens the same handles, in the same order, with the same access and device,
//!   only once.
//! - The library passes each [`Opened`] to [`close`](DeviceIpc::close), and each [`Imported`] to
//!   [`release`](DeviceReservations::release), once, after all device work of this process that uses
//!   the range has finished.
//! - The library may call [`free`](DeviceMemory::free) while submitted work still uses the memory; the backend waits or defers.
//! - Ranges, [`Extent`]s and [`BorrowedStream`](crate::BorrowedStream)s are plain values and keep nothing alive.
//!
//! # Threads, waiting and processes
//!
//! - Any thread may call any method, concurrently with others, also a thread without a current context or with the context of
//!   another device. The caller's current context or device is the same after the call.
//! - [`info`](DeviceIpc::info), [`devices`](DeviceIpc::devices) and [`peer_access`](DeviceIpc::peer_access) create no context
//!   on a device and start no thread.
//! - **Streams are asynchronous.** Submitting work does not wait for earlier work on any stream: a stream may be waiting for
//!   the next action of the calling thread. These methods may wait: `free`, `close`, `unpin_host`, `unregister`, `read`, a
//!   `write` of more bytes than the backend can buffer, `synchronize`, `synchronize_device`, and the first kernel on a device.
//! - `devices`, `capabilities` and `handle_kinds` return the same values on every call.
//! - The library calls nothing in a child of `fork`. A call there may return [`Error::Forked`](crate::Error::Forked).
//!
//! Behaviour is undefined only for violations of the `# Safety` sections of the unsafe methods.
//!
//! # Growth of the types
//!
//! [`Exported`], [`ReceivedHandle`], [`Opened`], [`Imported`], [`Extent`] and [`MemoryInfo`] are exhaustive on purpose: a new field is a new
//! question that every backend has to answer, so it comes with a new major version. All other structures that may grow, such
//! as [`HandleKindInfo`] and [`Capabilities`], are non-exhaustive, and have constructors.
//!
//! # Access and trust
//!
//! [`export`](DeviceIpc::export) does not receive the access of the share, because no vendor has read-only handles:
//! `cuMemExportToShareableHandle`, `cuIpcGetMemHandle`, `cuMemPoolExportPointer`, `aclrtIpcMemGetExportKey` and
//! `aclrtMemExportToShareableHandle` take no access. Read-only is a property of the importer's mapping: `open` with
//! [`Access::ReadOnly`] makes a mapping that the hardware protects, or fails. It protects against errors in the importer, not
//! against a hostile importer: a process that has received the handle of a read-only share can pass it to the driver itself
//! and map it read-write. To protect memory from a hostile importer, share a copy of it
//! ([`ShareBuilder::exposure`](crate::ShareBuilder::exposure), [`Ipc::share_copy`](crate::Ipc::share_copy)).
//!
//! # Ordering
//!
//! Opening memory does not imply that its data has been written. A wait for a [`DeviceEvent`] applies to the last record
//! submitted before the call, and an event that has never been recorded is complete (both as in `cudaStreamWaitEvent` and
//! `aclrtStreamWaitEvent`).

mod blocks;
mod bound;
pub(crate) mod buffer;
mod capabilities;
mod check;
mod diagnosis;
pub mod engine;
mod event;
mod gate;
mod handles;
mod host_copy;
pub(crate) mod interop;
pub mod library;
mod memory;
pub(crate) mod memory_use;
mod reservations;
pub(crate) mod select;
pub(crate) mod stream;
mod test_kernels;
mod timeline;

use std::fmt;

pub use crate::model::address::{Extent, Generation};
pub use crate::model::device::HostId;
pub use crate::model::error::{BackendRemedy, Remedy, VendorError, VendorStatus};
pub use crate::os::environment;
pub use blocks::{BlockedTensors, check_blocks};
pub(crate) use bound::DeviceBound;
pub(crate) use buffer::{Buffer, Stream, check_whole_elements};
pub use capabilities::{BackendInfo, Capabilities, HandleKind, HandleKindInfo, Lifetime};
pub use check::{check_backend, check_copy_lengths, check_stream_device};
pub(crate) use check::{check_stream_of, test_kernels_of, timelines_of};
pub use diagnosis::{Diagnosis, Finding, Machine, Symptom, Verdict};
pub use event::DeviceEvent;
#[doc(hidden)]
pub use gate::Gate;
pub use handles::{Exported, HandleBytes, Opened, ReceivedHandle};
pub(crate) use host_copy::{read_elements, read_tensor};
pub use interop::{ViewStream, ViewTypes};
pub use memory::{DeviceMemory, DeviceStream, MemoryInfo};
pub(crate) use memory_use::MemoryUse;
pub use reservations::{DeviceReservations, Imported, ReservationGranularity};
#[doc(inline)]
pub use select::register_backend;
pub use select::{BACKEND_VARIABLE, Backends, Rank, Registration, Unavailable};
pub use test_kernels::TestKernels;
pub use timeline::DeviceTimelines;

pub(crate) use crate::model::access::Access;
use crate::model::address::DeviceRange;
use crate::model::device::{DeviceInfo, DeviceOrdinal};
use crate::model::error::Result;

/// A vendor's device IPC. See the [module documentation](self) for the contract.
pub trait DeviceIpc: fmt::Debug + Send + Sync {
    /// Returns the name, the versions and the vendor's library. Accesses no device.
    ///
    /// Descriptors contain the name: 1 to 32 ASCII letters, digits, `-` and `_`.
    fn info(&self) -> &BackendInfo;

    /// Returns the devices visible to this process, indexed by ordinal. Creates no context.
    ///
    /// The identity of a device is the same in every process of the host, also if devices are hidden or renumbered. There is
    /// at least one device; loading a backend without devices fails with [`Unavailable`].
    ///
    /// # Errors
    ///
    /// [`Error::Vendor`](crate::Error::Vendor) with the call that failed.
    fn devices(&self) -> Result<Vec<DeviceInfo>>;

    /// Returns the name of the vendor's environment variable that hides devices from a process, for error messages.
    fn visible_devices_variable(&self) -> &'static str;

    /// Returns whether `from` can read and write the memory of `to`. True for a device and itself. Creates no context.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchDevice`](crate::Error::NoSuchDevice), or the vendor's error.
    fn peer_access(&self, from: DeviceOrdinal, to: DeviceOrdinal) -> Result<bool>;

    /// Returns the capabilities of `device`. May probe once, with a context.
    ///
    /// Capabilities fail closed: a capability is absent unless a probe has shown that it works. A call that needs an absent
    /// capability returns [`Error::Unsupported`](crate::Error::Unsupported).
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchDevice`](crate::Error::NoSuchDevice), or the vendor's error.
    fn capabilities(&self, device: DeviceOrdinal) -> Result<Capabilities>;

    /// Returns the kinds of handle that this backend can export or open, the preferred kind first.
    ///
    /// [`DeviceMemory::allocate`] allocates memory of the first kind. The list may contain kinds that some devices do not
    /// support; [`allocate_as`](DeviceMemory::allocate_as) refuses them there. Descriptors contain the number of a kind, which
    /// is never reused for another kind.
    fn handle_kinds(&self) -> Vec<HandleKindInfo>;

    /// Returns the allocations that contain `range`, in the order of their addresses.
    ///
    /// The extents are whole, adjacent allocations; the first contains the first byte of the range and the last contains its
    /// last byte. There are several only if the vendor can map allocations side by side (virtual memory). The address may be
    /// anywhere in an allocation, and another allocator may have allocated the memory.
    ///
    /// `stated_base` is the first allocation as its owner states it. If the vendor can look up the allocation of an address,
    /// the backend compares the two: the first address must be the same, and the stated length must not be larger. If the
    /// vendor cannot (CANN before 9.0), the backend checks `stated_base` as far as possible and uses it; without it the call
    /// returns an error.
    ///
    /// # Errors
    ///
    /// [`Error::NotDeviceMemory`](crate::Error::NotDeviceMemory) for null, host memory and addresses unknown to the vendor;
    /// [`Error::InvalidRegion`](crate::Error::InvalidRegion) if the range exceeds the allocations or the address space, if
    /// `range.device` is not the memory's device, or if `stated_base` is wrong or missing;
    /// [`Error::SharedOn`](crate::Error::SharedOn) for memory that [`open`](Self::open) returned;
    /// [`Error::NotShareable`](crate::Error::NotShareable) for other memory that has no handle, with the remedy.
    fn extents_of(&self, range: DeviceRange, stated_base: Option<DeviceRange>) -> Result<Vec<Extent>>;

    /// Exports a handle of one allocation, of the given kind or of the kind that fits the memory.
    ///
    /// `extent` was returned by [`extents_of`](Self::extents_of), and its memory has not been freed since. The library calls
    /// this once for an allocation, and again for kinds with
    /// [`one_open_per_process`](HandleKindInfo::one_open_per_process). The call does not wait for work on the memory and does
    /// not receive the access of the share: see [Access and trust](self#access-and-trust).
    ///
    /// # Errors
    ///
    /// [`Error::NotShareable`](crate::Error::NotShareable) if this memory has no such handle;
    /// [`Error::Unsupported`](crate::Error::Unsupported) if no memory has one; otherwise the vendor's error.
    fn export(&self, extent: &Extent, kind: Option<HandleKind>) -> Result<Exported>;

    /// Runs `body` once, on this thread, with the context of `device` current, and then restores the caller's context.
    ///
    /// "Current" is as the driver itself reports it. If the device has no context yet, the call creates one. The library drops
    /// owners of memory and runs callbacks in `body`, which may call the vendor's library by any means. It also groups several
    /// calls of the backend for one device in one `body`. Captures of the calling thread stay valid. If the context cannot be
    /// entered (because the device was reset), `body` runs nevertheless.
    ///
    /// Backends without contexts run `body` directly.
    fn with_device_context(&self, device: DeviceOrdinal, body: &mut dyn FnMut()) {
        let _ = device;
        body();
    }

    /// Releases a handle and every resource that [`export`](Self::export) took for it: file descriptors, references, table
    /// entries. The memory stays allocated. For a vendor that does not count exports, this drops the file descriptors.
    ///
    /// # Errors
    ///
    /// The vendor's error; the export has ended nevertheless.
    fn unexport(&self, exported: Exported) -> Result<()>;

    /// Returns the range of this process's memory that device work of an importer can access after it has opened the handle.
    ///
    /// For most kinds it is the allocation. It is larger if the vendor maps whole pages that contain other blocks, and `None`
    /// if the range is unknown.
    fn reach(&self, exported: &Exported) -> Option<DeviceRange> {
        Some(exported.extent.allocation)
    }

    /// Permits the process with the vendor's identifier `peer` (its [`local_peer_id`](Self::local_peer_id)) to open the handle.
    ///
    /// The library calls this only for kinds with [`whitelist`](HandleKindInfo::whitelist), before it sends the handle, and
    /// possibly several times for one peer. `peer` comes from the importing process and is hostile.
    ///
    /// # Errors
    ///
    /// [`Error::Protocol`](crate::Error::Protocol) for bytes that are not a peer identifier; the vendor's error.
    fn authorize(&self, exported: &Exported, peer: &[u8]) -> Result<()> {
        let _ = (exported, peer);
        Ok(())
    }

    /// Returns the vendor's identifier of this process for whitelists; empty for vendors without whitelists.
    ///
    /// # Errors
    ///
    /// The vendor's error.
    fn local_peer_id(&self, on: DeviceOrdinal) -> Result<Vec<u8>> {
        let _ = on;
        Ok(Vec::new())
    }

    /// Opens the handles of one or more allocations as one contiguous range in the address space of `on`.
    ///
    /// The allocations are adjacent in the order of the handles. A resource that several handles share (a pool) is opened with
    /// the first of them and closed after the last. [`Opened::range`] has the device `on` and **the length that the driver
    /// mapped**: the library and the user's bounds checks rely on it. [`ReceivedHandle::size`] is a claim of the exporter; a
    /// backend whose driver does not report the length of a mapping passes the claim to a driver call that fails for a wrong
    /// length.
    ///
    /// The hardware protects a mapping with [`Access::ReadOnly`]: a write by device work fails and changes nothing. The
    /// backend owns the file descriptors from this call on and closes them, also on errors. It does not wait for work on the
    /// memory.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`](crate::Error::Unsupported) for a kind, an access or a number of handles (also 0) that the
    /// backend cannot open; [`Error::Protocol`](crate::Error::Protocol) for a wrong number of file
    /// descriptors; [`Error::NoPeerAccess`](crate::Error::NoPeerAccess), also if [`ReceivedHandle::home`] is not visible;
    /// [`Error::OverlapsInUse`](crate::Error::OverlapsInUse) if the driver refuses because this process still maps memory that
    /// the exporter has freed since, or has this memory imported for reserved addresses: the library then closes its unused mappings,
    /// waits for those that were dropped or released, and retries; otherwise the vendor's error.
    /// Nothing stays open after an error.
    fn open(&self, handles: Vec<ReceivedHandle>, on: DeviceOrdinal, access: Access) -> Result<Opened>;

    /// Closes a range that [`open`](Self::open) returned: unmaps it and releases every resource that `open` kept for it.
    ///
    /// The device frees the memory once its owner has freed it and the last importer has closed it.
    ///
    /// # Errors
    ///
    /// The vendor's error; the range is closed nevertheless.
    fn close(&self, opened: Opened) -> Result<()>;

    /// Creates an event on `device` that can be exported.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`](crate::Error::Unsupported) if [`Capabilities::ipc_events`] is false.
    fn create_event(&self, device: DeviceOrdinal) -> Result<Box<dyn DeviceEvent>>;

    /// Creates an event on `device` for this process alone, also on devices without interprocess events.
    ///
    /// The default creates one that can be exported.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`](crate::Error::Unsupported) from a backend without events; the vendor's error.
    fn create_local_event(&self, device: DeviceOrdinal) -> Result<Box<dyn DeviceEvent>> {
        self.create_event(device)
    }

    /// Opens an event of another process from the bytes of its handle, for streams of `on`. The bytes are hostile.
    ///
    /// # Errors
    ///
    /// As [`create_event`](Self::create_event); [`Error::Protocol`](crate::Error::Protocol) or the vendor's error for a bad
    /// handle.
    fn open_event(&self, handle: &[u8], on: DeviceOrdinal) -> Result<Box<dyn DeviceEvent>>;

    /// Waits on the host until all work of this process on `device` has finished, also on streams that this backend did not
    /// create.
    ///
    /// # Errors
    ///
    /// The vendor's error, including errors of the work itself.
    fn synchronize_device(&self, device: DeviceOrdinal) -> Result<()>;

    /// Returns the kind of memory that a [transfer engine](engine) finds at the addresses of `device`.
    fn transfer_space(&self, device: DeviceOrdinal) -> engine::MemorySpace {
        engine::MemorySpace::Device { backend: self.info().name, ordinal: device }
    }

    /// Returns plain memory and streams of the same vendor.
    fn memory(&self) -> &dyn DeviceMemory;

    /// Returns the stream operations on shared words, if the vendor has them; [`Capabilities::timelines`] says for which
    /// devices.
    fn timelines(&self) -> Option<&dyn DeviceTimelines> {
        None
    }

    /// Returns the operations on reserved address ranges, if the vendor has them.
    /// [`HandleKindInfo::remappable`] says for which kinds.
    fn reservations(&self) -> Option<&dyn DeviceReservations> {
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
        // A backend that violates the contract has not entered a context either.
        (None, Some(body)) => body(),
        (None, None) => unreachable!("the body has run or is still available"),
    }
}
