//! Ctrl-C and SIGTERM as events for the main thread.

use std::sync::mpsc::SyncSender;

use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::{emulate_default_handler, signal_name};

use super::Event;
use crate::output::{notice, set_stopping};

/// Sends an event for the first signal. The second signal terminates the process immediately.
pub(super) fn on_signals(events: SyncSender<Event>) -> Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM]).context("cannot register signal handlers")?;
    std::thread::spawn(move || {
        let mut first = true;
        for signal in &mut signals {
            if !std::mem::take(&mut first) {
                let _ = emulate_default_handler(signal);
            }
            set_stopping();
            notice("stopping; send the signal again to exit immediately");
            let _ = events.send(Event::Stop(signal_name(signal).unwrap_or("a signal")));
        }
    });
    Ok(())
}
