//! The command loop of the peer process.

#![allow(unsafe_code, reason = "raw writes and waits on words that stay mapped until the process exits")]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use device_ipc::{
    AsStream, Buffer, CacheLimits, Channel, Descriptor, Export, Ipc, Mapping, MemoryUse, Stream,
};

use super::bundles;
use super::channels;
use super::echo::{self, Socket};
use super::footprint;
use super::message::{Command, Reply, WordLocation};
use super::network::Served;
use super::rings::{self, RingMember};
use super::tcp;
use super::words::{Page, REQUEST, RESPONSE};
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

/// Executes the commands of standard input until it is closed.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let mut server = None;
    for text in std::io::stdin().lines() {
        let command: Command = serde_json::from_str(&text.context("cannot read a command")?)?;
        let reply = match &command {
            // Must be the first use of the library.
            Command::StartUp => Ok(Reply::StartUp { nanoseconds: footprint::start_up() }),
            command => {
                Server::get_or_start(&mut server, arguments).and_then(|server| server.execute(command))
            }
        };
        let reply = reply.unwrap_or_else(|error| Reply::Failed { reason: format!("{error:#}") });
        line(serde_json::to_string(&reply)?)?;
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
    /// Blocks exported by raw calls.
    raw_blocks: Vec<(Buffer, RawExport)>,
    /// Mapped pages, and the address of each for the device.
    pages: HashMap<PathBuf, (Page, u64)>,
    ring: Option<RingMember>,
    /// Memory for importers of other hosts.
    served: Option<Served>,
}

