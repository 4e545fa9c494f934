//! A slot that is being read.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::reader::Inner;
use crate::backend::interop::{ViewStream, ViewTypes};
use crate::backend::stream::AsStream;
use crate::model::address::DeviceRange;
use crate::model::error::Result;
use crate::model::tensor::{Element, TensorTable};
use crate::sharing::ErrorWith;
use crate::sharing::import::{Keeper, Tensor};

/// A slot that is being read. It keeps the memory mapped.
///
/// The slot may have been taken ahead of its publication, which may then never come: accesses and releases fail once that is
/// known. A result is valid if the work that computed it has finished before [`release`](Self::release) or
/// [`check`](Self::check) returned `Ok`; see [the end of the ring](crate::RingReader#the-end-of-the-ring).
///
/// [`release`](Self::release) lets the writer write it again when a stream gets there. Dropping it does so when everything that
/// had been submitted to the device has finished, off the caller's thread; the reader's next call waits for that.
#[derive(Debug)]
#[must_use = "a slot that is dropped at once has not been read"]
pub struct RingReadSlot {
    inner: Arc<Inner>,
    sequence: u64,
    released: bool,
    /// The bytes were accessed, and no call has said since that they were never published.
    accessed: AtomicBool,
}

impl RingReadSlot {
    pub(super) const fn new(inner: Arc<Inner>, sequence: u64) -> Self {
        Self { inner, sequence, released: false, accessed: AtomicBool::new(false) }
    }

    /// Its sequence: 0 for the ring's first publication, then 1, 2, …
    pub const fn sequence(&self) -> u64 {
        self.sequence
    }

    /// The bytes, at an address of this process. Does not check whether they have been published, or ever will be.
    pub fn range(&self) -> DeviceRange {
        self.accessed.store(true, Ordering::Relaxed);
        self.inner.slots.of(self.sequence)
    }

    /// Has it been published, as the host sees it?
    ///
    /// # Errors
    ///
    /// As [`check`](Self::check).
    pub fn is_published(&self) -> Result<bool> {
        self.inner.owner.check()?;
        let published = self.inner.is_published(self.sequence);
        if published.is_err() {
            self.accessed.store(false, Ordering::Relaxed);
        }
        published
    }

    /// Are the bytes what was published, or may they still be? To be asked when the work that reads them has finished, before
    /// its result is used: a stream that waited for a publication that never came has gone on over bytes that were never
    /// written.
    ///
    /// # Errors
    ///
    /// [`Error::ExporterGone`](crate::Error::ExporterGone) or [`Error::RingClosed`](crate::Error::RingClosed) where it was never published, [`Error::DismissedFromRing`](crate::Error::DismissedFromRing) where it may have
    /// been written over, [`Error::Forked`](crate::Error::Forked).
    pub fn check(&self) -> Result<()> {
        self.is_published().map(drop)
    }

    /// The elements, to be read by work on `stream`: the one that [`RingReader::next`](crate::RingReader::next) was given, or
    /// one that has been ordered behind it.
    ///
    /// # Errors
    ///
    /// As [`check`](Self::check); [`Error::WrongStream`](crate::Error::WrongStream) for a stream of another device than the reader's; [`Error::Layout`](crate::Error::Layout)
    /// where the bytes are not whole, aligned elements.
    pub fn view<T: Element, M: ViewTypes>(&self, stream: &impl ViewStream<M>) -> Result<M::View<'_, T>> {
        self.check()?;
        Keeper::from(self.inner.mapping().held()).view(self.range(), None, stream)
    }

    /// The tensor of this name in a table of what lies in each slot, which came by any road. Its [`view`](Tensor::view) is for the
    /// stream that [`RingReader::next`](crate::RingReader::next) was given, or one that has been ordered behind it.
    ///
    /// # Errors
    ///
    /// As [`check`](Self::check); [`Error::NoSuchTensor`](crate::Error::NoSuchTensor); [`Error::Descriptor`](crate::Error::Descriptor) for one that does not fit the slot.
    pub fn tensor<'s>(&'s self, table: &'s TensorTable, name: &str) -> Result<Tensor<'s>> {
        self.check()?;
        Tensor::in_table(self.inner.mapping().held(), self.range(), table, name)
    }

    /// Lets the writer write the slot again when the stream gets here: work that was submitted to it so far may still read the
    /// slot. Work on other streams must have been ordered before that, by an event. Does not wait.
    ///
    /// The writer hears of it when all older slots are released too. Releases on different streams are told in order: a stream
    /// waits for the release before. Streams are told apart by their handle, so do not destroy one before its release has
    /// arrived to go on with another. Where the writer has gone this only checks that the slot had been published.
    ///
    /// # Errors
    ///
    /// [`ErrorWith`], which gives the slot back: [`Error::RingClosed`](crate::Error::RingClosed) or [`Error::ExporterGone`](crate::Error::ExporterGone) where it was never
    /// published, so that what was read from it is not data; [`Error::DismissedFromRing`](crate::Error::DismissedFromRing); [`Error::WrongBackend`](crate::Error::WrongBackend);
    /// [`Error::StreamCapturing`](crate::Error::StreamCapturing); [`Error::Unsupported`](crate::Error::Unsupported) for a stream of a device without timelines, in a ring of one that has
    /// them; else what the vendor says.
    pub fn release<M>(self, stream: &impl AsStream<M>) -> Result<(), ErrorWith<Self>> {
        self.end(|inner, sequence| inner.release_on(sequence, stream.as_stream()))
    }

    /// Lets the writer write the slot again at once. The caller says that it has finished with it: that no work which reads the
    /// slot is left on any stream. For hosts that hand over to hosts; does not wait, and neither calls the driver nor the
    /// system, nor allocates.
    ///
    /// The writer hears of it when all older slots are released too. It takes its turn among releases on streams: where
    /// [`RingReader::waits_on_host`](crate::RingReader::waits_on_host), it is told when the streams have got to the older ones;
    /// else they have to have.
    ///
    /// # Errors
    ///
    /// [`ErrorWith`], which gives the slot back: [`Error::RingNotYet`](crate::Error::RingNotYet) where a stream has yet to get to the release of
    /// another slot; as [`check`](Self::check).
    pub fn release_now(self) -> Result<(), ErrorWith<Self>> {
        self.end(|inner, sequence| inner.release_now(sequence))
    }

    fn end(mut self, release: impl FnOnce(&Arc<Inner>, u64) -> Result<()>) -> Result<(), ErrorWith<Self>> {
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
            Err(error) => Err(ErrorWith::new(error, self)),
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
        if self.inner.owner.is_here() && !matches!(self.inner.is_published(self.sequence), Ok(true)) {
            self.note_if_accessed();
        }
        self.inner.let_go(self.sequence);
    }
}
