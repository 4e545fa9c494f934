//! The second process itself.

#![allow(unsafe_code, reason = "bare writes and waits on words that stay mapped until the process ends")]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use device_ipc::{AsStream, Buffer, CacheLimits, Channel, Descriptor, Export, Ipc, Mapping, Stream};

use super::bundles;
use super::channels;
use super::echo::{self, Socket};
use super::footprint;
use super::message::{Answer, Command, Words};
use super::rings::{self, RingMember};
use super::words::{BACK, Page, THERE};
use crate::raw::{self, RawExport, RawSide};
use crate::wait::TIMEOUT;
use device_ipc_cli::output::line;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    #[arg(long)]
    backend: String,
    #[arg(long)]
    device: u32,
}

/// Does what the lines of standard input say until they end.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let mut server = None;
    for text in std::io::stdin().lines() {
        let command: Command = serde_json::from_str(&text.context("reading a command")?)?;
        let answer = match &command {
            // Before anything else of the library.
            Command::StartUp => Ok(Answer::StartUp { nanoseconds: footprint::start_up() }),
            command => Server::in_place(&mut server, arguments).and_then(|server| server.answer(command)),
        };
        let answer = answer.unwrap_or_else(|error| Answer::Failed { why: format!("{error:#}") });
        line(serde_json::to_string(&answer)?)?;
    }
    Ok(())
}

struct Server {
    ipc: Ipc,
    raw: Arc<dyn RawSide>,
    device: u32,
    stream: Stream,
    exports: Vec<Export>,
    mappings: Vec<Mapping>,
    /// Exported by bare calls, until they are forgotten or the process ends.
    raw_blocks: Vec<(Buffer, RawExport)>,
    /// The address of each page's words for the stream's device.
    pages: HashMap<PathBuf, (Page, u64)>,
    ring: Option<RingMember>,
}

