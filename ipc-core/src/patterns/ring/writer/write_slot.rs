//! The guard of a slot for writing.

use std::fmt;

use super::Ring;
use crate::backend::interop::{ViewStream, ViewTypes};
use crate::backend::stream::BorrowedStream;
use crate::model::address::DeviceRange;
#[cfg(doc)]
use crate::model::error::Error;
use crate::model::error::Result;
use crate::model::tensor::{Element, TensorTable};
use crate::sharing::import::{Tensor, ViewOwner};

/// A guard of a slot for writing.
///
/// Dropping the guard without publishing returns the slot: the next [`Ring::write`] returns the same sequence, and readers are
/// not notified.
///
/// # Examples
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let ipc = device_ipc_core::Ipc::with_backend(device_ipc_mock::MockBackend::from_spec("devices=1")?);
/// # let mut ring = ipc.ring(ipc.allocate(0, 512)?).start()?;
/// # let stream = ipc.create_stream(0)?;
/// let mut slot = ring.write(&stream)?;
/// slot.view_mut(&stream)?.copy_from(&[1_u8; 256])?;
/// slot.publish()?; // readers are notified when the stream reaches this point
/// # Ok(())
/// # }
/// ```
#[must_use = "no reader receives the slot before RingWriteSlot::publish"]
pub struct RingWriteSlot<'r> {
    pub(super) ring: &'r mut Ring,
    /// The stream of [`Ring::write`].
    pub(super) stream: BorrowedStream<'r>,
    pub(super) sequence: u64,
}

impl RingWriteSlot<'_> {
    /// Returns the sequence that the slot will have when it is published.
    pub const fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Returns the address range.
    pub fn range(&self) -> DeviceRange {
        self.ring.slots.of(self.sequence)
    }

    /// Returns a view of the elements for writing by work on `stream`.
    ///
    /// Pass the stream of [`Ring::write`], or a stream ordered after it.
    ///
    /// # Errors
    ///
    /// [`Error::WrongStream`] for a stream of another device than the memory's; [`Error::Layout`] if the slot does not
    /// consist of whole, aligned elements.
    pub fn view_mut<T: Element, M: ViewTypes>(
        &mut self,
        stream: &impl ViewStream<M>,
    ) -> Result<M::ViewMut<'_, T>> {
        ViewOwner::from(&self.ring.memory).view_mut(self.range(), None, stream)
    }

    /// Returns a tensor of the slot by name.
    ///
    /// The table states the layout of each slot. Pass to [`view_mut`](Tensor::view_mut) the stream of [`Ring::write`], or a
    /// stream ordered after it.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchTensor`]; [`Error::Descriptor`] if the tensor exceeds the slot.
    pub fn tensor<'s>(&'s self, table: &'s TensorTable, name: &str) -> Result<Tensor<'s>> {
        Tensor::in_table(&self.ring.memory, self.range(), table, name)
    }

    /// Publishes the slot when the stream of [`Ring::write`] reaches this point: every reader then sees the written bytes. Does not
    /// wait.
    ///
    /// Work on other streams that writes the slot has to be ordered before. Publications on different streams
    /// are signalled in the order of their sequences: the stream waits for the previous publication. Streams are
    /// distinguished by their handles, so do not replace a stream by a new one before its publication has arrived.
    ///
    /// # Errors
    ///
    /// [`Error::StreamCapturing`], [`Error::Unsupported`] for a stream of a device without timelines; otherwise the vendor's error. The
    /// slot is then unpublished and returned to the ring.
    pub fn publish(self) -> Result<()> {
        self.ring.publish(self.sequence, self.stream)
    }

    /// Publishes the slot immediately. Does not wait, call the driver or the system, or allocate.
    ///
    /// The caller states that all work that writes the slot has finished on all streams. A publication from the host never
    /// overtakes a publication on a stream: the streams must have reached all earlier publications already, unless the ring
    /// [waits on the host](Ring::waits_on_host); then the publication is signalled after the earlier ones.
    ///
    /// # Errors
    ///
    /// [`Error::RingNotYet`] if a stream has not reached an earlier publication, or a reader has not released the slot
    /// ([`Ring::wait_writable`] waits for that); [`Error::Forked`]. The slot is then unpublished and returned to the ring
    /// with the written bytes.
    pub fn publish_now(self) -> Result<()> {
        self.ring.publish_now(self.sequence)
    }
}

impl fmt::Debug for RingWriteSlot<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RingWriteSlot").field("sequence", &self.sequence).finish_non_exhaustive()
    }
}
