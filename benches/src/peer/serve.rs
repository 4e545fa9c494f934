//! The command loop of the peer process.

#![allow(unsafe_code, reason = "raw writes and waits on words that stay mapped until the process exits")]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use device_ipc::limits::CacheLimits;
use device_ipc::{AsStream, Buffer, Channel, Descriptor, Export, Ipc, Mapping, MemoryUse, Stream};

use super::bundles;
use super::channels;
use super::echo::{self, Socket};
use super::message::{Command, Reply};
use super::network::Served;
use super::rings::{self, RingMember};
use super::tcp;
use super::words::{Page, REQUEST, RESPONSE};
use crate::raw::{self, RawExport, RawHandle, RawSide};
use crate::wait::TIMEOUT;
use device_ipc_cli::output::line;
use serde_json::{Value, json};

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
        let reply = match command {
            // Must be the first use of the library.
            Command::StartUp => {
                let begin = Instant::now();
                drop(Ipc::available());
                Ok(json!(begin.elapsed().as_nanos() as f64))
            }
            _ => Server::get_or_start(&mut server, arguments).and_then(|server| server.execute(command)),
        };
        let reply: Reply = reply.map_err(|error| format!("{error:#}"));
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

    /// Executes a command and returns its value.
    fn execute(&mut self, command: Command) -> Result<Value> {
        let (ipc, device) = (self.ipc.clone(), self.device);
        match command {
            Command::Share { blocks, bytes, times } => {
                return Ok(json!(self.share(blocks, times, || ipc.allocate(device, bytes))?));
            }
            Command::ShareRemappable { blocks, bytes } => {
                let remappable = MemoryUse::new().remappable();
                let allocate = || ipc.allocate_for(device, bytes, remappable);
                return Ok(json!(self.share(blocks, 1, allocate)?));
            }
            Command::RawHandles { blocks, bytes, peer } => {
                return Ok(json!(self.raw_handles(blocks, bytes, &peer)?));
            }
            Command::FreeRaw => {
                for (block, export) in self.raw_blocks.drain(..) {
                    self.raw.unexport(export)?;
                    drop(block);
                }
            }
            Command::Echo { spins } => {
                let suffix = if spins { "spinning-echo" } else { "echo" };
                return Ok(json!(echo::serve(suffix, move |socket| echo::echo(&socket, spins))?));
            }
            Command::ReceiveByChannel { spins } => {
                let suffix = if spins { "spinning" } else { "sleeping" };
                return self.listen(suffix, move |channel| channels::receive(&channel, spins));
            }
            Command::EchoByTcpChannel => return Ok(json!(tcp::serve_channel(&ipc)?)),
            Command::EchoByTcp => return Ok(json!(tcp::serve_plain()?)),
            Command::Transport { staged, bytes } => {
                let transport = channels::Transport::new(&ipc, self.device, bytes, staged)?;
                let suffix = if staged { "staged" } else { "mapped" };
                return self.listen(suffix, move |channel| transport.serve(&channel));
            }
            Command::Receive => {
                return Ok(json!(echo::serve("receive", move |socket| receive(&ipc, &socket))?));
            }
            Command::ReceiveBundles { open } => {
                let suffix = if open { "bundles" } else { "pieces" };
                let ipc = open.then_some(ipc);
                let body = move |socket: Socket| bundles::receive(ipc.as_ref(), &socket);
                return Ok(json!(echo::serve(suffix, body)?));
            }
            Command::TimelineRounds { first, rounds } => {
                let export = self.exports.last().context("nothing is shared yet")?;
                let timelines = export.timelines(1, TIMEOUT)?;
                let [timeline] = timelines.as_slice() else {
                    bail!("{} timelines instead of 1", timelines.len())
                };
                for value in first..first + rounds {
                    timeline.wait(value, &self.stream)?;
                    timeline.signal(value, &self.stream)?;
                }
            }
            Command::RawRounds { page, first, rounds } => self.raw_rounds(&page, first, rounds)?,
            Command::Synchronize => self.stream.synchronize()?,
            Command::OpenAll { file, count } => self.open_all(&file, count)?,
            Command::CloseMappings => self.mappings.clear(),
            Command::StartUp => bail!("the library is already in use"),
            Command::JoinRing { descriptor } => {
                self.ring = Some(RingMember::join(&ipc, &descriptor, &self.stream)?);
            }
            Command::RingRounds { rounds, by } => self.member()?.receive_and_release(rounds, by)?,
            Command::SpinRounds { page, first, rounds } => rings::spin(&Page::open(&page)?, first, rounds)?,
            Command::CopyBuckets { buckets } => self.member()?.copy_buckets(&ipc, buckets)?,
            Command::CopyOwnBuckets { buckets } => self.member()?.copy_own_buckets(buckets)?,
            Command::ShareRemotely { bytes } => {
                // Frees the memory of the last call before.
                self.served = None;
                self.raw.enter(self.device)?;
                let (served, reply) = Served::start(ipc.backend().info().name, self.device, bytes)?;
                self.served = Some(served);
                return Ok(json!(reply));
            }
            Command::HostWaits => return Ok(json!(device_ipc::counters().ring_host_waits_total)),
            Command::LeaveRing => self.ring = None,
        }
        Ok(Value::Null)
    }

    fn member(&mut self) -> Result<&mut RingMember> {
        self.ring.as_mut().context("the process has not joined a ring")
    }

    /// Listens for a channel; a thread accepts and serves it.
    fn listen(
        &self,
        suffix: &str,
        body: impl FnOnce(Channel) -> Result<()> + Send + 'static,
    ) -> Result<Value> {
        let name = format!("bench-{}-{suffix}", std::process::id());
        let listener = self.ipc.listen(&name).start()?;
        in_background(move || body(listener.accept(TIMEOUT)?));
        Ok(json!(name))
    }

    /// Allocates blocks and shares each of them `times` times.
    fn share(
        &mut self,
        blocks: usize,
        times: usize,
        allocate: impl Fn() -> device_ipc::Result<Buffer>,
    ) -> Result<Vec<Descriptor>> {
        let first = self.exports.len();
        for _ in 0..blocks {
            let block = Arc::new(allocate()?);
            for _ in 0..times {
                self.exports.push(self.ipc.share(Arc::clone(&block)).start()?);
            }
        }
        Ok(self.exports[first..].iter().map(|export| export.descriptor().clone()).collect())
    }

    fn raw_handles(&mut self, blocks: usize, bytes: u64, peer: &[u8]) -> Result<Vec<RawHandle>> {
        let mut handles = Vec::with_capacity(blocks);
        for _ in 0..blocks {
            let block = self.ipc.allocate(self.device, bytes)?;
            let export = self.raw.export(block.range())?;
            self.raw.authorize(&export, peer)?;
            handles.push(export.handle.clone());
            self.raw_blocks.push((block, export));
        }
        Ok(handles)
    }

    fn raw_rounds(&mut self, path: &Path, first: u64, rounds: u64) -> Result<()> {
        let base = self.registered(path)?;
        for value in first..first + rounds {
            // SAFETY: the page stays registered until the process exits.
            unsafe {
                self.raw.wait_value(self.stream.as_stream(), base + REQUEST, value)?;
                self.raw.write_value(self.stream.as_stream(), base + RESPONSE, value)?;
            }
        }
        Ok(())
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

    fn open_all(&mut self, file: &Path, count: usize) -> Result<()> {
        // Released mappings stay cached until the exporter closes the exports.
        device_ipc::limits::set_cache_limits(CacheLimits::default().with_mappings(usize::MAX))?;
        let text = std::fs::read_to_string(file).context("cannot read the descriptors")?;
        let descriptors: Vec<Descriptor> =
            text.lines().take(count).map(str::parse).collect::<Result<_, _>>()?;
        self.mappings.reserve(count);
        for descriptor in &descriptors {
            self.mappings.push(self.ipc.open(descriptor).timeout(TIMEOUT).at_home()?);
        }
        Ok(())
    }
}

/// Serves a connection on a thread of its own.
pub(super) fn in_background(serve: impl FnOnce() -> Result<()> + Send + 'static) {
    std::thread::spawn(move || {
        if let Err(error) = serve() {
            eprintln!("error: the peer process stopped serving a connection: {error:#}");
        }
    });
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
