//! Mappings at reserved addresses that follow a keeper, which answers with one version after the other, or dies.

use std::time::Duration;

use device_ipc_broker_tests::{
    ASCEND, Answer, CUDA, Child, DESCRIPTORS, PINNING, REVOKING, agent, eventually, within,
};
use device_ipc_core::front_end::list_keepers;

/// Time for calls that wait for no process.
const AT_ONCE: Duration = Duration::from_secs(5);

const MACHINES: [&str; 5] = [PINNING, REVOKING, DESCRIPTORS, CUDA, ASCEND];

/// Shares memory of a kind that can be mapped at reserved addresses.
fn share(exporter: &mut Child, machine: &str, name: &str, bytes: u64) -> String {
    // The vendors allocate memory of another kind by default.
    let kind = if matches!(machine, CUDA | ASCEND) { " kind=2" } else { "" };
    exporter.share(&format!("{name} {bytes}{kind}")).to_string()
}

/// A keeper with version 1 under this name, and an importer that has it as the mapping `m`, whose first float it has made 1.
fn keeper_and_reader(machine: &str, name: &str, dies_at: Option<&str>) -> (Child, Child) {
    let (keeper, mut reader) = (keeper(machine, name, dies_at), agent!(machine));
    reader.ok(&format!("open-reserved-kept m {name}"));
    assert_eq!(reader.ok("touch m"), "1");
    (keeper, reader)
}

fn keeper(machine: &str, name: &str, dies_at: Option<&str>) -> Child {
    let mut keeper = agent!(machine, dies_at: dies_at);
    share(&mut keeper, machine, "one", 8192);
    keeper.ok(&format!("keep-under one {name}"));
    keeper
}

fn keep_next(keeper: &mut Child, machine: &str, name: &str, version: u64, keep_former: bool) {
    share(keeper, machine, "next", 8192);
    keeper.ok(&format!("keep-next next {name} {version} {}", u8::from(keep_former)));
}

/// Each name is of one test and machine, as all tests run at the same time.
fn unique(test: &str, machine: &str) -> String {
    let place = MACHINES.iter().position(|known| *known == machine).expect("a known machine");
    format!("{test}-{place}-{}", std::process::id())
}

#[test]
fn keeper_is_listed_until_it_ends() {
    let name = unique("listed", PINNING);
    let listed = || {
        let keepers = list_keepers(None).expect("the sockets of this machine");
        keepers.iter().filter(|keeper| keeper.name == name).count()
    };
    assert_eq!(listed(), 0);
    let mut keeper = keeper(PINNING, &name, None);
    assert_eq!(listed(), 1);
    keeper.kill();
    assert_eq!(listed(), 0);
}

#[test]
fn follow_takes_each_version_of_the_keeper() {
    for machine in MACHINES {
        let name = unique("each", machine);
        let (mut keeper, mut reader) = keeper_and_reader(machine, &name, None);
        let address = reader.ok("address m");
        assert_eq!(reader.ok("follow m"), "none", "{machine}: the present version");
        for (version, keep_former, call) in
            [(2, false, "follow m"), (7, true, "follow m 0"), (8, false, "follow m"), (9, true, "follow m")]
        {
            keep_next(&mut keeper, machine, &name, version, keep_former);
            assert_eq!(reader.ok(call), version.to_string(), "{machine}");
            assert_eq!(reader.ok("touch m"), "1", "{machine}: version {version}");
            assert_eq!(reader.ok("address m"), address, "{machine}: version {version}");
            assert_eq!(reader.ok(call), "none", "{machine}: version {version} again");
            eventually("leases", 1, || keeper.counter("leases"));
        }
        reader.ok("drop m");
        eventually("mapped bytes", 0, || reader.counter("mapped_bytes"));
    }
}

/// A follow without a change neither asks the keeper nor its process, which is stopped.
#[test]
fn follow_without_a_change_asks_no_process() {
    let name = unique("unchanged", PINNING);
    let (mut keeper, mut reader) = keeper_and_reader(PINNING, &name, None);
    assert_eq!(reader.ok("follow m"), "none", "the first one asks");
    keeper.stop();
    assert_eq!(within(AT_ONCE, "following", || reader.ok("follow m")), "none");
    keeper.resume();
    // A change of the exporter that is none of the keeper.
    keeper.share("other 4096");
    keeper.ok("drop other");
    assert_eq!(reader.ok("follow m"), "none");
    keep_next(&mut keeper, PINNING, &name, 2, true);
    assert_eq!(reader.ok("follow m"), "2");
}

