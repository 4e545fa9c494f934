//! Shares accelerator memory between processes.
//!
//! One process, the exporter, shares a region of device memory. Other processes, the importers, open the same bytes without a
//! copy, on the same device or on another one. Both order their work on streams. The same program runs on NVIDIA CUDA, on
//! Huawei Ascend and on a mock without hardware; the backend is selected at run time.
//!
//! ```
//! use std::time::Duration;
//! use device_ipc::{Descriptor, Ipc};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // The exporter.
//! let ipc = Ipc::builder().allow_simulated(true).auto()?;
//! let stream = ipc.create_stream(0)?;
//! let weights = ipc.allocate(0, 20 * 4)?;
//! weights.view_mut(&stream)?.copy_from(&[1.0_f32; 20])?;
//! let export = ipc.share(weights).dtype(device_ipc::Dtype::F32).shape([4, 5]).ready_on(&stream).start()?;
//! let line = export.descriptor().to_string(); // send it over any transport
//!
//! // The importer: another process, or this one.
//! let descriptor: Descriptor = line.parse()?;
//! let tensor = ipc.open(&descriptor).on(&stream)?; // the stream waits until the weights are ready, not the host
//! tensor.view_mut(&stream)?.copy_from(&[2.0_f32; 20])?;
//! tensor.release(&stream)?; // the lease ends when the stream reaches this point
//!
//! export.wait_released(Duration::from_secs(30))?; // the error names process, program and bytes
//! # Ok(())
//! # }
//! ```
//!
//! # Rings
//!
//! A ring serves repeated hand-overs: the memory is shared once, in slots that are written in turn. The writer's host does not
//! wait, and readers process every publication.
//!
//! ```
//! use std::time::Duration;
//! use device_ipc::{Descriptor, Error, Ipc};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // The writer.
//! let ipc = Ipc::builder().allow_simulated(true).auto()?;
//! let stream = ipc.create_stream(0)?;
//! let mut ring = ipc.ring(ipc.allocate(0, 2 * 1024)?).slots(2).start()?;
//! let descriptor = ring.descriptor().to_string(); // send it over any transport
//!
//! // A reader: another process, or a thread of this one.
//! let read = |descriptor: Descriptor| -> Result<u64, Error> {
//!     let ipc = Ipc::builder().allow_simulated(true).auto()?;
//!     let stream = ipc.create_stream(0)?;
//!     let mut reader = ipc.open_ring(&descriptor).on(&stream)?;
//!     while let Some(slot) = reader.next(Duration::from_secs(30))? {
//!         let values: Vec<f32> = slot.view(&stream)?.to_vec()?;
//!         assert_eq!(values, [slot.sequence() as f32; 256]);
//!         slot.release(&stream)?; // the writer may reuse the slot when the stream reaches this point
//!     }
//!     Ok(reader.sequence())
//! };
//! # let descriptor = descriptor.parse()?;
//! let reader = std::thread::spawn(move || read(descriptor));
//!
//! ring.wait_readers(1, Duration::from_secs(30))?;
//! for bucket in 0..5 {
//!     let mut slot = ring.write(&stream)?; // the stream waits until every reader has released the slot
//!     slot.view_mut(&stream)?.copy_from(&[bucket as f32; 256])?;
//!     slot.publish()?; // readers receive it when the stream reaches this point
//! }
//! ring.close(Duration::from_secs(30))?; // readers receive what has been published, then None
//! # let read = reader.join().expect("the reader does not panic")?;
//! # assert_eq!(read, 5);
//! # Ok(())
//! # }
//! ```
//!
//! # Where to look
//!
//! | task | items |
//! |---|---|
//! | select a backend | [`Ipc::auto`], [`Ipc::named`], [`Ipc::available`], `DEVICE_IPC_BACKEND` |
//! | share memory | [`Ipc::share`], [`ShareBuilder`], [`Export`]; owners: [`DeviceOwner`], [`OwnedRegion`] |
//! | allocate memory | [`Ipc::allocate`]; [`Ipc::allocate_for`] with a [`MemoryUse`] |
//! | open memory | [`Ipc::open`], [`OpenBuilder`], [`Mapping`]; placement: [`OpenBuilder::on`], [`DeviceMap`] |
//! | read any element type and strides | [`Mapping::to_host`], [`Mapping::to_host_bytes`], [`Mapping::view_bytes`]; [`Element`] lists the types |
//! | share many named tensors | [`Ipc::share_named`]; [`Ipc::tensors`], [`TensorSet`], [`Ipc::share_all`]; [`Mapping::get`], [`Mapping::tensors`]; [`TensorTable`] |
//! | repeat hand-overs | [`Ipc::ring`], [`Ring`]; [`Ipc::open_ring`], [`RingReader`]; or a plain [`Timeline`] |
//! | send memory in messages | [`Ipc::listen`], [`Ipc::connect`], [`Channel`], [`Message`], [`Received`] |
//! | find memory by a name, in its current version | [`Ipc::keep`], [`Keeper`]; [`Ipc::find`], [`KeeperExport`] |
//! | copy between devices without peer access | [`OpenBuilder::copy`], [`CopyPolicy`], [`Mapping::is_copy`] |
//! | send a descriptor | [`Descriptor`]: bytes or one line of text |
//! | use cudarc's slices and streams | `cuda::interop` and the re-exported `cuda::cudarc`, with the feature `cuda` |
//! | write a backend | [`backend`] for the contract and its types, [`backend::register_backend!`] |
//!
//! # Features
//!
//! | feature | backend |
//! |---|---|
//! | `cuda` (default) | NVIDIA CUDA; `libcuda` is loaded at run time, building needs no CUDA toolkit |
//! | `ascend` (default) | Huawei Ascend; `libascendcl` is loaded at run time, building needs no CANN |
//! | `mock` (default) | simulated devices in shared memory, for machines and tests without hardware |
//!
//! | feature | element types |
//! |---|---|
//! | `half` | `half::f16` and `half::bf16`, also in cudarc's slices and views; the crate is re-exported as `device_ipc::half` |
//! | `float8` | `float8::F8E4M3` and `float8::F8E5M2`, likewise; the crate is re-exported as `device_ipc::float8` |
//!
//! # Threads and forks
//!
//! Listing devices and backends starts no thread and creates no context. The first export or the first open of another
//! process's memory starts two threads, or fails if the system cannot start them. The poller serves the sockets. The worker
//! performs operations that may block, drops owners of memory and runs callbacks, with the context of the memory's device
//! current. In callbacks and drops of owners, calls that wait return [`Error::OnWorkerThread`]. Both threads block all signals.
//! Device memory does not survive `fork`: in a forked child, guards do nothing and calls return [`Error::Forked`].

