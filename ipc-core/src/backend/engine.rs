//! The interface between the library and a transfer engine: existing software that copies memory between hosts.
//!
//! A vendor's IPC shares memory within one host. To another host the bytes travel as a copy, and this library moves none of
//! them itself: an engine does, such as NIXL (`device-ipc-nixl`), over InfiniBand, EFA or TCP. The exporter
//! [registers](TransferEngine::register) a region and sends the [metadata](RegisteredMemory::metadata) of the registration to
//! the importer, over a connection that the engine knows nothing of. The importer's engine
//! [pulls](TransferEngine::pull) the bytes into memory of the importer; the exporter's program takes no part in that.
//!
//! # Division of labour
//!
//! An engine has no policy. Permission, leases, time limits, and how long memory stays allocated are decided above it, by
//! [`Pull`](crate::Pull) for the destination. An engine is not relied on to protect the exporter: NIXL
//! lets a peer read memory by TCP after its registration has ended. The exporter therefore keeps a region allocated and
//! registered until the importer has reported that it has finished.
//!
//! # No cancellation
//!
//! There is no method that stops a transfer. The engines cannot stop one reliably: NIXL's release of a request that is in
//! progress only forgets it, while bytes continue to arrive in the destination, and Mooncake's C API has no such function.
//! A caller that no longer waits has to leave the destination allocated until [`Transfer::is_finished`] reports the end, which
//! dropping a [`Pull`](crate::Pull) does.
//!
//! # Other engines
//!
//! Mooncake's C API (`transfer_engine_c.h`) corresponds as follows: `register` to `registerLocalMemory` with
//! the location `cpu:N` or `npu:N`; the metadata to the segment name (`host:port` with `P2PHANDSHAKE`), the address and the
//! length; `pull` to `openSegment`, `allocateBatchID(1)` and `submitTransfer` with `OPCODE_READ`; `is_finished` to
//! `getTransferStatus`, and then `freeBatchID`.

#![allow(unsafe_code, reason = "declares the vendor boundary; plain addresses keep no memory alive")]

use std::fmt;

use crate::backend::BackendInfo;
use crate::model::device::DeviceOrdinal;
use crate::model::error::Result;

/// A transfer engine. See the [module documentation](self) for the contract.
///
/// Any thread may call any method, concurrently with others.
pub trait TransferEngine: fmt::Debug + Send + Sync {
    /// Returns the name, the version and the library of the engine.
    ///
    /// Only engines of the same name understand each other's [metadata](RegisteredMemory::metadata).
    fn info(&self) -> &BackendInfo;

    /// Returns whether the engine can transfer memory of this kind.
    fn supports(&self, space: MemorySpace) -> bool;

    /// Registers memory, so that engines of other processes can pull from it. Dropping the result deregisters the memory.
    ///
    /// # Safety
    ///
    /// The memory is readable and stays allocated until the result is dropped and all transfers from it, in all processes, are
    /// over.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidRegion`](crate::Error::InvalidRegion) for memory of 0 B;
    /// [`Error::Unsupported`](crate::Error::Unsupported) if the engine does not [support](Self::supports) the memory;
    /// otherwise the engine's error.
    unsafe fn register(&self, memory: TransferMemory) -> Result<Box<dyn RegisteredMemory>>;

    /// Starts a copy of `destination.len` bytes into `destination`, from the offset `offset` of a region that another process
    /// has registered. May connect to that process, but does not wait for the bytes.
    ///
    /// `metadata` is that of the registration. The engine checks its form, since it comes from another process, and that the
    /// bytes lie in the region. Everything else that it states is taken from an exporter that the caller trusts.
    ///
    /// # Safety
    ///
    /// After success, the destination stays allocated, and no other code accesses it, until [`Transfer::is_finished`] has
    /// returned true or an error. If the result is dropped before, the destination stays allocated for ever.
    ///
    /// # Errors
    ///
    /// As for [`register`](Self::register), for the destination; [`Error::InvalidRegion`](crate::Error::InvalidRegion) if the
    /// bytes exceed the region; [`Error::Protocol`](crate::Error::Protocol) if `metadata` is not in the engine's format. After
    /// an error the engine does not use the destination.
    unsafe fn pull(
        &self,
        metadata: &[u8],
        offset: u64,
        destination: TransferMemory,
    ) -> Result<Box<dyn Transfer>>;
}

/// Memory that is registered with an engine until it is dropped.
pub trait RegisteredMemory: fmt::Debug + Send + Sync {
    /// Returns the bytes with which the engine of another process can pull from this memory.
    ///
    /// They are as good as permission to read the memory: the library sends them over authenticated connections only.
    fn metadata(&self) -> &[u8];
}

/// A copy from another process that has been started.
pub trait Transfer: fmt::Debug + Send + Sync {
    /// Returns whether all bytes have arrived. Does not wait.
    ///
    /// Once the result was true or an error, the engine does not use the destination any longer, and every further call
    /// returns the same. The result can remain false for ever: the exporter's process may be suspended.
    ///
    /// # Errors
    ///
    /// The engine's error. The destination then has unspecified contents.
    fn is_finished(&self) -> Result<bool>;
}

/// Memory of this process that an engine reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferMemory {
    /// The kind of memory.
    pub space: MemorySpace,
    /// The first address.
    pub address: u64,
    /// The length in bytes.
    pub len: u64,
}

/// The kind of memory that an engine reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemorySpace {
    /// Memory that the processor can access.
    Host,
    /// Memory of a device.
    Device {
        /// The name of the device's backend.
        backend: &'static str,
        /// The ordinal of the device.
        ordinal: DeviceOrdinal,
    },
}
