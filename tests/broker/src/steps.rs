//! Steps that several test files share.

use crate::child::Child;

/// Shares the buffer `x` of the exporter, opens it as `x` and takes both timelines.
#[track_caller]
pub fn take_timelines(exporter: &mut Child, importer: &mut Child) {
    // A driver may load a kernel at its first use, behind work that waits for the peer.
    exporter.ok("warm-up");
    importer.ok("warm-up");
    exporter.ok("allocate x 4096");
    exporter.ok("fill x 0");
    let descriptor = exporter.share("x 4096 of=x");
    importer.ok(&format!("open x {descriptor}"));
    importer.ok("timeline x");
    assert_eq!(exporter.ok("timelines x 1 10000"), "1");
}

/// Opens bytes that the exporter's stream has yet to write: on a stream the open does not wait, and the bytes are waited for in any
/// case.
#[track_caller]
pub fn hand_over_late_bytes(exporter: &mut Child, importer: &mut Child, place: &str) {
    if place.starts_with("stream") {
        let blocked = exporter.share("blocked 4096 gate=closed");
        importer.ok(&format!("open blocked {blocked} place={place}"));
        assert_eq!(exporter.ok("open-gates"), "true", "the host has waited");
        importer.ok("drop blocked");
        exporter.ok("close blocked 10000");
    }
    let late = exporter.share("late 4096 gate=soon");
    importer.ok(&format!("open late {late} place={place}"));
    importer.ok("touch late");
    assert_eq!(exporter.ok("gates-are-open"), "true", "neither the stream nor the host has waited");
    importer.ok("drop late");
    exporter.ok("wait-released late 10000");
    exporter.ok("close late 10000");
}

/// Hands one sequence over through a new ring.
#[track_caller]
pub fn hand_over_through_ring(writer: &mut Child, reader: &mut Child) {
    let descriptor = writer.ok("ring 2");
    reader.ok(&format!("ring-join {descriptor}"));
    writer.ok("ring-publish 1");
    reader.ok("ring-read 1 10000");
    reader.ok("ring-leave");
    writer.ok("ring-close 10000");
}
