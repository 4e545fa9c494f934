//! All that is the same for every vendor: the trait that a backend implements, the descriptor, the broker that hands out
//! leases, the cache of what is open, and the guards that close it.
//!
//! Programs use it through the crate `device-ipc`, which adds the backends; a backend depends on this crate alone. Core
//! knows no vendor.
//!
//! | layer | modules |
//! |---|---|
//! | what users hold | [`Ipc`], [`Export`], [`Mapping`], [`BundleExport`], [`BundleMapping`], [`Buffer`], [`Stream`] |
//! | above them | [`Ring`], [`RingReader`], [`Channel`], [`Listener`] |
//! | the two sides | `export` (what is shared, who holds it), `import` (what is open, the cache) |
//! | between processes | [`descriptor`], [`broker`] |
//! | what a vendor provides | [`backend`], made known by [`select`] |
//!
//! `unsafe` stands in few modules, each of which says why in an `allow(unsafe_code)`; everywhere else it is denied.

#![deny(unsafe_code)]

mod address;
pub mod backend;
pub mod broker;
mod bundle;
mod channel;
mod control;
pub mod descriptor;
pub mod device;
pub mod environment;
mod error;
mod export;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
mod host_pages;
mod import;
mod interop;
mod ipc;
mod kill;
mod lease;
mod memory;
mod placement;
mod printable;
mod process;
mod received_file;
mod recent;
mod ring;
mod runtime;
pub mod select;
mod staging;
mod stream;
pub mod tensor;
mod timeline;

pub use address::{DevicePtr, DeviceRange, Extent, Generation};
pub use backend::{
    Access, BackendInfo, Capabilities, DeviceEvent, DeviceIpc, DeviceMemory, DeviceStream, DeviceTimelines,
    Exported, HandleBytes, HandleKind, HandleKindInfo, Lifetime, MemoryInfo, Opened, ReceivedHandle,
};
pub use broker::{AllowList, BrokerAddress, ListedExport, ListedHolder, ListedProcess, list_exports};
pub use bundle::{
    BUNDLE_TEXT_PREFIX, BundleBuilder, BundleDescriptor, BundleError, BundleExport, BundleMapping,
    BundleOpenBuilder, BundleView, MAX_BUNDLE_ALLOCATIONS, MAX_BUNDLE_PARTS, MemoryId,
};
pub use channel::{
    Channel, ConnectBuilder, ListenBuilder, Listener, MAX_MESSAGE_TENSORS, Message, OpenReceived,
    OpenReceivedBundle, Received, ReceivedBundle, ReceivedTensor,
};
pub use control::{
    close_mappings_of, close_unused, counters, set_cache_limits, set_staging_limits, shutdown,
};
pub use descriptor::{Descriptor, DescriptorError, ExportId};
pub use device::{DeviceIdentity, DeviceInfo, DeviceOrdinal, HostId};
pub use error::{Error, Result, VendorError, VendorStatus};
pub use export::{Export, Exposing, Exposure, Hanging, ShareBuilder, ShareError};
pub use import::{CacheLimits, Mapping, OpenBuilder, ReleaseError, Tensor};
pub use interop::{DeviceOwner, OwnedRegion, Region, ViewStream, ViewTypes};
pub use ipc::{Ipc, IpcBuilder};
#[cfg(feature = "kill-points")]
pub use kill::KILL_POINTS;
pub use lease::{Holder, Holders, LeaseId};
pub use memory::{Buffer, BufferSlice, Stream, View, ViewMut};
pub use placement::{DeviceMap, DeviceName};
pub use printable::printable;
pub use process::ProcessIdentity;
pub use ring::{
    JoinBuilder, MAX_RING_SLOTS, RING_TEXT_PREFIX, ReaderPosition, Ring, RingBuilder, RingDescriptor,
    RingReadSlot, RingReader, RingReaders, RingReleaseError, RingView, RingWriteSlot,
};
pub use runtime::Counters;
pub use select::{BackendStatus, Backends, Rank, Registration, Unavailable};
pub use staging::StagingLimits;
pub use stream::{AsStream, BorrowedStream};
pub use tensor::{Dtype, Element, LayoutError, TensorLayout, TensorTable};
pub use timeline::{TIMELINE_END, Timeline};
