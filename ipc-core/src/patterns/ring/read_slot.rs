//! A reader's slot guard.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::reader_state::ReaderState;
use crate::backend::interop::{ViewStream, ViewTypes};
use crate::backend::stream::AsStream;
use crate::model::address::DeviceRange;
use crate::model::error::Result;
use crate::model::tensor::{Element, TensorTable};
use crate::sharing::RecoverableError;
use crate::sharing::import::{Tensor, ViewOwner};

/// A guard of a slot that a reader has taken. It keeps the memory mapped.
///
/// A slot of [`RingReader::next`](crate::RingReader::next) or [`try_next`](crate::RingReader::try_next) has been published. A
/// slot of [`next_ahead`](crate::RingReader::next_ahead) may never be published: accesses and releases fail as soon as that is
/// known. A result is then valid if the work that computed it has finished before [`release`](Self::release) or
/// [`check`](Self::check) returned `Ok`; see [slots ahead of their
/// publication](crate::RingReader#slots-ahead-of-their-publication).
///
/// [`release`](Self::release) lets the writer reuse the slot when a stream reaches that point. Dropping the guard releases the
/// slot when all work submitted to the device has finished, asynchronously; the reader's next call waits for that.
///
/// # Examples
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let ipc = device_ipc_core::Ipc::with_backend(device_ipc_mock::MockBackend::from_spec("devices=1")?);
/// # let mut ring = ipc.ring(ipc.allocate(0, 512)?).start()?;
/// # let stream = ipc.create_stream(0)?;
/// # let descriptor = ring.descriptor().clone();
/// let mut reader = ipc.open_ring(&descriptor).on(&stream)?;
/// # ring.write(&stream)?.publish()?;
/// # use std::time::Duration;
/// if let Some(slot) = reader.next(Duration::from_secs(30))? {
///     let values: Vec<f32> = slot.to_host(&stream)?;
///     slot.release(&stream)?;
/// #   assert_eq!(values.len(), 64);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "dropping the slot releases it unread"]
pub struct RingReadSlot {
    inner: Arc<ReaderState>,
    sequence: u64,
    released: bool,
    /// Whether the bytes were accessed, and no later call has reported that they were never published.
    accessed: AtomicBool,
}

impl RingReadSlot {
    pub(super) const fn new(inner: Arc<ReaderState>, sequence: u64) -> Self {
        Self { inner, sequence, released: false, accessed: AtomicBool::new(false) }
    }

    /// Returns the sequence of the slot: 0 for the ring's first publication, then 1, 2, …
    pub const fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Returns the address range in this process. Does not check whether the slot has been or will be published.
    pub fn range(&self) -> DeviceRange {
        self.accessed.store(true, Ordering::Relaxed);
        self.inner.slots.of(self.sequence)
    }

    /// Returns whether the publication has arrived at the host. False only for a slot taken
    /// [ahead](crate::RingReader::next_ahead) of it.
    ///
    /// # Errors
    ///
    /// As for [`check`](Self::check).
    pub fn is_published(&self) -> Result<bool> {
        self.inner.runtime.check()?;
        let published = self.inner.is_published(self.sequence);
        if published.is_err() {
            self.accessed.store(false, Ordering::Relaxed);
        }
        published
    }

    /// Returns an error if the slot was never published, or may have been overwritten.
    ///
    /// For a slot taken [ahead](crate::RingReader::next_ahead) of its publication, call this when the work that reads the slot
    /// has finished, before its result is used: a stream that waited for a publication that never arrived has continued over
    /// bytes that were never written.
    ///
    /// # Errors
    ///
    /// [`Error::ExporterGone`](crate::Error::ExporterGone) or [`Error::RingClosed`](crate::Error::RingClosed) if the slot was never published; [`Error::DismissedFromRing`](crate::Error::DismissedFromRing) if it may
    /// have been overwritten; [`Error::Forked`](crate::Error::Forked).
    pub fn check(&self) -> Result<()> {
        self.is_published().map(drop)
    }

