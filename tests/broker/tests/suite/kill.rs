//! Either side is killed at every point of the protocol, and at random moments; the other side gets the right error in
//! time, and afterwards it has what it had before: no lease, descriptor, mapping or byte more.
//!
//! One survivor lives through all rounds, as that is what shows a leak. `DEVICE_IPC_KILL_ROUNDS` says how many rounds
//! there are at each point.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::{Duration, Instant};

use device_ipc_broker_tests::{
    ASCEND, Answer, Before, CUDA, Child, DESCRIPTORS, PINNING, REVOKING, agent, eventually, kill_points,
    kill_rounds, revokes, settle,
};

/// A pair that has done everything once, so that what is made once has been made.
fn warm(exporter: &mut Child, importer: &mut Child) {
    importer.ok("cache 0 0");
    // Its stream has a thread from its first work on.
    exporter.ok("allocate stream 4096");
    exporter.ok("fill stream 0");
    exporter.ok("sync");
    exporter.ok("free stream");
    let descriptor = exporter.share("warm 4096");
    importer.ok(&format!("open warm {descriptor}"));
    importer.ok("touch warm");
    importer.ok("drop warm");
    exporter.ok("wait-released warm 10000");
    exporter.ok("close warm 10000");
}

/// Warms the survivor up with another process, and waits until it has forgotten that.
fn warm_and_alone(survivor: &mut Child, warm: impl FnOnce(&mut Child, &mut Child), machine: &str) {
    let mut other = agent!(machine);
    warm(survivor, &mut other);
    drop(other);
    settle([survivor]);
}

/// Kills importers at their points, round after round, under one exporter.
fn importers_die(machine: &str) {
    let mut exporter = agent!(machine);
    warm_and_alone(&mut exporter, warm, machine);
    // The first question tries them.
    let timelines = exporter.has_timelines();
    let before = Before::of(&mut exporter);
    for point in
        kill_points("importer", "").into_iter().filter(|point| timelines || !point.ends_with("timeline"))
    {
        for round in 0..kill_rounds(2) {
            let when = format!("{machine} {point} round {round}");
            println!("{when}");
            importer_dies(point, round, machine, &mut exporter);
            before.is_now(&when, &mut exporter);
        }
    }
}

fn importer_dies(point: &'static str, round: usize, machine: &str, exporter: &mut Child) {
    // A point of every open is reached a second time in every other round.
    let connects = matches!(point, "importer:connected" | "importer:said-hello");
    let again = !connects && round % 2 == 1;
    let dies_at = format!("{point}={}", 1 + usize::from(again));
    let mut importer = agent!(machine, dies_at: Some(&dies_at));
    importer.ok("cache 0 0");
    if again {
        let descriptor = exporter.share("first 4096");
        importer.ok(&format!("open first {descriptor}"));
        importer.ok("drop first");
        exporter.ok("close first 10000");
    }
    let descriptor = exporter.share("x 8192");
    let has_opened = matches!(point, "importer:releasing" | "importer:closed" | "importer:released");
    let takes_words = point == "importer:took-timeline";
    let is_granted = has_opened
        || takes_words
        || matches!(point, "importer:granted" | "importer:opened" | "importer:mapped");
    // In every other round the exporter waits for the importer that is going to die.
    let waits = is_granted && round % 4 < 2;
    if has_opened || takes_words {
        importer.ok(&format!("open x {descriptor}"));
        importer.ok("touch x");
        assert_eq!(exporter.holders("x"), 1);
    }
    if takes_words {
        return dies_with_words(point, again, &mut importer, exporter);
    }
    if waits {
        exporter.send("wait-released x 15000");
    }
    importer.send(&if has_opened { "drop x".to_owned() } else { format!("open x {descriptor}") });
    if has_opened {
        // The drop answers at once; another thread closes the mapping.
        if let Answer::Done(_) = importer.receive() {
            importer.is_killed();
        }
    } else {
        importer.is_killed();
    }
    if waits {
        let answer = exporter.receive();
        // It has died with the lease in use, unless its report of the release has arrived before.
        let kind = if let Answer::Failed(refusal) = &answer { &refusal.kind } else { "" };
        let is_reported = kind.is_empty() && point == "importer:released";
        assert!(is_reported || kind == "HolderDied", "{point}: {answer:?}");
    } else {
        eventually(&format!("{point}: holders"), 0, || exporter.holders("x"));
    }
    exporter.ok("close x 10000");
}

