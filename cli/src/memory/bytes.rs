//! Bytes of device memory, whatever their elements are.
//!
//! A mapping's own views are typed, and there are element types that Rust has no type for. These bytes are read and
//! written in pieces, so that a large tensor needs no host memory of its size.

use anyhow::{Context, Result};
use device_ipc::{DeviceRange, Stream, View, ViewMut, ViewStream};

use crate::progress::Progress;

/// The largest piece in bytes: whole elements of every type.
const PIECE: u64 = 64 * 1024 * 1024;

/// Bytes that somebody else keeps mapped for `'m`, and a stream of their device.
pub(crate) struct DeviceBytes<'m> {
    /// Keeps them mapped.
    _keeper: std::marker::PhantomData<&'m ()>,
    range: DeviceRange,
    stream: &'m Stream,
}

impl<'m> DeviceBytes<'m> {
    /// Bytes that work on the stream reads and, where they are mapped so, writes.
    ///
    /// # Safety
    ///
    /// The range stays mapped for `'m` in the address space of the stream's device.
    pub(crate) unsafe fn new(range: DeviceRange, stream: &'m Stream) -> Self {
        Self { _keeper: std::marker::PhantomData, range, stream }
    }

    pub(crate) fn len(&self) -> u64 {
        self.range.len
    }

    /// A part of them.
    pub(crate) fn part(&self, offset: u64, len: u64) -> Result<Self> {
        let range = self.range.slice(offset, len).context("a tensor that leaves its region")?;
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
        // SAFETY: the piece lies in the range, which is mapped for as long as this lives; every byte is an element.
        Ok(unsafe { self.stream.view(piece)? })
    }

    fn view_mut(&self, piece: DeviceRange) -> Result<ViewMut<'_, u8>> {
        // SAFETY: as in `view`; who writes has asked whether the bytes are mapped for that.
        Ok(unsafe { self.stream.view_mut(piece)? })
    }

    /// Reads everything, a piece at a time, behind the work submitted before.
    pub(crate) fn read(&self, mut take: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let progress = Progress::of_bytes("reading", self.range.len, PIECE);
        for piece in self.pieces() {
            take(&self.view(piece)?.to_vec()?)?;
            progress.more(piece.len);
        }
        Ok(())
    }

    /// Overwrites everything with what `give` puts into each piece.
    pub(crate) fn write(&self, mut give: impl FnMut(&mut [u8]) -> Result<()>) -> Result<()> {
        let progress = Progress::of_bytes("writing", self.range.len, PIECE);
        let mut host = Vec::new();
        for piece in self.pieces() {
            host.resize(piece.len as usize, 0);
            give(&mut host)?;
            self.view_mut(piece)?.copy_from(&host)?;
            progress.more(piece.len);
        }
        Ok(self.stream.synchronize()?)
    }

    /// Reads each piece, changes it and writes it back.
    pub(crate) fn change(&self, mut change: impl FnMut(&mut [u8]) -> Result<()>) -> Result<()> {
        let progress = Progress::of_bytes("changing", self.range.len, PIECE);
        for piece in self.pieces() {
            let mut host = self.view(piece)?.to_vec()?;
            change(&mut host)?;
            self.view_mut(piece)?.copy_from(&host)?;
            progress.more(piece.len);
        }
        Ok(self.stream.synchronize()?)
    }

    /// Has the device set every byte.
    pub(crate) fn fill(&self, byte: u8) -> Result<()> {
        if self.range.len > 0 {
            self.view_mut(self.range)?.fill_bytes(byte)?;
        }
        Ok(self.stream.synchronize()?)
    }
}
