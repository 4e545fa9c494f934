//! Runs cases, each in a process of its own, and sums up.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{Read, Seek};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::arguments::Arguments;
use crate::case::MAIN_ROLE;
use crate::expected::{ExpectedSkips, Mismatch, Position, Skip, as_lines};
use crate::process::{Address, ReceiveError, describe, output_file};

/// The case that only says how many devices there are.
pub(crate) const PROBE: &str = "(probe)";

const DEADLINE_VARIABLE: &str = "DEVICE_IPC_CONFORMANCE_DEADLINE";
const REQUIRE_VARIABLE: &str = "DEVICE_IPC_CONFORMANCE_REQUIRE";
const DEFAULT_DEADLINE: Duration = Duration::from_secs(60);

/// The time within which a process exits after its case.
const END_PATIENCE: Duration = Duration::from_secs(20);

/// Makes the processes of a case one node for backends on the mock's engine, the vendors' simulators included: they account
/// for the memory of a device together, and for that of no other case. A driver does so for the whole host.
const NODE_VARIABLE: &str = "DEVICE_IPC_MOCK_NODE";

/// How messages name the process of a case's main role.
const THE_PROCESS: &str = "the case's process";

/// The number of cases that run at a time, unless the command line says otherwise: that of tests with the standard harness.
const THREADS_VARIABLE: &str = "RUST_TEST_THREADS";

/// Cases that run at a time on each processor, unless stated otherwise: a case mostly waits for its processes.
const JOBS_PER_PROCESSOR: usize = 2;

/// Maximum number of cases that run at a time, unless stated otherwise.
const MOST_JOBS: usize = 4;

/// What a run has of a variant.
pub(crate) struct Plan {
    pub(crate) variant: &'static str,
    pub(crate) cases: Vec<&'static str>,
    /// The text with which the cases have to fail, as the variant makes a mistake.
    pub(crate) remedy: Option<&'static str>,
}

pub(crate) struct Runner {
    pub(crate) suite: &'static str,
    pub(crate) plans: Vec<Plan>,
    /// All cases of the suite.
    pub(crate) cases: Vec<&'static str>,
    pub(crate) expected: ExpectedSkips,
    pub(crate) arguments: Arguments,
}

enum Verdict {
    Passed,
    Skipped(String),
    Failed(String),
}

#[derive(Default)]
struct Summary {
    passed: usize,
    skipped: Vec<(String, String)>,
    failed: Vec<String>,
    /// The number of devices of each variant that ran.
    devices: BTreeMap<&'static str, usize>,
    /// Skips of cases, listed or not.
    skips: Vec<Skip>,
    /// Skips that are not listed.
    not_listed: Vec<Skip>,
}

impl Runner {
    pub(crate) fn run(&self) -> ExitCode {
        if self.arguments.list {
            self.list();
            return ExitCode::SUCCESS;
        }
        let mut summary = Summary::default();
        let variants: Vec<_> = self.plans.iter().map(|plan| plan.variant).collect();
        for unknown in self.expected.unknown(&variants, &self.cases) {
            println!(
                "FAILED: the list of expected skips names {unknown}, which does not exist; remove the line"
            );
            summary.failed.push(unknown);
        }
        let queue = self.plans.iter().flat_map(|plan| self.queue(plan, &mut summary)).collect();
        self.run_cases(queue, &mut summary);
        if self.arguments.wants_everything() {
            for unused in self.expected.unused_themes(&summary.devices, &summary.skips) {
                println!(
                    "FAILED: no case was skipped as the line {unused} of the expected skips says; remove the line"
                );
                summary.failed.push(unused);
            }
        }
        let lines = as_lines(&summary.not_listed, &variants, &self.cases);
        if !lines.is_empty() {
            println!(
                "\nIf these skips are right, add the lines to the list of expected skips:\n{}",
                lines.join("\n")
            );
        }
        summary.print()
    }

    fn list(&self) {
        if self.arguments.ignored {
            return;
        }
        for plan in &self.plans {
            for case in self.wanted(plan) {
                println!("{}: test", self.full_name(plan.variant, case));
            }
        }
    }

    fn full_name(&self, variant: &str, case: &str) -> String {
        format!("{}/{variant}/{case}", self.suite)
    }

