//! Leases ahead: an importer that opens one of many exports of an allocation receives the leases on the next ones with it, and one that
//! opens exports in their order those on exports in other allocations.

use device_ipc_broker_tests::{Child, PINNING, agent, eventually};

const LIMIT: &str = "600000";

/// Exports of parts of one allocation, `x0` and so on, and a grant of each.
struct Parts {
    exporter: Child,
    descriptors: Vec<String>,
    grants: Vec<String>,
}

impl Parts {
    fn of(count: usize) -> Self {
        let mut exporter = agent!(PINNING);
        let text = exporter.ok(&format!("share-parts x {count}"));
        let descriptors = text.split_whitespace().map(str::to_owned).collect();
        let mut parts = Self { exporter, descriptors, grants: Vec::new() };
        parts.grants = (0..count).map(|part| parts.grant(part)).collect();
        parts
    }

    fn grant(&mut self, part: usize) -> String {
        self.exporter.ok(&format!("grant x{part} {LIMIT}"))
    }

    /// Returns the command that opens a part as `yPART` by its first grant.
    fn open(&self, part: usize) -> String {
        format!("open-by y{part} {} {}", self.descriptors[part], self.grants[part])
    }
}

#[test]
fn exports_of_one_allocation_share_requests() {
    let mut parts = Parts::of(300);
    let mut importer = agent!(PINNING);
    for part in 0..300 {
        importer.ok(&parts.open(part));
    }
    assert_eq!(importer.counter("requests_total"), 3, "one, and 128 ahead with it");
    assert_eq!(importer.counter("driver_opens_total"), 1);
    importer.ok("touch y200");
    assert_eq!(parts.exporter.ok("states x299").matches("in use").count(), 1);
    // Each has its own lifetime.
    for part in 0..300 {
        importer.ok(&format!("drop y{part}"));
        if part == 199 {
            (0..200).for_each(|part| drop(parts.exporter.ok(&format!("drop x{part}"))));
            eventually("exports", 100, || parts.exporter.counter("exports"));
        }
    }
    (200..300).for_each(|part| drop(parts.exporter.ok(&format!("drop x{part}"))));
    eventually("exports", 0, || parts.exporter.counter("exports"));
    eventually("mapped", 0, || importer.counter("mapped_bytes"));
    assert_eq!(parts.exporter.counter("leases"), 0);
    assert_eq!(parts.exporter.allocated(), 0);
}

#[test]
fn lease_ahead_keeps_no_memory() {
    let mut parts = Parts::of(3);
    let mut importer = agent!(PINNING);
    importer.ok(&parts.open(0));
    assert_eq!(parts.exporter.counter("leases"), 3);
    importer.ok(&format!("give-back {}", parts.grants[1]));
    parts.exporter.ok("recall x0");
    eventually("grants", 0, || parts.exporter.holders("x1"));
    // Without a grant, the exporter reclaims it.
    parts.exporter.ok("recall x1");
    eventually("leases", 2, || parts.exporter.counter("leases"));
    parts.exporter.ok("drop x1");
    eventually("exports", 2, || parts.exporter.counter("exports"));
    // The importer is notified, and forgets the lease.
    eventually("idle", 1, || importer.counter("imports_idle"));
    importer.fails(&parts.open(1), "GrantEnded");
    // A grant keeps a dropped export, and a lease ahead does not.
    parts.exporter.ok("drop x2");
    eventually("leases", 1, || parts.exporter.counter("leases"));
    eventually("idle", 0, || importer.counter("imports_idle"));
    importer.ok(&parts.open(2));
    importer.ok("drop y2");
    eventually("exports", 1, || parts.exporter.counter("exports"));
}

#[test]
fn nothing_is_left_of_returned_leases() {
    let mut parts = Parts::of(129);
    let plain = parts.exporter.share("plain 256");
    let mut importer = agent!(PINNING);
    importer.ok(&format!("open plain {plain}"));
    importer.ok("cache 0 0");
    importer.idle();
    let before = importer.heap().blocks;
    importer.ok(&parts.open(0));
    importer.ok("drop y0");
    eventually("leases", 1, || parts.exporter.counter("leases"));
    importer.idle();
    let after = importer.heap().blocks;
    assert!(
        after < before + 64,
        "128 leases ahead were returned: {before} blocks on the heap before, {after} after"
    );
}

