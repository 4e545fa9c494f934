//! Ctrl-C and SIGTERM, as something that is told like the rest.

use std::sync::mpsc::Sender;

use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::{emulate_default_handler, signal_name};

use super::server::Told;

/// Has the first signal told. A second one ends the process at once, as if nobody had listened.
pub(super) fn on_signals(tell: Sender<Told>) -> Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM]).context("listening for signals")?;
    std::thread::spawn(move || {
        let mut first = true;
        for signal in &mut signals {
            if !std::mem::take(&mut first) {
                let _ = emulate_default_handler(signal);
            }
            eprintln!("stopping; once more to end at once");
            let _ = tell.send(Told::Stop(signal_name(signal).unwrap_or("a signal")));
        }
    });
    Ok(())
}
