//! Programs that must not compile, as doctests.
//!
//! A mapping cannot be used once it has been released:
//!
//! ```compile_fail,E0382
//! # use device_ipc::{Error, Mapping, Stream};
//! fn use_after_release(tensor: Mapping, stream: &Stream) -> Result<(), Error> {
//!     tensor.release(stream)?;
//!     tensor.view_mut::<f32, _>(stream)?.fill_bytes(0)
//! }
//! ```
//!
//! A view cannot outlive its mapping:
//!
//! ```compile_fail,E0515
//! # use device_ipc::{Error, Mapping, Stream, View};
//! fn view_outlives_its_mapping<'a>(tensor: Mapping, stream: &'a Stream) -> Result<View<'a, f32>, Error> {
//!     tensor.view(stream)
//! }
//! ```
//!
//! Borrowed memory is shared by an unsafe call, because the caller keeps it allocated:
//!
//! ```compile_fail,E0133
//! # use device_ipc::{Error, Ipc, Region};
//! fn borrowed_memory_needs_unsafe(ipc: &Ipc, region: Region) {
//!     let _export = ipc.share_borrowed(region).start();
//! }
//! ```
//!
//! A slot of a ring is published or released once:
//!
//! ```compile_fail,E0382
//! # use device_ipc::{Error, RingWriteSlot};
//! fn publish_twice(slot: RingWriteSlot<'_>) -> Result<(), Error> {
//!     slot.publish()?;
//!     slot.publish()?;
//!     Ok(())
//! }
//! ```
