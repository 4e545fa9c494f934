//! Copies through host memory, with processes that die, are stopped, lie or release in the middle of one.

mod tensors;

use std::time::Duration;

use device_ipc_broker_tests::{
    ASCEND, CUDA, Census, Child, Connection, DEADLINE, Forged, FromExporter, PINNING, REVOKING, Refusal,
    Stage, ToExporter, advance_until, agent, eventually, kill_points, settle,
};
use device_ipc_core::Descriptor;

/// The shortest chunk.
const CHUNK: u64 = 64 << 10;
/// A region of ten chunks, the last of them short.
const REGION: u64 = 9 * CHUNK + 5;

/// The time after which an importer that takes no chunk makes room for others.
const SILENCE: Duration = Duration::from_secs(10);

/// An exporter with short chunks, and a region with contents; the sum of these.
fn exporter(machine: &str, dies_at: Option<&str>) -> (Child, Descriptor, String) {
    let mut exporter = agent!(machine, dies_at: dies_at);
    exporter.ok(&format!("staging-limits {CHUNK} 1000000000"));
    let (descriptor, sum) = share(&mut exporter, "x");
    (exporter, descriptor, sum)
}

fn share(exporter: &mut Child, name: &str) -> (Descriptor, String) {
    let descriptor = exporter.share(&format!("{name} {REGION}"));
    exporter.ok(&format!("open own {descriptor}"));
    exporter.ok("pattern own");
    let sum = exporter.ok("checksum own");
    exporter.ok("drop own");
    (descriptor, sum)
}

/// The resources of a process that a copy could leave behind.
fn rest(child: &mut Child) -> (u64, u64, u64, Census) {
    // Pending teardown is complete.
    child.ok("close-unused 10000");
    let mut census = child.census();
    census.threads.clear();
    (child.counter("leases"), child.counter("staging_bytes"), child.allocated(), census)
}

fn has_no_more_than(before: &(u64, u64, u64, Census), now: &(u64, u64, u64, Census)) -> bool {
    now.0 <= before.0 && now.1 <= before.1 && now.2 <= before.2 && !now.3.exceeds(&before.3)
}

