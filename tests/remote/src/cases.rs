//! The cases that hold for every engine, with an exporter and an importer of the engine.

use std::time::{Duration, Instant};

use device_ipc_test_process::Process;

use crate::backend::is_mock;
use crate::pair::{LONG_MS, Pair, SHORT_MS, Start};
use crate::{LONG, advance_until, after_a_while, elsewhere, eventually, with_wrong_token};

/// The length of a region whose copy takes a while.
const MANY: usize = 96 << 20;

/// Regions of these lengths arrive unchanged.
pub fn pulled_bytes_are_those_of_the_exporter(mut pair: Pair, lengths: &[usize]) {
    for (seed, length) in lengths.iter().enumerate() {
        let descriptor = pair.exporter.ask(&format!("share x {length} {seed}"));
        let answer = pair.open("pulled", seed as u8, LONG_MS, &descriptor);
        assert_eq!(answer, format!("{length} B right, copied"));
        assert_eq!(pair.exporter.ask("close x 60000"), "closed");
    }
    pair.finish();
}

/// All tensors of a state dict arrive by one request.
pub fn state_dict_is_pulled(mut pair: Pair) {
    for bytes in [1, 1000, 4096] {
        let descriptor = pair.exporter.ask(&format!("dict x 1000 {bytes}"));
        let answer = pair.importer.ask(&format!("dict pulled 1000 {LONG_MS} {descriptor}"));
        assert_eq!(answer, "1000 tensors, wrong: []", "{bytes} B each");
        assert_eq!(pair.exporter.ask("close x 60000"), "closed");
    }
    pair.finish();
}

/// Bytes arrive in memory that exists already, and nowhere else; the same memory can be written again.
pub fn pull_into_existing_memory_writes_the_tensors_alone(mut pair: Pair) {
    for (seed, length) in [1, 64, 1_000_003, 8 << 20].into_iter().enumerate() {
        let descriptor = pair.exporter.ask(&format!("share x {length} {seed}"));
        let answer = pair.importer.ask(&format!("into {seed} {LONG_MS} {descriptor}"));
        assert_eq!(answer, format!("{length} B right"));
        assert_eq!(pair.exporter.ask("close x 60000"), "closed");
    }
    let descriptor = pair.exporter.ask("dict x 1000 1000");
    // All of them, and some of them.
    for (first, count) in [(0, 1000), (17, 5)] {
        let answer = pair.importer.ask(&format!("dict-into {first} {count} 1000 {LONG_MS} {descriptor}"));
        let bytes = count * 1000;
        assert_eq!(answer, format!("{count} tensors, wrong: [], {bytes} of {bytes} B"));
    }
    let refused = [
        ("1000 t0,t1", "overlap", "InvalidRegion"),
        ("999 t0", "uint8 [1000]", "Layout of InBundle"),
        ("1000 other", "other", "NoSuchTensor"),
    ];
    for (destination, phrase, kind) in refused {
        let error = pair.importer.ask(&format!("refused-into {destination} {LONG_MS} {descriptor}"));
        assert!(error.starts_with(kind) && error.contains(phrase), "{error}");
    }
    eventually(&mut pair.exporter, "holders x", "");
    pair.finish();
}

/// Existing memory is kept as long as the engine may write it, and returned to its owner after an error.
pub fn memory_of_a_failed_pull_into_is_kept_as_long_as_it_is_written(mut pair: Pair) {
    let descriptor = pair.begin_request("into", MANY, SHORT_MS);
    pair.exporter.suspend();
    let answer = pair.importer.ask("end");
    assert!(answer.starts_with("Timeout of InPull") && answer.ends_with("the set is kept"), "{answer}");
    assert_eq!(pair.importer.ask("kept"), "true");
    pair.let_go();
    pair.exporter.resume();
    eventually(&mut pair.importer, "kept", "false");
    eventually(&mut pair.exporter, "holders x", "");
    pair.exporter.ask("drop x");
    let answer = pair.importer.ask(&format!("into 1 {SHORT_MS} {descriptor}"));
    assert!(
        answer.starts_with("ExportDropped of InPull") && answer.ends_with("the set is returned"),
        "{answer}"
    );
    pair.finish();
}

