//! A process that carries out commands: it shares, opens, reads, writes, delays, releases and exits.
//!
//! With it a test of two or three processes is one function, in the order of its steps. The suite's cases and the tests
//! of the broker use the same agent; the latter write its commands in [`words`] and add commands of their own.

mod answer;
mod command;
mod server;
mod text;
pub mod words;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use device_ipc_core::backend::HandleKind;
use device_ipc_core::{Descriptor, DeviceIdentity};
use serde::Serialize;

pub use answer::{Answer, Mapped, Reply};
pub use command::{
    BareHandle, Command, Copying, Gating, Opening, Place, RingLoop, SharedTensor, Sharing, TensorSharing,
};
pub(crate) use server::run;
pub use server::{Rings, Server, reply, serve, touch};

use crate::check::{Refusal, that};
use crate::context::PATIENCE;
use crate::outcome::{Outcome, Stop, fail, skip};
use crate::process::{Peer, ReceiveError};
use crate::usage::Usage;

/// Begins a line that reports an event.
const EVENT: &str = "event ";

/// An agent, seen from the test. Dropping it kills it.
///
/// A method that returns a [`Stop`] fails if the agent has exited or does not reply, or if the library's error is not a
/// part of its return type.
#[derive(Debug)]
pub struct Agent {
    peer: Peer,
    events: VecDeque<String>,
}

impl Agent {
    /// Returns the agent that serves in this process.
    pub const fn new(peer: Peer) -> Self {
        Self { peer, events: VecDeque::new() }
    }

    /// The process, to look at and to signal.
    pub const fn process(&self) -> &Peer {
        &self.peer
    }

    /// The process, to send to, kill or wait for.
    pub const fn peer(&mut self) -> &mut Peer {
        &mut self.peer
    }

    /// Sends a command and waits for the reply.
    #[track_caller]
    pub fn request(&mut self, command: &Command) -> Result<Reply, Stop> {
        self.send(command)?;
        self.receive_reply()
    }

    /// Sends a command; [`receive_reply`](Self::receive_reply) waits for the reply.
    #[track_caller]
    pub fn send(&mut self, command: &impl Serialize) -> Outcome {
        Ok(self.peer.send_line(&serde_json::to_string(command)?)?)
    }

    /// Waits for the reply to the last command.
    #[track_caller]
    pub fn receive_reply(&mut self) -> Result<Reply, Stop> {
        self.receive(PATIENCE).map_err(|error| self.peer.explain(&error))
    }

    /// Waits for the reply to the last command, with a time limit.
    ///
    /// # Errors
    ///
    /// [`ReceiveError`] if the agent has exited or does not reply.
    pub fn receive(&mut self, timeout: Duration) -> Result<Reply, ReceiveError> {
        let until = Instant::now() + timeout;
        loop {
            let line = self.peer.receive_line(until.saturating_duration_since(Instant::now()))?;
            match line.strip_prefix(EVENT) {
                Some(event) => self.events.push_back(event.to_owned()),
                None => {
                    return serde_json::from_str(&line).map_err(|error| ReceiveError::Io(error.to_string()));
                }
            }
        }
    }

    /// Waits for the next event, with a time limit.
    ///
    /// # Errors
    ///
    /// [`ReceiveError`] if the agent has exited or reports none.
    pub fn event(&mut self, timeout: Duration) -> Result<String, ReceiveError> {
        if let Some(event) = self.events.pop_front() {
            return Ok(event);
        }
        let line = self.peer.receive_line(timeout)?;
        let event = line.strip_prefix(EVENT);
        event.map(str::to_owned).ok_or_else(|| ReceiveError::Io(format!("expected an event, not {line}")))
    }

    /// Takes the events that have arrived.
    pub fn take_events(&mut self) -> Vec<String> {
        self.events.drain(..).collect()
    }

