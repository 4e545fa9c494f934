//! The bare counterpart of rounds between streams of two processes: writes and waits on two words of a page of host memory.

#![allow(unsafe_code, reason = "raw writes and waits on words that stay mapped until the process exits")]

use std::time::Instant;

use anyhow::Result;
use device_ipc::{AsStream, Stream};

use crate::frame::Bench;
use crate::peer::message::Command;
use crate::peer::{Page, REQUEST, RESPONSE, Remote};

/// Two words that are registered with this process's device, and with that of the peer at its first round.
pub(super) struct RawWords {
    page: Page,
    /// Device address of the page.
    base: u64,
    /// The value of the next round.
    next: u64,
}

impl RawWords {
    pub(super) fn new(bench: &Bench) -> Result<Self> {
        let page = Page::create()?;
        // SAFETY: the page stays mapped until the process exits.
        let base = unsafe { bench.raw.register(page.address(), page.bytes(), bench.device) }?;
        Ok(Self { page, base, next: 1 })
    }

    /// Submits rounds to the streams of the peer and of this process; returns when those of this process began.
    pub(super) fn submit(
        &mut self,
        bench: &Bench,
        remote: &mut Remote,
        stream: &Stream,
        rounds: u64,
    ) -> Result<Instant> {
        let first = self.next;
        self.next += rounds;
        remote.execute(&Command::RawRounds { page: self.page.path(), first, rounds })?;
        let begin = Instant::now();
        for value in first..self.next {
            // SAFETY: the page stays mapped until the process exits.
            unsafe {
                bench.raw.write_value(stream.as_stream(), self.base + REQUEST, value)?;
                bench.raw.wait_value(stream.as_stream(), self.base + RESPONSE, value)?;
            }
        }
        Ok(begin)
    }
}