/// A copy of many bytes is reported several times, unless an engine ends it between two looks, and the end always.
pub fn progress_is_reported(mut pair: Pair) {
    for (length, least) in [(64, 1), (256 << 20, 2)] {
        let mut report = || {
            let descriptor = pair.exporter.ask(&format!("share x {length} 1"));
            let answer = pair.importer.ask(&format!("progress {LONG_MS} {descriptor}"));
            let (count, rest) = answer.split_once(' ').expect("a count");
            assert_eq!(rest, format!("true {length} of {length}"));
            assert_eq!(pair.exporter.ask("close x 60000"), "closed");
            count.parse::<usize>().expect("a count")
        };
        assert!((0..10).any(|_| report() >= least), "{length}");
    }
    pair.finish();
}

/// A pull replaces an open only where that is not possible.
pub fn memory_of_another_host_is_pulled(mut pair: Pair) {
    let here = pair.exporter.ask("share x 5000 3");
    let there = elsewhere(&here);
    assert_eq!(pair.open("pulled-if-needed", 3, LONG_MS, &here), "5000 B right, opened");
    for mode in ["pulled-if-needed", "if-needed", "pulled"] {
        assert_eq!(pair.open(mode, 3, LONG_MS, &there), "5000 B right, copied", "{mode}");
    }
    let error = pair.open("never", 3, LONG_MS, &there);
    assert!(error.starts_with("OtherHost") && error.contains("CopyPolicy::PulledIfNeeded"), "{error}");
    pair.finish();
}

/// An unaltered descriptor of another host opens as a copy, on request.
pub fn descriptor_of_another_host_opens_as_a_copy(mut pair: Pair) {
    let descriptor = pair.exporter.ask("share x 5000 3");
    for mode in ["pulled-if-needed", "if-needed", "pulled"] {
        assert_eq!(pair.open(mode, 3, LONG_MS, &descriptor), "5000 B right, copied", "{mode}");
    }
    let error = pair.open("never", 3, LONG_MS, &descriptor);
    assert!(error.starts_with("OtherHost") && error.contains("CopyPolicy::PulledIfNeeded"), "{error}");
    pair.finish();
}

/// A missing setting of either side is named by the error.
pub fn missing_settings_are_named(start: Start) {
    let (Some(mut deaf), Some(mut exporter)) = (start("exporter", "deaf"), start("exporter", "")) else {
        return;
    };
    let (Some(mut importer), Some(mut without)) = (start("importer", ""), start("importer", "without"))
    else {
        return;
    };
    let unreachable = deaf.ask("share x 64 1");
    let refused = |process: &mut Process, mode: &str, descriptor: &str, phrases: &[&str]| {
        let error = process.ask(&format!("open {mode} 1 {LONG_MS} {descriptor}"));
        for phrase in phrases {
            assert!(error.contains(phrase), "{phrase:?} is missing in {error}");
        }
    };
    refused(&mut importer, "never", &elsewhere(&unreachable), &["OtherHost", "Remote::listen"]);
    refused(&mut importer, "pulled-if-needed", &elsewhere(&unreachable), &["OtherHost", "Remote::listen"]);
    refused(&mut importer, "pulled", &unreachable, &["Unsupported", "no network address", "Remote::listen"]);
    let reachable = exporter.ask("share x 64 1");
    refused(&mut without, "pulled-if-needed", &elsewhere(&reachable), &["Unsupported", "IpcBuilder::remote"]);
}

/// A descriptor of a dropped export, or with another token, is refused.
pub fn stale_descriptors_are_refused(mut pair: Pair) {
    let descriptor = pair.exporter.ask("share x 64 1");
    let altered = with_wrong_token(&descriptor);
    let exporter = pair.exporter.id();
    let error = pair.open("pulled", 1, LONG_MS, &altered);
    assert!(error.starts_with("ExportDropped of InPull"), "{error}");
    assert_eq!(pair.open("pulled", 1, LONG_MS, &descriptor), "64 B right, copied");
    // A connection for the right token is open.
    let error = pair.open("pulled", 1, LONG_MS, &altered);
    assert!(error.starts_with("ExportDropped of InPull"), "{error}");
    let other = pair.exporter.ask("share y 64 2");
    assert_eq!(pair.open("pulled", 2, LONG_MS, &other), "64 B right, copied");
    pair.exporter.ask("drop x");
    let error = pair.open("pulled", 1, LONG_MS, &descriptor);
    assert!(error.starts_with("ExportDropped of InPull"), "{error}");
    assert!(
        error.contains(&format!("process {exporter} of host "))
            && error.contains(&format!("{}:", pair.addresses()[0])),
        "{error}"
    );
    pair.exporter.kill();
    // With a connection that was open, and without one.
    for descriptor in [&other, &descriptor] {
        let error = pair.open("pulled", 1, LONG_MS, descriptor);
        assert!(error.starts_with("Io of InPull") && error.contains("refused"), "{error}");
    }
}