    /// Tells it something that must succeed.
    #[track_caller]
    pub fn must(&mut self, command: &Command) -> Result<Answer, Stop> {
        match self.request(command)?.result {
            Ok(answer) => Ok(answer),
            Err(refusal) => fail(format_args!(
                "another process should {}, and got {}: {}",
                in_words(command),
                refusal.kind,
                refusal.text
            )),
        }
    }

    /// Sends a command that must succeed with an answer of this type.
    #[track_caller]
    pub fn get<T: TryFrom<Answer, Error = Answer>>(&mut self, command: &Command) -> Result<T, Stop> {
        T::try_from(self.must(command)?).or_else(|other| wrong(&other))
    }

    /// The identities of the devices that it sees.
    #[track_caller]
    pub fn devices(&mut self) -> Result<Vec<DeviceIdentity>, Stop> {
        self.get(&Command::Devices)
    }

    /// Has it make its stream of a device, so that what comes next is quick.
    #[track_caller]
    pub fn prepare(&mut self, device: u32) -> Outcome {
        self.must(&Command::Prepare { device }).map(drop)
    }

    /// Has it allocate a buffer with these bytes.
    #[track_caller]
    pub fn allocate(&mut self, name: &str, device: u32, bytes: &[u8]) -> Outcome {
        let (name, len, bytes) = (name.into(), bytes.len() as u64, Some(bytes.to_vec()));
        self.must(&Command::Allocate { name, len, device, kind: None, bytes }).map(drop)
    }

    /// Has it allocate a buffer for handles of this kind on device 0 with these bytes, and share all of it.
    #[track_caller]
    pub fn export_as(&mut self, kind: HandleKind, name: &str, bytes: &[u8]) -> Result<Descriptor, Stop> {
        let (len, bytes) = (bytes.len() as u64, Some(bytes.to_vec()));
        self.must(&Command::Allocate { name: name.into(), len, device: 0, kind: Some(kind.0), bytes })?;
        self.share(name, Sharing::default())
    }

    /// Has it share a buffer, or a part of it, by the buffer's name.
    #[track_caller]
    pub fn share(&mut self, name: &str, sharing: Sharing) -> Result<Descriptor, Stop> {
        self.share_as(name, name, sharing)
    }

    /// Has it share a buffer, or a part of it, by a name of its own.
    #[track_caller]
    pub fn share_as(&mut self, name: &str, of: &str, sharing: Sharing) -> Result<Descriptor, Stop> {
        let sharing = Sharing { name: name.into(), of: Some(of.into()), ..sharing };
        self.get(&Command::Share(Box::new(sharing)))
    }

    /// Has it allocate a buffer on device 0 with these bytes, and share all of it.
    #[track_caller]
    pub fn export(&mut self, name: &str, bytes: &[u8]) -> Result<Descriptor, Stop> {
        self.allocate(name, 0, bytes)?;
        self.share(name, Sharing::default())
    }

    /// Has it open memory.
    #[track_caller]
    pub fn open(&mut self, name: &str, descriptor: &Descriptor, place: Place) -> Result<Mapped, Stop> {
        let opening = Opening { name: name.into(), ..Opening::new(descriptor, place) };
        self.get(&Command::Open(Box::new(opening)))
    }

    /// Has it try to open memory.
    #[track_caller]
    pub fn try_open(&mut self, name: &str, opening: Opening) -> Result<Result<Mapped, Refusal>, Stop> {
        let opening = Opening { name: name.into(), ..opening };
        match self.request(&Command::Open(Box::new(opening)))?.result {
            Ok(Answer::Mapping(mapped)) => Ok(Ok(mapped)),
            Ok(other) => wrong(&other),
            Err(refusal) => Ok(Err(refusal)),
        }
    }

    /// The bytes of a mapping or a buffer.
    #[track_caller]
    pub fn bytes(&mut self, name: &str) -> Result<Vec<u8>, Stop> {
        self.get(&Command::Bytes { name: name.into() })
    }

    /// The CRC-32 of the bytes of a mapping or a buffer.
    #[track_caller]
    pub fn checksum(&mut self, name: &str) -> Result<u32, Stop> {
        self.get(&Command::Checksum { name: name.into() }).map(|sum: u64| sum as u32)
    }

