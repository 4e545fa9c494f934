//! The cases of rings that are read from another host, for every engine.

use std::time::Duration;

use device_ipc_test_process::Process;

use crate::pair::{LONG_MS, Pair, SHORT_MS, Start};
use crate::{after_a_while, elsewhere, eventually};

/// The size of a slot whose copy takes a while.
const LARGE: usize = 16 << 20;

impl Pair {
    /// Shares a ring, and joins it by copies.
    fn joined(&mut self, slots: u32, bytes: usize, timeout: u32) -> String {
        let descriptor = self.exporter.ask(&format!("ring x {slots} {bytes}"));
        let joined = self.importer.ask(&format!("join r pulled {timeout} {descriptor}"));
        assert_eq!(joined, "copied from 0");
        assert_eq!(self.exporter.ask("readers x"), "1");
        descriptor
    }

    fn publish(&mut self, count: u64) {
        let answer = self.exporter.ask(&format!("publish x {count} {LONG_MS}"));
        assert_eq!(answer, format!("{count} published"));
    }

    /// Begins to read on another thread of the importer; `end` returns the answer.
    fn begin_read(&mut self, count: u64) {
        self.importer.ask(&format!("begin read r {count} {LONG_MS}"));
    }

    /// Publishes until the writer waits for the reader, and returns the reason.
    fn publish_until_full(&mut self) -> String {
        self.exporter.ask("publish x 100 1000")
    }
}

/// The number of slots of a ring, their size, and the number of publications.
pub type RingShape = (u32, usize, u64);

/// Publications arrive in order with the sequences of the writer, from the one at which the reader joins, until the writer
/// closes the ring.
pub fn ring_publications_arrive_in_order(mut pair: Pair, shapes: &[RingShape]) {
    for (slots, bytes, count) in shapes {
        let descriptor = pair.exporter.ask(&format!("ring x {slots} {bytes}"));
        pair.publish(5);
        let joined = pair.importer.ask(&format!("join r pulled {LONG_MS} {descriptor}"));
        assert_eq!(joined, "copied from 5");
        pair.begin_read(count + 1);
        pair.publish(*count);
        // The reader has not left: the writer waits for the copies only.
        assert_eq!(pair.exporter.ask(&format!("close-ring x {LONG_MS}")), "closed");
        assert_eq!(pair.importer.ask("end"), format!("{count} right, closed"));
        assert_eq!(pair.importer.ask("read r 1 0"), "0 right, closed", "the end is reported repeatedly");
        let late = pair.importer.ask(&format!("join l pulled {LONG_MS} {descriptor}"));
        assert!(late.starts_with("ExportDropped of InPull"), "{late}");
    }
    pair.finish();
}

/// Copies replace the open of a ring only where that is not possible.
pub fn ring_of_another_host_is_pulled(mut pair: Pair) {
    let here = pair.exporter.ask("ring x 2 4096");
    let is_here = pair.hosts.is_none();
    let there = if is_here { elsewhere(&here) } else { here.clone() };
    let mut join = |mode: &str, descriptor: &str| {
        pair.importer.ask(&format!("join {mode} {mode} {LONG_MS} {descriptor}"))
    };
    if is_here {
        assert_eq!(join("pulled-if-needed", &here), "opened from 0");
    }
    assert_eq!(join("pulled-if-needed", &there), "copied from 0");
    let error = join("never", &there);
    assert!(error.starts_with("OtherHost"), "{error}");
    pair.publish(2);
    assert_eq!(pair.importer.ask(&format!("read pulled-if-needed 2 {LONG_MS}")), "2 right");
    assert_eq!(pair.importer.ask("leave pulled-if-needed"), "left");
    eventually(&mut pair.exporter, "readers x", "0");
    pair.finish();
}

/// The writer waits for a reader that does not release its slots, and names it.
pub fn ring_writer_waits_for_a_slow_reader(mut pair: Pair) {
    pair.joined(2, 4096, LONG_MS);
    // Two slots of the ring and two of the reader.
    let answer = pair.publish_until_full();
    assert!(answer.starts_with("4 published, Timeout"), "{answer}");
    let reader = format!("process {} (", pair.importer.id());
    assert!(
        answer.contains(&reader) && answer.contains(&format!(" on {})", pair.addresses()[1])),
        "{answer}"
    );
    for _ in 0..3 {
        assert_eq!(pair.importer.ask(&format!("read r 1 {LONG_MS}")), "1 right");
        let answer = pair.publish_until_full();
        assert!(answer.starts_with("1 published, Timeout"), "{answer}");
    }
    assert_eq!(pair.importer.ask(&format!("read r 4 {LONG_MS}")), "4 right");
    let nothing = pair.importer.ask("read r 1 100");
    assert!(
        nothing.starts_with("0 right, Timeout of Timeout") && nothing.contains("not published"),
        "{nothing}"
    );
    pair.finish();
}

/// The death of the writer is reported after the publications that have arrived.
pub fn ring_reader_reports_the_death_of_the_writer(mut pair: Pair) {
    pair.joined(2, 4096, LONG_MS);
    let answer = pair.publish_until_full();
    assert!(answer.starts_with("4 published, Timeout"), "{answer}");
    pair.exporter.kill();
    for arrived in [2, 0] {
        let error = pair.importer.ask(&format!("read r 5 {LONG_MS}"));
        assert!(error.starts_with(&format!("{arrived} right, ExporterGone of InPull")), "{error}");
        assert!(error.contains(&format!("process {} of", pair.exporter.id())), "{error}");
    }
    eventually(&mut pair.importer, "gone", "true");
    assert_eq!(pair.importer.ask("leave r"), "left");
    pair.importer.finish();
}

