//! The rows: each hands memory over in its own way. This is the exporting process.

mod patterns;
mod single;

pub(crate) use patterns::wait_readable;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::ValueEnum;
use cudarc::driver::CudaStream;
use device_ipc::{Buffer, Ipc, Keeper, MemoryUse, Stream, close_unused, counters, shutdown};

use crate::partner::Partner;
use crate::sizes::Sizes;
use crate::{Options, TIMEOUT, report};

/// Elements of each tensor, of type f32.
pub(crate) const ELEMENTS: usize = 1024;

/// How often progress is reported.
const PROGRESS: Duration = Duration::from_secs(5);

/// Time that processes have to end what they do on other threads, how often that is looked at, and how often in a row nothing
/// may have changed.
const SETTLING: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(50);
const LOOKS: u32 = 10;

/// How many more times a row that has grown runs. Tables keep the room of the most messages that were ever in flight at a time, so
/// a process may grow once; one that leaks grows each time.
const REPETITIONS: u32 = 2;

/// A way to hand memory over. A round is one hand-over of one tensor, bundle or publication.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Row {
    /// New memory, shared once the host has waited for its bytes
    Plain,
    /// New memory, shared with `ready_on`
    Ready,
    /// As `ready`, with cudarc's `CudaSlice` on the default stream as the only owner (CUDA)
    Cudarc,
    /// As `plain`, observed by `holders`, `on_change` and `on_dropped`, with idle leases, recalls and closes of memory in use
    Observe,
    /// New memory, and a timeline signalled in both directions
    Timeline,
    /// A publication of a ring; a new ring every 100
    Ring,
    /// A channel message with new memory, dropped when it has been sent; a new channel every 100
    Channel,
    /// A bundle of four tensors in two allocations
    Bundle,
    /// A copy through the host
    Staged,
    /// New memory of a keeper, which takes the place of the last round's at a reserved address: followed, replaced, or suspended
    /// and resumed
    Replaced,
    /// As `ready`, with importers that are killed while they have the memory open
    Killed,
}

impl Row {
    /// The rows that the selected backend supports.
    pub(crate) fn supported() -> Result<Vec<Self>> {
        let ipc = ipc()?;
        let timelines = ipc.backend().capabilities(0.into())?.timelines;
        let supports = |row: &Self| match row {
            Self::Cudarc => ipc.backend().info().name == "cuda",
            Self::Timeline => timelines,
            _ => true,
        };
        Ok(Self::value_variants().iter().copied().filter(supports).collect())
    }

    /// The name on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Ready => "ready",
            Self::Cudarc => "cudarc",
            Self::Observe => "observe",
            Self::Timeline => "timeline",
            Self::Ring => "ring",
            Self::Channel => "channel",
            Self::Bundle => "bundle",
            Self::Staged => "staged",
            Self::Replaced => "replaced",
            Self::Killed => "killed",
        }
    }
}

/// The backend that `DEVICE_IPC_BACKEND` names, or the first with a device, or the mock.
pub(crate) fn ipc() -> Result<Ipc> {
    Ok(Ipc::builder().allow_simulated(true).timeout(TIMEOUT).auto()?)
}

/// The exporting process.
struct Exporter {
    ipc: Ipc,
    stream: Stream,
    device: u32,
    importer: Partner,
    kill_every: u64,
    done: u64,
    default_stream: Option<Arc<CudaStream>>,
    /// The keeper of the export that the importer has at its reserved address.
    keeper: Option<Keeper>,
}

/// The way in which new memory takes a reserved address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exchange {
    Followed,
    Replaced,
    Suspended,
}

impl Exchange {
    /// Returns that of the round with this value.
    pub(crate) fn of(value: f32) -> Self {
        match value % 10.0 {
            0.0 => Self::Suspended,
            5.0 => Self::Replaced,
            _ => Self::Followed,
        }
    }
}

impl Exporter {
    /// New memory that holds the round's value everywhere once the stream has got there.
    fn new_tensor(&self) -> Result<Buffer> {
        self.new_tensor_for(MemoryUse::new())
    }

    fn new_tensor_for(&self, usage: MemoryUse) -> Result<Buffer> {
        let buffer = self.ipc.allocate_for(self.device, (ELEMENTS * size_of::<f32>()) as u64, usage)?;
        buffer.view_mut::<f32, _>(&self.stream)?.copy_from(&[self.value(); ELEMENTS])?;
        Ok(buffer)
    }

