//! What an importer is told.

use std::time::{Duration, Instant};

use device_ipc_core::{Descriptor, Ipc, Mapping, Result, Stream, counters};

use super::{Agent, Words, say, variant};

impl Agent {
    /// `open NAME DESCRIPTOR [timeout=MS]`: address and length.
    pub(super) fn open(&mut self, words: &Words<'_>) -> Result<String> {
        let descriptor = words.descriptor(1)?;
        let mapping = opening(self.ipc(), &descriptor, words.number_of("timeout"))?;
        Ok(self.keep(words.name(0), mapping))
    }

    /// `open-with-stream NAME DESCRIPTOR`: the agent's stream waits until the bytes are ready.
    pub(super) fn open_with_stream(&mut self, words: &Words<'_>) -> Result<String> {
        let (descriptor, stream) = (words.descriptor(1)?, self.stream()?);
        let mapping = self.ipc().open(&descriptor).on(&stream)?;
        Ok(self.keep(words.name(0), mapping))
    }

    pub(super) fn keep(&mut self, name: &str, mapping: Mapping) -> String {
        let range = mapping.range();
        self.mappings.insert(name.to_owned(), mapping);
        format!("{} {}", range.ptr, range.len)
    }

    /// `opened-by NAME`: the descriptor, as the mapping tells it.
    pub(super) fn opened_by(&mut self, words: &Words<'_>) -> Result<String> {
        Ok(self.mappings.get(words.name(0)).expect("it was opened").descriptor().to_string())
    }

    /// `touch NAME`: adds one to every float, and tells the first.
    pub(super) fn touch(&mut self, words: &Words<'_>) -> Result<String> {
        let stream = self.stream()?;
        let mapping = self.mappings.get(words.name(0)).expect("it was opened");
        let touched = touch(mapping, &stream);
        if touched.is_err() {
            self.replace_stream()?;
        }
        touched.map(|value| value.to_string())
    }

    /// `last-float NAME`
    pub(super) fn last_float(&mut self, words: &Words<'_>) -> Result<String> {
        let stream = self.stream()?;
        let mapping = self.mappings.get(words.name(0)).expect("it was opened");
        let all = mapping.view::<f32, _>(&stream)?.to_vec()?;
        Ok(all.last().expect("a mapping has bytes").to_string())
    }

    /// A stream whose work has failed is of no use any more.
    fn replace_stream(&mut self) -> Result<()> {
        self.stream = None;
        self.stream().map(drop)
    }

    /// `on-gone NAME`: an event when the exporter has gone.
    pub(super) fn on_gone(&mut self, words: &Words<'_>) -> Result<String> {
        let name = words.name(0).to_owned();
        let mapping = self.mappings.get(&name).expect("it was opened");
        mapping.on_gone(move |error| say(&format!("event gone {name} {}", variant(error))));
        Ok(String::new())
    }

    /// `release NAME`: when the agent's stream gets there.
    pub(super) fn release(&mut self, words: &Words<'_>) -> Result<String> {
        let stream = self.stream()?;
        self.mappings.remove(words.name(0)).expect("it was opened").release(&stream)?;
        Ok(String::new())
    }

    /// `drop NAME…`: mappings and exports.
    pub(super) fn drop_guard(&mut self, words: &Words<'_>) -> Result<String> {
        for name in &words.names {
            let known = self.mappings.remove(*name).is_some() | self.exports.remove(*name).is_some();
            assert!(known, "there is no {name}");
        }
        Ok(String::new())
    }

    /// `threads DESCRIPTOR THREADS ROUNDS`: each opens, uses and lets go so many times.
    pub(super) fn threads(&mut self, words: &Words<'_>) -> Result<String> {
        let (descriptor, threads, rounds) = (words.descriptor(0)?, words.number(1), words.number(2));
        let ipc = self.ipc().clone();
        let stream = self.stream()?;
        let work = |thread: usize| -> Result<()> {
            for round in 0..rounds {
                let mapping = ipc.open(&descriptor).at_home()?;
                if (round + thread).is_multiple_of(8) {
                    touch(&mapping, &stream)?;
                }
                if (round + thread).is_multiple_of(3) { mapping.release(&stream)? } else { drop(mapping) }
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let started: Vec<_> = (0..threads).map(|thread| scope.spawn(move || work(thread))).collect();
            started.into_iter().try_for_each(|thread| thread.join().expect("it does not panic"))
        })?;
        Ok(String::new())
    }

    /// `open-until-error DESCRIPTOR`: opens, uses and lets go for ever; the error that ends it.
    pub(super) fn open_until_error(&mut self, words: &Words<'_>) -> Result<String> {
        let (descriptor, stream) = (words.descriptor(0)?, self.stream()?);
        for round in 0_u64.. {
            let mapping = opening(self.ipc(), &descriptor, Some(5000))?;
            if round.is_multiple_of(4)
                && let Err(error) = touch(&mapping, &stream)
            {
                drop(stream);
                self.replace_stream()?;
                return Err(error);
            }
            drop(mapping);
        }
        Ok(String::new())
    }

    /// `two-opens DESCRIPTOR MS DESCRIPTOR MS`: at the same time, the second once the first has sent its request; for
    /// each its result and how many milliseconds it took.
    pub(super) fn two_opens(&mut self, words: &Words<'_>) -> Result<String> {
        let (first, second) = (words.descriptor(0)?, words.descriptor(2)?);
        let ipc = self.ipc();
        let timed = |descriptor: &Descriptor, time: u64| {
            let since = Instant::now();
            let result = opening(ipc, descriptor, Some(time)).map(drop);
            let name = result.map_or_else(|error| variant(&error), |()| "Opened".to_owned());
            (name, since.elapsed().as_millis())
        };
        let (one, other) = std::thread::scope(|scope| {
            let asked = counters().requests_total;
            let one = scope.spawn(|| timed(&first, words.number(1) as u64));
            while counters().requests_total == asked && !one.is_finished() {
                std::thread::yield_now();
            }
            let other = timed(&second, words.number(3) as u64);
            (one.join().expect("it does not panic"), other)
        });
        Ok(format!("{} {} {} {}", one.0, one.1, other.0, other.1))
    }
}

fn opening(ipc: &Ipc, descriptor: &Descriptor, timeout: Option<u64>) -> Result<Mapping> {
    let mut builder = ipc.open(descriptor);
    if let Some(timeout) = timeout {
        builder = builder.timeout(Duration::from_millis(timeout));
    }
    builder.at_home()
}

fn touch(mapping: &Mapping, stream: &Stream) -> Result<f32> {
    let mut view = mapping.view_mut::<f32, _>(stream)?;
    view.add(1.0)?;
    Ok(view.to_vec()?[0])
}