    /// Returns a view of the elements for reading by work on `stream`.
    ///
    /// Of a slot taken [ahead](crate::RingReader::next_ahead), pass the stream that waits for the publication, or a stream
    /// ordered after it.
    ///
    /// # Errors
    ///
    /// As for [`check`](Self::check); [`Error::WrongStream`](crate::Error::WrongStream) for a stream of another device than the reader's;
    /// [`Error::Layout`](crate::Error::Layout) if the slot does not consist of whole, aligned elements.
    pub fn view<T: Element, M: ViewTypes>(&self, stream: &impl ViewStream<M>) -> Result<M::View<'_, T>> {
        self.check()?;
        ViewOwner::from(self.inner.mapping().first_part()).view(self.range(), None, stream)
    }

    /// Returns a view of the bytes for reading by work on `stream`.
    ///
    /// # Errors
    ///
    /// As for [`view`](Self::view).
    pub fn view_bytes<M: ViewTypes>(&self, stream: &impl ViewStream<M>) -> Result<M::View<'_, u8>> {
        self.view(stream)
    }

    /// Copies the elements to the host, waits for the copy, and [checks](Self::check) that they were published.
    ///
    /// Pass a stream as for [`view`](Self::view).
    ///
    /// # Errors
    ///
    /// As for [`view`](Self::view), also if the ring ended meanwhile; [`Error::Io`](crate::Error::Io) if the host has no memory
    /// for the elements; otherwise the vendor's error.
    pub fn to_host<T: Element, M>(&self, stream: &impl AsStream<M>) -> Result<Vec<T>> {
        self.check()?;
        let elements = ViewOwner::from(self.inner.mapping().first_part()).to_host(
            self.range(),
            None,
            stream.as_stream(),
        )?;
        self.check()?;
        Ok(elements)
    }

    /// Returns a tensor of the slot by name.
    ///
    /// The table states the layout of each slot; it arrives over any transport. Pass to [`view`](Tensor::view) a stream as for
    /// [`RingReadSlot::view`].
    ///
    /// # Errors
    ///
    /// As for [`check`](Self::check); [`Error::NoSuchTensor`](crate::Error::NoSuchTensor); [`Error::Descriptor`](crate::Error::Descriptor) if the tensor exceeds the slot.
    pub fn tensor<'s>(&'s self, table: &'s TensorTable, name: &str) -> Result<Tensor<'s>> {
        self.check()?;
        Tensor::in_table(self.inner.mapping().first_part(), self.range(), table, name)
    }

    /// Lets the writer reuse the slot when the stream reaches this point. Does not wait.
    ///
    /// Work submitted to the stream before this call may still read the slot. Work on other streams must be ordered before
    /// this point, by an event. The writer is notified when all older slots are released too. Releases on different streams
    /// are signalled in order: a stream waits for the previous release. Streams are distinguished by their handles, so do not
    /// replace a stream by a new one before its release has arrived. If the writer has terminated, this only checks that the
    /// slot was published.
    ///
    /// # Errors
    ///
    /// [`RecoverableError`], which contains the slot: [`Error::RingClosed`](crate::Error::RingClosed) or [`Error::ExporterGone`](crate::Error::ExporterGone) if the slot was never
    /// published, so that the bytes read from it are invalid; [`Error::DismissedFromRing`](crate::Error::DismissedFromRing); [`Error::WrongBackend`](crate::Error::WrongBackend);
    /// [`Error::StreamCapturing`](crate::Error::StreamCapturing); [`Error::Unsupported`](crate::Error::Unsupported) for a stream of a device without timelines in a ring of a device with
    /// timelines; otherwise the vendor's error.
    pub fn release<M>(self, stream: &impl AsStream<M>) -> Result<(), RecoverableError<Self>> {
        self.end(|inner, sequence| inner.release_on(sequence, stream.as_stream()))
    }

    /// Lets the writer reuse the slot immediately. Does not wait, call the driver or the system, or allocate.
    ///
    /// The caller states that all work that reads the slot has finished on all streams. The writer is notified when all older
    /// slots are released too. The streams must have reached the older releases already, unless the reader [waits on the
    /// host](crate::RingReader::waits_on_host): then the release is signalled after the older ones.
    ///
    /// # Errors
    ///
    /// [`RecoverableError`], which contains the slot: [`Error::RingNotYet`](crate::Error::RingNotYet) if a stream has not reached the release of another
    /// slot; otherwise as for [`check`](Self::check).
    pub fn release_now(self) -> Result<(), RecoverableError<Self>> {
        self.end(|inner, sequence| inner.release_now(sequence))
    }

    fn end(
        mut self,
        release: impl FnOnce(&Arc<ReaderState>, u64) -> Result<()>,
    ) -> Result<(), RecoverableError<Self>> {
        let released = self.is_published().and_then(|published| {
            release(&self.inner, self.sequence)?;
            Ok(published)
        });
        match released {
            Ok(published) => {
                self.released = true;
                if !published {
                    self.note_if_accessed();
                }
                Ok(())
            }
            Err(error) => Err(RecoverableError::new(error, self)),
        }
    }

    fn note_if_accessed(&self) {
        if self.accessed.load(Ordering::Relaxed) {
            self.inner.note_read_ahead(self.sequence);
        }
    }
}

impl Drop for RingReadSlot {
    fn drop(&mut self) {
        if self.released {
            return;
        }
        if self.inner.runtime.is_here() && !matches!(self.inner.is_published(self.sequence), Ok(true)) {
            self.note_if_accessed();
        }
        self.inner.release_after_drop(self.sequence);
    }
}