impl Server {
    fn in_place<'a>(server: &'a mut Option<Self>, arguments: &Arguments) -> Result<&'a mut Self> {
        if server.is_none() {
            *server = Some(Self::new(arguments)?);
        }
        server.as_mut().context("it was just made")
    }

    fn new(arguments: &Arguments) -> Result<Self> {
        let ipc = Ipc::named(&arguments.backend)?;
        let raw = raw::of(&ipc)?;
        raw.enter(arguments.device)?;
        Ok(Self {
            stream: ipc.create_stream(arguments.device)?,
            ipc,
            raw,
            device: arguments.device,
            exports: Vec::new(),
            mappings: Vec::new(),
            raw_blocks: Vec::new(),
            pages: HashMap::new(),
            ring: None,
        })
    }

    fn answer(&mut self, command: &Command) -> Result<Answer> {
        match command {
            Command::Share { blocks, bytes, times } => self.share(*blocks, *bytes, *times),
            Command::RawHandles { blocks, bytes, peer } => self.raw_handles(*blocks, *bytes, peer),
            Command::ForgetRaw => {
                for (block, export) in self.raw_blocks.drain(..) {
                    self.raw.unexport(export)?;
                    drop(block);
                }
                Ok(Answer::Done)
            }
            Command::Unshare => {
                self.exports.drain(..).try_for_each(|export| export.close(TIMEOUT))?;
                Ok(Answer::Done)
            }
            Command::Echo { spins } => {
                let spins = *spins;
                let what = if spins { "spinning-echo" } else { "echo" };
                Ok(Answer::Listening { name: echo::serve(what, move |socket| echo::echo(&socket, spins))? })
            }
            Command::ReceiveByChannel { spins } => {
                let spins = *spins;
                let what = if spins { "spinning" } else { "sleeping" };
                self.listen(what, move |channel| channels::receive(&channel, spins))
            }
            Command::Transport { staged, bytes } => {
                let transport = channels::Transport::new(&self.ipc, self.device, *bytes, *staged)?;
                let what = if *staged { "staged" } else { "mapped" };
                self.listen(what, move |channel| transport.serve(&channel))
            }
            Command::Receive => {
                let ipc = self.ipc.clone();
                Ok(Answer::Listening { name: echo::serve("receive", move |socket| receive(&ipc, &socket))? })
            }
            Command::ReceiveBundles { open } => {
                let ipc = open.then(|| self.ipc.clone());
                let what = if *open { "bundles" } else { "pieces" };
                let body = move |socket: Socket| bundles::receive(ipc.as_ref(), &socket);
                Ok(Answer::Listening { name: echo::serve(what, body)? })
            }
            Command::TimelineRounds { first, rounds } => {
                let export = self.exports.last().context("nothing is shared")?;
                let timelines = export.timelines(1, TIMEOUT)?;
                let [timeline] = timelines.as_slice() else { bail!("there are {}", timelines.len()) };
                for value in *first..first + rounds {
                    timeline.wait(value, &self.stream)?;
                    timeline.signal(value, &self.stream)?;
                }
                Ok(Answer::Done)
            }
            Command::RawRounds { page, on, first, rounds } => self.raw_rounds(page, *on, *first, *rounds),
            Command::Synchronize => {
                self.stream.synchronize()?;
                Ok(Answer::Done)
            }
            Command::OpenAll { file, count } => self.open_all(file, *count),
            Command::LetGo => {
                self.mappings.clear();
                Ok(Answer::Done)
            }
            Command::Footprint { count } => {
                Ok(Answer::Footprint(footprint::measure(&self.ipc, self.device, *count)?))
            }
            Command::StartUp => bail!("it has started already"),
            Command::JoinRing { descriptor } => {
                self.ring = Some(RingMember::join(&self.ipc, descriptor, &self.stream)?);
                Ok(Answer::Done)
            }
            Command::RingRounds { rounds, by } => {
                self.member()?.take_and_release(*rounds, *by).map(|()| Answer::Done)
            }
            Command::SpinRounds { page, first, rounds } => {
                rings::spin(&Page::open(page)?, *first, *rounds).map(|()| Answer::Done)
            }
            Command::CopyBuckets { buckets } => {
                let ipc = self.ipc.clone();
                self.member()?.copy_buckets(&ipc, *buckets).map(|()| Answer::Done)
            }
            Command::CopyOwnBuckets { buckets } => {
                self.member()?.copy_own_buckets(*buckets).map(|()| Answer::Done)
            }
            Command::HostWaits => Ok(Answer::Waits { count: device_ipc::counters().ring_host_waits_total }),
            Command::LeaveRing => {
                self.ring = None;
                Ok(Answer::Done)
            }
        }
    }

    fn member(&mut self) -> Result<&mut RingMember> {
        self.ring.as_mut().context("it has joined no ring")
    }

    /// Listens for a channel, which is served on a thread.
    fn listen(
        &self,
        what: &str,
        body: impl FnOnce(Channel) -> Result<()> + Send + 'static,
    ) -> Result<Answer> {
        let name = format!("bench-{}-{what}", std::process::id());
        let listener = self.ipc.listen(&name).start()?;
        std::thread::spawn(move || {
            let served = listener.accept(TIMEOUT).map_err(anyhow::Error::from).and_then(body);
            if let Err(error) = served {
                eprintln!("error: the second process no longer answers by its channel: {error:#}");
            }
        });
        Ok(Answer::Listening { name })
    }

    fn share(&mut self, blocks: usize, bytes: u64, times: usize) -> Result<Answer> {
        let mut descriptors = Vec::with_capacity(blocks * times);
        for _ in 0..blocks {
            let block = Arc::new(self.ipc.allocate(self.device, bytes)?);
            for _ in 0..times {
                let export = self.ipc.share(Arc::clone(&block)).start()?;
                descriptors.push(export.descriptor().to_string());
                self.exports.push(export);
            }
        }
        Ok(Answer::Shared { descriptors })
    }

    fn raw_handles(&mut self, blocks: usize, bytes: u64, peer: &[u8]) -> Result<Answer> {
        let mut handles = Vec::with_capacity(blocks);
        for _ in 0..blocks {
            let block = self.ipc.allocate(self.device, bytes)?;
            let export = self.raw.export(block.range())?;
            self.raw.authorize(&export, peer)?;
            handles.push(export.handle.clone());
            self.raw_blocks.push((block, export));
        }
        Ok(Answer::Handles { handles })
    }

    fn raw_rounds(&mut self, path: &Path, on: Words, first: u64, rounds: u64) -> Result<Answer> {
        let base = match on {
            Words::Host => self.registered(path)?,
            Words::Device => {
                let (block, _) = self.raw_blocks.last().context("there is no bare block")?;
                block.range().ptr.get()
            }
        };
        for value in first..first + rounds {
            // SAFETY: the page stays registered, and the block allocated, until the process ends.
            unsafe {
                self.raw.wait_value(self.stream.as_stream(), base + THERE, value)?;
                self.raw.write_value(self.stream.as_stream(), base + BACK, value)?;
            }
        }
        Ok(Answer::Done)
    }

    fn registered(&mut self, path: &Path) -> Result<u64> {
        if let Some((_, address)) = self.pages.get(path) {
            return Ok(*address);
        }
        let page = Page::open(path)?;
        // SAFETY: pages stay mapped until the process ends.
        let address = unsafe { self.raw.register(page.address(), page.bytes(), self.device) }?;
        self.pages.insert(path.to_owned(), (page, address));
        Ok(address)
    }

    fn open_all(&mut self, file: &Path, count: usize) -> Result<Answer> {
        // What is let go of stays open, until the exporter ends it.
        device_ipc::set_cache_limits(CacheLimits { mappings: usize::MAX, bytes: u64::MAX })?;
        let text = std::fs::read_to_string(file).context("reading the descriptors")?;
        let descriptors: Vec<Descriptor> =
            text.lines().take(count).map(str::parse).collect::<Result<_, _>>()?;
        self.mappings.reserve(count);
        for descriptor in &descriptors {
            self.mappings.push(self.ipc.open(descriptor).timeout(TIMEOUT).at_home()?);
        }
        Ok(Answer::Done)
    }
}

/// Opens what each packet names, acknowledges it, and lets it go.
fn receive(ipc: &Ipc, socket: &Socket) -> Result<()> {
    let mut buffer = [0; 64 * 1024];
    loop {
        let received = socket.receive(&mut buffer)?;
        if received == 0 {
            return Ok(());
        }
        let mapping = ipc.open(&Descriptor::from_bytes(&buffer[..received])?).at_home()?;
        socket.send(&[1])?;
        drop(mapping);
    }
}