/// An importer that has counters, or is about to; the exporter's stream waits for it.
fn dies_with_words(point: &str, again: bool, importer: &mut Child, exporter: &mut Child) {
    if again {
        // The counters of another lease come first: it dies at the second.
        let other = exporter.share("y 4096");
        importer.ok(&format!("open y {other}"));
        importer.ok("timeline y");
    }
    importer.send("timeline x");
    // It may die before the exporter has received its request.
    if let Answer::Done(_) = exporter.ask("timelines x 1 300") {
        // The importer may have gone by now, and then there is nothing to wait for.
        if let Answer::Done(_) = exporter.ask("wait x 1") {
            exporter.ok("sync");
        }
    }
    importer.is_killed();
    eventually(&format!("{point}: holders"), 0, || exporter.holders("x"));
    exporter.ok("forget-timelines");
    exporter.ok("close x 10000");
    if again {
        exporter.ok("close y 10000");
    }
}

/// Kills exporters at their points, round after round, under one importer.
fn exporters_die(machine: &str) {
    let mut importer = agent!(machine);
    warm_and_alone(&mut importer, |importer, exporter| warm(exporter, importer), machine);
    // The first question tries them.
    let timelines = importer.has_timelines();
    if machine == ASCEND {
        // A stream that fails for the first time has buffers set aside beside those that it used.
        let alone = importer.census().descriptors;
        for _ in 0..2 {
            exporter_dies("the first failures", "exporter:dropped", machine, &mut importer);
            eventually("the peer is forgotten", alone.clone(), || importer.census().descriptors);
        }
        // And the stream that has taken its place has its thread.
        importer.ok("warm-up");
    }
    let before = Before::of(&mut importer);
    for point in
        kill_points("exporter", "").into_iter().filter(|point| timelines || !point.ends_with("timeline"))
    {
        for round in 0..kill_rounds(2) {
            let when = format!("{machine} {point} round {round}");
            println!("{when}");
            exporter_dies(&when, point, machine, &mut importer);
            before.is_now(&when, &mut importer);
        }
    }
}

fn exporter_dies(when: &str, point: &'static str, machine: &str, importer: &mut Child) {
    let mut exporter = agent!(machine, dies_at: Some(point));
    if matches!(point, "exporter:exported" | "exporter:published") {
        exporter.send("share x 4096");
        return exporter.is_killed();
    }
    let descriptor = exporter.share("x 4096");
    let open = format!("open x {descriptor} timeout=10000");
    match point {
        "exporter:accepted" | "exporter:answered-hello" | "exporter:leased" | "exporter:granted" => {
            let answer = importer.ask(&open);
            exporter.is_killed();
            match answer {
                Answer::Failed(failure) => assert_eq!(failure.kind, "ExporterGone", "{when}: {failure:?}"),
                // The grant was on its way, and the memory is pinned or not yet taken away.
                Answer::Done(_) if point == "exporter:granted" => {
                    importer.ok("on-gone x");
                    importer.event("gone x ExporterGone");
                    importer.ok("drop x");
                }
                other => panic!("{when}: {other:?}"),
            }
        }
        "exporter:gave-timeline" => {
            importer.ok(&open);
            // Its answer may have been on its way.
            match importer.ask("timeline x") {
                Answer::Failed(failure) => assert_eq!(failure.kind, "ExporterGone", "{when}: {failure:?}"),
                Answer::Done(_) => {
                    exporter.is_killed();
                    if let Answer::Done(_) = importer.ask("wait x 1") {
                        importer.ok("sync");
                    }
                    eventually(
                        when,
                        true,
                        || matches!(importer.ask("check x"), Answer::Failed(failure) if failure.kind == "ExporterGone"),
                    );
                }
                ended @ Answer::Ended(_) => panic!("{when}: {ended:?}"),
            }
            importer.ok("forget-timelines");
            importer.ok("drop x");
        }
        "exporter:released" => {
            importer.ok(&open);
            importer.ok("touch x");
            importer.ok("drop x");
            exporter.is_killed();
        }
        "exporter:dropped" => {
            importer.ok(&open);
            importer.ok("on-gone x");
            exporter.send("drop x");
            exporter.is_killed();
            importer.event("gone x ExporterGone");
            // Pinned memory stays; revoked memory is an error.
            match importer.ask("touch x") {
                Answer::Done(_) => assert!(!revokes(machine), "{when}"),
                Answer::Failed(failure) => {
                    assert!(revokes(machine) && failure.kind == "Vendor", "{when}: {failure:?}");
                }
                ended @ Answer::Ended(_) => panic!("{when}: {ended:?}"),
            }
            importer.ok("drop x");
        }
        "exporter:retiring" | "exporter:retired" => {
            importer.ok(&open);
            exporter.ok("drop x");
            importer.ok("drop x");
            exporter.is_killed();
        }
        unknown => panic!("nobody tests {unknown}"),
    }
    let text = importer.fails(&open, "ExporterGone");
    assert!(text.contains(&exporter.id().to_string()), "{text}");
}

