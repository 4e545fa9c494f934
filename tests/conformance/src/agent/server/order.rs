//! What orders streams: timelines and events.

use device_ipc_core::{AsStream, DeviceOrdinal, Result};

use super::{Server, named};
use crate::agent::{Answer, Command};

impl Server {
    pub(super) fn carry_out_order(&mut self, command: Command) -> Result<Answer> {
        let done = |()| Answer::Done;
        match command {
            Command::Timeline { name, of } => {
                let timeline = named(&self.mappings, of.as_ref().unwrap_or(&name)).timeline()?;
                self.timelines.insert(name, timeline);
                Ok(Answer::Done)
            }
            Command::Timelines { name, count, timeout, of } => {
                let export = named(&self.exports, of.as_ref().unwrap_or(&name));
                let timelines = export.timelines(count, timeout)?;
                let count = timelines.len();
                for (index, timeline) in timelines.into_iter().enumerate() {
                    let name = if index == 0 { name.clone() } else { format!("{name}.{index}") };
                    self.timelines.insert(name, timeline);
                }
                Ok(Answer::Number(count as u64))
            }
            Command::ForgetTimelines => {
                self.timelines.clear();
                Ok(Answer::Done)
            }
            Command::HasTimelines => {
                Ok(Answer::Truth(self.backend.capabilities(DeviceOrdinal::new(0))?.timelines))
            }
            Command::Signal { name, value, device } => {
                let stream = self.stream(device)?;
                named(&self.timelines, &name).signal(value, &stream).map(done)
            }
            Command::Wait { name, value, device } => {
                let stream = self.stream(device)?;
                named(&self.timelines, &name).wait(value, &stream).map(done)
            }
            Command::SignalNow { name, value } => named(&self.timelines, &name).signal_now(value).map(done),
            Command::WaitNow { name, value, timeout } => {
                named(&self.timelines, &name).wait_now(value, timeout).map(done)
            }
            Command::Value { name } => Ok(Answer::Number(named(&self.timelines, &name).value()?)),
            Command::Check { name } => named(&self.timelines, &name).check().map(done),
            Command::Rounds { name, count, first } => self.rounds(&name, count, first).map(done),
            other => self.carry_out_event(other),
        }
    }

    fn carry_out_event(&mut self, command: Command) -> Result<Answer> {
        let done = |()| Answer::Done;
        match command {
            Command::OpenEvent { name, handle, device } => {
                let event = self.backend.open_event(&handle, DeviceOrdinal::new(device))?;
                self.events.insert(name, event);
                Ok(Answer::Done)
            }
            Command::RecordEvent { name, device } => {
                let stream = self.stream(device)?;
                named(&self.events, &name).record(stream.as_stream()).map(done)
            }
            Command::WaitEvent { name, device } => {
                let stream = self.stream(device)?;
                named(&self.events, &name).wait_on(stream.as_stream()).map(done)
            }
            Command::QueryEvent { name } => Ok(Answer::Truth(named(&self.events, &name).query()?)),
            Command::SynchronizeEvent { name, timeout } => {
                named(&self.events, &name).synchronize(timeout).map(done)
            }
            Command::ExportEvent { name } => {
                Ok(Answer::Bytes(named(&self.events, &name).export()?.as_slice().to_vec()))
            }
            other => self.carry_out_channel(other),
        }
    }

    fn rounds(&mut self, name: &str, count: u64, first: bool) -> Result<()> {
        let stream = self.stream(0)?;
        let timeline = named(&self.timelines, name);
        let mut view = match self.mappings.get(name) {
            Some(mapping) => mapping.view_mut::<f32, _>(&stream)?,
            None => named(&self.buffers, name).view_mut::<f32, _>(&stream)?,
        };
        for round in 1..=count {
            // The process that begins is one round ahead.
            let before = if first { round - 1 } else { round };
            if before > 0 {
                timeline.wait(before, &stream)?;
            }
            // In parts, so that a wait without effect would show.
            for _ in 0..4 {
                view.add(0.25)?;
            }
            timeline.signal(round, &stream)?;
        }
        Ok(())
    }
}
