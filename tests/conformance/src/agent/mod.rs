//! A process that does as it is told: shares, opens, reads, writes, delays, releases and dies.
//!
//! With it a case about two or three processes stands in one function, in the order in which things happen.

mod channels;
mod command;
mod server;

use std::time::Duration;

use device_ipc_core::{BundleDescriptor, Descriptor, DeviceIdentity, HandleKind};

pub use command::{
    Answer, BareHandle, BundleSharing, BundledTensor, Command, Copying, Mapped, Opening, Place, Reply,
    Sharing,
};
pub(crate) use server::run;

use crate::check::Refusal;
use crate::context::PATIENCE;
use crate::outcome::{Outcome, Stop, fail};
use crate::process::Peer;
use crate::usage::Usage;

/// A process that does as it is told. Dropping it kills it.
#[derive(Debug)]
pub struct Agent {
    peer: Peer,
}

impl Agent {
    pub(crate) const fn new(peer: Peer) -> Self {
        Self { peer }
    }

    /// The process.
    pub const fn peer(&mut self) -> &mut Peer {
        &mut self.peer
    }

    /// Tells it something, and waits for the answer.
    ///
    /// # Errors
    ///
    /// [`Stop::Failed`] where the agent has ended, or does not answer.
    #[track_caller]
    pub fn tell(&mut self, command: &Command) -> Result<Reply, Stop> {
        self.begin(command)?;
        self.answer()
    }

    /// Tells it something; [`answer`](Self::answer) is to be called later.
    ///
    /// # Errors
    ///
    /// [`Stop::Failed`] where the agent has ended.
    #[track_caller]
    pub fn begin(&mut self, command: &Command) -> Outcome {
        Ok(self.peer.send_line(&serde_json::to_string(command)?)?)
    }

    /// The answer to what it was told.
    ///
    /// # Errors
    ///
    /// [`Stop::Failed`] where the agent has ended, or does not answer.
    #[track_caller]
    pub fn answer(&mut self) -> Result<Reply, Stop> {
        match self.peer.receive_line(PATIENCE) {
            Ok(line) => Ok(serde_json::from_str(&line)?),
            Err(error) => Err(self.peer.explain(&error)),
        }
    }

    /// Tells it something that must succeed.
    ///
    /// # Errors
    ///
    /// [`Stop::Failed`] with the library's error.
    #[track_caller]
    pub fn must(&mut self, command: &Command) -> Result<Answer, Stop> {
        match self.tell(command)?.result {
            Ok(answer) => Ok(answer),
            Err(refusal) => fail(format_args!(
                "another process should {}, and got {}: {}",
                in_words(command),
                refusal.kind,
                refusal.text
            )),
        }
    }

    /// The identities of the devices that it sees.
    ///
    /// # Errors
    ///
    /// [`Stop::Failed`].
    #[track_caller]
    pub fn devices(&mut self) -> Result<Vec<DeviceIdentity>, Stop> {
        match self.must(&Command::Devices)? {
            Answer::Devices(devices) => Ok(devices),
            other => wrong(&other),
        }
    }

    /// Has it make its stream of a device, so that what comes next is quick.
    ///
    /// # Errors
    ///
    /// [`Stop::Failed`].
    #[track_caller]
    pub fn prepare(&mut self, device: u32) -> Outcome {
        self.must(&Command::Prepare { device }).map(drop)
    }

    /// Has it allocate a buffer with these bytes.
    ///
    /// # Errors
    ///
    /// [`Stop::Failed`].
    #[track_caller]
    pub fn allocate(&mut self, name: &str, device: u32, bytes: &[u8]) -> Outcome {
        let (name, bytes) = (name.into(), bytes.to_vec());
        self.must(&Command::Allocate { name, device, bytes, kind: None }).map(drop)
    }

    /// Has it allocate a buffer for handles of this kind on device 0 with these bytes, and share all of it.
    ///
    /// # Errors
    ///
    /// [`Stop::Failed`].
    #[track_caller]
    pub fn export_as(&mut self, kind: HandleKind, name: &str, bytes: &[u8]) -> Result<Descriptor, Stop> {
        let (name, bytes) = (name.to_owned(), bytes.to_vec());
        self.must(&Command::Allocate { name: name.clone(), device: 0, bytes, kind: Some(kind.0) })?;
        self.share(&name, Sharing::default())
    }

    /// Has it share a buffer, or a part of it, by the buffer's name.
    ///
    /// # Errors
    ///
    /// [`Stop::Failed`].
    #[track_caller]
    pub fn share(&mut self, name: &str, sharing: Sharing) -> Result<Descriptor, Stop> {
        self.share_as(name, name, sharing)
    }

    /// Has it share a buffer, or a part of it, by a name of its own.
    ///
    /// # Errors
    ///
    /// [`Stop::Failed`].
    #[track_caller]
    pub fn share_as(&mut self, name: &str, of: &str, sharing: Sharing) -> Result<Descriptor, Stop> {
        descriptor(self.must(&Command::Share { name: name.into(), of: of.into(), sharing })?)
    }

    /// Has it allocate a buffer on device 0 with these bytes, and share all of it.
    ///
    /// # Errors
    ///
    /// [`Stop::Failed`].
    #[track_caller]
    pub fn export(&mut self, name: &str, bytes: &[u8]) -> Result<Descriptor, Stop> {
        self.allocate(name, 0, bytes)?;
        self.share(name, Sharing::default())
    }

