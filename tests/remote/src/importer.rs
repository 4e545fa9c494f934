//! The importer's process.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use device_ipc_core::{Descriptor, Ipc, Mapping, Remote, Result, Stream};
use device_ipc_mock::MockBackend;
use device_ipc_test_process::serve;

use crate::{Load, MACHINE, argument, contents, open_files, report, resident_memory};

/// Copies memory as the test requests, line by line.
pub fn importer(load: Load) {
    let mut state = None;
    let mut running: Option<JoinHandle<String>> = None;
    serve(|request, words| {
        let words: Vec<_> = words.split(' ').map(str::to_owned).collect();
        match request {
            "load" => match start(load, &words[0]) {
                Ok(started) => {
                    state = Some(Arc::new(started));
                    "loaded".into()
                }
                Err(reason) => reason,
            },
            "files" => open_files().to_string(),
            "memory" => resident_memory().to_string(),
            // Starts a request on another thread; `end` returns its answer.
            "begin" => {
                let state = Arc::clone(state.as_ref().expect("load comes first"));
                running = Some(std::thread::spawn(move || state.answer(&words[0], &words[1..])));
                "begun".into()
            }
            "end" => running.take().expect("begin comes first").join().expect("no panic"),
            _ => state.as_ref().expect("load comes first").answer(request, &words),
        }
    });
}

struct Importer {
    ipc: Ipc,
    stream: Stream,
}

/// With the argument `without`, no engine.
fn start(load: Load, words: &str) -> Result<Importer, String> {
    let engine = load()?;
    let backend = MockBackend::from_spec(MACHINE).expect("a valid machine");
    let ipc = match words {
        "without" => Ipc::with_backend(backend),
        _ => Ipc::builder().remote(Remote::new(engine)).with_backend(backend),
    };
    let stream = ipc.create_stream(0).map_err(|error| report(&error))?;
    Ok(Importer { ipc, stream })
}

impl Importer {
    fn answer(&self, request: &str, words: &[String]) -> String {
        let words: Vec<_> = words.iter().map(String::as_str).collect();
        let answer = match request {
            // open MODE SEED TIMEOUT_MS DESCRIPTOR: checks the bytes of a region.
            "open" => self.open(&words).and_then(|mapping| self.check(&mapping, argument(&words, 1))),
            // dict MODE TENSORS TIMEOUT_MS DESCRIPTOR: checks the bytes of named tensors.
            "dict" => self.open(&words).and_then(|mapping| self.check_tensors(&mapping, argument(&words, 1))),
            // many COUNT SEED TIMEOUT_MS DESCRIPTOR: pulls repeatedly.
            "many" => (0..argument::<usize>(&words, 0)).try_fold(String::new(), |_, _| {
                let mapping = self.open(&["pulled", words[1], words[2], words[3]])?;
                self.check(&mapping, argument(&words, 1))
            }),
            // time COUNT TIMEOUT_MS DESCRIPTOR: the median time of an open, in µs.
            "time" => self.time(&words),
            other => unreachable!("{other}"),
        };
        answer.unwrap_or_else(|error| report(&error))
    }

    fn open(&self, words: &[&str]) -> Result<Mapping> {
        let descriptor: Descriptor = argument(words, 3);
        let open = self.ipc.open(&descriptor).timeout(Duration::from_millis(argument(words, 2)));
        match words[0] {
            "plain" => open,
            "staged-or-pulled" => open.or_staged().or_pulled(),
            "or-pulled" => open.or_pulled(),
            "pulled" => open.pulled(),
            other => unreachable!("{other}"),
        }
        .on_device(0)
    }

    fn check(&self, mapping: &Mapping, seed: u8) -> Result<String> {
        let found = mapping.to_host_bytes(&self.stream)?;
        let expected = contents(found.len(), seed);
        let kind = if mapping.is_copy() { "copied" } else { "opened" };
        if found == expected {
            return Ok(format!("{} B right, {kind}", found.len()));
        }
        let at = found.iter().zip(&expected).position(|(found, expected)| found != expected);
        Ok(format!("wrong from {at:?} on, {kind}"))
    }

    fn check_tensors(&self, mapping: &Mapping, count: usize) -> Result<String> {
        let mut wrong = Vec::new();
        for number in 0..count {
            let name = format!("t{number}");
            let found = mapping.get(&name)?.to_host_bytes(&self.stream)?;
            if found != contents(found.len(), number as u8) {
                wrong.push(name);
            }
        }
        Ok(format!("{} tensors, wrong: {wrong:?}", mapping.tensors().len()))
    }

    fn time(&self, words: &[&str]) -> Result<String> {
        let mut times = Vec::new();
        for _ in 0..argument::<usize>(words, 0) {
            let begun = Instant::now();
            let mapping = self.open(&["pulled", "0", words[1], words[2]])?;
            times.push(begun.elapsed());
            drop(mapping);
        }
        times.sort_unstable();
        Ok(times[times.len() / 2].as_micros().to_string())
    }
}
