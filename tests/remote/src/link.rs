//! Cases of two hosts whose network fails during a copy.

use std::time::{Duration, Instant};

use crate::pair::{LONG_MS, Pair, Resources, SHORT_MS};
use crate::{Host, LONG, after_a_while, eventually};

/// The length of a region whose copy takes longer than the network needs to fail.
const MANY: usize = 256 << 20;

/// The time limit of a copy of [`MANY`] bytes in s, and the grace period of its lease: `docs/spec/remote.md`.
const LEASE_SECONDS: u64 = 1 + (MANY as u64 >> 24) + 10;

fn of_exporter(pair: &Pair) -> &Host {
    &pair.hosts.as_ref().expect("the case needs two hosts").exporter
}

fn of_importer(pair: &Pair) -> &Host {
    &pair.hosts.as_ref().expect("the case needs two hosts").importer
}

/// Starts a copy, disconnects a host while bytes arrive, and waits for the importer's error. Returns the resources of both processes
/// before it, and a time before the importer's last message.
fn lose(pair: &mut Pair, side: fn(&Pair) -> &Host) -> ([Resources; 2], Instant) {
    // The processes of later copies have these files, too.
    let descriptor = pair.exporter.ask("share warm 64 1");
    assert_eq!(pair.open("pulled", 1, LONG_MS, &descriptor), "64 B right, copied");
    assert_eq!(pair.exporter.ask("close warm 60000"), "closed");
    let before = pair.resources();
    let begun = Instant::now();
    pair.begin(MANY, SHORT_MS);
    side(pair).set_link(false);
    let error = pair.importer.ask("end");
    assert!(error.starts_with("Timeout of InPull") && error.contains("cannot be reached"), "{error}");
    pair.let_go();
    (before, begun)
}

/// Another copy succeeds, and both processes have no more than before the failure.
fn check_recovery(pair: &mut Pair, before: &[Resources; 2]) {
    let descriptor = pair.exporter.ask("share y 4096 2");
    let deadline = Instant::now() + LONG;
    loop {
        let answer = pair.open("pulled", 2, LONG_MS, &descriptor);
        // The hosts resolve each other's addresses again; attempts from the time of the failure may fail meanwhile.
        if !answer.contains("No route to host") || Instant::now() > deadline {
            assert_eq!(answer, "4096 B right, copied");
            break;
        }
    }
    assert_eq!(pair.exporter.ask("close y 60000"), "closed");
    pair.check_resources(before);
}

/// A copy whose network fails ends by its timeout. When the network is back, the lease ends, and copies succeed.
pub fn pull_over_a_lost_link_times_out(mut pair: Pair) {
    for side in [of_exporter, of_importer] {
        let (before, _) = lose(&mut pair, side);
        assert_ne!(pair.exporter.ask("holders x"), "", "the importer may still read");
        side(&pair).set_link(true);
        // The engine finishes with the destination, and the importer releases the lease.
        eventually(&mut pair.exporter, "holders x", "");
        assert_eq!(pair.exporter.ask("close x 60000"), "closed");
        check_recovery(&mut pair, &before);
    }
    pair.finish();
}

/// The lease of an importer that cannot be reached ends after the time limit of its transfer and a grace period. The exporter can
/// free the memory then. `gives_up` states whether the engine gives a connection up in that time only: it would read freed memory for the
/// importer if the network came back earlier, so the clock is not advanced.
pub fn lease_ends_while_the_link_is_lost(mut pair: Pair, gives_up: bool) {
    let (before, begun) = lose(&mut pair, of_importer);
    let mut after = begun.elapsed();
    if gives_up {
        eventually(&mut pair.exporter, "holders x", "");
        after = begun.elapsed();
    } else {
        after += after_a_while(&mut pair.exporter, "holders x", "");
    }
    // The exporter counts silence in seconds, and a ping of which a part was lost as one.
    assert!(after + Duration::from_secs(1) >= Duration::from_secs(LEASE_SECONDS), "{after:?}");
    assert_eq!(pair.exporter.ask("close x 60000"), "closed");
    of_importer(&pair).set_link(true);
    check_recovery(&mut pair, &before);
    pair.finish();
}
