//! Processes that are killed or stopped at each step of a copy.

use std::thread;
use std::time::{Duration, Instant};

use device_ipc_test_process::{Process, wait_for_state};
use rustix::process::WaitIdOptions;

use crate::pair::{Conditions, LONG_MS, Resources, SHORT_MS, StartUnder};
use crate::{Hosts, eventually};

/// The length of the region.
const BYTES: usize = 32 << 20;

/// The time limit of the copy, and the grace period of its lease: `docs/spec/remote.md`.
const LEASE: Duration = Duration::from_secs(1 + (BYTES as u64 >> 24) + 10);

/// The steps of the exporter, and the importer's result if the exporter is killed there, and if it is stopped there.
const STEPS_OF_EXPORTER: [(&str, &str, &str); 5] = [
    ("exporter:remote-accepted", "ExporterGone of InPull", "Timeout of InPull"),
    ("exporter:remote-proved", "ExporterGone of InPull", "Timeout of InPull"),
    ("exporter:remote-leased", "ExporterGone of InPull", "Timeout of InPull"),
    ("exporter:remote-granted", "ExporterGone of InPull", "Timeout of InPull"),
    ("exporter:remote-released", "33554432 B right", "33554432 B right"),
];

/// The steps of the importer, whether it has a lease there, and its result if it is stopped there until the export has ended.
const STEPS_OF_IMPORTER: [(&str, bool, &str); 7] = [
    ("importer:remote-connected", false, "ExportDropped of InPull"),
    ("importer:remote-proved", false, "ExportDropped of InPull"),
    ("importer:remote-asked", true, "Timeout of InPull"),
    ("importer:remote-granted", true, "Timeout of InPull"),
    ("importer:remote-pulling", true, "Timeout of InPull"),
    ("importer:remote-pulled", true, "33554432 B right"),
    ("importer:remote-released", false, "33554432 B right"),
];

/// The place of a case.
#[derive(Clone, Copy, Debug)]
pub enum Place {
    /// This host.
    Here,
    /// Two hosts, if this machine permits that.
    TwoHosts,
}

/// The processes of a step.
struct Step {
    start: StartUnder,
    /// Dropped after the processes of the step.
    hosts: Option<Hosts>,
}

impl Step {
    /// Returns `None` if this machine does not permit the place; prints the reason then.
    fn at(start: StartUnder, place: Place) -> Option<Self> {
        let hosts = match place {
            Place::Here => None,
            Place::TwoHosts => {
                Some(Hosts::create().inspect_err(|reason| eprintln!("skipped: {reason}")).ok()?)
            }
        };
        Some(Self { start, hosts })
    }

    fn exporter(&self, kill_point: &str) -> Option<Process> {
        let host = self.hosts.as_ref().map(|hosts| &hosts.exporter);
        (self.start)(&Conditions { host, kill_point }, "exporter", "")
    }

    fn importer(&self, kill_point: &str) -> Option<Process> {
        let host = self.hosts.as_ref().map(|hosts| &hosts.importer);
        (self.start)(&Conditions { host, kill_point }, "importer", "")
    }
}

fn pull(importer: &mut Process, timeout: u32, descriptor: &str) -> String {
    importer.ask(&format!("open pulled 1 {timeout} {descriptor}"))
}

/// The timeout in ms of a copy that is complete before its process stops with a lease, which outlasts the timeout.
const COMPLETE_MS: u32 = 10_000;

/// Returns the timeout in ms of a copy with this result, if the process that stops has a lease then or not.
fn timeout_of(expected: &str, has_lease: bool) -> u32 {
    match (expected.starts_with("Timeout"), has_lease) {
        (true, _) => SHORT_MS,
        (false, true) => COMPLETE_MS,
        (false, false) => LONG_MS,
    }
}

fn share(exporter: &mut Process) -> String {
    exporter.ask(&format!("share x {BYTES} 1"))
}

/// Copies once between processes that are not at the step, so that later copies need no further files.
fn warm(exporter: &mut Process, importer: &mut Process) {
    let descriptor = share(exporter);
    assert_eq!(pull(importer, LONG_MS, &descriptor), format!("{BYTES} B right, copied"));
    assert_eq!(exporter.ask("close x 60000"), "closed");
}

/// Waits until a child has killed itself, or, with `STOPPED`, has stopped itself.
fn wait_for(child: &Process, end: WaitIdOptions, point: &str) {
    println!("{point}");
    // The process is reaped when it is dropped.
    wait_for_state(child.id(), end | WaitIdOptions::NOWAIT);
}

fn each<T: Copy + Send + Sync>(steps: &[T], check: impl Fn(T) + Sync) {
    thread::scope(|scope| {
        for step in steps {
            scope.spawn(|| check(*step));
        }
    });
}

/// An exporter that is killed at any step: the importer reports it, has nothing left over, and copies from another exporter.
pub fn exporter_killed_at_each_step_ends_the_pull(start: StartUnder, place: Place) {
    for (point, expected, _) in STEPS_OF_EXPORTER {
        let Some(step) = Step::at(start, place) else { return };
        let Some((mut exporter, mut other)) = step.exporter(point).zip(step.exporter("")) else { return };
        let Some(mut importer) = step.importer("") else { return };
        warm(&mut other, &mut importer);
        let descriptor = share(&mut exporter);
        let before = Resources::of(&mut importer);
        let answer = pull(&mut importer, LONG_MS, &descriptor);
        assert!(answer.starts_with(expected), "{point}: {answer}");
        wait_for(&exporter, WaitIdOptions::EXITED, point);
        before.eventually_left_by(&mut importer);
        warm(&mut other, &mut importer);
    }
}