    fn wanted(&self, plan: &Plan) -> Vec<&'static str> {
        let wanted = |case: &&&str| self.arguments.wants(plan.variant, &self.full_name(plan.variant, case));
        plan.cases.iter().filter(wanted).copied().collect()
    }

    /// Returns the cases of a variant that can run.
    fn queue(&self, plan: &Plan, summary: &mut Summary) -> Vec<Position<'static>> {
        let (variant, wanted) = (plan.variant, self.wanted(plan));
        if wanted.is_empty() {
            return Vec::new();
        }
        let devices = match self.probe(variant) {
            Ok(devices) => devices,
            Err(Verdict::Skipped(reason)) => {
                println!("skipped: {}/{variant}: {reason}", self.suite);
                summary.skipped.push((format!("{}/{variant}", self.suite), reason));
                return Vec::new();
            }
            Err(Verdict::Failed(what)) => {
                println!("FAILED: {}/{variant}: {what}", self.suite);
                summary.failed.push(format!("{}/{variant}", self.suite));
                return Vec::new();
            }
            Err(Verdict::Passed) => return Vec::new(),
        };
        summary.devices.insert(variant, devices);
        wanted.into_iter().map(|case| Position { variant, case, devices }).collect()
    }

    /// Runs the cases of all variants, several at a time.
    fn run_cases(&self, queue: VecDeque<Position<'static>>, summary: &mut Summary) {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let stated = || std::env::var(THREADS_VARIABLE).ok()?.parse().ok();
        let jobs = self.arguments.jobs.or_else(stated);
        let jobs = jobs.unwrap_or(MOST_JOBS.min(JOBS_PER_PROCESSOR * processors)).max(1);
        let queue = Mutex::new(queue);
        let results = Mutex::new(summary);
        std::thread::scope(|scope| {
            for _ in 0..jobs {
                scope.spawn(|| {
                    loop {
                        let next = queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
                        let Some(at) = next else { return };
                        let begun = Instant::now();
                        let (verdict, output) = self.run_case(at.variant, at.case);
                        let verdict = self.compare_with_mistake(at, verdict, &output);
                        let name = self.full_name(at.variant, at.case);
                        let mut summary = results.lock().unwrap_or_else(PoisonError::into_inner);
                        let verdict = self.compare_with_expected(at, verdict, &mut summary);
                        summary.note(name, verdict, &output, begun.elapsed());
                    }
                });
            }
        });
    }

    /// How many devices the variant has, or why it cannot run.
    fn probe(&self, variant: &str) -> Result<usize, Verdict> {
        let (verdict, output) = self.run_process(variant, PROBE);
        match verdict {
            Ok(line) => match line.split_once(' ') {
                Some(("devices", count)) => {
                    count.parse().map_err(|_| Verdict::Failed(format!("it has {count:?} devices")))
                }
                Some(("unavailable", reason))
                    if std::env::var(REQUIRE_VARIABLE).is_ok_and(|value| value == "1") =>
                {
                    Err(Verdict::Failed(format!("{reason} ({REQUIRE_VARIABLE} is set)")))
                }
                Some(("unavailable", reason)) => Err(Verdict::Skipped(reason.to_owned())),
                _ => Err(Verdict::Failed(format!("{line}\n{output}"))),
            },
            Err(what) => Err(Verdict::Failed(format!("{what}\n{output}"))),
        }
    }

    fn run_case(&self, variant: &str, case: &str) -> (Verdict, String) {
        let (line, output) = self.run_process(variant, case);
        let verdict = match line {
            Ok(line) => match line.split_once(' ').unwrap_or((&line, "")) {
                ("passed", _) => Verdict::Passed,
                ("skipped", reason) => Verdict::Skipped(reason.to_owned()),
                ("failed", what) => Verdict::Failed(what.to_owned()),
                _ => Verdict::Failed(line),
            },
            Err(what) => Verdict::Failed(what),
        };
        (verdict, output)
    }

    /// The line that a fresh process answers with, and all that it has printed.
    fn run_process(&self, variant: &str, case: &str) -> (Result<String, String>, String) {
        let address = Address { variant: variant.into(), case: case.into(), role: MAIN_ROLE.into() };
        static STARTED: AtomicU64 = AtomicU64::new(0);
        let node = format!("case-{}-{}", std::process::id(), STARTED.fetch_add(1, Ordering::Relaxed));
        let environment = [(NODE_VARIABLE, node)];
        let started =
            output_file().and_then(|output| Ok((address.start(&environment, Some(&output))?, output)));
        let (mut peer, output) = match started {
            Ok(started) => started,
            Err(error) => return (Err(format!("its process could not be started: {error}")), String::new()),
        };
        let deadline = deadline();
        let line = match peer.receive_line(deadline) {
            Ok(line) => match peer.wait(END_PATIENCE) {
                Ok(status) if status.code().is_some() => Ok(line),
                Ok(status) => Err(format!("it said {line:?}; then {}", describe(THE_PROCESS, status))),
                Err(error) => Err(format!("it said {line:?}; then {error}")),
            },
            Err(ReceiveError::Closed) => Err(peer
                .wait(END_PATIENCE)
                .map_or_else(|error| error.to_string(), |status| describe(THE_PROCESS, status))),
            Err(ReceiveError::Timeout(_)) => {
                Err(format!("it ran past its deadline of {} s ({DEADLINE_VARIABLE})", deadline.as_secs()))
            }
            Err(error) => Err(error.to_string()),
        };
        drop(peer);
        (line, read_back(output))
    }

    /// Turns the verdict on a variant that makes a mistake round.
    fn compare_with_mistake(&self, at: Position<'_>, verdict: Verdict, output: &str) -> Verdict {
        let plan = self.plans.iter().find(|plan| plan.variant == at.variant);
        let Some(remedy) = plan.and_then(|plan| plan.remedy) else { return verdict };
        match verdict {
            Verdict::Failed(what) if what.contains(remedy) || output.contains(remedy) => Verdict::Passed,
            Verdict::Failed(what) => {
                Verdict::Failed(format!("it does not fail with {remedy:?}, but: {what}"))
            }
            Verdict::Passed | Verdict::Skipped(_) => Verdict::Failed("it does not detect the mistake".into()),
        }
    }

    fn compare_with_expected(&self, at: Position<'_>, verdict: Verdict, summary: &mut Summary) -> Verdict {
        let reason = match verdict {
            Verdict::Skipped(reason) => reason,
            Verdict::Passed if self.expected.must_skip(at) => {
                let what = "it passed and is among the expected skips; remove its line from the list";
                return Verdict::Failed(what.into());
            }
            verdict => return verdict,
        };
        let skip = Skip { variant: at.variant.into(), case: at.case.into(), reason: reason.clone() };
        summary.skips.push(skip.clone());
        match self.expected.check_skip(at, &reason) {
            Ok(()) => Verdict::Skipped(reason),
            Err(Mismatch::NotListed) => {
                summary.not_listed.push(skip);
                Verdict::Failed(format!("it was skipped and is not among the expected skips: {reason}"))
            }
            Err(Mismatch::OtherReason(expected)) => {
                Verdict::Failed(format!("it was skipped for another reason than {expected:?}: {reason}"))
            }
        }
    }
}

