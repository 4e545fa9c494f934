//! Progress of long operations: a bar on a terminal, else periodic lines.

use std::cell::{Cell, OnceCell};
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{HumanBytes, ProgressBar, ProgressStyle};

use crate::output::{is_quiet, notice};
use device_ipc::CopyProgress;

/// Interval between lines where standard error is not a terminal.
const INTERVAL: Duration = Duration::from_secs(5);

/// Progress of an operation that is done in pieces, shown on standard error.
pub(crate) struct Progress {
    operation: &'static str,
    total: u64,
    done: Cell<u64>,
    printed: Cell<Instant>,
    bar: Option<ProgressBar>,
}

impl Progress {
    /// Starts the progress of an operation on `total` bytes; a bar is shown if they exceed one piece.
    pub(crate) fn of_bytes(operation: &'static str, total: u64, piece: u64) -> Self {
        let bar = (total > piece && !is_quiet() && std::io::stderr().is_terminal()).then(|| {
            let style =
                ProgressStyle::with_template("{msg} {bar:40} {bytes} of {total_bytes}, {bytes_per_sec}");
            ProgressBar::new(total)
                .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
                .with_message(operation)
        });
        Self { operation, total, done: Cell::new(0), printed: Cell::new(Instant::now()), bar }
    }

    /// Records that `bytes` more bytes are done.
    pub(crate) fn advance(&self, bytes: u64) {
        self.set(self.done.get() + bytes);
    }

    fn set(&self, done: u64) {
        self.done.set(done);
        if let Some(bar) = &self.bar {
            bar.set_position(self.done.get());
        } else if self.printed.get().elapsed() >= INTERVAL {
            self.printed.set(Instant::now());
            let (done, total) = (HumanBytes(self.done.get()), HumanBytes(self.total));
            notice(format_args!("{}: {done} of {total}", self.operation));
        }
    }
}

/// Number of bytes from which on a copy from the sender is shown.
const SHOWN_COPY: u64 = 64 << 20;

/// Returns a function that shows the progress of a copy from the sender.
pub(crate) fn of_copy() -> impl Fn(CopyProgress) {
    let shown = OnceCell::new();
    move |progress| {
        let CopyProgress { copied_bytes, total_bytes, .. } = progress;
        shown.get_or_init(|| Progress::of_bytes("copying", total_bytes, SHOWN_COPY)).set(copied_bytes);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