/// An exporter that is stopped at any step: the importer reports it by its timeout. When the exporter continues, nothing is left
/// over, and it can be copied from.
pub fn exporter_stopped_at_each_step_times_out(start: StartUnder, place: Place) {
    each(&STEPS_OF_EXPORTER, |(point, _, expected)| {
        let Some(step) = Step::at(start, place) else { return };
        let Some((mut exporter, mut other)) = step.exporter(&format!("{point}!stop")).zip(step.exporter(""))
        else {
            return;
        };
        let Some(mut importer) = step.importer("") else { return };
        warm(&mut other, &mut importer);
        let descriptor = share(&mut exporter);
        let before = Resources::of(&mut importer);
        let answer = pull(&mut importer, timeout_of(expected, false), &descriptor);
        assert!(answer.starts_with(expected), "{point}: {answer}");
        wait_for(&exporter, WaitIdOptions::STOPPED, point);
        exporter.resume();
        eventually(&mut exporter, "holders x", "");
        assert_eq!(pull(&mut importer, LONG_MS, &descriptor), format!("{BYTES} B right, copied"));
        assert_eq!(exporter.ask("close x 60000"), "closed");
        exporter.finish();
        before.eventually_left_by(&mut importer);
        importer.finish();
    });
}

/// An importer that is killed at any step: its lease ends at once, and the exporter has nothing left over.
pub fn importer_killed_at_each_step_ends_the_lease(start: StartUnder, place: Place) {
    for (point, _, _) in STEPS_OF_IMPORTER {
        let Some(step) = Step::at(start, place) else { return };
        let Some((mut importer, mut other)) = step.importer(point).zip(step.importer("")) else { return };
        let Some(mut exporter) = step.exporter("") else { return };
        warm(&mut exporter, &mut other);
        let descriptor = share(&mut exporter);
        let before = Resources::of(&mut exporter);
        // The answer may not arrive: the copy can be at the point before it is written.
        importer.send(&format!("begin open pulled 1 {LONG_MS} {descriptor}"));
        wait_for(&importer, WaitIdOptions::EXITED, point);
        eventually(&mut exporter, "holders x", "");
        assert_eq!(pull(&mut other, LONG_MS, &descriptor), format!("{BYTES} B right, copied"));
        assert_eq!(exporter.ask("close x 60000"), "closed");
        before.eventually_left_by(&mut exporter);
        exporter.finish();
    }
}

/// An importer that is stopped at any step: its lease ends after the time limit and the grace period. When the importer continues, it
/// reports an error, unless all bytes had arrived before. `frees_early` states whether the exporter frees the memory before that.
pub fn importer_stopped_at_each_step_loses_the_lease(start: StartUnder, place: Place, frees_early: bool) {
    each(&STEPS_OF_IMPORTER, |(point, has_lease, expected)| {
        let Some(step) = Step::at(start, place) else { return };
        let Some((mut importer, mut other)) = step.importer(&format!("{point}!stop")).zip(step.importer(""))
        else {
            return;
        };
        let Some(mut exporter) = step.exporter("") else { return };
        warm(&mut exporter, &mut other);
        let descriptor = share(&mut exporter);
        let before = Resources::of(&mut exporter);
        let begun = Instant::now();
        importer.send(&format!("begin open pulled 1 {} {descriptor}", timeout_of(expected, has_lease)));
        wait_for(&importer, WaitIdOptions::STOPPED, point);
        if has_lease {
            assert_eq!(pull(&mut other, LONG_MS, &descriptor), format!("{BYTES} B right, copied"));
            assert_ne!(exporter.ask("holders x"), "", "{point}");
        }
        eventually(&mut exporter, "holders x", "");
        // The exporter counts silence in seconds.
        let after = begun.elapsed() + Duration::from_secs(1);
        assert!(!has_lease || after >= LEASE, "{point}: {after:?}");
        let is_freed = frees_early || !has_lease;
        if is_freed {
            assert_eq!(exporter.ask("close x 60000"), "closed");
        }
        importer.resume();
        importer.receive();
        let answer = importer.ask("end");
        if !is_freed {
            // The engine has finished with its first request before this one.
            assert_eq!(pull(&mut importer, LONG_MS, &descriptor), format!("{BYTES} B right, copied"));
            assert_eq!(exporter.ask("close x 60000"), "closed");
        }
        assert!(answer.starts_with(expected), "{point}: {answer}");
        before.eventually_left_by(&mut exporter);
        warm(&mut exporter, &mut importer);
        exporter.finish();
        importer.finish();
    });
}

/// Lists the cases of each step as tests, with a function that starts processes. `frees_early`: whether the engine survives that the
/// exporter frees memory which a suspended importer has not read.
#[macro_export]
macro_rules! steps {
    ($start:expr, $place:expr, frees_early: $frees_early:literal) => {
        $crate::steps!(
            @tests $start, $place;
            exporter_killed_at_each_step_ends_the_pull(),
            exporter_stopped_at_each_step_times_out(),
            importer_killed_at_each_step_ends_the_lease(),
            importer_stopped_at_each_step_loses_the_lease($frees_early),
        );
    };
    (@tests $start:expr, $place:expr; $($case:ident($($argument:expr)?),)+) => {
        $(
            #[test]
            fn $case() {
                $crate::$case($start, $place $(, $argument)?);
            }
        )+
    };
}