/// The importer closes connections after their last use. The exporter's clock is not advanced: it closes them later, unless a busy machine
/// takes as long for the test, which then uses them once more.
#[track_caller]
fn check_disconnects(pair: &mut Pair, last_use: impl Fn(&mut Pair)) {
    let deadline = Instant::now() + LONG;
    loop {
        let begun = Instant::now();
        last_use(pair);
        let (exporter, before) = (&mut pair.exporter, begun.elapsed());
        let waited = before + advance_until(&mut pair.importer, |_| exporter.ask("connections").is_empty());
        assert!(waited >= UNUSED, "{waited:?}");
        if begun.elapsed() < IDLE {
            return;
        }
        assert!(Instant::now() < deadline, "the exporter may have closed it: {:?}", begun.elapsed());
    }
}

/// The time after which an importer closes a connection that it does not use: `docs/spec/remote.md`.
const UNUSED: Duration = Duration::from_secs(5);

/// The time after which an exporter does.
const IDLE: Duration = Duration::from_secs(30);

/// Checks that repeated copies use the same connections, of this number. A copy that takes longer than a second sends a ping, and its
/// connection is not kept where the answer has not arrived: on a busy machine that may happen, and the copies are repeated.
#[track_caller]
fn check_reuse(pair: &mut Pair, count: usize, copy: impl Fn(&mut Pair)) {
    let deadline = Instant::now() + LONG;
    loop {
        copy(pair);
        let before = pair.exporter.ask("connections");
        copy(pair);
        let after = pair.exporter.ask("connections");
        if before == after && before.split(' ').count() == count {
            return;
        }
        assert!(Instant::now() < deadline, "connections {before:?}, then {after:?}");
    }
}

/// Further copies of an export, of either kind, use the connection of the first one, which is closed when it is not used for a while.
pub fn further_pulls_use_the_same_connection(mut pair: Pair) {
    let descriptor = pair.exporter.ask("share x 64 1");
    let pull = |pair: &mut Pair| {
        assert_eq!(pair.open("pulled", 1, LONG_MS, &descriptor), "64 B right, copied");
    };
    // Before further copies, whose ends close idle connections too.
    check_disconnects(&mut pair, pull);
    pull(&mut pair);
    let before = pair.resources();
    check_reuse(&mut pair, 1, |pair| {
        assert_eq!(pair.importer.ask(&format!("many 50 1 {LONG_MS} {descriptor}")), "64 B right, copied");
        assert_eq!(pair.importer.ask(&format!("into 1 {LONG_MS} {descriptor}")), "64 B right");
    });
    // Another export needs another one.
    let other = pair.exporter.ask("share y 64 2");
    let pull_both = |pair: &mut Pair| {
        assert_eq!(pair.open("pulled", 2, LONG_MS, &other), "64 B right, copied");
        pull(pair);
    };
    check_reuse(&mut pair, 2, pull_both);
    check_disconnects(&mut pair, pull_both);
    assert_eq!(pair.exporter.ask("close y 60000"), "closed");
    pull(&mut pair);
    pair.check_resources(&before);
    pair.finish();
}

/// An importer of many exports keeps few connections.
pub fn kept_connections_are_limited(mut pair: Pair) {
    const KEPT: usize = 16;
    let descriptors: Vec<_> =
        (0..KEPT + 4).map(|seed| pair.exporter.ask(&format!("share x{seed} 64 {seed}"))).collect();
    for _ in 0..2 {
        for (seed, descriptor) in descriptors.iter().enumerate() {
            assert_eq!(pair.open("pulled", seed as u8, LONG_MS, descriptor), "64 B right, copied");
        }
        // The system's table may show a connection that is being closed. Unused ones are closed later than this.
        let deadline = Instant::now() + Duration::from_secs(2);
        loop {
            let connections = pair.exporter.ask("connections");
            if connections.split(' ').count() <= KEPT {
                break;
            }
            assert!(Instant::now() < deadline, "{connections}");
        }
    }
    check_disconnects(&mut pair, |pair| {
        assert_eq!(pair.open("pulled", 0, LONG_MS, &descriptors[0]), "64 B right, copied");
    });
    pair.finish();
}