    /// The value of the current round. Neighbouring rounds have different ones, and `f32` holds them exactly.
    fn value(&self) -> f32 {
        (self.done % 60_000) as f32 + 1.0
    }

    /// Carries out one round, or several at once, but at most `most`.
    fn step(&mut self, row: Row, most: u64) -> Result<u64> {
        match row {
            Row::Plain => self.plain()?,
            Row::Ready => self.ready()?,
            Row::Cudarc => self.cudarc()?,
            Row::Observe => self.observe()?,
            Row::Timeline => self.timeline()?,
            Row::Bundle => self.bundle()?,
            Row::Staged => self.staged()?,
            Row::Replaced => self.replaced()?,
            Row::Killed => self.killed()?,
            Row::Ring => return self.ring(most.min(100)),
            Row::Channel => return self.channel(most.min(100)),
        }
        Ok(1)
    }

    fn rounds(&mut self, row: Row, count: u64) -> Result<Duration> {
        let begin = Instant::now();
        let (mut reported, until) = (begin, self.done + count);
        while self.done < until {
            self.done += self.step(row, until - self.done)?;
            if reported.elapsed() >= PROGRESS {
                reported = Instant::now();
                eprintln!("{}: {} of {count} rounds", row.name(), count - (until - self.done));
            }
        }
        Ok(begin.elapsed())
    }

    /// Returns the sizes of both processes once they no longer change: other threads close sockets and streams.
    fn settled_sizes(&mut self) -> Result<[Sizes; 2]> {
        let (begin, mut last, mut same) = (Instant::now(), self.sizes()?, 0);
        while same < LOOKS && begin.elapsed() < SETTLING {
            std::thread::sleep(LOOK);
            let now = self.sizes()?;
            same = if now.iter().zip(&last).all(|(now, last)| now.objects() == last.objects()) {
                same + 1
            } else {
                0
            };
            last = now;
        }
        Ok(last)
    }

    /// The sizes of both processes, with nothing in use.
    fn sizes(&mut self) -> Result<[Sizes; 2]> {
        let importer = Sizes::from_line(&self.importer.ask("sizes")?)?;
        self.keeper = None;
        close_unused(TIMEOUT)?;
        let begin = Instant::now();
        while counters().exports > 0 {
            // The library's thread drops the owner of a channel's message, and reports that to no caller.
            if begin.elapsed() > TIMEOUT {
                bail!("{} exports have not ended", counters().exports);
            }
            std::thread::yield_now();
        }
        Ok([Sizes::take(&self.ipc, self.device)?, importer])
    }
}

/// Runs the row and prints its lines. Fails where a process has grown.
pub(crate) fn run(row: Row, options: &Options) -> Result<()> {
    let ipc = ipc()?;
    let stream = ipc.create_stream(options.device)?;
    let importer = Partner::start(options.device)?;
    let (device, kill_every) = (options.device, options.kill_every);
    let (done, default_stream, keeper) = (0, None, None);
    let mut exporter = Exporter { ipc, stream, device, importer, kill_every, done, default_stream, keeper };
    // Killed importers are other processes before and after.
    let processes = if row == Row::Killed { &["exporter"][..] } else { &["exporter", "importer"] };
    exporter.rounds(row, options.warm_up)?;
    let mut before = exporter.settled_sizes()?;
    let mut time = exporter.rounds(row, options.rounds)?;
    let mut after = exporter.settled_sizes()?;
    for _ in 0..REPETITIONS {
        let mut pairs = before.iter().zip(&after).take(processes.len());
        if pairs.all(|(before, after)| after.grown_since(before).is_empty()) {
            break;
        }
        eprintln!("{}: has grown; another {} rounds show whether it grows again", row.name(), options.rounds);
        before = after;
        time = exporter.rounds(row, options.rounds)?;
        after = exporter.settled_sizes()?;
    }
    let mut all = Vec::new();
    for ((process, before), after) in processes.iter().zip(&before).zip(&after) {
        let grown = after.grown_since(before);
        println!("{}", report::line((row.name(), process), (options.rounds, time), (before, after), &grown));
        all.extend(grown.into_iter().map(|one| format!("the {process}'s {one}")));
    }
    shutdown(TIMEOUT)?;
    if all.is_empty() { Ok(()) } else { bail!("{}: {}", row.name(), all.join("; ")) }
}
