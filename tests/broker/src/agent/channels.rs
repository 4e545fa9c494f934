//! What an agent does with channels.

use std::time::Duration;

use device_ipc_core::{Channel, Listener, Message, Received, Result};

use super::{Agent, Words, say, variant};
use crate::raw::FakeServer;

/// What an agent has of channels.
#[derive(Default)]
pub(super) struct Channels {
    listeners: std::collections::HashMap<String, Listener>,
    channels: std::collections::HashMap<String, Channel>,
    received: std::collections::HashMap<String, Received>,
    squatted: Vec<FakeServer>,
}

impl Agent {
    /// `listen NAME`
    pub(super) fn listen(&mut self, words: &Words<'_>) -> Result<String> {
        let listener = self.ipc().listen(words.name(0)).start()?;
        self.channels.listeners.insert(words.name(0).to_owned(), listener);
        Ok(String::new())
    }

    /// `unlisten NAME`
    pub(super) fn unlisten(&mut self, words: &Words<'_>) -> Result<String> {
        self.channels.listeners.remove(words.name(0)).expect("it listens");
        Ok(String::new())
    }

    /// `accept NAME CHANNEL MS`: the process at the other end.
    pub(super) fn accept(&mut self, words: &Words<'_>) -> Result<String> {
        let channel = self.channels.listeners[words.name(0)].accept(words.time(2))?;
        Ok(self.keep_channel(words.name(1), channel))
    }

    /// `connect NAME CHANNEL MS [user=UID] [limit=BYTES]`: the process at the other end.
    pub(super) fn connect(&mut self, words: &Words<'_>) -> Result<String> {
        let mut connecting = self.ipc().connect(words.name(0)).timeout(words.time(2));
        if let Some(user) = words.number_of("user") {
            connecting = connecting.user(user as u32);
        }
        let channel = connecting.start()?;
        Ok(self.keep_channel(words.name(1), channel))
    }

    fn keep_channel(&mut self, name: &str, channel: Channel) -> String {
        let pid = channel.peer().pid.to_string();
        self.channels.channels.insert(name.to_owned(), channel);
        pid
    }

    /// `send CHANNEL BYTES MS [tensor=EXPORT] [bundle=BUNDLE] [drops=1] [ready=1]`: so many bytes, with an export or a bundle
    /// that is dropped then.
    pub(super) fn send_message(&mut self, words: &Words<'_>) -> Result<String> {
        let stream = self.stream()?;
        let bytes: Vec<u8> = (0..words.number(1)).map(|index| index as u8).collect();
        let mut message = Message::new().bytes(&bytes);
        if let Some(export) = words.setting("tensor") {
            message = message.tensor(&self.exports[export]);
        }
        if let Some(bundle) = words.setting("bundle") {
            message = message.bundle(&self.bundles[bundle]);
        }
        if words.setting("ready").is_some() {
            message = message.ready_on(&stream);
        }
        self.channels.channels[words.name(0)].send(message, words.time(2))?;
        if let (Some(export), Some(_)) = (words.setting("tensor"), words.setting("drops")) {
            self.exports.remove(export);
        }
        if let (Some(bundle), Some(_)) = (words.setting("bundle"), words.setting("drops")) {
            self.bundles.remove(bundle);
        }
        Ok(String::new())
    }

    /// `receive CHANNEL MESSAGE MS`: how many bytes, and how many tensors and bundles.
    pub(super) fn receive(&mut self, words: &Words<'_>) -> Result<String> {
        let received = self.channels.channels[words.name(0)].receive(words.time(2))?;
        let as_sent = received.bytes().iter().enumerate().all(|(index, byte)| *byte == index as u8);
        assert!(as_sent, "the bytes are those that were sent");
        let told =
            format!("{} {}", received.bytes().len(), received.tensors().len() + received.bundles().len());
        self.channels.received.insert(words.name(1).to_owned(), received);
        Ok(told)
    }

    /// `open-received MESSAGE NAME`: the first tensor, on the agent's stream.
    pub(super) fn open_received(&mut self, words: &Words<'_>) -> Result<String> {
        let stream = self.stream()?;
        let mapping = self.channels.received[words.name(0)].tensors()[0].open().on(&stream)?;
        Ok(self.keep(words.name(1), mapping))
    }

    /// `open-received-bundle MESSAGE NAME`: the first bundle, at home.
    pub(super) fn open_received_bundle(&mut self, words: &Words<'_>) -> Result<String> {
        let mapping = self.channels.received[words.name(0)].bundles()[0].open().at_home()?;
        let tensors = mapping.len();
        self.open_bundles.insert(words.name(1).to_owned(), mapping);
        Ok(tensors.to_string())
    }

    /// `discard MESSAGE`
    pub(super) fn discard(&mut self, words: &Words<'_>) -> Result<String> {
        self.channels.received.remove(words.name(0)).expect("it was received");
        Ok(String::new())
    }

    /// `close-channel CHANNEL MS`
    pub(super) fn close_channel(&mut self, words: &Words<'_>) -> Result<String> {
        let channel = self.channels.channels.remove(words.name(0)).expect("it was made");
        channel.close(words.time(1)).map(|()| String::new())
    }

    /// `drop-channel CHANNEL`
    pub(super) fn drop_channel(&mut self, words: &Words<'_>) -> Result<String> {
        self.channels.channels.remove(words.name(0)).expect("it was made");
        Ok(String::new())
    }

    /// `channel-on-gone CHANNEL`: an event `gone CHANNEL VARIANT`.
    pub(super) fn channel_on_gone(&mut self, words: &Words<'_>) -> Result<String> {
        let name = words.name(0).to_owned();
        self.channels.channels[&name]
            .on_gone(move |error| say(&format!("event gone {name} {}", variant(error))));
        Ok(String::new())
    }

    /// `squat NAME`: listens where a channel of user 0 would be, without being one.
    pub(super) fn squat(&mut self, words: &Words<'_>) -> Result<String> {
        self.channels.squatted.push(FakeServer::at(format!("device-ipc.0.{}", words.name(0)).as_bytes()));
        Ok(String::new())
    }

    /// `squatted`: what the first who came to the squatter said, as a number of bytes.
    pub(super) fn squatted(&mut self) -> Result<String> {
        let visitor = self.channels.squatted[0].accept();
        Ok(match visitor.receive(Duration::from_secs(1)) {
            crate::raw::Received::Packet(bytes, _) => bytes.len(),
            _ => 0,
        }
        .to_string())
    }

    /// What a forked child makes of its parent's channels.
    pub(super) fn try_channels_in_the_child(&mut self, told: impl Fn(&str, Result<()>)) {
        if self.channels.channels.is_empty() {
            return;
        }
        let time = Duration::from_secs(5);
        told("listen", self.ipc().listen("child").start().map(drop));
        told("connect", self.ipc().connect("child").timeout(time).start().map(drop));
        let Channels { listeners, channels, received, .. } = std::mem::take(&mut self.channels);
        for listener in listeners.values() {
            told("accept", listener.accept(time).map(drop));
        }
        for received in received.values() {
            told("reply", received.reply(Message::new(), time));
            told("open-received", received.tensors()[0].open().at_home().map(drop));
        }
        for (_, channel) in channels {
            told("send", channel.send(Message::new(), time));
            told("receive", channel.receive(time).map(drop));
            told("close-channel", channel.close(time));
        }
    }
}
