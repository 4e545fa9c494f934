//! What an agent does with channels.

use std::time::Duration;

use device_ipc_core::{DeviceMap, Message, Result, Stream};

use super::command::{Answer, Command, Copying, Place};
use super::server::Server;

impl Server<'_> {
    /// What concerns channels.
    pub(super) fn obey_about_channels(&mut self, command: Command) -> Result<Answer> {
        let done = |()| Answer::Done;
        match command {
            Command::Channel { name, under, listens, map, timeout } => {
                let insert = |map: DeviceMap, (from, to): &(u32, u32)| map.insert(*from, *to);
                let map = map.iter().try_fold(DeviceMap::new(), insert)?;
                let channel = if listens {
                    self.ipc.listen(&under).device_map(map).start()?.accept(timeout)?
                } else {
                    self.ipc.connect(&under).device_map(map).timeout(timeout).start()?
                };
                self.channels.insert(name, channel);
                Ok(Answer::Done)
            }
            Command::Send { by, bytes, of, ready_on, timeout } => {
                let stream = ready_on.map(|device| self.stream(device)).transpose()?;
                let message = self.message(&bytes, &of, stream.as_ref());
                self.channels[&by].send(message, timeout).map(done)
            }
            Command::Receive { name, by, timeout } => {
                let received = self.channels[&by].receive(timeout)?;
                let bytes = received.bytes().to_vec();
                self.received.insert(name, received);
                Ok(Answer::Bytes(bytes))
            }
            Command::OpenReceived { name, of, index, place, timeout } => {
                let stream = match place {
                    Some(Place::Stream(device)) => Some(self.stream(device)?),
                    _ => None,
                };
                let opening = self.received[&of].tensors()[index].open().timeout(timeout);
                let mapping = match (place, stream) {
                    (None, _) => opening.mapped()?,
                    (Some(Place::Device(device)), _) => opening.on_device(device)?,
                    (_, Some(stream)) => opening.on(&stream)?,
                    (Some(_), None) => opening.at_home()?,
                };
                Ok(self.keep_mapping(name, mapping))
            }
            Command::OpenReceivedBundle { name, of, index, place, timeout } => {
                let stream = match place {
                    Some(Place::Stream(device)) => Some(self.stream(device)?),
                    _ => None,
                };
                let opening = self.received[&of].bundles()[index].open().timeout(timeout);
                let mapping = match (place, stream) {
                    (None, _) => opening.mapped()?,
                    (Some(Place::Device(device)), _) => opening.on_device(device)?,
                    (_, Some(stream)) => opening.on(&stream)?,
                    (Some(_), None) => opening.at_home()?,
                };
                self.opened_bundles.insert(name, mapping);
                Ok(Answer::Done)
            }
            Command::CopyReceived { name, of, copying, place } => {
                let stream = match place {
                    Place::Stream(device) => Some(self.stream(device)?),
                    _ => None,
                };
                let opening = self.received[&of].tensors()[0].open();
                let opening = match copying {
                    Copying::Never => opening,
                    Copying::IfNeeded => opening.or_staged(),
                    Copying::Always => opening.staged(),
                };
                let mapping = match (place, stream) {
                    (Place::Device(device), _) => opening.on_device(device)?,
                    (_, Some(stream)) => opening.on(&stream)?,
                    (_, None) => opening.at_home()?,
                };
                Ok(self.keep_mapping(name, mapping))
            }
            Command::DeviceOfReceived { of } => {
                let device = self.received[&of].tensors()[0].device();
                Ok(device.map_or(Answer::Done, |device| Answer::Number(device.get().into())))
            }
            Command::Answer { of, bytes, tensors, timeout } => {
                let message = self.message(&bytes, &tensors, None);
                self.received[&of].reply(message, timeout).map(done)
            }
            Command::CheckReceived { of } => self.received[&of].check().map(done),
            Command::Discard { name } => {
                self.received.remove(&name).expect("it was received");
                Ok(Answer::Done)
            }
            Command::CloseChannel { name, timeout } => {
                let channel = self.channels.remove(&name).expect("it was made");
                timeout.map_or(Ok(()), |timeout| channel.close(timeout)).map(done)
            }
            Command::Echo { by, times, answers, timeout } => {
                self.echo(&by, times, answers, timeout).map(done)
            }
            Command::Said => {
                let counters = device_ipc_core::counters();
                let (requests, releases) = (counters.requests_total, counters.releases_total);
                Ok(Answer::Said { requests, releases })
            }
            other => panic!("the agent does not know what to do with {other:?}"),
        }
    }

    fn message<'a>(&'a self, bytes: &'a [u8], of: &[String], ready: Option<&'a Stream>) -> Message<'a> {
        let message = Message::new().bytes(bytes);
        let add = |message: Message<'a>, name| match self.bundles.get(name) {
            Some(bundle) => message.bundle(bundle),
            None => message.tensor(&self.exports[name]),
        };
        let message = of.iter().fold(message, add);
        match ready {
            Some(stream) => message.ready_on(stream),
            None => message,
        }
    }

    fn echo(&mut self, by: &str, times: u32, answers: bool, timeout: Duration) -> Result<()> {
        let stream = self.stream(0)?;
        let channel = &self.channels[by];
        for _ in 0..times {
            let received = channel.receive(timeout)?;
            let opened: Vec<_> =
                received.tensors().iter().map(|tensor| tensor.open().on(&stream)).collect::<Result<_>>()?;
            let bundles: Vec<_> =
                received.bundles().iter().map(|bundle| bundle.open().on(&stream)).collect::<Result<_>>()?;
            for mapping in opened {
                mapping.release(&stream)?;
            }
            for mapping in bundles {
                mapping.release(&stream)?;
            }
            if answers {
                received.reply(Message::new().bytes(received.bytes()), timeout)?;
            }
        }
        Ok(())
    }
}
