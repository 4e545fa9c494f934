//! Peers that write anything into shared counters: the process that orders its streams by its own counters continues, and a
//! ring continues without a reader that breaks the rules.

use std::time::Duration;

use device_ipc_broker_tests::{
    Answer, CUDA, Census, Child, Connection, Forged, FromExporter, PINNING, ToExporter, agent, eventually,
    open_request,
};

/// The offset of the counters of slot 0 in bytes (docs/spec/protocol.md).
const FROM_EXPORTER: u32 = 64;
const FROM_IMPORTER: u32 = 128;

/// The value of the counter of a closed timeline.
const ENDED: u64 = i64::MAX as u64;

fn warm_up(child: &mut Child) {
    // A driver may load a kernel, at its first use, behind work that is waiting for another process.
    child.ok("warm-up");
}

/// The writer of a ring of three slots, and two readers that have read two of its four publications.
struct Scene {
    writer: Child,
    honest: Child,
    hostile: Child,
}

impl Scene {
    fn new(machine: &str) -> Self {
        let [mut writer, mut honest, mut hostile] = [agent!(machine), agent!(machine), agent!(machine)];
        [&mut writer, &mut honest, &mut hostile].into_iter().for_each(warm_up);
        let descriptor = writer.ok("ring 3");
        honest.ok(&format!("ring-join {descriptor}"));
        hostile.ok(&format!("ring-join {descriptor}"));
        writer.ok("ring-readers 2 10000");
        writer.ok("ring-publish 2");
        for reader in [&mut honest, &mut hostile] {
            assert_eq!(reader.ok("ring-read 2 10000"), "2");
        }
        // The writer has seen both releases.
        eventually("no reader is behind", String::new(), || writer.ok("ring-behind"));
        writer.ok("ring-publish 2");
        writer.ok("sync");
        Self { writer, honest, hostile }
    }

    /// The ring has dismissed the hostile reader, and serves the honest one.
    #[track_caller]
    fn goes_on_without_the_hostile(mut self, when: &str) {
        assert_eq!(self.writer.ok("ring-count"), "1", "{when}");
        let text = self.hostile.fails("ring-next-ahead", "DismissedFromRing");
        assert!(text.contains(&self.writer.id().to_string()), "{when}: {text}");
        self.honest.send("ring-read 12 15000");
        self.writer.ok("ring-publish 5");
        self.writer.ok("ring-publish-now 5");
        assert_eq!(self.honest.receive(), Answer::Done("14".into()), "{when}");
    }
}

#[test]
fn ring_reader_that_releases_the_unpublished_is_dismissed() {
    for machine in [PINNING, CUDA] {
        for value in [5, 1000, 1 << 62, ENDED, u64::MAX] {
            let mut scene = Scene::new(machine);
            scene.hostile.ok(&format!("scribble {FROM_IMPORTER} {value}"));
            scene.goes_on_without_the_hostile(&format!("{machine}: {value}"));
        }
    }
}

#[test]
fn ring_reader_that_takes_a_release_back_is_dismissed() {
    for value in [0, 1] {
        let mut scene = Scene::new(PINNING);
        scene.hostile.ok(&format!("scribble {FROM_IMPORTER} {value}"));
        scene.goes_on_without_the_hostile(&value.to_string());
    }
}

#[test]
fn ring_reader_that_resets_its_publications_stops_no_host() {
    let Scene { mut writer, mut honest, mut hostile } = Scene::new(PINNING);
    hostile.ok("ring-next-ahead");
    hostile.ok("ring-release");
    hostile.ok("ring-next-ahead");
    hostile.ok("ring-release");
    hostile.ok("sync");
    hostile.ok(&format!("scribble {FROM_EXPORTER} 0"));
    honest.send("ring-read 3 15000");
    writer.ok("ring-publish-now 1");
    assert_eq!(honest.receive(), Answer::Done("5".into()));
}

