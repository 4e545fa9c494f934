//! The vendor-independent part of device-ipc: the traits of a backend, descriptors, the broker that grants leases, the import
//! cache, rings and channels, and their guards.
//!
//! Programs use it through the crate `device-ipc`, which adds the backends. A backend depends on this crate only, and this
//! crate depends on no vendor.
//!
//! Each folder is a layer and uses only the layers above it in this table; `cargo xtask layers` checks it.
//!
//! | layer | contents | knows nothing of |
//! |---|---|---|
//! | `model` | values without I/O: devices, addresses, element types, tensors, leases, errors | everything else |
//! | `os` | environment variables, process identity, fork detection, threads, clock, spinning | devices |
//! | [`backend`] | the traits that a vendor implements, their contract, the registry, buffers and streams | processes |
//! | `wire` | encoding and decoding of descriptors, the broker protocol and channel frames | sockets |
//! | `transport` | sockets and peer credentials, poller, worker, deadlines | exports and imports |
//! | `sharing` | exports, leases, import cache, timelines, staging | rings and channels |
//! | `patterns` | rings, channels, claims and keepers | |
//! | `ipc`, `control` | the entry points | |
//!
//! Unsafe code is denied except in a few modules, each of which states its reason in an `allow(unsafe_code)`.

#![deny(unsafe_code)]
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests may read the system's clock"))]

pub mod backend;
mod control;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
#[path = "../../fuzz/conversations/mod.rs"]
pub mod fuzzing;
mod ipc;
mod model;
mod os;
mod patterns;
mod sharing;
mod transport;
mod wire;

#[cfg(feature = "float8")]
pub use float8;
#[cfg(feature = "half")]
pub use half;

pub use device_ipc_tcp::Key;

pub use backend::buffer::{Buffer, Stream, View, ViewMut};
pub use backend::interop::{DeviceOwner, OwnedRegion, Region};
pub use backend::memory_use::MemoryUse;
pub use backend::select::BackendStatus;
pub use backend::stream::{AsStream, BorrowedStream};
#[cfg(feature = "kill-points")]
#[doc(hidden)]
pub use control::wait_until_idle;
pub use control::{close_mappings_of, close_unused, counters, shutdown};
pub use ipc::IpcBuilder;
pub use model::access::Access;
pub use model::address::{DevicePtr, DeviceRange};
pub use model::device::{DeviceIdentity, DeviceInfo, DeviceOrdinal};
pub use model::error::{Error, ErrorKind, Result};
pub use model::lease::{Holder, Holders, LeaseId, LeaseState};
pub use model::placement::{DeviceMap, DeviceName};
pub use model::tensor::{Bool, Dtype, Element, LayoutError, TensorLayout, TensorTable};
#[cfg(any(test, feature = "test-clock"))]
#[doc(hidden)]
pub use os::clock::TestClock;
#[cfg(feature = "kill-points")]
#[doc(hidden)]
pub use os::kill::KILL_POINTS;
pub use os::process::ProcessIdentity;
pub use patterns::channel::{
    Channel, ChannelBuilder, ChannelReceiver, ChannelSender, ConnectBuilder, Connecting, ListenBuilder,
    Listener, Message, Received, ReceivedExport, TrySendError,
};
pub use patterns::keeper::{Keeper, KeeperExport};
pub use patterns::ring::{
    ReaderPosition, Ring, RingBuilder, RingReadSlot, RingReader, RingReaders, RingWriteSlot,
};
pub use sharing::export::{
    Export, ExportChanges, Exposure, ExposurePolicy, HolderPolicy, ShareBuilder, TensorSet,
};
pub use sharing::import::{CopyPolicy, CopyProgress, Mapping, OpenBuilder, Reservation, Tensor};
pub use sharing::remote::Remote;
pub use sharing::timeline::Timeline;
pub use sharing::{Ipc, RecoverableError};
pub use transport::{AllowList, Counters};
pub use wire::Grant;
pub use wire::descriptor::{Descriptor, DescriptorError, ExportId};
pub use wire::ring::RingSlots;

/// The limits of descriptors, tables, rings and messages; the constants of the descriptor format; and the limits of this process,
/// which can be set.
pub mod limits {
    pub use crate::control::{set_cache_limits, set_staging_limits};
    pub use crate::model::tensor::{MAX_DIMENSIONS, MAX_NAME_BYTES, MAX_TABLE_BYTES, MAX_TENSORS};
    pub use crate::sharing::import::CacheLimits;
    pub use crate::sharing::staging::StagingLimits;
    pub use crate::wire::channel::MAX_MESSAGE_TENSORS;
    pub use crate::wire::descriptor::{
        FORMAT_VERSION, FormatVersion, MAX_DESCRIPTOR_BYTES, MAX_EXTENTS, MAX_REGIONS_ALLOCATIONS,
        MAX_REGIONS_SECTIONS, TEXT_PREFIX,
    };
    pub use crate::wire::ring::MAX_RING_SLOTS;
}

/// For this project's front ends, the program and the Python package: lists, signals of an interpreter, and texts for terminals. Their
/// documented forms are `device-ipc ps` and `device-ipc keep list`, and the functions of the package.
#[doc(hidden)]
pub mod front_end {
    pub use crate::model::printable::printable;
    pub use crate::os::clock::interruptible;
    pub use crate::os::process_epoch;
    pub use crate::patterns::keeper::{KeeperName, list_keepers};
    pub use crate::sharing::claims::{ClaimTable, Claims};
    pub use crate::transport::{ListedProcess, list_exports};
    pub use crate::wire::{ListedExport, ListedHolder};
}

/// For [`backend::register_backend!`].
#[doc(hidden)]
pub mod __private {
    pub use inventory;

    pub use crate::backend::select::Registered;
}