    /// The floats of a mapping or a buffer.
    #[track_caller]
    pub fn floats(&mut self, name: &str) -> Result<Vec<f32>, Stop> {
        self.get(&Command::Floats { name: name.into() })
    }

    /// Submits adding to every float of a mapping or a buffer.
    #[track_caller]
    pub fn add(&mut self, name: &str, value: f32) -> Outcome {
        self.must(&Command::Add { name: name.into(), value }).map(drop)
    }

    /// Waits for its stream of a device.
    #[track_caller]
    pub fn synchronize(&mut self, device: u32) -> Outcome {
        self.must(&Command::Sync { device }).map(drop)
    }

    /// Closes a gate in a device's stream.
    ///
    /// # Errors
    ///
    /// [`Stop::Skipped`] where the device has no gates.
    #[track_caller]
    pub fn close_gate(&mut self, device: u32) -> Outcome {
        match self.request(&Command::CloseGate { device, gate: Gating::Closed })?.result {
            Err(refusal) if refusal.kind == "Unsupported" => skip(refusal.text),
            Err(refusal) => Err(Stop::failed(refusal.text)),
            Ok(_) => Ok(()),
        }
    }

    /// Opens its gates. `what` has happened since they were closed.
    ///
    /// # Errors
    ///
    /// [`Stop::Failed`] where a gate opened by itself, as something waited for the stream.
    #[track_caller]
    pub fn open_gates(&mut self, what: &str) -> Outcome {
        that(self.get(&Command::OpenGates)?, format!("{what} should not wait for the stream"))
    }

    /// Drops a mapping; says how long that took.
    #[track_caller]
    pub fn drop_mapping(&mut self, name: &str) -> Result<Duration, Stop> {
        let reply = self.request(&Command::Drop { names: vec![name.into()] })?;
        reply.result.map_err(|refusal| Stop::failed(refusal.text))?;
        Ok(reply.took)
    }

    /// Has it open a handle on the bare backend and close it again. Returns the length of the range in bytes, and how the
    /// backend answered the question for the extents of that range; or the error of the open.
    #[track_caller]
    #[allow(clippy::type_complexity, reason = "two results, of the backend and of the agent")]
    pub fn bare_open(
        &mut self,
        handle: BareHandle,
        device: u32,
    ) -> Result<Result<(u64, Result<usize, Refusal>), Refusal>, Stop> {
        match self.request(&Command::BareOpen { handle, device })?.result {
            Ok(Answer::BareOpened { len, extents }) => Ok(Ok((len, extents))),
            Ok(other) => wrong(&other),
            Err(refusal) => Ok(Err(refusal)),
        }
    }

    /// Counts its mappings and descriptors.
    #[track_caller]
    pub fn usage(&mut self) -> Result<Usage, Stop> {
        self.get(&Command::Usage)
    }

    /// Has it end at once, without dropping anything, and reaps it.
    #[track_caller]
    pub fn exit(mut self) -> Outcome {
        self.send(&Command::Exit)?;
        self.peer.finish(PATIENCE)
    }

    /// Kills it, and reaps it.
    #[track_caller]
    pub fn kill(mut self) -> Outcome {
        self.peer.kill()?;
        self.peer.wait(PATIENCE)?;
        Ok(())
    }
}

#[track_caller]
fn wrong<T>(answer: &Answer) -> Result<T, Stop> {
    fail(format_args!("the agent answered something else: {answer:?}"))
}

/// The command's name as words: `DropExport` is "drop export".
fn in_words(command: &Command) -> String {
    let debug = format!("{command:?}");
    let name = debug.split(|letter: char| !letter.is_alphanumeric()).next().unwrap_or_default();
    let mut words = String::new();
    for letter in name.chars() {
        if letter.is_uppercase() && !words.is_empty() {
            words.push(' ');
        }
        words.extend(letter.to_lowercase());
    }
    words
}