#[test]
fn ring_writer_that_resets_a_release_blocks_no_reader_stream() {
    for machine in [PINNING, CUDA] {
        let [mut writer, mut reader] = [agent!(machine), agent!(machine)];
        [&mut writer, &mut reader].into_iter().for_each(warm_up);
        let descriptor = writer.ok("ring 3");
        reader.ok(&format!("ring-join {descriptor}"));
        writer.ok("ring-publish 2");
        assert_eq!([reader.ok("ring-next-ahead"), reader.ok("ring-next-ahead")], ["0", "1"]);
        reader.ok("ring-release");
        reader.ok("sync");
        writer.ok(&format!("scribble {FROM_IMPORTER} 0"));
        reader.ok("ring-release elsewhere=1");
    }
}

/// The first listens, under a name.
fn connect(one: &mut Child, other: &mut Child, under: &str) {
    other.send(&format!("connect {under} c 20000"));
    one.ok(&format!("accept {under} c 20000"));
    assert!(matches!(other.receive(), Answer::Done(_)));
}

#[test]
fn channel_receiver_that_resets_ready_blocks_no_sender_stream() {
    for machine in [PINNING, CUDA] {
        let under = format!("hostile-words-{}-{}", std::process::id(), machine.len());
        let [mut sender, mut receiver] = [agent!(machine), agent!(machine)];
        sender.ok("warm-up");
        sender.ok(&format!("listen {under}"));
        let of_a_channel = |census: Census| census.of_kind("socket") + census.of_kind("pidfd");
        let without = of_a_channel(sender.census());
        // Threads and descriptors that are made once.
        connect(&mut sender, &mut receiver, &under);
        sender.ok("drop-channel c");
        receiver.ok("drop-channel c");
        eventually("the first channel has ended", without, || of_a_channel(sender.census()));
        let before = sender.census();
        connect(&mut sender, &mut receiver, &under);
        sender.ok("send c 5 20000 ready-on=0");
        sender.ok("sync");
        assert_eq!(receiver.ok("receive c m 20000"), "5 0");
        // The listening peer's counter of slot 0.
        receiver.ok(&format!("scribble {FROM_EXPORTER} 0"));
        sender.ok("send c 5 20000 ready-on=0");
        sender.ok("sync");
        receiver.ok(&format!("scribble {FROM_EXPORTER} 0"));
        drop(receiver);
        sender.ok("drop-channel c");
        eventually("the channel has left nothing", before.descriptors.clone(), || {
            sender.census().descriptors
        });
    }
}

/// The importer rewrites the counter after its lease has ended, and before the exporter's stream reaches its wait.
#[test]
fn importer_that_reopens_a_closed_counter_blocks_no_stream() {
    for machine in [PINNING, CUDA] {
        let [mut exporter, mut importer, mut gate] = [agent!(machine), agent!(machine), agent!(machine)];
        [&mut exporter, &mut importer, &mut gate].into_iter().for_each(warm_up);
        for (name, child) in [("x", &mut importer), ("gate", &mut gate)] {
            let descriptor = exporter.share(&format!("{name} 4096"));
            child.ok(&format!("open {name} {descriptor}"));
            child.ok(&format!("timeline {name}"));
            assert_eq!(exporter.ok(&format!("timelines {name} 1 10000")), "1");
        }
        let other = exporter.share("other 4096");
        exporter.ok("wait gate 1");
        exporter.ok("wait x 9");
        importer.ok("drop x");
        exporter.ok("wait-released x 10000");
        // The exporter answers this behind everything that it does for the release.
        importer.ok(&format!("open other {other}"));
        importer.ok(&format!("scribble {FROM_IMPORTER} 0"));
        gate.ok("signal-now gate 1");
        exporter.send("sync");
        exporter.says_nothing_for(Duration::from_millis(200));
        drop(importer);
        let answer = exporter.receive();
        assert_eq!(answer, Answer::Done(String::new()), "{machine}");
    }
}

/// A lease and its place: slot and base.
#[track_caller]
fn lease_with_words(connection: &Connection, target: &Forged) -> (u64, u32, u64) {
    connection.send(&open_request(target, 1)).expect("it reads");
    let FromExporter::Opened(grant) = connection.receive_message() else { panic!("no lease") };
    connection
        .send(&ToExporter::Timeline { request: 2, lease: grant.lease, ready: false })
        .expect("it reads");
    match connection.receive_message() {
        FromExporter::Timeline { request: 2, page: 0, slot, base } => (grant.lease, slot, base),
        other => panic!("no words, but {other:?}"),
    }
}

