//! How a row is measured: rounds of ours and of the bare side, one after the other in one run.

use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use device_ipc::{DeviceOrdinal, Ipc};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use crate::line::{Line, Subject};
use crate::peer::Remote;
use crate::raw::{RawHandle, RawSide};

/// Rounds before the first that counts.
const WARM_UP: usize = 3;

/// A row of the table: a name to choose it by, and what measures it.
pub(super) struct Row {
    pub(super) name: &'static str,
    pub(super) title: &'static str,
    pub(super) run: fn(&Bench) -> Result<Vec<Line>>,
}

/// What rows have in common.
pub(super) struct Bench {
    pub(super) ipc: Ipc,
    pub(super) raw: Arc<dyn RawSide>,
    /// This process's device.
    pub(super) device: u32,
    /// The second process's: another one where there is any.
    pub(super) other: u32,
    /// Is there a vendor's hardware behind the backend?
    pub(super) hardware: bool,
    pub(super) rounds: usize,
    pub(super) importers: usize,
    pub(super) exports: usize,
    /// What 1000 tensors of 1 MiB lie in.
    pub(super) allocations: usize,
    /// Bytes of the row 'weights'.
    pub(super) weights: u64,
    /// What they are handed over in.
    pub(super) buckets: usize,
    /// Of the ring that they go through.
    pub(super) slots: u32,
    pub(super) row: &'static str,
    pub(super) progress: MultiProgress,
}

impl Bench {
    pub(super) fn backend(&self) -> &'static str {
        self.ipc.backend().info().name
    }

    /// A second process of this program, on this device.
    pub(super) fn remote(&self, device: u32) -> Result<Remote> {
        Remote::start(self.backend(), device, &[])
    }

    /// Bare handles of blocks of the second process, which this process may open.
    pub(super) fn raw_handles(
        &self,
        exporter: &mut Remote,
        blocks: usize,
        bytes: u64,
    ) -> Result<Vec<RawHandle>> {
        let peer = self.ipc.backend().local_peer_id(DeviceOrdinal::new(self.device))?;
        exporter.raw_handles(blocks, bytes, peer)
    }

    /// Measures both sides in turn. Who goes first changes from round to round.
    pub(super) fn compare<S>(
        &self,
        subject: Subject,
        state: &mut S,
        mut ours: impl FnMut(&mut S) -> Result<f64>,
        mut raw: impl FnMut(&mut S) -> Result<Option<f64>>,
    ) -> Result<Line> {
        let bar = self.bar(&subject.case, self.rounds + WARM_UP);
        let mut samples = Vec::with_capacity(self.rounds);
        for round in 0..self.rounds + WARM_UP {
            let sample = if round % 2 == 0 {
                let first = ours(state)?;
                (first, raw(state)?)
            } else {
                let first = raw(state)?;
                (ours(state)?, first)
            };
            if round >= WARM_UP {
                samples.push(sample);
            }
            bar.inc(1);
        }
        bar.finish_and_clear();
        Ok(Line::of(self.row, subject, &samples, self.hardware))
    }

    /// A line of what one side alone has.
    pub(super) fn figure(&self, subject: Subject, samples: &[f64]) -> Line {
        let samples: Vec<_> = samples.iter().map(|sample| (*sample, None)).collect();
        Line::of(self.row, subject, &samples, self.hardware)
    }

    /// A bar that says which measurement is running.
    pub(super) fn bar(&self, case: &str, length: usize) -> ProgressBar {
        let style = ProgressStyle::with_template("{prefix:.bold} {msg:<50!} {bar:30} {pos}/{len} {eta}");
        let bar = ProgressBar::new(length as u64).with_prefix(self.row).with_message(case.to_owned());
        let bar = if let Ok(style) = style { bar.with_style(style) } else { bar };
        self.progress.add(bar)
    }

    pub(super) fn skipped(&self, case: impl Into<String>, why: impl Into<String>) -> Line {
        Line::skipped(self.row, case, why)
    }

    /// Do the two devices reach each other, and are there two?
    pub(super) fn two_cards(&self) -> Result<bool> {
        let [from, to] = [self.device, self.other].map(DeviceOrdinal::new);
        Ok(from != to && self.ipc.backend().peer_access(from, to)?)
    }
}

/// Nanoseconds of one of `count` calls.
pub(super) fn timed(count: usize, mut call: impl FnMut(usize) -> Result<()>) -> Result<f64> {
    let begin = Instant::now();
    for index in 0..count {
        call(index)?;
    }
    Ok(begin.elapsed().as_nanos() as f64 / count as f64)
}