impl Summary {
    fn note(&mut self, name: String, verdict: Verdict, output: &str, took: Duration) {
        let seconds = took.as_secs_f32();
        match verdict {
            Verdict::Passed => {
                println!("ok       {name} ({seconds:.2} s)");
                self.passed += 1;
            }
            Verdict::Skipped(reason) => {
                println!("skipped  {name}: {reason}");
                self.skipped.push((name, reason));
            }
            Verdict::Failed(what) => {
                println!("FAILED   {name} ({seconds:.2} s)\n  {}", what.replace('\n', "\n  "));
                if !output.trim().is_empty() {
                    println!("  its output:\n    {}", output.trim_end().replace('\n', "\n    "));
                }
                self.failed.push(name);
            }
        }
    }

    fn print(&self) -> ExitCode {
        let (passed, failed, skipped) = (self.passed, self.failed.len(), self.skipped.len());
        println!("\nran {}, skipped {skipped}", passed + failed);
        for (name, reason) in &self.skipped {
            println!("  skipped {name}: {reason}");
        }
        for name in &self.failed {
            println!("  FAILED  {name}");
        }
        println!("{passed} passed, {failed} failed, {skipped} skipped");
        if self.failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

fn deadline() -> Duration {
    let seconds = std::env::var(DEADLINE_VARIABLE).ok().and_then(|value| value.parse().ok());
    seconds.map_or(DEFAULT_DEADLINE, Duration::from_secs)
}

fn read_back(mut file: File) -> String {
    let mut bytes = Vec::new();
    match file.rewind().and_then(|()| file.read_to_end(&mut bytes)) {
        Ok(_) => String::from_utf8_lossy(&bytes).into_owned(),
        Err(error) => format!("(the output could not be read: {error})"),
    }
}
