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