/// The machines of these that are here: Ascend's is a library that a bundle for a machine with GPUs does not hold.
fn built<const N: usize>(machines: [&'static str; N]) -> impl Iterator<Item = &'static str> {
    machines.into_iter().filter(|machine| {
        let here = *machine != ASCEND || device_ipc_sim_ascendcl::library().is_ok();
        if !here {
            println!("skipped: {machine}: its simulator was not built beside the tests");
        }
        here
    })
}

/// Returns the resources of a process once earlier copies have ended on its side and it is idle.
fn settled(child: &mut Child) -> (u64, u64, u64, Census) {
    settle([child]);
    let rest = rest(child);
    assert_eq!(
        (rest.0, rest.3.of_kind("/memfd:device-ipc-staging (deleted)")),
        (0, 0),
        "leases, host memory"
    );
    rest
}

/// The command that opens a copy on device 0.
fn copy_of(descriptor: &impl std::fmt::Display) -> String {
    format!("open y {descriptor} place=device:0 copying=always")
}

#[test]
fn copy_has_the_bytes_and_leaves_nothing() {
    for machine in built([PINNING, REVOKING, CUDA, ASCEND]) {
        let (mut exporter, descriptor, sum) = exporter(machine, None);
        let mut importer = agent!(machine);
        let copy = |importer: &mut Child| {
            let opened = importer.ok(&copy_of(&descriptor));
            assert!(opened.ends_with(&format!(" {REGION}")), "{machine}: {opened}");
            assert_eq!(importer.ok("checksum y"), sum, "{machine}");
            importer.ok("drop y");
        };
        // What is made once is made sooner or later, some of it where a copy begins while another is taken down; what each copy
        // leaves behind grows for ever.
        let mut before = None;
        let stays = (0..10).any(|_| {
            (0..5).for_each(|_| copy(&mut importer));
            let now = (settled(&mut exporter), settled(&mut importer));
            before.replace(now.clone()) == Some(now)
        });
        assert!(stays, "{machine}: what the exporter and the importer have: {before:?}");
    }
}

#[test]
fn exporter_after_importer_deaths_during_copies_is_clean() {
    for machine in built([PINNING, CUDA, ASCEND]) {
        let (mut exporter, descriptor, sum) = exporter(machine, None);
        let mut living = agent!(machine);
        for _ in 0..2 {
            living.ok(&copy_of(&descriptor));
            living.ok("drop y");
        }
        let die = |point: &str| {
            let mut importer = agent!(machine, dies_at: Some(point));
            importer.send(&copy_of(&descriptor));
            importer.is_killed();
        };
        // A driver keeps a buffer for each copy that began while others were torn down, and how many are torn down at a time
        // depends on the load. A resource that each death leaves behind grows with every pass.
        let mut before = None;
        let stays = (0..5).any(|_| {
            for point in kill_points("importer", "staging-") {
                // At its first visit, and in the middle of the chunks.
                for visit in if point.ends_with("chunk") { vec![1, 4] } else { vec![1] } {
                    die(&format!("{point}={visit}"));
                }
            }
            let now = settled(&mut exporter);
            let stays = before.as_ref().is_some_and(|before| has_no_more_than(before, &now));
            before = Some(now);
            stays
        });
        assert!(stays, "{machine}: the resources of the exporter grow with each pass: {before:?}");
        living.ok(&copy_of(&descriptor));
        assert_eq!(living.ok("checksum y"), sum, "{machine}: it serves others as before");
    }
}

#[test]
fn importer_after_exporter_deaths_during_copies_is_clean() {
    for machine in built([PINNING, CUDA, ASCEND]) {
        let mut importer = agent!(machine);
        let (mut living, descriptor, sum) = exporter(machine, None);
        for _ in 0..2 {
            importer.ok(&copy_of(&descriptor));
            importer.ok("checksum y");
            importer.ok("drop y");
        }
        let die = |importer: &mut Child, point: &str| {
            let (mut dying, descriptor, _) = exporter(machine, Some(point));
            importer.fails(&(copy_of(&descriptor) + " timeout=60000"), "ExporterGone");
            dying.is_killed();
        };
        // As above.
        die(&mut importer, "exporter:staging-chunk=1");
        let before = settled(&mut importer);
        for point in kill_points("exporter", "staging-") {
            for visit in if point.ends_with("chunk") { vec![1, 4] } else { vec![1] } {
                let point = format!("{point}={visit}");
                die(&mut importer, &point);
                assert_eq!(settled(&mut importer), before, "{machine} {point}");
            }
        }
        importer.ok(&copy_of(&descriptor));
        assert_eq!(importer.ok("checksum y"), sum, "{machine}: it copies from others as before");
        eventually("holders", 0, || living.holders("x"));
    }
}

/// A copy by hand.
struct ByHand {
    connection: Connection,
    lease: u64,
    next: u64,
}

impl ByHand {
    fn begin(descriptor: &Descriptor) -> Self {
        let forged = Forged::of(descriptor);
        let connection = Connection::greeted(&forged);
        connection.send(&ToExporter::Stage(forged.stage(1, &[]))).expect("it reads");
        let FromExporter::Staging { request: 1, lease, chunk_bytes: CHUNK, bytes: REGION } =
            connection.receive_message()
        else {
            panic!("no copy of ten chunks")
        };
        Self { connection, lease, next: 0 }
    }

    fn ask(&self, lease: u64, chunk: u64) {
        let request = chunk.wrapping_add(100);
        self.connection.send(&ToExporter::StageNext { request, lease, chunk }).expect("it reads");
    }

    fn answer(&mut self) -> FromExporter {
        self.ask(self.lease, self.next);
        self.next += 1;
        self.connection.receive_message()
    }

    #[track_caller]
    fn takes_the_next(&mut self) {
        let chunk = self.next;
        let bytes = CHUNK.min(REGION - chunk * CHUNK);
        assert_eq!(self.answer(), FromExporter::Staged { request: chunk + 100, chunk, bytes });
    }

    fn release(&self) {
        self.connection.send(&ToExporter::release(self.lease)).expect("it reads");
    }
}

#[test]
fn exporter_of_a_copy_is_one_chunk_ahead() {
    let (mut exporter, descriptor, _) = exporter(PINNING, None);
    let before = exporter.calls("copy");
    let mut copy = ByHand::begin(&descriptor);
    for chunk in 0..10_u64 {
        // The chunk that is asked for next has been submitted; the one after it would overwrite what is being taken.
        let submitted = (chunk + 1).min(10);
        eventually(&format!("copies before chunk {chunk}"), before + submitted, || exporter.calls("copy"));
        copy.takes_the_next();
    }
    eventually("copies", before + 10, || exporter.calls("copy"));
    assert_eq!(exporter.counter("staged_chunks_total"), 10);
    assert_eq!(
        exporter.counter("staged_chunks_ahead_total"),
        10,
        "each was submitted before it was asked for"
    );
    copy.release();
    eventually("holders", 0, || exporter.holders("x"));
}

#[test]
fn chunks_out_of_order_close_the_connection() {
    let (mut exporter, descriptor, sum) = exporter(PINNING, None);
    let forged = Forged::of(&descriptor);
    let ends = |what: &str, break_rules: &dyn Fn(&mut ByHand)| {
        let mut copy = ByHand::begin(&descriptor);
        copy.takes_the_next();
        break_rules(&mut copy);
        println!("{what}");
        copy.connection.is_closed_within(DEADLINE);
    };
    ends("the same chunk again", &|copy| copy.ask(copy.lease, 0));
    ends("a chunk too far", &|copy| copy.ask(copy.lease, 2));
    ends("no chunk at all", &|copy| copy.ask(copy.lease, u64::MAX));
    ends("another one's lease", &|copy| copy.ask(copy.lease + 1, 1));
    ends("past the end", &past_the_end);
    ends("after the lease", &|copy| {
        copy.release();
        copy.ask(copy.lease, 1);
    });
    let wrong = Connection::greeted(&forged);
    wrong.send(&ToExporter::Stage(Stage { token: [9; 16], ..forged.stage(1, &[]) })).expect("it reads");
    let refused = FromExporter::Refused { request: 1, refusal: Refusal::WrongToken };
    assert_eq!(wrong.receive_message(), refused);
    eventually("holders", 0, || exporter.holders("x"));
    eventually("host memory", 0, || exporter.counter("staging_bytes"));
    let mut importer = agent!(PINNING);
    importer.ok(&copy_of(&descriptor));
    assert_eq!(importer.ok("checksum y"), sum);
}

fn past_the_end(copy: &mut ByHand) {
    for _ in 1..10 {
        copy.takes_the_next();
    }
    copy.ask(copy.lease, 10);
}

#[test]
fn export_dropped_during_a_copy_is_copied_completely() {
    let (mut exporter, descriptor, _) = exporter(PINNING, None);
    let mut copy = ByHand::begin(&descriptor);
    copy.takes_the_next();
    exporter.ok("drop x");
    let FromExporter::Dropped { .. } = copy.connection.receive_message() else { panic!("no notice") };
    for _ in 1..10 {
        copy.takes_the_next();
    }
    assert_eq!(exporter.counter("exports"), 1, "the copy keeps it");
    copy.release();
    eventually("exports", 0, || exporter.counter("exports"));
}

#[test]
fn borrowed_memory_freed_during_a_copy_is_stale() {
    let mut exporter = agent!(PINNING);
    exporter.ok(&format!("staging-limits {CHUNK} 1000000000"));
    exporter.ok(&format!("allocate b {REGION}"));
    let descriptor: Descriptor = exporter.ok("share-borrowed x b").parse().expect("a descriptor");
    let mut copy = ByHand::begin(&descriptor);
    copy.takes_the_next();
    exporter.ok("free b");
    // Another block takes its place.
    exporter.ok(&format!("allocate c {REGION}"));
    // The chunk that was ahead may have been copied before.
    let answers = [copy.answer(), copy.answer()];
    let stale = |answer: &FromExporter| {
        matches!(answer, FromExporter::Refused { refusal: Refusal::Stale { .. }, .. })
    };
    assert!(stale(&answers[1]), "{answers:?}");
    copy.release();
    let mut importer = agent!(PINNING);
    importer.fails(&copy_of(&descriptor), "StaleGeneration");
    eventually("host memory", 0, || exporter.counter("staging_bytes"));
    eventually("holders", 0, || exporter.holders("x"));
}

#[test]
fn region_over_several_allocations_is_copied_completely() {
    const MACHINE: &str = "devices=2;peers=none;neighbours=on";
    let mut exporter = agent!(MACHINE);
    exporter.ok(&format!("staging-limits {CHUNK} 1000000000"));
    // Allocations that are no multiple of a chunk, from the middle of the first on.
    let descriptor = exporter.ok("share-many x 5 86016 from=1001");
    exporter.ok(&format!("open x {descriptor}"));
    exporter.ok("pattern x");
    let sum = exporter.ok("checksum x");
    let mut importer = agent!(MACHINE);
    let opened = importer.ok(&copy_of(&descriptor));
    assert!(opened.ends_with(&format!(" {}", 5 * 86016 - 1001)), "{opened}");
    assert_eq!(importer.ok("checksum y"), sum);
}

#[test]
fn copy_without_device_memory_fails_and_returns_the_lease() {
    let (mut exporter, descriptor, _) = exporter(PINNING, None);
    let mut importer = agent!("devices=2;memory=256KiB");
    importer.fails(&copy_of(&descriptor), "OutOfMemory");
    eventually("holders", 0, || exporter.holders("x"));
    eventually("host memory", 0, || exporter.counter("staging_bytes"));
}

#[test]
fn copy_from_a_stopped_exporter_times_out_and_is_returned() {
    let (exporter, descriptor, sum) = exporter(PINNING, None);
    let mut importer = copies_after_a_timeout(exporter, &descriptor);
    assert_eq!(importer.ok("checksum y"), sum);
}

/// Stops the exporter while an importer asks for a copy. Returns the importer with the next copy.
fn copies_after_a_timeout(mut exporter: Child, descriptor: &Descriptor) -> Child {
    let mut importer = agent!(PINNING);
    importer.ok(&copy_of(descriptor));
    importer.ok("drop y");
    exporter.stop();
    let text = importer.fails(&(copy_of(descriptor) + " timeout=300"), "Timeout");
    assert!(text.contains("300 ms") && text.contains("stopped"), "{text}");
    exporter.resume();
    eventually("holders", 0, || exporter.holders("x"));
    eventually("host memory", 0, || exporter.counter("staging_bytes"));
    importer.ok(&copy_of(descriptor));
    importer
}

#[test]
fn stopped_copying_importer_yields_to_waiting_importers() {
    let (mut exporter, descriptor, sum) = exporter(PINNING, None);
    // Room for one.
    exporter.ok(&format!("staging-limits {CHUNK} 1"));
    exporter.ok("advance 0");
    let mut standing = ByHand::begin(&descriptor);
    standing.takes_the_next();
    let mut importer = agent!(PINNING);
    std::thread::scope(|scope| {
        let copy = scope.spawn(|| importer.ok(&copy_of(&descriptor)));
        let silent = advance_until(&mut exporter, || copy.is_finished());
        assert!(silent >= SILENCE, "it lost its place after {silent:?}");
    });
    assert_eq!(importer.ok("checksum y"), sum);
    let FromExporter::Refused { refusal: Refusal::Failed { detail, .. }, .. } = standing.answer() else {
        panic!("it was to lose its place")
    };
    assert!(detail.contains("waited for room"), "{detail}");
    standing.release();
    eventually("holders", 0, || exporter.holders("x"));
}

/// To unpin pages, drivers wait for streams. One that waits for a timeline may wait for what the library's worker does next.
#[test]
fn copy_behind_a_waiting_stream_does_not_block_the_worker() {
    const MACHINE: &str = "devices=2;memory=1GiB";
    const LARGE: u64 = 17 << 20;
    let mut exporter = agent!(MACHINE);
    let mut importer = agent!(MACHINE);
    let timeline = exporter.share("t 4096");
    let descriptor = exporter.share(&format!("x {LARGE}"));
    importer.ok(&format!("open t {timeline}"));
    importer.ok("timeline t");
    exporter.ok("timelines t 1 10000");
    importer.ok("wait t 1");
    for number in 0..10 {
        importer.ok(&format!("open y{number} {descriptor} place=device:0 copying=always"));
    }
    importer.ok("close-unused 5000");
    exporter.ok("close-unused 5000");
    exporter.ok("signal t 1");
    importer.ok("sync");
    eventually("holders", 0, || exporter.holders("x"));
}
