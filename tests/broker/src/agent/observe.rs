//! What an exporter observes of its importers, and importers of it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use device_ipc_conformance::agent::{Answer, Server};
use device_ipc_core::{Descriptor, Error, Result};

use super::Agent;
use super::opens::open;

impl Agent {
    pub(super) fn states(&mut self, name: &str) -> Answer {
        let holders = self.server().exports[name].holders();
        let mut states: Vec<_> =
            holders.iter().map(|holder| format!("{}:{}", holder.pid, holder.state)).collect();
        states.sort_unstable();
        Answer::Text(states.join(" "))
    }

    pub(super) fn close_keeping(&mut self, name: &str, timeout: Duration) -> Answer {
        let exports = &mut self.server().exports;
        let export = exports.remove(name).expect("the test has shared it");
        let Err(failed) = export.close(timeout) else { return Answer::Text("closed".into()) };
        let text = failed.to_string();
        exports.insert(name.to_owned(), failed.into_inner());
        Answer::Text(text)
    }

    pub(super) fn on_dropped(&mut self, name: &str) -> Answer {
        let lines = Arc::clone(&self.lines);
        let event = format!("dropped {name}");
        self.server().mappings[name].on_dropped(move || Server::event(&lines, &event));
        Answer::Done
    }

    pub(super) fn report_changes(&mut self, name: &str) -> Answer {
        let lines = Arc::clone(&self.lines);
        let event = format!("changed {name}");
        self.server().exports[name].on_change(move || Server::event(&lines, &event));
        Answer::Done
    }

    /// Opens, reads and drops an export until an open fails. Every byte is to be `byte`, at the begin and at the end of each
    /// mapping.
    pub(super) fn reopen_until_dropped(&mut self, descriptor: &Descriptor, byte: u8) -> Result<Answer> {
        let stream = self.server().stream(0)?;
        let mut rounds = 0;
        loop {
            let mapping = match open(&self.server().ipc, descriptor, Duration::from_secs(5)) {
                Ok(mapping) => mapping,
                Err(Error::ExportDropped { .. }) => return Ok(Answer::Number(rounds)),
                Err(error) => return Err(error),
            };
            for place in ["begin", "end"] {
                let bytes: Vec<u8> = mapping.to_host(&stream)?;
                let wrong = bytes.iter().find(|read| **read != byte);
                assert_eq!(wrong, None, "at the {place} of round {rounds}, not {byte}");
                // Long enough for the other process to do something meanwhile.
                spin(Duration::from_micros(100));
            }
            // The lease is idle now and then, so that it can be taken back.
            if rounds % 4 == 3 {
                mapping.release(&stream)?;
            } else {
                drop(mapping);
                spin(Duration::from_micros(100));
            }
            rounds += 1;
        }
    }

    pub(super) fn read_on_host(&mut self, descriptor: &Descriptor) -> Result<Answer> {
        let stream = self.server().stream(0)?;
        let mapping = open(&self.server().ipc, descriptor, Duration::from_secs(5))?;
        Ok(Answer::Bytes(mapping.to_host(&stream)?))
    }

    pub(super) fn drop_and_exit(&mut self, name: &str) -> Answer {
        drop(self.server().exports.remove(name).expect("the test has shared it"));
        // SAFETY: ends the process, and runs nothing of it.
        unsafe { libc::_exit(0) }
    }
}

fn spin(time: Duration) {
    let end = Instant::now() + time;
    while Instant::now() < end {
        std::hint::spin_loop();
    }
}