/// A forked child of the importer does not use the connection, and does not keep it open.
pub fn forked_child_has_no_connection(mut pair: Pair) {
    let descriptor = pair.exporter.ask("share x 64 1");
    assert_eq!(pair.open("pulled", 1, LONG_MS, &descriptor), "64 B right, copied");
    let connection = pair.exporter.ask("connections");
    let error = pair.importer.ask(&format!("fork {LONG_MS} {descriptor}"));
    assert!(error.starts_with("Forked of "), "{error}");
    let pull = |pair: &mut Pair| {
        assert_eq!(pair.open("pulled", 1, LONG_MS, &descriptor), "64 B right, copied");
    };
    pull(&mut pair);
    assert_eq!(pair.exporter.ask("connections"), connection);
    check_disconnects(&mut pair, pull);
    pair.finish();
}

/// An importer with another engine is refused before any transfer.
pub fn other_engine_is_refused(mut pair: Pair, mut other: Process) {
    let descriptor = pair.exporter.ask("share x 64 1");
    let error = other.ask(&format!("open pulled 1 {LONG_MS} {descriptor}"));
    assert!(error.starts_with("Unsupported of InPull") && error.contains("Remote::new"), "{error}");
    pair.finish();
}

/// The exporter waits for its streams before it grants a lease.
pub fn pull_waits_until_the_bytes_are_ready(mut pair: Pair) {
    let descriptor = pair.exporter.ask("share x 4096 1 blocked");
    let error = pair.open("pulled", 1, SHORT_MS, &descriptor);
    assert!(error.starts_with("Timeout of InPull") && error.contains("streams"), "{error}");
    eventually(&mut pair.exporter, "holders x", "");
    pair.importer.ask(&format!("begin open pulled 1 {LONG_MS} {descriptor}"));
    assert_eq!(pair.exporter.ask("open-gate"), "opened");
    assert_eq!(pair.importer.ask("end"), "4096 B right, copied");
}

/// A pull from an exporter that dies ends in an error with its name.
pub fn pull_fails_when_the_exporter_is_killed(mut pair: Pair) {
    pair.begin(MANY, LONG_MS);
    pair.exporter.suspend();
    pair.exporter.kill();
    let error = pair.importer.ask("end");
    assert!(error.starts_with("ExporterGone of InPull"), "{error}");
    assert!(
        error.contains(&format!("process {} of", pair.exporter.id())) && error.contains(pair.addresses()[0]),
        "{error}"
    );
    pair.let_go();
    pair.importer.finish();
}

/// A pull from a suspended exporter ends by its timeout, and the exporter keeps nothing of it when it continues.
pub fn pull_from_a_suspended_exporter_times_out(mut pair: Pair) {
    let descriptor = pair.begin(MANY, SHORT_MS);
    pair.exporter.suspend();
    let error = pair.importer.ask("end");
    assert!(error.starts_with("Timeout of InPull") && error.contains("suspended"), "{error}");
    pair.let_go();
    pair.exporter.resume();
    // The engine finishes with the destination, and the importer releases the lease.
    eventually(&mut pair.exporter, "holders x", "");
    assert_eq!(pair.open("pulled", 1, LONG_MS, &descriptor), format!("{MANY} B right, copied"));
    assert_eq!(pair.exporter.ask("close x 60000"), "closed");
    pair.finish();
}

/// The lease of an importer ends with its process.
pub fn lease_ends_when_the_importer_is_killed(mut pair: Pair) {
    pair.begin(MANY, LONG_MS);
    pair.importer.suspend();
    let holders = pair.exporter.ask("holders x");
    assert!(holders.starts_with(&format!("{} ", pair.importer.id())), "{holders}");
    assert!(holders.ends_with(&format!(" on {}", pair.addresses()[1])), "{holders}");
    pair.importer.kill();
    eventually(&mut pair.exporter, "holders x", "");
    assert_eq!(pair.exporter.ask("close x 60000"), "closed");
    pair.exporter.finish();
}

/// An error of the exporter is not one of permissions, and the next request may succeed.
pub fn error_of_the_exporter_keeps_its_kind(mut pair: Pair) {
    let descriptor = pair.exporter.ask("share x 64 1");
    assert_eq!(pair.exporter.ask("fail-registration"), "set");
    let open = format!("open pulled 1 {LONG_MS} {descriptor}");
    let error = pair.importer.ask(&open);
    assert!(error.starts_with("Refused OutOfMemory of InPull"), "{error}");
    assert!(error.contains("the registration fails"), "{error}");
    let copied = pair.importer.ask(&open);
    assert!(copied.starts_with("64 B right"), "{copied}");
    pair.finish();
}