#[test]
fn exporter_after_importer_deaths_has_no_leftovers() {
    importers_die(PINNING);
}

#[test]
fn revoking_exporter_after_importer_deaths_has_no_leftovers() {
    importers_die(REVOKING);
}

#[test]
fn fd_exporter_after_importer_deaths_has_no_leftovers() {
    importers_die(DESCRIPTORS);
}

#[test]
fn cuda_exporter_after_importer_deaths_has_no_leftovers() {
    importers_die(CUDA);
}

#[test]
fn cuda_importer_after_exporter_deaths_has_no_leftovers() {
    exporters_die(CUDA);
}

#[test]
fn ascend_exporter_after_importer_deaths_has_no_leftovers() {
    importers_die(ASCEND);
}

#[test]
fn ascend_importer_after_exporter_deaths_has_no_leftovers() {
    exporters_die(ASCEND);
}

#[test]
fn importer_after_exporter_deaths_has_no_leftovers() {
    exporters_die(PINNING);
}

#[test]
fn revoked_importer_after_exporter_deaths_has_no_leftovers() {
    exporters_die(REVOKING);
}

#[test]
fn fd_importer_after_exporter_deaths_has_no_leftovers() {
    exporters_die(DESCRIPTORS);
}

/// Returns a random moment within this time.
fn random_moment(most: Duration) {
    let random = RandomState::new().build_hasher().finish();
    let moment = most.mul_f64((random % 1000) as f64 / 1000.0);
    let until = Instant::now() + moment;
    // Not awaited but chosen: any moment will do.
    std::thread::sleep(until.saturating_duration_since(Instant::now()));
}

#[test]
fn exporter_after_random_importer_deaths_has_no_leftovers() {
    for machine in [PINNING, REVOKING] {
        let mut exporter = agent!(machine);
        warm_and_alone(&mut exporter, warm, machine);
        let before = Before::of(&mut exporter);
        for round in 0..kill_rounds(2) {
            let descriptor = exporter.share("x 8192");
            let mut importers = [agent!(machine), agent!(machine)];
            for (index, importer) in importers.iter_mut().enumerate() {
                importer.ok(if index == 0 { "cache 0 0" } else { "cache 8 100000000" });
                importer.send(&format!("open-until-error {descriptor}"));
            }
            for importer in &mut importers {
                random_moment(Duration::from_millis(15));
                importer.kill();
            }
            eventually("holders", 0, || exporter.holders("x"));
            exporter.ok("close x 10000");
            before.is_now(&format!("{machine} round {round}"), &mut exporter);
        }
    }
}

#[test]
fn importer_after_random_exporter_deaths_has_no_leftovers() {
    for machine in [PINNING, REVOKING] {
        let mut importer = agent!(machine);
        warm_and_alone(&mut importer, |importer, exporter| warm(exporter, importer), machine);
        let before = Before::of(&mut importer);
        for round in 0..kill_rounds(2) {
            let when = format!("{machine} round {round}");
            println!("{when}");
            let mut exporter = agent!(machine);
            let descriptor = exporter.share("x 8192");
            importer.send(&format!("open-until-error {descriptor}"));
            random_moment(Duration::from_millis(15));
            exporter.kill();
            match importer.receive() {
                Answer::Failed(failure) if failure.kind == "ExporterGone" => {}
                // Work with memory that has been taken away says so itself, or what came behind it on its stream.
                Answer::Failed(failure)
                    if machine == REVOKING
                        && ["Revoked", "Cancelled"].iter().any(|name| failure.text.contains(name)) => {}
                other => panic!("{when}: {other:?}"),
            }
            before.is_now(&when, &mut importer);
        }
    }
}
