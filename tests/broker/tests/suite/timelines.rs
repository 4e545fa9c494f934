//! Timelines: streams of two processes that wait for each other, and what becomes of them when one goes.

use std::os::fd::OwnedFd;
use std::time::Duration;

use device_ipc_broker_tests::{
    Answer, CUDA, Child, Connection, DEADLINE, DESCRIPTORS, Forged, FromExporter, PINNING, Received,
    ToExporter, agent, eventually, hand_over_late_bytes, open_request, take_timelines,
};

/// The value of the counter of a closed timeline.
const ENDED: u64 = i64::MAX as u64;

/// An exporter with the export `x` of its buffer `x`, and an importer that has it open; both with their timelines.
fn pair(machine: &str) -> (Child, Child) {
    let (mut exporter, mut importer) = (agent!(machine), agent!(machine));
    take_timelines(&mut exporter, &mut importer);
    (exporter, importer)
}

/// The driver's free waits for every stream and holds its lock: nothing that needs the driver could free the stream.
#[test]
fn stream_resumes_while_a_free_waits_for_it() {
    for machine in [PINNING, CUDA] {
        let (mut exporter, importer) = pair(machine);
        exporter.share("other 4096");
        exporter.ok("wait x 1");
        exporter.send("close other 15000");
        // The free has begun: it is what keeps the close from coming back.
        exporter.says_nothing_for(Duration::from_millis(300));
        drop(importer);
        let answer = exporter.receive();
        assert_eq!(answer, Answer::Done(String::new()));
        exporter.fails("check x", "ImporterGone");
    }
}

/// A machine whose third process cannot open events, as where `/dev/shm` is not shared.
const NO_OPENED_EVENTS: &str = "devices=2;fault=open_event:1:205";

#[test]
fn ready_bytes_whose_event_does_not_open_use_a_counter() {
    for place in ["stream:0", "home"] {
        let (mut exporter, mut importer) = (agent!(PINNING), agent!(NO_OPENED_EVENTS));
        hand_over_late_bytes(&mut exporter, &mut importer, place);
    }
}

#[test]
fn bytes_that_never_get_ready_fail_at_exporter_exit() {
    let (mut exporter, mut importer) = (agent!(PINNING), agent!(NO_OPENED_EVENTS));
    let late = exporter.share("late 4096 gate=closed");
    importer.send(&format!("open late {late} timeout=30000"));
    eventually("the importer waits", 1, || exporter.holders("late"));
    exporter.kill();
    match importer.receive() {
        Answer::Failed(failure) => assert_eq!(failure.kind, "ExporterGone", "{}", failure.text),
        other => panic!("{other:?}"),
    }
}

#[test]
fn stream_waiting_for_bytes_of_a_killed_exporter_resumes() {
    for machine in [PINNING, DESCRIPTORS, CUDA] {
        let (mut exporter, mut importer) = (agent!(machine), agent!(machine));
        exporter.ok("warm-up");
        importer.ok("warm-up");
        let late = exporter.share("late 4096 gate=closed");
        importer.ok(&format!("open late {late} place=stream:0"));
        importer.ok("on-gone late");
        importer.send("sync");
        importer.says_nothing_for(Duration::from_millis(100));
        exporter.kill();
        let answer = importer.receive();
        assert_eq!(answer, Answer::Done(String::new()), "{machine}");
        importer.event("gone late ExporterGone");
        importer.fails("check-mapping late", "ExporterGone");
        importer.ok("drop late");
    }
}