impl Server {
    fn get_or_start<'a>(server: &'a mut Option<Self>, arguments: &Arguments) -> Result<&'a mut Self> {
        if server.is_none() {
            *server = Some(Self::new(arguments)?);
        }
        server.as_mut().context("the server was just created")
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
            served: None,
        })
    }

    fn execute(&mut self, command: &Command) -> Result<Reply> {
        match command {
            Command::Share { blocks, bytes, times } => self.share(*blocks, *bytes, *times),
            Command::ShareRemappable { blocks, bytes } => self.share_remappable(*blocks, *bytes),
            Command::RawHandles { blocks, bytes, peer } => self.raw_handles(*blocks, *bytes, peer),
            Command::FreeRaw => {
                for (block, export) in self.raw_blocks.drain(..) {
                    self.raw.unexport(export)?;
                    drop(block);
                }
                Ok(Reply::Done)
            }
            Command::Unshare => {
                self.exports.drain(..).try_for_each(|export| export.close(TIMEOUT))?;
                Ok(Reply::Done)
            }
            Command::Echo { spins } => {
                let spins = *spins;
                let suffix = if spins { "spinning-echo" } else { "echo" };
                Ok(Reply::Listening { name: echo::serve(suffix, move |socket| echo::echo(&socket, spins))? })
            }
            Command::ReceiveByChannel { spins } => {
                let spins = *spins;
                let suffix = if spins { "spinning" } else { "sleeping" };
                self.listen(suffix, move |channel| channels::receive(&channel, spins))
            }
            Command::EchoByTcpChannel => tcp::serve_channel(&self.ipc),
            Command::EchoByTcp => tcp::serve_plain(),
            Command::Transport { staged, bytes } => {
                let transport = channels::Transport::new(&self.ipc, self.device, *bytes, *staged)?;
                let suffix = if *staged { "staged" } else { "mapped" };
                self.listen(suffix, move |channel| transport.serve(&channel))
            }
            Command::Receive => {
                let ipc = self.ipc.clone();
                Ok(Reply::Listening { name: echo::serve("receive", move |socket| receive(&ipc, &socket))? })
            }
            Command::ReceiveBundles { open } => {
                let ipc = open.then(|| self.ipc.clone());
                let suffix = if *open { "bundles" } else { "pieces" };
                let body = move |socket: Socket| bundles::receive(ipc.as_ref(), &socket);
                Ok(Reply::Listening { name: echo::serve(suffix, body)? })
            }
            Command::TimelineRounds { first, rounds } => {
                let export = self.exports.last().context("nothing is shared yet")?;
                let timelines = export.timelines(1, TIMEOUT)?;
                let [timeline] = timelines.as_slice() else {
                    bail!("{} timelines instead of 1", timelines.len())
                };
                for value in *first..first + rounds {
                    timeline.wait(value, &self.stream)?;
                    timeline.signal(value, &self.stream)?;
                }
                Ok(Reply::Done)
            }
            Command::RawRounds { page, on, first, rounds } => self.raw_rounds(page, *on, *first, *rounds),
            Command::Synchronize => {
                self.stream.synchronize()?;
                Ok(Reply::Done)
            }
            Command::OpenAll { file, count } => self.open_all(file, *count),
            Command::CloseMappings => {
                self.mappings.clear();
                Ok(Reply::Done)
            }
            Command::Footprint { count } => {
                Ok(Reply::Footprint(footprint::measure(&self.ipc, self.device, *count)?))
            }
            Command::StartUp => bail!("the library is already in use"),
            Command::JoinRing { descriptor } => {
                self.ring = Some(RingMember::join(&self.ipc, descriptor, &self.stream)?);
                Ok(Reply::Done)
            }
            Command::RingRounds { rounds, by } => {
                self.member()?.receive_and_release(*rounds, *by).map(|()| Reply::Done)
            }
            Command::SpinRounds { page, first, rounds } => {
                rings::spin(&Page::open(page)?, *first, *rounds).map(|()| Reply::Done)
            }
            Command::CopyBuckets { buckets } => {
                let ipc = self.ipc.clone();
                self.member()?.copy_buckets(&ipc, *buckets).map(|()| Reply::Done)
            }
            Command::CopyOwnBuckets { buckets } => {
                self.member()?.copy_own_buckets(*buckets).map(|()| Reply::Done)
            }
            Command::ShareRemotely { bytes } => {
                // Frees the memory of the last call before.
                self.served = None;
                self.raw.enter(self.device)?;
                let (served, reply) = Served::start(self.ipc.backend().info().name, self.device, *bytes)?;
                self.served = Some(served);
                Ok(reply)
            }
            Command::HostWaits => Ok(Reply::Waits { count: device_ipc::counters().ring_host_waits_total }),
            Command::LeaveRing => {
                self.ring = None;
                Ok(Reply::Done)
            }
        }
    }

    fn member(&mut self) -> Result<&mut RingMember> {
        self.ring.as_mut().context("the process has not joined a ring")
    }

    /// Listens for a channel; a thread accepts and serves it.
    fn listen(
        &self,
        suffix: &str,
        body: impl FnOnce(Channel) -> Result<()> + Send + 'static,
    ) -> Result<Reply> {
        let name = format!("bench-{}-{suffix}", std::process::id());
        let listener = self.ipc.listen(&name).start()?;
        std::thread::spawn(move || {
            let served = listener.accept(TIMEOUT).map_err(anyhow::Error::from).and_then(body);
            if let Err(error) = served {
                eprintln!("error: the peer process stopped serving its channel: {error:#}");
            }
        });
        Ok(Reply::Listening { name })
    }

    fn share(&mut self, blocks: usize, bytes: u64, times: usize) -> Result<Reply> {
        let mut descriptors = Vec::with_capacity(blocks * times);
        for _ in 0..blocks {
            let block = Arc::new(self.ipc.allocate(self.device, bytes)?);
            for _ in 0..times {
                let export = self.ipc.share(Arc::clone(&block)).start()?;
                descriptors.push(export.descriptor().to_string());
                self.exports.push(export);
            }
        }
        Ok(Reply::Shared { descriptors })
    }

    fn share_remappable(&mut self, blocks: usize, bytes: u64) -> Result<Reply> {
        let mut descriptors = Vec::with_capacity(blocks);
        for _ in 0..blocks {
            let block = self.ipc.allocate_for(self.device, bytes, MemoryUse::new().remappable())?;
            let export = self.ipc.share(block).start()?;
            descriptors.push(export.descriptor().to_string());
            self.exports.push(export);
        }
        Ok(Reply::Shared { descriptors })
    }

    fn raw_handles(&mut self, blocks: usize, bytes: u64, peer: &[u8]) -> Result<Reply> {
        let mut handles = Vec::with_capacity(blocks);
        for _ in 0..blocks {
            let block = self.ipc.allocate(self.device, bytes)?;
            let export = self.raw.export(block.range())?;
            self.raw.authorize(&export, peer)?;
            handles.push(export.handle.clone());
            self.raw_blocks.push((block, export));
        }
        Ok(Reply::Handles { handles })
    }

    fn raw_rounds(&mut self, path: &Path, on: WordLocation, first: u64, rounds: u64) -> Result<Reply> {
        let base = match on {
            WordLocation::Host => self.registered(path)?,
            WordLocation::Device => {
                let (block, _) = self.raw_blocks.last().context("no raw block is exported")?;
                block.range().ptr.get()
            }
        };
        for value in first..first + rounds {
            // SAFETY: the page stays registered, and the block allocated, until the process exits.
            unsafe {
                self.raw.wait_value(self.stream.as_stream(), base + REQUEST, value)?;
                self.raw.write_value(self.stream.as_stream(), base + RESPONSE, value)?;
            }
        }
        Ok(Reply::Done)
    }

    fn registered(&mut self, path: &Path) -> Result<u64> {
        if let Some((_, address)) = self.pages.get(path) {
            return Ok(*address);
        }
        let page = Page::open(path)?;
        // SAFETY: pages stay mapped until the process exits.
        let address = unsafe { self.raw.register(page.address(), page.bytes(), self.device) }?;
        self.pages.insert(path.to_owned(), (page, address));
        Ok(address)
    }

    fn open_all(&mut self, file: &Path, count: usize) -> Result<Reply> {
        // Released mappings stay cached until the exporter closes the exports.
        device_ipc::set_cache_limits(CacheLimits::default().with_mappings(usize::MAX))?;
        let text = std::fs::read_to_string(file).context("cannot read the descriptors")?;
        let descriptors: Vec<Descriptor> =
            text.lines().take(count).map(str::parse).collect::<Result<_, _>>()?;
        self.mappings.reserve(count);
        for descriptor in &descriptors {
            self.mappings.push(self.ipc.open(descriptor).timeout(TIMEOUT).at_home()?);
        }
        Ok(Reply::Done)
    }
}

/// Opens the descriptor in each packet, acknowledges it and closes it.
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