#[test]
fn counters_of_a_live_lease_cannot_be_returned() {
    let mut exporter = agent!(PINNING);
    let target = Forged::of(&exporter.share("x 4096"));
    let connection = Connection::greeted(&target);
    let lease = || lease_with_words(&connection, &target);
    let [first, second] = [lease(), lease()];
    assert_eq!([(first.1, first.2), (second.1, second.2)], [(0, 0), (1, 0)]);
    let release = |lease, words, late| {
        connection.send(&ToExporter::Release { lease, words, late }).expect("it reads");
    };
    let unused = (0, 0, 0);
    // The first is still in use, as it says, and the second has not been released.
    release(first.0, None, vec![(second.0, unused)]);
    let third = lease();
    assert_eq!((third.1, third.2), (2, 0));
    // Now the first is returned, with a wait for 41; twice, which returns nothing else.
    release(third.0, None, vec![(first.0, (41, 0, 0)), (first.0, unused)]);
    let fourth = lease();
    assert_eq!((fourth.1, fourth.2), (0, 41));
    // Its slot has another lease by now.
    release(second.0, Some(unused), vec![(first.0, unused)]);
    let [fifth, sixth] = [lease(), lease()];
    assert_eq!([(fifth.1, fifth.2), (sixth.1, sixth.2)], [(1, 1), (3, 0)]);
    // A signal that is announced and never arrives costs that slot alone.
    release(fourth.0, Some((0, 5, 0)), Vec::new());
    release(fifth.0, Some((u64::MAX, 0, u64::MAX)), Vec::new());
    assert_eq!(lease().1, 4);
    assert_eq!(exporter.holders("x"), 2);
}

#[test]
fn timelines_of_one_importer_take_few_descriptors() {
    let mut exporter = agent!(PINNING);
    exporter.ok("limit-descriptors 256");
    let target = Forged::of(&exporter.share("x 4096"));
    let connection = Connection::greeted(&target);
    let mut timelines = 0;
    let refusal = loop {
        connection.send(&open_request(&target, 1)).expect("it reads");
        let FromExporter::Opened(grant) = connection.receive_message() else { panic!("no lease") };
        let request = ToExporter::Timeline { request: 2, lease: grant.lease, ready: false };
        connection.send(&request).expect("it reads");
        match connection.receive_message() {
            FromExporter::Timeline { .. } => timelines += 1,
            other => break other,
        }
    };
    assert!(matches!(refusal, FromExporter::Refused { .. }), "{refusal:?}");
    // Four pages of 256 slots: a 64th of the limit.
    assert_eq!(timelines, 1024);
    assert_eq!(exporter.census().of_kind("device-ipc-words"), 4);
    // Others have timelines.
    let mut importer = agent!(PINNING);
    let descriptor = exporter.share("y 4096");
    importer.ok(&format!("open y {descriptor}"));
    importer.ok("timeline y");
}

#[test]
fn importer_that_writes_lease_states_harms_its_own_lease_only() {
    let (mut exporter, mut honest, mut hostile) = (agent!(PINNING), agent!(PINNING), agent!(PINNING));
    let descriptor = exporter.share("x 4096");
    for importer in [&mut honest, &mut hostile] {
        importer.ok(&format!("open x {descriptor}"));
    }
    // No state, all of them, and that of a lease which the exporter has ended: it keeps the lease.
    for value in [u64::MAX, 3 << 32 | 3, 4 << 32 | 4, 1 << 63] {
        hostile.ok(&format!("scribble-states 0 {value}"));
        exporter.ok("recall x");
        assert_eq!(exporter.holders("x"), 2, "{value:#x}");
    }
    // Idle, while it uses the memory: it has returned the lease, and the other importer has not.
    hostile.ok(&format!("scribble-states 0 {}", 2_u64 << 32 | 2));
    exporter.ok("recall x");
    assert_eq!(exporter.ok("states x"), format!("{}:in use", honest.id()));
    honest.ok("touch x");
    honest.ok("release x");
    exporter.ok("close x 10000");
    // What it does with the lease from now on concerns no other process.
    hostile.ok("drop x");
    hostile.ok("nothing");
    let next = exporter.share("next 4096");
    for importer in [&mut honest, &mut hostile] {
        importer.ok(&format!("open next {next}"));
        importer.ok("touch next");
    }
}
