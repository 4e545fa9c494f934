//! How far long work has come: a bar on a terminal, else a line now and then.

use std::cell::Cell;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{HumanBytes, ProgressBar, ProgressStyle};

/// How often a line is written where there is no terminal.
const EVERY: Duration = Duration::from_secs(5);

/// Of work that is done piece by piece. Goes to standard error.
pub(crate) struct Progress {
    what: &'static str,
    total: u64,
    done: Cell<u64>,
    told: Cell<Instant>,
    bar: Option<ProgressBar>,
}

impl Progress {
    /// Of so many bytes; shown where they are more than `piece`.
    pub(crate) fn of_bytes(what: &'static str, total: u64, piece: u64) -> Self {
        let bar = (total > piece && std::io::stderr().is_terminal()).then(|| {
            let style =
                ProgressStyle::with_template("{msg} {bar:40} {bytes} of {total_bytes}, {bytes_per_sec}");
            ProgressBar::new(total)
                .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
                .with_message(what)
        });
        Self { what, total, done: Cell::new(0), told: Cell::new(Instant::now()), bar }
    }

    pub(crate) fn more(&self, bytes: u64) {
        self.done.set(self.done.get() + bytes);
        if let Some(bar) = &self.bar {
            bar.set_position(self.done.get());
        } else if self.told.get().elapsed() >= EVERY {
            self.told.set(Instant::now());
            eprintln!("{}: {} of {}", self.what, HumanBytes(self.done.get()), HumanBytes(self.total));
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
