//! Hands memory over, again and again, and sees to it that neither process grows.
//!
//! `soak --hand-overs 1000000`: half of them of a new export each, with nothing kept open; half of them with the cache,
//! a new export every hundred.

use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use device_ipc_broker_tests::Census;
use device_ipc_core::{CacheLimits, Descriptor, Ipc, set_cache_limits};
use device_ipc_mock::MockBackend;

const MACHINE: &str = "devices=1;latency=0";
const BYTES: u64 = 64 * 1024;
const PATIENCE: Duration = Duration::from_secs(30);

/// Hand-overs of one export while the importer keeps it open.
const REPEATS: u64 = 100;

/// How much memory may come and go, in KiB.
const SLACK_KIB: u64 = 2048;

/// The same for mappings of all kinds: the allocator's.
const SLACK_MAPPINGS: usize = 8;

type Failure = Box<dyn std::error::Error>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match words[..] {
        ["--hand-overs", count] => match count.parse() {
            Ok(count) => export(count),
            Err(_) => Err("--hand-overs takes a number".into()),
        },
        ["importer"] => import(),
        _ => Err("usage: soak --hand-overs N".into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("soak: {failure}");
            ExitCode::FAILURE
        }
    }
}

/// The receiving process: a line is a descriptor and how often to take it, or a choice of cache.
fn import() -> Result<(), Failure> {
    let ipc = Ipc::with_backend(MockBackend::from_spec(MACHINE)?);
    let stream = ipc.create_stream(0)?;
    for line in std::io::stdin().lines() {
        let line = line?;
        match line.split_once(' ') {
            Some(("cache", "off")) => set_cache_limits(CacheLimits::NONE)?,
            Some(("cache", _)) => set_cache_limits(CacheLimits::default())?,
            Some((count, descriptor)) => {
                let descriptor: Descriptor = descriptor.parse()?;
                for _ in 0..count.parse::<u64>()? {
                    let mapping = ipc.open(&descriptor).on(&stream)?;
                    mapping.view_mut::<f32, _>(&stream)?.add(1.0)?;
                    mapping.release(&stream)?;
                }
            }
            None => return Err(format!("what is {line:?}?").into()),
        }
        writeln!(std::io::stdout(), "done")?;
    }
    Ok(())
}

/// The other process.
struct Importer {
    process: Child,
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Importer {
    fn start() -> Result<Self, Failure> {
        let mut process = Command::new(std::env::current_exe()?)
            .arg("importer")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdin = process.stdin.take().ok_or("no input")?;
        let lines = BufReader::new(process.stdout.take().ok_or("no output")?).lines();
        Ok(Self { process, stdin, lines })
    }

    fn tell(&mut self, line: &str) -> Result<(), Failure> {
        writeln!(self.stdin, "{line}")?;
        match self.lines.next() {
            Some(Ok(line)) if line == "done" => Ok(()),
            other => Err(format!("the importer ended: {other:?}").into()),
        }
    }
}

impl Drop for Importer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// What both processes have.
struct Sizes([(u64, Census, usize); 2]);

impl Sizes {
    fn take(importer: &Importer) -> Self {
        Self([std::process::id(), importer.process.id()].map(|pid| {
            let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
            (Census::resident_kib(pid), Census::of(pid), maps.lines().count())
        }))
    }

    fn print(&self, when: &str) {
        for ((resident, census, mappings), who) in self.0.iter().zip(["exporter", "importer"]) {
            println!(
                "{when:>6}  {who}: {resident} KiB resident, {} descriptors, {mappings} mappings, {} of them device \
                 memory, {} threads",
                census.all_descriptors(),
                census.mock_mappings,
                census.threads
            );
        }
    }

    fn check_against(&self, start: &Self) -> Result<(), Failure> {
        for (index, who) in ["exporter", "importer"].into_iter().enumerate() {
            let ((resident, census, mappings), before) = (&self.0[index], &start.0[index]);
            if *census != before.1 {
                return Err(format!("the {who} had {:?} and has {census:?}", before.1).into());
            }
            if *resident > before.0 + SLACK_KIB {
                return Err(format!("the {who} has grown from {} to {resident} KiB", before.0).into());
            }
            if *mappings > before.2 + SLACK_MAPPINGS {
                return Err(format!("the {who} had {} mappings and has {mappings}", before.2).into());
            }
        }
        Ok(())
    }
}

/// The sending process.
struct Soak {
    ipc: Ipc,
    importer: Importer,
    done: u64,
    since: Instant,
    told: Instant,
}

impl Soak {
    /// New exports, each taken `repeats` times, until so many hand-overs have been made.
    fn hand_over(&mut self, count: u64, repeats: u64) -> Result<(), Failure> {
        let until = self.done + count;
        while self.done < until {
            let repeats = repeats.min(until - self.done);
            let buffer = self.ipc.allocate(0, BYTES)?;
            let export = self.ipc.share(buffer).start().map_err(|error| error.to_string())?;
            self.importer.tell(&format!("{repeats} {}", export.descriptor()))?;
            export.wait_released(PATIENCE)?;
            export.close(PATIENCE)?;
            self.done += repeats;
            if self.told.elapsed() >= Duration::from_secs(1) {
                self.told = Instant::now();
                let rate = self.done as f64 / self.since.elapsed().as_secs_f64();
                println!("{} hand-overs, {rate:.0} a second", self.done);
            }
        }
        Ok(())
    }

    fn cached(&mut self, count: u64) -> Result<(), Failure> {
        self.importer.tell("cache on")?;
        self.hand_over(count, REPEATS)
    }

    fn uncached(&mut self, count: u64) -> Result<(), Failure> {
        self.importer.tell("cache off")?;
        self.hand_over(count, 1)
    }
}

fn export(count: u64) -> Result<(), Failure> {
    let now = Instant::now();
    let ipc = Ipc::with_backend(MockBackend::from_spec(MACHINE)?);
    let mut soak = Soak { ipc, importer: Importer::start()?, done: 0, since: now, told: now };
    let quarter = (count / 4).max(1);
    // What is made once is made, and the allocators have what they need.
    let warm = quarter.min(2000);
    soak.uncached(warm)?;
    soak.cached(warm)?;
    let start = Sizes::take(&soak.importer);
    start.print("start");
    soak.uncached(quarter)?;
    soak.cached(quarter)?;
    let middle = Sizes::take(&soak.importer);
    middle.print("middle");
    soak.uncached(quarter)?;
    soak.cached(count.saturating_sub(3 * quarter))?;
    let end = Sizes::take(&soak.importer);
    end.print("end");
    println!("{} hand-overs in {:.1} s", soak.done, soak.since.elapsed().as_secs_f64());
    middle.check_against(&start)?;
    end.check_against(&start)
}