#[test]
fn recalled_export_opens_ahead_and_is_released_with_its_mapping() {
    let mut parts = Parts::of(2);
    let mut importer = agent!(PINNING);
    importer.ok(&parts.open(0));
    parts.exporter.ok("recall x1");
    assert_eq!(parts.exporter.ok("states x1"), "0:in a message", "the grant, and no lease ahead");
    importer.ok(&parts.open(1));
    assert_eq!(importer.counter("requests_total"), 1);
    // The importer has received the notification now, and gives the grant back.
    eventually("holders", 1, || parts.exporter.holders("x1"));
    assert!(parts.exporter.ok("states x1").contains("in use"));
    importer.ok("drop y1");
    eventually("holders", 0, || parts.exporter.holders("x1"));
}

#[test]
fn close_does_not_wait_for_leases_ahead() {
    let mut parts = Parts::of(2);
    let mut importer = agent!(PINNING);
    importer.ok(&parts.open(0));
    importer.ok(&format!("give-back {}", parts.grants[1]));
    // Also when the importer does not answer.
    parts.exporter.ok("recall x0");
    eventually("grants", 0, || parts.exporter.holders("x1"));
    importer.stop();
    parts.exporter.ok("close x1 10000");
    importer.resume();
    importer.ok("drop y0");
    parts.exporter.ok("close x0 10000");
}

#[test]
fn lease_ahead_ends_with_its_importer() {
    let mut parts = Parts::of(100);
    let mut importer = agent!(PINNING);
    importer.ok(&parts.open(0));
    assert_eq!(parts.exporter.counter("leases"), 100);
    importer.kill();
    eventually("leases", 0, || parts.exporter.counter("leases"));
    // Another process opens what the first one had leases ahead on.
    let mut second = agent!(PINNING);
    (1..100).for_each(|part| drop(second.ok(&parts.open(part))));
    assert_eq!(second.counter("requests_total"), 1);
}

/// Exports of an allocation each, `x0-0` and so on, which the importer opens as `y0` and so on.
struct Allocations {
    exporter: Child,
    opens: Vec<String>,
}

impl Allocations {
    fn of(count: usize) -> Self {
        let mut exporter = agent!(PINNING);
        let share = |part: usize| {
            let descriptor = exporter.ok(&format!("share-parts x{part}- 1")).trim().to_owned();
            let grant = exporter.ok(&format!("grant x{part}-0 {LIMIT}"));
            format!("open-by y{part} {descriptor} {grant}")
        };
        let opens = (0..count).map(share).collect();
        Self { exporter, opens }
    }

    /// Returns an importer whose worker is kept in a callback, and which opens the first `count` then.
    fn importer_without_worker(&mut self, count: usize) -> Child {
        let mut importer = agent!(PINNING);
        let plain = self.exporter.share("plain 256");
        importer.ok(&format!("open plain {plain}"));
        importer.ok("hold-worker plain");
        self.exporter.ok("drop plain");
        importer.event("worker-held");
        importer.ok("drop plain");
        for open in &self.opens[..count] {
            importer.ok(open);
        }
        importer
    }

    /// Drops all exports, and these mappings of the importer; nothing is left then.
    fn end(mut self, mut importer: Child, mappings: std::ops::Range<usize>) {
        mappings.for_each(|part| drop(importer.ok(&format!("drop y{part}"))));
        (0..self.opens.len()).for_each(|part| drop(self.exporter.ok(&format!("drop x{part}-0"))));
        for open in &self.opens {
            let grant = open.split_whitespace().last().expect("a grant");
            importer.ok(&format!("give-back {grant}"));
        }
        eventually("mapped", 0, || importer.counter("mapped_bytes"));
        eventually("exports", 0, || self.exporter.counter("exports"));
        assert_eq!((self.exporter.counter("leases"), self.exporter.allocated()), (0, 0));
    }
}