/// The writer's death in the middle of a copy is reported, too.
pub fn ring_reader_reports_the_death_of_the_writer_in_a_copy(mut pair: Pair) {
    pair.joined(2, LARGE, LONG_MS);
    pair.begin_read(2);
    pair.publish(1);
    pair.exporter.suspend();
    pair.exporter.kill();
    let error = pair.importer.ask("end");
    assert!(error.contains(" right, ExporterGone of InPull"), "{error}");
    pair.importer.finish();
}

/// A suspended writer is reported after the timeout of the reader.
pub fn ring_reader_reports_a_suspended_writer(mut pair: Pair) {
    pair.joined(2, 4096, SHORT_MS);
    pair.publish(1);
    assert_eq!(pair.importer.ask(&format!("read r 1 {LONG_MS}")), "1 right");
    pair.exporter.suspend();
    let error = pair.importer.ask(&format!("read r 1 {LONG_MS}"));
    assert!(error.starts_with("0 right, Timeout of InPull") && error.contains("suspended"), "{error}");
    assert_eq!(pair.importer.ask("gone"), "false");
    pair.exporter.resume();
    eventually(&mut pair.exporter, "readers x", "0");
    pair.finish();
}

/// The death of a reader frees its slots at once.
pub fn ring_writer_continues_when_the_reader_is_killed(mut pair: Pair) {
    pair.joined(2, 4096, LONG_MS);
    let answer = pair.publish_until_full();
    assert!(answer.starts_with("4 published, Timeout"), "{answer}");
    pair.importer.suspend();
    let holders = pair.exporter.ask("holders x");
    assert!(holders.starts_with(&format!("{} ", pair.importer.id())), "{holders}");
    pair.importer.kill();
    pair.publish(100);
    eventually(&mut pair.exporter, "holders x", "");
    assert_eq!(pair.exporter.ask("close-ring x 60000"), "closed");
    pair.exporter.finish();
}

/// A suspended reader is dismissed after its timeout and a grace period, and learns of it when it continues.
pub fn ring_reader_that_is_suspended_is_dismissed(mut pair: Pair) {
    pair.joined(2, 4096, SHORT_MS);
    pair.importer.suspend();
    let waited = after_a_while(&mut pair.exporter, "readers x", "0");
    assert!(waited > Duration::from_secs(10), "{waited:?}");
    pair.publish(10);
    pair.importer.resume();
    let error = pair.importer.ask(&format!("read r 10 {LONG_MS}"));
    assert!(error.contains(" right, DismissedFromRing of DismissedFromRing"), "{error}");
    pair.finish();
}

/// A reader that the writer dismisses receives what has arrived, and then the error.
pub fn ring_reader_is_dismissed(mut pair: Pair) {
    let descriptor = pair.joined(2, 4096, LONG_MS);
    let answer = pair.publish_until_full();
    assert!(answer.starts_with("4 published, Timeout"), "{answer}");
    assert_eq!(pair.exporter.ask("dismiss x"), "1");
    pair.publish(4);
    let error = pair.importer.ask(&format!("read r 4 {LONG_MS}"));
    assert!(error.starts_with("2 right, DismissedFromRing of DismissedFromRing"), "{error}");
    let joined = pair.importer.ask(&format!("join r pulled {LONG_MS} {descriptor}"));
    assert_eq!(joined, "copied from 8");
    pair.publish(2);
    assert_eq!(pair.importer.ask(&format!("read r 2 {LONG_MS}")), "2 right");
    pair.finish();
}

/// Readers of other hosts and of this one receive every publication.
pub fn ring_has_readers_of_several_hosts(start: Start) {
    let Some(mut pair) = Pair::start(start) else { return };
    let more = [start("importer", ""), start("importer", "")].map(|other| other.expect("as above"));
    let descriptor = pair.joined(3, 4096, LONG_MS);
    let [mut second, mut local] = more;
    assert_eq!(second.ask(&format!("join r pulled {LONG_MS} {descriptor}")), "copied from 0");
    assert_eq!(local.ask(&format!("join r pulled-if-needed {LONG_MS} {descriptor}")), "opened from 0");
    assert_eq!(pair.exporter.ask("readers x"), "3");
    let count = 200;
    let mut readers = [&mut pair.importer, &mut second, &mut local];
    for reader in &mut readers {
        reader.ask(&format!("begin read r {count} {LONG_MS}"));
    }
    assert_eq!(pair.exporter.ask(&format!("publish x {count} {LONG_MS}")), format!("{count} published"));
    for reader in readers {
        assert_eq!(reader.ask("end"), format!("{count} right"));
    }
    [second, local].into_iter().for_each(Process::finish);
    eventually(&mut pair.exporter, "readers x", "1");
    pair.finish();
}

/// Publications leave no files open and no memory, and readers that leave no lease.
pub fn ring_leaves_nothing_over(mut pair: Pair, count: u64) {
    let descriptor = pair.joined(4, 4096, LONG_MS);
    let publish = |pair: &mut Pair, count: u64| {
        pair.begin_read(count);
        pair.publish(count);
        assert_eq!(pair.importer.ask("end"), format!("{count} right"));
    };
    publish(&mut pair, 100);
    let before = pair.resources();
    publish(&mut pair, count);
    pair.check_resources(&before);
    for _ in 0..20 {
        assert_eq!(pair.importer.ask("leave r"), "left");
        let joined = pair.importer.ask(&format!("join r pulled {LONG_MS} {descriptor}"));
        assert_eq!(joined, format!("copied from {}", count + 100));
    }
    eventually(&mut pair.exporter, "readers x", "1");
    pair.check_resources(&before);
    pair.finish();
}