#[test]
fn follow_to_another_layout_changes_nothing() {
    for machine in MACHINES {
        let name = unique("layout", machine);
        let (mut keeper, mut reader) = keeper_and_reader(machine, &name, None);
        share(&mut keeper, machine, "longer", 16384);
        keeper.ok(&format!("keep-next longer {name} 2 1"));
        let opens = reader.counter("driver_opens_total");
        for _ in 0..2 {
            let text = reader.fails("follow m", "Layout");
            assert!(text.contains("16384"), "{machine}: {text}");
        }
        assert_eq!(reader.counter("driver_opens_total"), opens, "{machine}");
        assert_eq!(reader.ok("touch m"), "2", "{machine}: the former version");
        keep_next(&mut keeper, machine, &name, 3, false);
        eventually("the export that was not opened is freed", 2, || keeper.counter("exports"));
        assert_eq!(reader.ok("follow m"), "3", "{machine}");
    }
}

#[test]
fn follow_of_a_killed_keeper_fails_at_once() {
    for machine in [PINNING, DESCRIPTORS, CUDA] {
        let name = unique("killed", machine);
        let (mut first, mut reader) = keeper_and_reader(machine, &name, None);
        assert_eq!(reader.ok("follow m"), "none");
        first.kill();
        for _ in 0..2 {
            within(AT_ONCE, "following", || reader.fails("follow m", "NoListener"));
        }
        assert_eq!(reader.ok("touch m"), "2", "{machine}: the version of the killed keeper");
        let mut second = keeper(machine, &name, None);
        assert_eq!(reader.ok("follow m"), "1", "{machine}: the next keeper's");
        assert_eq!(reader.ok("touch m"), "1", "{machine}");
        // A keeper that frees its name, and keeps its export.
        assert_eq!(reader.ok("follow m"), "none");
        second.ok(&format!("keep-no-longer {name}"));
        within(AT_ONCE, "following", || reader.fails("follow m", "NoListener"));
        assert_eq!(reader.ok("touch m"), "2", "{machine}");
    }
}

#[test]
fn keeper_killed_within_a_follow_leaves_the_former_version() {
    let points = [
        "acceptor:channel-accepted",
        "acceptor:channel-welcomed",
        "sender:channel-granted",
        "sender:channel-sent",
        "exporter:leased",
        "exporter:granted",
    ];
    for machine in [PINNING, DESCRIPTORS, CUDA] {
        for point in points {
            let name = unique(&point.replace(':', "."), machine);
            // The first visit is that of the open.
            let (mut first, mut reader) = keeper_and_reader(machine, &name, Some(&format!("{point}=2")));
            keep_next(&mut first, machine, &name, 2, true);
            let answer = within(AT_ONCE, point, || reader.ask("follow m"));
            first.is_killed();
            let touched = match answer {
                Answer::Failed(failure) => {
                    assert!(["NoListener", "ExporterGone"].contains(&&*failure.kind), "{point}: {failure:?}");
                    "2"
                }
                // The message, or the grant, was on its way.
                Answer::Done(version)
                    if ["sender:channel-sent", "exporter:granted"].contains(&point) && version == "2" =>
                {
                    "1"
                }
                other => panic!("{machine} {point}: {other:?}"),
            };
            assert_eq!(reader.ok("touch m"), touched, "{machine} {point}");
            let mut second = keeper(machine, &name, None);
            assert_eq!(reader.ok("follow m"), "1", "{machine} {point}");
            eventually("leases", 1, || second.counter("leases"));
            reader.ok("drop m");
            eventually("mapped bytes", 0, || reader.counter("mapped_bytes"));
        }
    }
}

#[test]
fn follow_needs_reserved_memory_of_a_keeper() {
    let name = unique("refused", PINNING);
    let (mut keeper, mut reader) = keeper_and_reader(PINNING, &name, None);
    let other = share(&mut keeper, PINNING, "other", 8192);
    reader.ok(&format!("open plain {other}"));
    let text = reader.fails("follow plain", "Unsupported");
    assert!(text.contains("not reserved"), "{text}");
    reader.ok(&format!("open reserved {other} reserved=1"));
    let text = reader.fails("follow reserved", "Unsupported");
    assert!(text.contains("no keeper"), "{text}");
    reader.ok("suspend m");
    reader.fails("follow m", "Suspended");
    keep_next(&mut keeper, PINNING, &name, 2, false);
    reader.ok(&format!("open-reserved-kept m {name}"));
    assert_eq!(reader.ok("touch m"), "1");
    assert_eq!(reader.ok("follow m"), "none");
    // One that was replaced by another export comes back by the next follow.
    reader.ok(&format!("replace m {other}"));
    assert_eq!(reader.ok("follow m"), "2");
}
