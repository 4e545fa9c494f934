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
//! the exporter's lease and by the importer, which keeps the destination. An engine is not relied on to protect the exporter: NIXL
//! lets a peer read memory by TCP after its registration has ended. The exporter therefore keeps a region allocated and
//! registered until the importer has reported that it has finished.
//!
//! # No cancellation
//!
//! There is no method that stops a transfer: [`Transfer::cancel_rest`] only begins nothing more. The engines cannot stop a copy
//! reliably: NIXL's release of a request that is in progress only forgets it, while bytes continue to arrive in the destination,
//! and Mooncake's C API has no such function.
//! A caller that no longer waits has to leave the destination allocated until [`Transfer::is_finished`] reports the end.
//!
//! # Other engines
//!
//! Mooncake's C API (`transfer_engine_c.h`) corresponds as follows: `register` to `registerLocalMemory` with
//! the location `cpu:N` or `npu:N`; the metadata to the segment name (`host:port` with `P2PHANDSHAKE`), the address and the
//! length; `pull` to `openSegment`, `allocateBatchID` for all pieces and `submitTransfer` with `OPCODE_READ`; `is_finished` to
//! `getTransferStatus`, and then `freeBatchID`. The page `docs/internals/mooncake.md` has the details.

#![allow(unsafe_code, reason = "declares the vendor boundary; plain addresses keep no memory alive")]

use std::fmt;

use crate::backend::BackendInfo;
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Result};

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
    /// [`Error::InvalidRegion`] for memory of 0 B;
    /// [`Error::Unsupported`] if the engine does not [support](Self::supports) the memory;
    /// otherwise the engine's error.
    unsafe fn register(&self, memory: TransferMemory) -> Result<Box<dyn RegisteredMemory>>;

    /// Starts one transfer, which copies all pieces of a request from regions that another process has registered. May connect
    /// to that process, but does not wait for the bytes.
    ///
    /// The metadata comes from another process, so the engine checks its form, and that each piece lies in its region.
    /// Everything else that the metadata states is taken from an exporter that the caller trusts.
    ///
    /// # Safety
    ///
    /// After success, the destinations stay allocated, and no other code accesses them, until [`Transfer::is_finished`] has
    /// returned true or an error. If the result is dropped before, the destinations stay allocated for ever.
    ///
    /// # Errors
    ///
    /// As for [`register`](Self::register), for the destinations; [`Error::InvalidRegion`] if there
    /// is no piece, or one exceeds its region or its destination; [`Error::Protocol`] if metadata is not
    /// in the engine's format, or the regions are not of one process and one kind of memory. After an error the engine does not
    /// use the destinations.
    unsafe fn pull(&self, request: &PullRequest<'_>) -> Result<Box<dyn Transfer>>;
}

/// The copies of one transfer.
#[derive(Clone, Copy, Debug)]
pub struct PullRequest<'a> {
    /// The [metadata](RegisteredMemory::metadata) of each source region. All regions belong to one process, and are one kind of
    /// memory.
    pub sources: &'a [&'a [u8]],
    /// The destinations, of one kind of memory. They do not overlap.
    pub destinations: &'a [TransferMemory],
    /// The bytes to copy. No two pieces have the same destination bytes.
    pub pieces: &'a [Piece],
}

/// Bytes of a source region, and their place in a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The index of the source region.
    pub source: usize,
    /// The offset in the source region in bytes.
    pub source_offset: u64,
    /// The index of the destination.
    pub destination: usize,
    /// The offset in the destination in bytes.
    pub destination_offset: u64,
    /// The length in bytes, at least 1.
    pub len: u64,
}

impl PullRequest<'_> {
    /// Returns the destination address of a piece.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidRegion`] if the piece exceeds its destination or has no bytes.
    pub fn destination_of(&self, piece: &Piece) -> Result<TransferMemory> {
        let Piece { destination, destination_offset, len, .. } = *piece;
        let found = self.destinations.get(destination).filter(|memory| {
            len > 0 && destination_offset.checked_add(len).is_some_and(|end| end <= memory.len)
        });
        let memory = found.ok_or_else(|| {
            Error::InvalidRegion(format!(
                "{len} B at offset {destination_offset} of destination {destination} of a transfer exceed it"
            ))
        })?;
        Ok(TransferMemory { address: memory.address + destination_offset, len, ..*memory })
    }

    /// Returns the number of bytes of all pieces.
    pub fn bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.len).fold(0, u64::saturating_add)
    }
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

    /// Cancels the parts of the transfer that the engine has not begun, because their bytes are not needed. The parts that are
    /// running are not affected: [`is_finished`](Self::is_finished) reports the end as always. By default nothing.
    fn cancel_rest(&self) {}

    /// Returns the number of bytes that have arrived at the time of the last call of [`is_finished`](Self::is_finished), as far
    /// as the engine knows it, for reports of progress. By default 0.
    fn arrived_bytes(&self) -> u64 {
        0
    }
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
