//! Share accelerator memory between processes.
//!
//! One process exports a region of device memory; another opens the same bytes with no copy, on the same card or on
//! another one; both order their work on streams. The same program runs on NVIDIA CUDA, on Huawei Ascend and on a mock
//! that needs no hardware; the backend is chosen when the program starts.
//!
//! ```
//! use std::time::Duration;
//! use device_ipc::{Descriptor, Ipc};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // The sender.
//! let ipc = Ipc::builder().allow_simulated(true).auto()?;
//! let stream = ipc.create_stream(0)?;
//! let weights = ipc.allocate(0, 20 * 4)?;
//! weights.view_mut::<f32>(&stream)?.copy_from(&[1.0; 20])?;
//! let share = ipc.share(weights).dtype(device_ipc::Dtype::F32).shape([4, 5]).ready_on(&stream).start()?;
//! let line = share.descriptor().to_string(); // travels by any road
//!
//! // The receiver: another process, or this one.
//! let descriptor: Descriptor = line.parse()?;
//! let tensor = ipc.open(&descriptor).on(&stream)?; // waits for `ready` on the stream, not on the host
//! tensor.view_mut::<f32, _>(&stream)?.add(1.0)?;
//! tensor.release(&stream)?; // the lease ends when the stream gets here
//!
//! share.wait_released(Duration::from_secs(30))?; // an error would name process, program and bytes
//! # Ok(())
//! # }
//! ```
//!
//! # Rings
//!
//! For hand-overs that repeat: memory that is shared once, in slots that are written again and again. No host waits.
//!
//! ```
//! use std::time::Duration;
//! use device_ipc::{Error, Ipc, RingDescriptor};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // The writer.
//! let ipc = Ipc::builder().allow_simulated(true).auto()?;
//! let stream = ipc.create_stream(0)?;
//! let mut ring = ipc.ring(ipc.allocate(0, 2 * 1024)?).slots(2).start()?;
//! let line = ring.descriptor().to_string(); // travels by any road
//!
//! // A reader: another process, or this one.
//! let descriptor: RingDescriptor = line.parse()?;
//! let reading = ipc.create_stream(0)?;
//! let mut reader = ipc.open_ring(&descriptor).on(&reading)?;
//!
//! ring.wait_readers(1, Duration::from_secs(30))?;
//! for bucket in 0..5 {
//!     // The stream waits until every reader has passed what the slot held.
//!     let mut slot = ring.write(&stream)?;
//!     slot.view_mut::<f32, _>(&stream)?.copy_from(&[bucket as f32; 256])?;
//!     slot.publish(&stream)?;
//!
//!     let slot = reader.next(&reading)?; // the stream waits for the publication
//!     assert_eq!(slot.view::<f32, _>(&reading)?.to_vec()?, [bucket as f32; 256]);
//!     // The slot may be written again when the stream gets here. Fails if the ring ended before it published this.
//!     slot.release(&reading)?;
//! }
//! drop(ring);
//! assert!(matches!(reader.next(&reading), Err(Error::RingClosed { .. })));
//! # Ok(())
//! # }
//! ```
//!
//! # Where to look
//!
//! | to | see |
//! |---|---|
//! | choose a backend | [`Ipc::auto`], [`Ipc::named`], [`Ipc::available`], `DEVICE_IPC_BACKEND` |
//! | share memory | [`Ipc::share`], [`ShareBuilder`], [`Export`]; owners: [`DeviceOwner`], [`OwnedRegion`] |
//! | open it | [`Ipc::open`], [`OpenBuilder`], [`Mapping`]; where: [`OpenBuilder::on`], [`DeviceMap`] |
//! | share many named tensors | [`Ipc::bundle`], [`BundleExport`]; [`Ipc::open_bundle`], [`BundleMapping`]; [`TensorTable`] |
//! | write and read in turns | [`Ipc::ring`], [`Ring`]; [`Ipc::open_ring`], [`RingReader`]; or a bare [`Timeline`] |
//! | send it to a process | [`Ipc::listen`], [`Ipc::connect`], [`Channel`], [`Message`], [`Received`] |
//! | have a copy where cards do not reach each other | [`OpenBuilder::or_staged`], [`Mapping::is_copy`] |
//! | send a descriptor | [`Descriptor`]: bytes, or one line of text |
//! | use cudarc's slices and streams | `cuda::interop`, with the feature `cuda` |
//! | write a backend | [`backend`] for the contract, [`Registration`] to make it known |
//!
//! # Features
//!
//! | feature | backend |
//! |---|---|
//! | `cuda` (default) | NVIDIA CUDA; `libcuda` is loaded at run time, nothing of the vendor is needed to build |
//! | `ascend` (default) | Huawei Ascend; `libascendcl` is loaded at run time, nothing of the vendor is needed to build |
//! | `mock` (default) | devices in shared memory, for machines and tests without hardware |
//!
//! # Threads and forks
//!
//! Listing devices and backends starts no thread and creates no context. The first export or open of another process's
//! memory starts two threads, or fails where the system starts none: one serves the sockets, the other one does what may
//! block, drops owners of memory and runs callbacks, with the context of the memory's device current. In callbacks and drops
//! of owners, calls that wait return [`Error::OnWorkerThread`]. Neither thread is ever delivered a signal. Device memory does not survive `fork`: in a forked child guards do nothing, and calls return
//! [`Error::Forked`].

pub use device_ipc_core::*;

#[cfg(feature = "ascend")]
pub use device_ipc_ascend as ascend;
#[cfg(feature = "cuda")]
pub use device_ipc_cuda as cuda;
#[cfg(feature = "mock")]
pub use device_ipc_mock as mock;