#[test]
fn event_that_does_not_open_fails_without_timelines() {
    let machine = format!("{NO_OPENED_EVENTS};timelines=off");
    let (mut exporter, mut importer) = (agent!(PINNING), agent!(&machine));
    let late = exporter.share("late 4096 gate=closed");
    importer.fails(&format!("open late {late}"), "Vendor");
    exporter.ok("open-gates");
    exporter.ok("close late 10000");
    // And the reverse: the exporter has no counters to write.
    let (mut exporter, mut importer) = (agent!("devices=2;timelines=off"), agent!(NO_OPENED_EVENTS));
    let late = exporter.share("late 4096 gate=closed");
    importer.fails(&format!("open late {late}"), "Vendor");
    exporter.ok("open-gates");
    let plain = exporter.share("plain 4096");
    importer.ok(&format!("open plain {plain}"));
    importer.ok("timeline plain");
    assert_eq!(exporter.ok("timelines plain 1 10000"), "1");
    exporter.fails("signal plain 1", "Unsupported");
    exporter.ok("signal-now plain 1");
    importer.ok("wait-now plain 1 10000");
}

/// An importer that keeps the page and writes to it after its lease has ended, as the device of a killed process does.
#[test]
fn signal_after_the_lease_ends_is_reverted() {
    let mut exporter = agent!(PINNING);
    exporter.ok("allocate x 4096");
    let descriptor = exporter.share("x 4096 of=x");
    let target = Forged::of(&descriptor);
    let connection = Connection::greeted(&target);
    connection.send(&open_request(&target, 1)).expect("it reads");
    let FromExporter::Opened(grant) = connection.receive_message() else { panic!("it grants") };
    let (slot, page) = words_of(&connection, grant.lease);
    exporter.ok("timelines x 1 10000");
    exporter.ok("wait x 9");
    exporter.send("sync");
    drop(connection);
    // The exporter poisons the counter; then the late signal arrives.
    let words = Words::map(page);
    words.wait_for_the_end(slot);
    words.write_importers(slot, 3);
    let answer = exporter.receive();
    assert_eq!(answer, Answer::Done(String::new()));
    eventually("the late signal is taken back", ENDED, || words.importers(slot));
    exporter.fails("check x", "ImporterGone");
}

fn words_of(connection: &Connection, lease: u64) -> (u32, OwnedFd) {
    connection.send(&ToExporter::Timeline { request: 2, lease, ready: false }).expect("it reads");
    let Received::Packet(bytes, fds) = connection.receive(DEADLINE) else { panic!("it answers") };
    let Ok((FromExporter::Timeline { request: 2, page: 0, slot, base: 0 }, [])) =
        postcard::take_from_bytes(&bytes)
    else {
        panic!("not as it is documented: {bytes:?}")
    };
    (slot, fds.into_iter().next().expect("the page comes along"))
}

/// The page as `docs/spec/protocol.md` has it: slots of 256 bytes; the importer's counter is at byte 128 of its slot.
struct Words(std::fs::File);

impl Words {
    fn map(page: OwnedFd) -> Self {
        Self(page.into())
    }

    fn importers(&self, slot: u32) -> u64 {
        use std::os::unix::fs::FileExt;
        let mut bytes = [0; 8];
        self.0.read_exact_at(&mut bytes, u64::from(slot) * 256 + 128).expect("the page is that long");
        u64::from_ne_bytes(bytes)
    }

    fn write_importers(&self, slot: u32, value: u64) {
        use std::os::unix::fs::FileExt;
        self.0
            .write_all_at(&value.to_ne_bytes(), u64::from(slot) * 256 + 128)
            .expect("the page can be written");
    }

    fn wait_for_the_end(&self, slot: u32) {
        eventually("the word is ended", ENDED, || self.importers(slot));
    }
}

#[test]
fn request_for_counters_of_a_foreign_lease_is_refused() {
    let mut exporter = agent!(PINNING);
    let descriptor = exporter.share("x 4096");
    let target = Forged::of(&descriptor);
    let connection = Connection::greeted(&target);
    connection.send(&ToExporter::Timeline { request: 1, lease: 1, ready: true }).expect("it reads");
    connection.is_closed_within(DEADLINE);
    assert_eq!(exporter.ok("nothing"), "");
}
