//! A reader of a ring, and its raw counterpart.

use std::sync::atomic::Ordering;

use anyhow::{Context, Result, ensure};
use device_ipc::{Buffer, Descriptor, Ipc, RingReader, Stream};

use super::message::RingUser;
use super::words::{Page, REQUEST, RESPONSE};
use crate::wait::TIMEOUT;

/// A reader and the buffers that it copies into.
pub(super) struct RingMember {
    reader: RingReader,
    stream: Stream,
    copies: Vec<Buffer>,
}

impl RingMember {
    pub(super) fn join(ipc: &Ipc, descriptor: &Descriptor, stream: &Stream) -> Result<Self> {
        let reader = ipc.open_ring(descriptor).timeout(TIMEOUT).on(stream)?;
        Ok(Self { reader, stream: stream.clone(), copies: Vec::new() })
    }

    pub(super) fn receive_and_release(&mut self, rounds: u64, by: RingUser) -> Result<()> {
        for _ in 0..rounds {
            match by {
                RingUser::Host => {
                    let slot = self.reader.next(TIMEOUT)?.context("the ring is closed")?;
                    slot.release_now().map_err(device_ipc::Error::from)?;
                }
                RingUser::Stream => {
                    let slot = self.reader.next_ahead(&self.stream)?;
                    slot.release(&self.stream).map_err(device_ipc::Error::from)?;
                }
            }
        }
        Ok(())
    }

    /// Copies each bucket into a private buffer, which is kept for the next call.
    pub(super) fn copy_buckets(&mut self, ipc: &Ipc, buckets: usize) -> Result<()> {
        for bucket in 0..buckets {
            let slot = self.reader.next_ahead(&self.stream)?;
            if self.copies.len() == bucket {
                self.copies.push(ipc.allocate(slot.range().device, slot.range().len)?);
            }
            let mut copy = self.copies[bucket].view_mut::<u8, _>(&self.stream)?;
            copy.copy_from_device(&slot.view::<u8, _>(&self.stream)?)?;
            slot.release(&self.stream).map_err(device_ipc::Error::from)?;
        }
        Ok(())
    }

    /// Copies the buffers of [`copy_buckets`](Self::copy_buckets) to each other, without the ring.
    pub(super) fn copy_own_buckets(&mut self, buckets: usize) -> Result<()> {
        ensure!(self.copies.len() > 1, "at least two buckets must be copied first");
        for bucket in 0..buckets {
            let (from, to) = (bucket % self.copies.len(), (bucket + 1) % self.copies.len());
            let mut copy = self.copies[to].view_mut::<u8, _>(&self.stream)?;
            copy.copy_from_device(&self.copies[from].view::<u8, _>(&self.stream)?)?;
        }
        Ok(())
    }
}

/// Answers each value in one word of a shared page by writing it to the other.
pub(super) fn spin(page: &Page, first: u64, rounds: u64) -> Result<()> {
    for value in first..first + rounds {
        while page.word(REQUEST).load(Ordering::Acquire) < value {
            std::hint::spin_loop();
        }
        page.word(RESPONSE).store(value, Ordering::Release);
    }
    Ok(())
}
