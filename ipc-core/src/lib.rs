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
//! | `os` | environment variables, process identity, fork detection, threads, spinning | devices |
//! | [`backend`] | the traits that a vendor implements, their contract, the registry, buffers and streams | processes |
//! | `wire` | encoding and decoding of [`descriptor`]s, the broker protocol and channel frames | sockets |
//! | `transport` | sockets and peer credentials, poller, worker, deadlines | exports and imports |
//! | `sharing` | exports, leases, import cache, timelines, staging | rings and channels |
//! | `patterns` | rings and channels | |
//! | `ipc`, `control` | the entry points | |
//!
//! Unsafe code is denied except in a few modules, each of which states its reason in an `allow(unsafe_code)`.

#![deny(unsafe_code)]

pub mod backend;
mod control;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
mod ipc;
mod model;
mod os;
mod patterns;
mod sharing;
mod transport;
mod wire;

pub use backend::interop::{DeviceOwner, OwnedRegion, Region, ViewStream, ViewTypes};
pub use backend::select::{self, BackendStatus, Backends, Rank, Registration, Unavailable};
pub use backend::stream::{AsStream, BorrowedStream};
pub use backend::{
    Access, BackendInfo, Buffer, BufferSlice, Capabilities, DeviceEvent, DeviceIpc, DeviceMemory,
    DeviceStream, DeviceTimelines, Exported, HandleBytes, HandleKind, HandleKindInfo, Lifetime, MemoryInfo,
    Opened, ReceivedHandle, Stream, View, ViewMut,
};
pub use control::{
    close_mappings_of, close_unused, counters, set_cache_limits, set_staging_limits, shutdown,
};
pub use ipc::{Ipc, IpcBuilder};
pub use model::address::{DevicePtr, DeviceRange, Extent, Generation};
pub use model::device::{self, DeviceIdentity, DeviceInfo, DeviceOrdinal, HostId};
pub use model::error::{Error, Result, VendorError, VendorStatus};
pub use model::lease::{Holder, Holders, LeaseId};
pub use model::placement::{DeviceMap, DeviceName};
pub use model::printable::printable;
pub use model::tensor::{self, Dtype, Element, LayoutError, TensorLayout, TensorTable};
pub use os::environment;
#[cfg(feature = "kill-points")]
pub use os::kill::KILL_POINTS;
pub use os::process::ProcessIdentity;
pub use patterns::channel::{
    Channel, ConnectBuilder, ListenBuilder, Listener, Message, OpenReceived, Received, ReceivedExport,
};
pub use patterns::ring::{
    ReaderPosition, Ring, RingBuilder, RingOpenBuilder, RingReadSlot, RingReader, RingReaders, RingWriteSlot,
};
pub use sharing::ErrorWith;
pub use sharing::export::{
    Export, Exposure, ExposurePolicy, HolderPolicy, MemoryId, ShareBuilder, TensorSet,
};
pub use sharing::import::{CacheLimits, Mapping, OpenBuilder, Tensor};
pub use sharing::staging::StagingLimits;
pub use sharing::timeline::{TIMELINE_END, Timeline};
pub use transport::{AllowList, Counters, ListedProcess, list_exports};
pub use wire::channel::MAX_MESSAGE_TENSORS;
pub use wire::descriptor::{self, Descriptor, DescriptorError, DescriptorView, ExportId};
pub use wire::ring::{MAX_RING_SLOTS, RingSlots};
pub use wire::{BrokerAddress, ListedExport, ListedHolder, SOCKET_DIR_VARIABLE};
