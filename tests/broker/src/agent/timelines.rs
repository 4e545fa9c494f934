//! What an agent does with timelines.

use std::time::Duration;

use device_ipc_core::{Result, Timeline};

use super::{Agent, Words};

impl Agent {
    /// `timeline NAME`: that of a mapping, under its name.
    pub(super) fn take_timeline(&mut self, words: &Words<'_>) -> Result<String> {
        let timeline = self.mappings.get(words.name(0)).expect("it was opened").timeline()?;
        self.timelines.insert(words.name(0).to_owned(), timeline);
        Ok(String::new())
    }

    /// `timelines NAME COUNT MS`: those of an export, once there are so many; under its name, the second as `NAME.1`.
    pub(super) fn take_timelines(&mut self, words: &Words<'_>) -> Result<String> {
        let name = words.name(0);
        let timelines =
            self.exports.get(name).expect("it was shared").timelines(words.number(1), words.time(2))?;
        let count = timelines.len();
        for (index, timeline) in timelines.into_iter().enumerate() {
            let name = if index == 0 { name.to_owned() } else { format!("{name}.{index}") };
            self.timelines.insert(name, timeline);
        }
        Ok(count.to_string())
    }

    /// `signal NAME VALUE`: when the stream gets there.
    pub(super) fn signal(&mut self, words: &Words<'_>) -> Result<String> {
        let stream = self.stream()?;
        self.timeline(words).signal(words.number(1) as u64, &stream)?;
        Ok(String::new())
    }

    /// `signal-now NAME VALUE`
    pub(super) fn signal_now(&mut self, words: &Words<'_>) -> Result<String> {
        self.timeline(words).signal_now(words.number(1) as u64)?;
        Ok(String::new())
    }

    /// `wait NAME VALUE`: the stream does.
    pub(super) fn wait(&mut self, words: &Words<'_>) -> Result<String> {
        let stream = self.stream()?;
        self.timeline(words).wait(words.number(1) as u64, &stream)?;
        Ok(String::new())
    }

    /// `wait-now NAME VALUE MS`
    pub(super) fn wait_now(&mut self, words: &Words<'_>) -> Result<String> {
        self.timeline(words).wait_now(words.number(1) as u64, words.time(2))?;
        Ok(String::new())
    }

    /// `check NAME`
    pub(super) fn check_timeline(&mut self, words: &Words<'_>) -> Result<String> {
        self.timeline(words).check()?;
        Ok(String::new())
    }

    /// `delay MS`: the stream does nothing for so long.
    pub(super) fn delay(&mut self, words: &Words<'_>) -> Result<String> {
        self.stream()?.delay(words.time(0)).map(|()| String::new())
    }

    /// `forget-timelines`
    pub(super) fn forget_timelines(&mut self) -> Result<String> {
        self.timelines.clear();
        Ok(String::new())
    }

    /// `rounds NAME COUNT first=0|1`: adds one to every float in turns with the other side, with no host waiting: the first
    /// begins. The mapping's name, or that of a buffer of our own.
    pub(super) fn rounds(&mut self, words: &Words<'_>) -> Result<String> {
        let stream = self.stream()?;
        let timeline = self.timeline(words).clone();
        let begins = words.number_of("first") == Some(1);
        let mut view = match self.mappings.get(words.name(0)) {
            Some(mapping) => mapping.view_mut::<f32, _>(&stream)?,
            None => self.buffers.get(words.name(0)).expect("it is there").view_mut::<f32>(&stream)?,
        };
        for round in 1..=words.number(1) as u64 {
            // Who begins is one ahead.
            let before = if begins { round - 1 } else { round };
            if before > 0 {
                timeline.wait(before, &stream)?;
            }
            view.add(1.0)?;
            // Late, so that a wait that does nothing would show.
            stream.delay(Duration::from_micros(50))?;
            timeline.signal(round, &stream)?;
        }
        Ok(String::new())
    }

    /// `warm-up`: has every operation done once.
    pub(super) fn warm_up(&mut self) -> Result<String> {
        let stream = self.stream()?;
        let buffer = self.ipc().allocate(0, 4096)?;
        let mut view = buffer.view_mut::<f32>(&stream)?;
        view.fill_bytes(0)?;
        view.add(1.0)?;
        stream.delay(Duration::from_micros(1))?;
        stream.synchronize()?;
        Ok(String::new())
    }

    /// `first-float NAME`: of a buffer of our own.
    pub(super) fn first_float(&mut self, words: &Words<'_>) -> Result<String> {
        let stream = self.stream()?;
        let buffer = self.buffers.get(words.name(0)).expect("it was allocated");
        Ok(buffer.view::<f32>(&stream)?.to_vec()?[0].to_string())
    }

    /// `clear NAME`: zeros in a buffer of our own.
    pub(super) fn clear(&mut self, words: &Words<'_>) -> Result<String> {
        let stream = self.stream()?;
        let buffer = self.buffers.get(words.name(0)).expect("it was allocated");
        buffer.view_mut::<f32>(&stream)?.fill_bytes(0)?;
        Ok(String::new())
    }

    fn timeline(&self, words: &Words<'_>) -> &Timeline {
        self.timelines.get(words.name(0)).expect("it was taken")
    }
}
