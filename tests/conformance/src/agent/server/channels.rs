//! Channels.

use std::time::Duration;

use device_ipc_core::{Channel, CopyPolicy, Message, Result, Stream};

use super::imports::device_map;
use super::{Server, named, taken};
use crate::agent::{Answer, Command, Copying};

impl Server {
    pub(super) fn carry_out_channel(&mut self, command: Command) -> Result<Answer> {
        let done = |()| Answer::Done;
        match command {
            Command::Listen { under, map } => {
                let listener = self.ipc.listen(&under).device_map(device_map(&map)?).start()?;
                self.listeners.insert(under, listener);
                Ok(Answer::Done)
            }
            Command::Unlisten { under } => {
                taken(&mut self.listeners, &under);
                Ok(Answer::Done)
            }
            Command::Accept { under, name, timeout } => {
                let channel = named(&self.listeners, &under).accept(timeout)?;
                Ok(self.keep_channel(name, channel))
            }
            Command::Connect { under, name, timeout, user, map } => {
                let mut connecting = self.ipc.connect(&under).device_map(device_map(&map)?).timeout(timeout);
                if let Some(user) = user {
                    connecting = connecting.user(user);
                }
                let channel = connecting.start()?;
                Ok(self.keep_channel(name, channel))
            }
            Command::Send { by, len, timeout, of, drops, ready_on, bytes } => {
                let stream = ready_on.map(|device| self.stream(device)).transpose()?;
                let bytes = bytes.unwrap_or_else(|| (0..len).map(|index| index as u8).collect());
                let message = self.message(&bytes, &of, stream.as_ref());
                named(&self.channels, &by).send(message, timeout)?;
                if drops {
                    return self.carry_out(Command::Drop { names: of });
                }
                Ok(Answer::Done)
            }
            Command::Receive { by, name, timeout } => {
                let received = named(&self.channels, &by).receive(timeout)?;
                let items = received.exports().len();
                let bytes = received.bytes().to_vec();
                self.received.insert(name, received);
                Ok(Answer::Received { bytes, items })
            }
            Command::CloseChannel { name, timeout } => {
                taken(&mut self.channels, &name).close(timeout).map(done)
            }
            Command::DropChannel { name } => {
                taken(&mut self.channels, &name);
                Ok(Answer::Done)
            }
            Command::Echo { by, times, answers, timeout } => {
                self.echo(&by, times, answers, timeout).map(done)
            }
            other => self.carry_out_received(other),
        }
    }

    fn carry_out_received(&mut self, command: Command) -> Result<Answer> {
        let done = |()| Answer::Done;
        match command {
            Command::OpenReceived { of, name, place, index, timeout, copying } => {
                let received = taken(&mut self.received, &of);
                let export = &received.exports()[index];
                let mut opening = export.open();
                if let Some(timeout) = timeout {
                    opening = opening.timeout(timeout);
                }
                opening = match copying {
                    Copying::Never => opening,
                    Copying::IfNeeded => opening.copy(CopyPolicy::StagedIfNeeded),
                    Copying::Always => opening.copy(CopyPolicy::Staged),
                };
                let opened = match place {
                    None => opening.on_mapped_devices(&export.device_map()),
                    Some(place) => self.open_at(opening, place),
                };
                self.received.insert(of, received);
                opened.map(|mapping| self.keep_mapping(name, mapping))
            }
            Command::DeviceOfReceived { of } => {
                let device = named(&self.received, &of).exports()[0].device();
                Ok(device.map_or(Answer::Done, |device| Answer::Number(device.get().into())))
            }
            Command::Answer { of, bytes, tensors, timeout } => {
                let message = self.message(&bytes, &tensors, None);
                named(&self.received, &of).reply(message, timeout).map(done)
            }
            Command::CheckReceived { of } => named(&self.received, &of).check().map(done),
            Command::Discard { name } => {
                taken(&mut self.received, &name);
                Ok(Answer::Done)
            }
            other => self.carry_out_tensors(other),
        }
    }

    fn keep_channel(&mut self, name: String, channel: Channel) -> Answer {
        let pid = channel.peer().pid;
        self.channels.insert(name, channel);
        Answer::Number(pid.into())
    }

    fn message<'a>(&'a self, bytes: &'a [u8], of: &[String], ready: Option<&'a Stream>) -> Message<'a> {
        let message = Message::new().bytes(bytes);
        let message = of.iter().fold(message, |message, name| message.export(named(&self.exports, name)));
        match ready {
            Some(stream) => message.ready_on(stream),
            None => message,
        }
    }

    fn echo(&mut self, by: &str, times: u32, answers: bool, timeout: Duration) -> Result<()> {
        let stream = self.stream(0)?;
        let channel = named(&self.channels, by);
        for _ in 0..times {
            let received = channel.receive(timeout)?;
            let opened: Vec<_> =
                received.exports().iter().map(|export| export.open().on(&stream)).collect::<Result<_>>()?;
            for mapping in opened {
                mapping.release(&stream)?;
            }
            if answers {
                received.reply(Message::new().bytes(received.bytes()), timeout)?;
            }
        }
        Ok(())
    }
}
