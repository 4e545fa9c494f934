//! Bytes of device memory, independent of their element type.
//!
//! Views of a mapping are typed, and some element types have no Rust type. The bytes are read and written in pieces, so
//! that a large tensor does not need host memory of its size.

use anyhow::{Context, Result};
use device_ipc::backend::ViewStream;
use device_ipc::{DeviceRange, Stream, View, ViewMut};

use crate::progress::Progress;

/// Maximum length of a piece in bytes; a multiple of the size of every element type.
const PIECE: u64 = 64 * 1024 * 1024;

/// A range of device memory that stays mapped for `'m`, with a stream of its device.
pub(crate) struct DeviceBytes<'m> {
    /// The lifetime for which the range stays mapped.
    _mapped: std::marker::PhantomData<&'m ()>,
    range: DeviceRange,
    stream: &'m Stream,
}

impl<'m> DeviceBytes<'m> {
    /// Wraps a range; work on the stream reads it and, if it is mapped writable, writes it.
    ///
    /// # Safety
    ///
    /// The range stays mapped for `'m` in the address space of the stream's device.
    pub(crate) unsafe fn new(range: DeviceRange, stream: &'m Stream) -> Self {
        Self { _mapped: std::marker::PhantomData, range, stream }
    }

    pub(crate) fn len(&self) -> u64 {
        self.range.len
    }

    /// Returns a part of the range.
    pub(crate) fn slice(&self, offset: u64, len: u64) -> Result<Self> {
        let range =
            self.range.slice(offset, len).context("out of range: the tensor extends beyond its region")?;
        Ok(Self { range, ..*self })
    }

    fn pieces(&self) -> impl Iterator<Item = DeviceRange> {
        let range = self.range;
        (0..range.len.div_ceil(PIECE)).filter_map(move |index| {
            let offset = index * PIECE;
            range.slice(offset, PIECE.min(range.len - offset))
        })
    }

    fn view(&self, piece: DeviceRange) -> Result<View<'_, u8>> {
        // SAFETY: the piece is in the range, which is mapped for the lifetime of `self`; every byte is a valid `u8`.
        Ok(unsafe { self.stream.view(piece)? })
    }

    fn view_mut(&self, piece: DeviceRange) -> Result<ViewMut<'_, u8>> {
        // SAFETY: as in `view`; the caller has checked that the range is mapped writable.
        Ok(unsafe { self.stream.view_mut(piece)? })
    }

    /// Reads the range piece by piece, after all work submitted to the stream before.
    pub(crate) fn read(&self, mut consume: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let progress = Progress::of_bytes("reading", self.range.len, PIECE);
        for piece in self.pieces() {
            consume(&self.view(piece)?.to_vec()?)?;
            progress.advance(piece.len);
        }
        Ok(())
    }

    /// Overwrites the range piece by piece with the bytes that `produce` writes.
    pub(crate) fn write(&self, mut produce: impl FnMut(&mut [u8]) -> Result<()>) -> Result<()> {
        let progress = Progress::of_bytes("writing", self.range.len, PIECE);
        let mut host = Vec::new();
        for piece in self.pieces() {
            host.resize(piece.len as usize, 0);
            produce(&mut host)?;
            self.view_mut(piece)?.copy_from(&host)?;
            progress.advance(piece.len);
        }
        Ok(self.stream.synchronize()?)
    }

    /// Submits a write of bytes of the same length. They may be changed when the call returns.
    pub(crate) fn overwrite(&self, bytes: &[u8]) -> Result<()> {
        Ok(self.view_mut(self.range)?.copy_from(bytes)?)
    }

    /// Submits a copy of a view of the same length.
    pub(crate) fn copy_from(&self, source: &View<'_, u8>) -> Result<()> {
        Ok(self.view_mut(self.range)?.copy_from_device(source)?)
    }

    /// Reads each piece, modifies it and writes it back.
    pub(crate) fn modify(&self, mut modify: impl FnMut(&mut [u8]) -> Result<()>) -> Result<()> {
        let progress = Progress::of_bytes("modifying", self.range.len, PIECE);
        for piece in self.pieces() {
            let mut host = self.view(piece)?.to_vec()?;
            modify(&mut host)?;
            self.view_mut(piece)?.copy_from(&host)?;
            progress.advance(piece.len);
        }
        Ok(self.stream.synchronize()?)
    }

    /// Sets every byte, on the device.
    pub(crate) fn fill(&self, byte: u8) -> Result<()> {
        if self.range.len > 0 {
            self.view_mut(self.range)?.fill_bytes(byte)?;
        }
        Ok(self.stream.synchronize()?)
    }
}
