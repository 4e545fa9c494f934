//! The measurement of a row: rounds of our side and of the raw side, in turn within one run.

use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use device_ipc::{DeviceOrdinal, Ipc};

use crate::line::{Line, Subject};
use crate::peer::Remote;
use crate::peer::message::Command;
use crate::raw::{RawHandle, RawSide};

/// Number of rounds before the first one that is recorded.
const WARM_UP: usize = 3;

/// A row of the report: its name for `--row`, its title and its measurement.
pub(super) struct Row {
    pub(super) name: &'static str,
    pub(super) title: &'static str,
    pub(super) run: fn(&Bench) -> Result<Vec<Line>>,
}

/// The options and the state that all rows share.
pub(super) struct Bench {
    pub(super) ipc: Ipc,
    pub(super) raw: Arc<dyn RawSide>,
    /// Ordinal of this process's device.
    pub(super) device: u32,
    /// Ordinal of the peer's device: another device if there are several.
    pub(super) other: u32,
    /// Whether the backend runs on hardware, not on a simulator.
    pub(super) hardware: bool,
    pub(super) rounds: usize,
    pub(super) importers: usize,
    pub(super) exports: usize,
    /// Number of allocations for 1000 tensors of 1 MiB in the row 'state-dict'.
    pub(super) allocations: usize,
    /// Size of the weights in the row 'weights', in bytes.
    pub(super) weights: u64,
    /// Number of buckets of the weights.
    pub(super) buckets: usize,
    /// Number of slots of the ring for the weights.
    pub(super) slots: u32,
    pub(super) row: &'static str,
}

impl Bench {
    pub(super) fn backend(&self) -> &'static str {
        self.ipc.backend().info().name
    }

    /// Starts a peer process on this device.
    pub(super) fn remote(&self, device: u32) -> Result<Remote> {
        Remote::start(self.backend(), device, &[])
    }

    /// Returns raw handles of blocks of the peer that this process is authorized to open.
    pub(super) fn raw_handles(
        &self,
        exporter: &mut Remote,
        blocks: usize,
        bytes: u64,
    ) -> Result<Vec<RawHandle>> {
        let peer = self.ipc.backend().local_peer_id(DeviceOrdinal::new(self.device))?;
        exporter.request(&Command::RawHandles { blocks, bytes, peer })
    }

    /// Measures both sides in turn. The side that starts alternates from round to round.
    pub(super) fn compare<S>(
        &self,
        subject: Subject,
        state: &mut S,
        mut ours: impl FnMut(&mut S) -> Result<f64>,
        mut raw: impl FnMut(&mut S) -> Result<Option<f64>>,
    ) -> Result<Line> {
        self.announce(&subject.case);
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
        }
        Ok(Line::of(self.row, subject, &samples, self.hardware))
    }

    /// Returns a line of samples without a raw side.
    pub(super) fn figure(&self, subject: Subject, samples: &[f64]) -> Line {
        let samples: Vec<_> = samples.iter().map(|sample| (*sample, None)).collect();
        Line::of(self.row, subject, &samples, self.hardware)
    }

    /// Names the measurement that begins, because it may take minutes.
    pub(super) fn announce(&self, case: &str) {
        eprintln!("{}: {case}", self.row);
    }

    pub(super) fn skipped(&self, case: impl Into<String>, reason: impl Into<String>) -> Line {
        Line::skipped(self.row, case, reason)
    }

    /// Returns whether there are two devices with peer access.
    pub(super) fn has_peer_device(&self) -> Result<bool> {
        let [from, to] = [self.device, self.other].map(DeviceOrdinal::new);
        Ok(from != to && self.ipc.backend().peer_access(from, to)?)
    }
}

/// Returns the mean time of `count` calls in nanoseconds.
pub(super) fn timed(count: usize, mut call: impl FnMut(usize) -> Result<()>) -> Result<f64> {
    let begin = Instant::now();
    for index in 0..count {
        call(index)?;
    }
    Ok(begin.elapsed().as_nanos() as f64 / count as f64)
}