/// The memory of a dropped export stays allocated and registered until the importer has finished.
pub fn dropped_export_is_kept_until_the_pull_has_finished(mut pair: Pair) {
    // Also if the exporter frees memory that others hold: an engine reads addresses, and nothing revokes that.
    let closes = ["close", "free"];
    let closes = if is_mock() { &closes[..] } else { &closes[..1] };
    if !is_mock() {
        eprintln!(
            "skipped: memory is freed although others hold it; the backend refuses that for all importers"
        );
    }
    for close in closes {
        pair.begin(MANY, LONG_MS);
        pair.importer.suspend();
        let answer = pair.exporter.ask(&format!("{close} x 0"));
        assert!(answer.starts_with("StillHeld"), "{answer}");
        pair.importer.resume();
        pair.let_go();
        assert_eq!(pair.importer.ask("end"), format!("{MANY} B right, copied"), "{close}");
    }
    pair.finish();
}

/// The lease of a silent importer ends after the time limit of its transfer and a grace period.
pub fn lease_of_a_silent_importer_ends(mut pair: Pair) {
    pair.begin(64 << 20, SHORT_MS);
    pair.importer.suspend();
    assert_ne!(pair.exporter.ask("holders x"), "");
    let waited = after_a_while(&mut pair.exporter, "holders x", "");
    assert!(waited > Duration::from_secs(10), "{waited:?}");
    assert_eq!(pair.exporter.ask("close x 60000"), "closed");
}

/// Repeated pulls leave no files open, no memory and no lease.
pub fn repeated_pulls_leave_nothing_over(mut pair: Pair, count: usize) {
    let descriptor = pair.exporter.ask("share x 4096 1");
    let pulls = |pair: &mut Pair, count: usize| {
        // An answer has a time limit, within which a slow machine cannot copy all.
        for begun in (0..count).step_by(1000) {
            let count = (count - begun).min(1000);
            let answer = pair.importer.ask(&format!("many {count} 1 {LONG_MS} {descriptor}"));
            assert_eq!(answer, "4096 B right, copied");
        }
        eventually(&mut pair.exporter, "holders x", "");
    };
    pulls(&mut pair, 50);
    let before = pair.resources();
    pulls(&mut pair, count);
    pair.check_resources(&before);
    assert_eq!(pair.exporter.ask("close x 60000"), "closed");
    pair.finish();
}

/// Lists the cases as tests, with a function that starts processes.
#[macro_export]
macro_rules! cases {
    (between hosts: $start:expr; $($case:ident $(($($argument:expr),+))?),+ $(,)?) => {
        $(
            #[test]
            fn $case() {
                let Some(pair) = $crate::Pair::between_hosts($start) else { return };
                $crate::$case(pair $($(, $argument)+)?);
            }
        )+
    };
    // Those of two processes of one host, for every engine.
    (all: $start:expr; $lengths:expr, $rings:expr, pulls: $pulls:expr, publications: $publications:expr) => {
        $crate::cases! {
            $start;
            pulled_bytes_are_those_of_the_exporter($lengths),
            state_dict_is_pulled,
            pull_into_existing_memory_writes_the_tensors_alone,
            memory_of_a_failed_pull_into_is_kept_as_long_as_it_is_written,
            progress_is_reported,
            memory_of_another_host_is_pulled,
            stale_descriptors_are_refused,
            error_of_the_exporter_keeps_its_kind,
            further_pulls_use_the_same_connection,
            kept_connections_are_limited,
            forked_child_has_no_connection,
            pull_waits_until_the_bytes_are_ready,
            pull_fails_when_the_exporter_is_killed,
            pull_from_a_suspended_exporter_times_out,
            lease_ends_when_the_importer_is_killed,
            dropped_export_is_kept_until_the_pull_has_finished,
            lease_of_a_silent_importer_ends,
            repeated_pulls_leave_nothing_over($pulls),
            ring_publications_arrive_in_order($rings),
            ring_of_another_host_is_pulled,
            ring_writer_waits_for_a_slow_reader,
            ring_reader_reports_the_death_of_the_writer,
            ring_reader_reports_the_death_of_the_writer_in_a_copy,
            ring_reader_reports_a_suspended_writer,
            ring_writer_continues_when_the_reader_is_killed,
            ring_reader_that_is_suspended_is_dismissed,
            ring_reader_is_dismissed,
            ring_leaves_nothing_over($publications),
        }
    };
    ($start:expr; $($case:ident $(($($argument:expr),+))?),+ $(,)?) => {
        $(
            #[test]
            fn $case() {
                let Some(pair) = $crate::Pair::start($start) else { return };
                $crate::$case(pair $($(, $argument)+)?);
            }
        )+
    };
}