#[test]
fn allocations_opened_in_order_share_requests() {
    let Allocations { mut exporter, opens } = Allocations::of(100);
    let mut importer = agent!(PINNING);
    for open in &opens {
        importer.ok(open);
    }
    assert_eq!(importer.counter("requests_total"), 8, "of the exports 0, 1, 3, 6, 11, 20, 37 and 70");
    assert_eq!(importer.counter("driver_opens_total"), 100);
    importer.ok("touch y99");
    assert_eq!(exporter.ok("states x99-0").matches("in use").count(), 1);
    // An importer of some opens no others.
    let mut other = agent!(PINNING);
    for part in [50, 10, 12] {
        let descriptor = opens[part].split_whitespace().nth(2).expect("a descriptor");
        let grant = exporter.ok(&format!("grant x{part}-0 {LIMIT}"));
        other.ok(&format!("open-by z{part} {descriptor} {grant}"));
    }
    assert_eq!((other.counter("requests_total"), other.counter("driver_opens_total")), (3, 3));
    drop(other);
    for part in 0..100 {
        importer.ok(&format!("drop y{part}"));
        exporter.ok(&format!("drop x{part}-0"));
    }
    eventually("exports", 0, || exporter.counter("exports"));
    eventually("mapped", 0, || importer.counter("mapped_bytes"));
    assert_eq!((exporter.counter("leases"), exporter.allocated()), (0, 0));
}

#[test]
fn plain_open_and_other_allocations_have_no_leases_ahead() {
    let mut parts = Parts::of(3);
    let others = parts.exporter.ok("share-parts z 2");
    let plain = parts.exporter.share("plain 256");
    let mut importer = agent!(PINNING);
    importer.ok(&format!("open first {}", parts.descriptors[0]));
    assert_eq!(parts.exporter.counter("leases"), 1, "by the descriptor alone");
    importer.ok(&parts.open(1));
    assert_eq!(parts.exporter.counter("leases"), 3, "not of the other allocation, nor twice of x0");
    let grant = parts.exporter.ok(&format!("grant plain {LIMIT}"));
    importer.ok(&format!("open-by p {plain} {grant}"));
    for other in others.split_whitespace() {
        importer.ok(&format!("open other {other}"));
    }
    assert_eq!(importer.counter("requests_total"), 5);
}

#[test]
fn idle_limit_refuses_leases_ahead() {
    let mut parts = Parts::of(10);
    let mut importer = agent!(PINNING);
    importer.ok("cache 4 1000000000");
    importer.ok(&parts.open(0));
    eventually("leases", 5, || parts.exporter.counter("leases"));
    (1..10).for_each(|part| drop(importer.ok(&parts.open(part))));
    importer.ok("touch y9");
    assert_eq!(
        parts.exporter.counter("leases_total"),
        15,
        "none ahead again for an importer that returns them"
    );
    (0..10).for_each(|part| drop(importer.ok(&format!("drop y{part}"))));
    importer.ok("close-unused 10000");
    assert_eq!(importer.counter("mapped_bytes"), 0);
}

#[test]
fn lease_ahead_whose_bytes_are_not_ready_is_returned() {
    let mut exporter = agent!(PINNING);
    let mut importer = agent!(PINNING);
    let mut shared = [String::new(), String::new(), String::new()];
    for (part, text) in shared.iter_mut().enumerate() {
        let ready_on = if part == 2 { "ready-on=0" } else { "" };
        if part == 2 {
            exporter.ok("close-gate 0 closed");
        }
        let descriptor = exporter.ok(&format!("share-parts x{part}- 1 {ready_on}")).trim().to_owned();
        let grant = exporter.ok(&format!("grant x{part}-0 {LIMIT}"));
        *text = format!("open-by y{part} {descriptor} {grant}");
    }
    // The second request brings a lease on the third export.
    importer.ok(&shared[0]);
    importer.ok(&shared[1]);
    assert_eq!(exporter.counter("leases_total"), 3);
    eventually("leases", 2, || exporter.counter("leases"));
    importer.idle();
    assert_eq!((importer.counter("driver_opens_total"), importer.counter("imports_idle")), (3, 0));
    (0..2).for_each(|part| drop(importer.ok(&format!("drop y{part}"))));
    importer.ok("close-unused 10000");
    assert_eq!(importer.counter("mapped_bytes"), 0);
    exporter.ok("open-gates");
    importer.ok(&shared[2]);
    importer.ok("touch y2");
}

#[test]
fn worker_opens_the_next_allocations() {
    let allocations = Allocations::of(100);
    let mut importer = agent!(PINNING);
    for open in &allocations.opens[..4] {
        importer.ok(open);
    }
    // The requests of the exports 1 and 3 brought 2, and 4 and 5.
    eventually("driver opens", 6, || importer.counter("driver_opens_total"));
    eventually("idle", 2, || importer.counter("imports_idle"));
    assert_eq!(importer.counter("requests_total"), 3);
    importer.ok(&allocations.opens[4]);
    importer.ok("touch y4");
    assert_eq!((importer.counter("requests_total"), importer.counter("driver_opens_total")), (3, 6));
    allocations.end(importer, 0..5);
}