    /// Has it open memory.
    ///
    /// # Errors
    ///
    /// [`Stop::Failed`] with the library's error.
    #[track_caller]
    pub fn open(&mut self, name: &str, descriptor: &Descriptor, place: Place) -> Result<Mapped, Stop> {
        match self
            .must(&Command::Open { name: name.into(), opening: Box::new(Opening::new(descriptor, place)) })?
        {
            Answer::Mapping(mapped) => Ok(mapped),
            other => wrong(&other),
        }
    }

    /// Has it try to open memory.
    ///
    /// # Errors
    ///
    /// [`Stop::Failed`] where the agent has ended; the library's error is the inner one.
    #[track_caller]
    pub fn try_open(&mut self, name: &str, opening: Opening) -> Result<Result<Mapped, Refusal>, Stop> {
        match self.tell(&Command::Open { name: name.into(), opening: Box::new(opening) })?.result {
            Ok(Answer::Mapping(mapped)) => Ok(Ok(mapped)),
            Ok(other) => wrong(&other),
            Err(refusal) => Ok(Err(refusal)),
        }
    }

    /// The bytes of a mapping or a buffer.
    ///
    /// # Errors
    ///
    /// [`Stop::Failed`].
    #[track_caller]
    pub fn bytes(&mut self, name: &str) -> Result<Vec<u8>, Stop> {
        match self.must(&Command::Bytes { name: name.into() })? {
            Answer::Bytes(bytes) => Ok(bytes),
            other => wrong(&other),
        }
    }

    /// The CRC-32 of the bytes of a mapping or a buffer.
    ///
    /// # Errors
    ///
    /// [`Stop::Failed`].
    #[track_caller]
    pub fn checksum(&mut self, name: &str) -> Result<u32, Stop> {
        match self.must(&Command::Checksum { name: name.into() })? {
            Answer::Number(sum) => Ok(sum as u32),
            other => wrong(&other),
        }
    }

    /// The floats of a mapping or a buffer.
    ///
    /// # Errors
    ///
    /// [`Stop::Failed`].
    #[track_caller]
    pub fn floats(&mut self, name: &str) -> Result<Vec<f32>, Stop> {
        match self.must(&Command::Floats { name: name.into() })? {
            Answer::Floats(floats) => Ok(floats),
            other => wrong(&other),
        }
    }

    /// Submits adding to every float of a mapping or a buffer.
    ///
    /// # Errors
    ///
    /// [`Stop::Failed`].
    #[track_caller]
    pub fn add(&mut self, name: &str, value: f32) -> Outcome {
        self.must(&Command::Add { name: name.into(), value }).map(drop)
    }

    /// Waits for its stream of a device.
    ///
    /// # Errors
    ///
    /// [`Stop::Failed`].
    #[track_caller]
    pub fn synchronize(&mut self, device: u32) -> Outcome {
        self.must(&Command::Synchronize { device }).map(drop)
    }

    /// Drops a mapping; says how long that took.
    ///
    /// # Errors
    ///
    /// [`Stop::Failed`].
    #[track_caller]
    pub fn drop_mapping(&mut self, name: &str) -> Result<Duration, Stop> {
        let reply = self.tell(&Command::Drop { name: name.into() })?;
        reply.result.map_err(|refusal| Stop::failed(refusal.text))?;
        Ok(reply.took)
    }

    /// Has it open a handle on the bare backend and close it again. Returns the length of the range in bytes, and how the
    /// backend answered the question for the extents of that range; or the error of the open.
    ///
    /// # Errors
    ///
    /// [`Stop::Failed`].
    #[track_caller]
    #[allow(clippy::type_complexity, reason = "two results, of the backend and of the agent")]
    pub fn bare_open(
        &mut self,
        handle: BareHandle,
        device: u32,
    ) -> Result<Result<(u64, Result<usize, Refusal>), Refusal>, Stop> {
        match self.tell(&Command::BareOpen { handle, device })?.result {
            Ok(Answer::BareOpened { len, extents }) => Ok(Ok((len, extents))),
            Ok(other) => wrong(&other),
            Err(refusal) => Ok(Err(refusal)),
        }
    }

    /// Counts its mappings and descriptors.
    ///
    /// # Errors
    ///
    /// [`Stop::Failed`].
    #[track_caller]
    pub fn usage(&mut self) -> Result<Usage, Stop> {
        match self.must(&Command::Usage)? {
            Answer::Usage(usage) => Ok(usage),
            other => wrong(&other),
        }
    }

    /// Has it end at once, without dropping anything, and reaps it.
    ///
    /// # Errors
    ///
    /// [`Stop::Failed`].
    #[track_caller]
    pub fn exit(mut self) -> Outcome {
        self.begin(&Command::Exit)?;
        self.peer.finish(PATIENCE)
    }

    /// Kills it, and reaps it.
    ///
    /// # Errors
    ///
    /// [`Stop::Failed`].
    #[track_caller]
    pub fn kill(mut self) -> Outcome {
        self.peer.kill()?;
        self.peer.wait(PATIENCE)?;
        Ok(())
    }
}

/// The bundle that was answered with.
///
/// # Errors
///
/// [`Stop::Failed`] where it is something else.
#[track_caller]
pub fn bundle(answer: Answer) -> Result<BundleDescriptor, Stop> {
    match answer {
        Answer::Bundle(descriptor) => Ok(descriptor),
        other => wrong(&other),
    }
}

/// The descriptor that was answered with.
///
/// # Errors
///
/// [`Stop::Failed`] where it is something else.
#[track_caller]
pub fn descriptor(answer: Answer) -> Result<Descriptor, Stop> {
    match answer {
        Answer::Descriptor(descriptor) => Ok(*descriptor),
        other => wrong(&other),
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