mod misuse;

#[cfg(feature = "float8")]
pub use device_ipc_core::float8;
#[doc(hidden)]
pub use device_ipc_core::front_end;
#[cfg(feature = "half")]
pub use device_ipc_core::half;
pub use device_ipc_core::{
    Access, AllowList, AsStream, BackendStatus, Bool, BorrowedStream, Buffer, Channel, ChannelBuilder,
    ChannelReceiver, ChannelSender, ConnectBuilder, Connecting, CopyPolicy, CopyProgress, Counters,
    Descriptor, DescriptorError, DeviceIdentity, DeviceInfo, DeviceMap, DeviceName, DeviceOrdinal,
    DeviceOwner, DevicePtr, DeviceRange, Dtype, Element, Error, ErrorKind, Export, ExportChanges, ExportId,
    Exposure, ExposurePolicy, Grant, Holder, HolderPolicy, Holders, Ipc, IpcBuilder, Keeper, KeeperExport,
    Key, LayoutError, LeaseId, LeaseState, ListenBuilder, Listener, Mapping, MemoryUse, Message, OpenBuilder,
    OwnedRegion, ProcessIdentity, ReaderPosition, Received, ReceivedExport, RecoverableError, Region, Remote,
    Reservation, Result, Ring, RingBuilder, RingReadSlot, RingReader, RingReaders, RingSlots, RingWriteSlot,
    ShareBuilder, Stream, Tensor, TensorLayout, TensorSet, TensorTable, Timeline, TrySendError, View,
    ViewMut, backend, close_mappings_of, close_unused, counters, limits, shutdown,
};

#[cfg(feature = "ascend")]
pub use device_ipc_ascend as ascend;
#[cfg(feature = "cuda")]
pub use device_ipc_cuda as cuda;
#[cfg(feature = "mock")]
pub use device_ipc_mock as mock;
#[cfg(feature = "nixl")]
pub use device_ipc_nixl as nixl;