#[test]
fn opens_do_not_wait_for_a_busy_worker() {
    let mut allocations = Allocations::of(100);
    let mut importer = allocations.importer_without_worker(100);
    importer.ok("touch y99");
    assert_eq!(importer.counter("requests_total"), 9, "8, and that of the plain export");
    importer.ok("free-worker");
    importer.idle();
    assert_eq!(importer.counter("driver_opens_total"), 101, "none twice");
    allocations.end(importer, 0..100);
}

#[test]
fn close_unused_returns_what_is_not_open_yet() {
    let mut allocations = Allocations::of(100);
    let mut importer = allocations.importer_without_worker(7);
    assert_eq!(allocations.exporter.counter("leases"), 1 + 11, "the plain one, 0 to 6, and 4 ahead");
    importer.fails("close-unused 0", "Timeout");
    importer.ok("free-worker");
    importer.idle();
    assert_eq!(importer.counter("driver_opens_total"), 1 + 8, "the job of 7 was before the close");
    assert_eq!(importer.counter("imports_idle"), 0);
    eventually("leases", 7, || allocations.exporter.counter("leases"));
    importer.ok(&allocations.opens[7]);
    importer.ok("drop y7");
    allocations.end(importer, 0..7);
}

#[test]
fn forced_close_returns_what_is_not_open_yet() {
    let mut allocations = Allocations::of(20);
    let mut importer = allocations.importer_without_worker(4);
    let descriptor = allocations.opens[0].split_whitespace().nth(2).expect("a descriptor");
    assert_eq!(importer.ok(&format!("close-mappings-of {descriptor}")), "5", "4, and the plain one");
    importer.ok("free-worker");
    importer.idle();
    assert_eq!(importer.counter("driver_opens_total"), 1 + 4);
    allocations.end(importer, 0..4);
}

#[test]
fn exporter_dies_before_its_leases_ahead_are_open() {
    let mut allocations = Allocations::of(20);
    let mut importer = allocations.importer_without_worker(4);
    allocations.exporter.kill();
    importer.fails(&allocations.opens[4], "ExporterGone");
    importer.ok("free-worker");
    importer.idle();
    (0..4).for_each(|part| drop(importer.ok(&format!("drop y{part}"))));
    eventually("mapped", 0, || importer.counter("mapped_bytes"));
    assert_eq!(importer.counter("imports_idle"), 0);
}

#[test]
fn lease_taken_back_is_not_opened() {
    let mut allocations = Allocations::of(20);
    let mut importer = allocations.importer_without_worker(4);
    allocations.exporter.ok("drop x5-0");
    importer.ok("free-worker");
    importer.idle();
    assert_eq!(importer.counter("driver_opens_total"), 1 + 5, "the plain one, and 0 to 4");
    // The grant has kept it.
    importer.ok(&allocations.opens[5]);
    importer.ok("touch y5");
    assert_eq!(importer.counter("driver_opens_total"), 1 + 6);
    importer.ok("drop y5");
    allocations.exporter.ok("share-parts x5- 1");
    allocations.end(importer, 0..4);
}

#[test]
fn mapping_with_reserved_addresses_keeps_no_leases_ahead() {
    let mut allocations = Allocations::of(20);
    let mut importer = agent!(PINNING);
    let first = allocations.exporter.share("first 256");
    importer.ok(&format!("open reserved {first} reserved=1"));
    for open in &allocations.opens[..4] {
        let [_, _, descriptor, grant] = open.split(' ').collect::<Vec<_>>()[..] else { panic!("{open}") };
        importer.ok(&format!("replace-by reserved {descriptor} {grant}"));
        // Before the next request: the former lease and one ahead are returned without an answer.
        eventually("leases", 1, || allocations.exporter.counter("leases"));
    }
    assert_eq!(
        allocations.exporter.counter("leases_total"),
        1 + 4 + 1,
        "none ahead again once one was returned"
    );
    importer.idle();
    assert_eq!(importer.counter("imports_idle"), 0);
    importer.ok("drop reserved");
    allocations.exporter.ok("drop first");
    allocations.end(importer, 4..4);
}
