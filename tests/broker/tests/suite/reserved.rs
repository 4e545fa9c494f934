//! Mappings at reserved addresses: either side is killed at each step of a replacement, and steps of the driver fail.

use device_ipc_broker_tests::{
    ASCEND, Answer, Before, CUDA, Child, DESCRIPTORS, PINNING, REVOKING, agent, eventually, kill_points,
    revokes,
};
use device_ipc_core::Descriptor;

const MACHINES: [&str; 5] = [PINNING, REVOKING, DESCRIPTORS, CUDA, ASCEND];

/// The machines on which calls can be made to fail.
const MOCKS: [&str; 3] = [PINNING, REVOKING, DESCRIPTORS];

/// Shares memory of a kind that can be mapped at reserved addresses.
fn share(exporter: &mut Child, machine: &str, name: &str) -> Descriptor {
    // The vendors allocate memory of another kind by default.
    let kind = if matches!(machine, CUDA | ASCEND) { " kind=2" } else { "" };
    exporter.share(&format!("{name} 8192{kind}"))
}

/// Opens the export at reserved addresses, and adds one to its floats.
fn open_reserved(importer: &mut Child, exporter: &mut Child, machine: &str, name: &str) -> String {
    let descriptor = share(exporter, machine, name);
    let mapped = importer.ok(&format!("open m {descriptor} reserved=1"));
    assert_eq!(importer.ok("touch m"), "1");
    mapped
}

/// The exports `old` and `new` have these numbers of holders; a release arrives after the call that caused it.
#[track_caller]
fn are_held(exporter: &mut Child, holders: (usize, usize)) {
    eventually("holders of both versions", holders, || (exporter.holders("old"), exporter.holders("new")));
}

/// An importer that dies within a replacement leaves no lease on the old version or the new one.
#[test]
fn importer_killed_within_a_replacement_has_no_leases() {
    for machine in MACHINES {
        let mut exporter = agent!(machine);
        let mut warm = agent!(machine);
        open_reserved(&mut warm, &mut exporter, machine, "warm");
        warm.kill();
        eventually("the first importer has gone", 0, || exporter.holders("warm"));
        exporter.ok("close warm 10000");
        let before = Before::of(&mut exporter);
        let replaced = kill_points("importer", "replace-").into_iter().map(|point| (point, "replace"));
        let resumed = replaced.clone().filter(|(point, _)| !point.ends_with("unmapped"));
        for (point, call) in replaced.chain(resumed.map(|(point, _)| (point, "resume"))) {
            let mut importer = agent!(machine, dies_at: Some(point));
            open_reserved(&mut importer, &mut exporter, machine, "old");
            let new = share(&mut exporter, machine, "new");
            if call == "resume" {
                importer.ok("suspend m");
            }
            importer.send(&format!("{call} m {new}"));
            importer.is_killed();
            for name in ["old", "new"] {
                eventually(&format!("{point}: holders of {name}"), 0, || exporter.holders(name));
                exporter.ok(&format!("close {name} 10000"));
            }
            before.is_now(&format!("{machine} {point} {call}"), &mut exporter);
        }
    }
}

/// An exporter that dies while it is asked for the next version leaves the old one mapped.
#[test]
fn exporter_killed_within_a_replacement_leaves_the_old_version() {
    for machine in MACHINES {
        let mut importer = agent!(machine);
        let mut first = agent!(machine);
        let mapped = open_reserved(&mut importer, &mut first, machine, "old");
        let mut touched = 1;
        for point in ["exporter:accepted", "exporter:answered-hello", "exporter:leased", "exporter:granted"] {
            let mut exporter = agent!(machine, dies_at: Some(point));
            let new = share(&mut exporter, machine, "new");
            let answer = importer.ask(&format!("replace m {new}"));
            exporter.is_killed();
            match answer {
                Answer::Failed(failure) => assert_eq!(failure.kind, "ExporterGone", "{point}: {failure:?}"),
                // The grant was on its way: the next version of a dead exporter is mapped.
                Answer::Done(_) if point == "exporter:granted" => {
                    let again = first.ok("descriptor old");
                    importer.ok(&format!("replace m {again}"));
                }
                other => panic!("{machine} {point}: {other:?}"),
            }
            touched += 1;
            assert_eq!(importer.ok("touch m"), touched.to_string(), "{machine} {point}");
            assert_eq!(first.holders("old"), 1);
        }
        importer.ok("suspend m");
        eventually("holders of a suspended mapping's export", 0, || first.holders("old"));
        let again = first.ok("descriptor old");
        importer.ok(&format!("resume m {again}"));
        importer.ok("drop m");
        assert!(!mapped.is_empty());
        eventually("mapped bytes", 0, || importer.counter("mapped_bytes"));
        first.ok("close old 10000");
    }
}

/// An exporter that dies while the importer stands at a step of a replacement, be it that of the old version or of the new one, ends
/// the replacement in one of the two versions, and another exporter's takes its place.
#[test]
fn exporter_killed_at_each_step_leaves_one_version() {
    for machine in [PINNING, DESCRIPTORS, CUDA] {
        for point in kill_points("importer", "replace-") {
            for dies in ["old", "new"] {
                let what = format!("{machine} {point} {dies}");
                let mut importer = agent!(machine, dies_at: Some(&format!("{point}!stop")));
                let (mut old, mut new) = (agent!(machine), agent!(machine));
                open_reserved(&mut importer, &mut old, machine, "old");
                let next = share(&mut new, machine, "new");
                importer.send(&format!("replace m {next}"));
                importer.has_stopped();
                if dies == "old" {
                    old.kill()
                } else {
                    new.kill()
                }
                importer.resume();
                let has_new = match importer.receive() {
                    Answer::Done(_) => true,
                    Answer::Failed(failure) if dies == "new" && failure.kind == "ExporterGone" => false,
                    other => panic!("{what}: {other:?}"),
                };
                assert_eq!(importer.ok("touch m"), if has_new { "1" } else { "2" }, "{what}");
                let (survivor, name, has_it) =
                    if dies == "old" { (&mut new, "new", has_new) } else { (&mut old, "old", !has_new) };
                eventually(&what, usize::from(has_it), || survivor.holders(name));
                let last = share(survivor, machine, "last");
                importer.ok(&format!("replace m {last}"));
                assert_eq!(importer.ok("touch m"), "1", "{what}: the survivor's");
                eventually(&what, 0, || survivor.holders(name));
                importer.ok("drop m");
                eventually("mapped bytes", 0, || importer.counter("mapped_bytes"));
            }
        }
    }
}

/// The machine with calls that fail, the first of an operation having the number 1.
fn failing(machine: &str, faults: &str) -> String {
    format!("{machine};fault={faults}")
}

/// A driver that does not map the next version maps the old one again; one that does neither leaves a suspended mapping.
#[test]
fn failed_map_of_the_next_version_restores_the_old_one() {
    for machine in MOCKS {
        // The first version is mapped, the second not, the first again; and later neither.
        let mut importer = agent!(&failing(machine, "map_block:2,map_block:5,map_block:6"));
        let mut exporter = agent!(machine);
        open_reserved(&mut importer, &mut exporter, machine, "old");
        let new = share(&mut exporter, machine, "new");
        let text = importer.fails(&format!("replace m {new}"), "Vendor");
        assert!(text.contains("map_block"), "{text}");
        assert_eq!(importer.ok("touch m"), "2", "the old version");
        eventually("holders of the new version", 0, || exporter.holders("new"));
        // The fourth succeeds.
        importer.ok(&format!("replace m {new}"));
        assert_eq!(importer.ok("touch m"), "1", "the new version");
        are_held(&mut exporter, (0, 1));

        let old = exporter.ok("descriptor old");
        importer.fails(&format!("replace m {old}"), "Vendor");
        importer.fails("touch m", "Suspended");
        are_held(&mut exporter, (0, 0));
        assert_eq!(importer.counter("mapped_bytes"), 0);
        importer.ok(&format!("resume m {old}"));
        assert_eq!(importer.ok("touch m"), "3");
        importer.ok("drop m");
        for name in ["old", "new"] {
            exporter.ok(&format!("close {name} 10000"));
        }
        eventually("mapped bytes", 0, || importer.counter("mapped_bytes"));
    }
}

/// A driver that does not unmap the old version leaves it mapped.
#[test]
fn failed_unmap_of_the_old_version_changes_nothing() {
    let machine = PINNING;
    let mut importer = agent!(&failing(machine, "unmap_blocks:1,unmap_blocks:2"));
    let mut exporter = agent!(machine);
    open_reserved(&mut importer, &mut exporter, machine, "old");
    let new = share(&mut exporter, machine, "new");
    importer.fails(&format!("replace m {new}"), "Vendor");
    assert_eq!(importer.ok("touch m"), "2", "the old version");
    importer.fails("suspend m", "Vendor");
    assert_eq!(importer.ok("touch m"), "3", "the old version");
    eventually("holders of the new version", 0, || exporter.holders("new"));
    importer.ok("suspend m");
    eventually("holders of a suspended mapping's export", 0, || exporter.holders("old"));
}

/// A driver that imports one of several allocations and not the next one changes nothing, and keeps nothing.
#[test]
fn failed_import_of_one_of_several_allocations_changes_nothing() {
    for machine in MOCKS {
        let mut importer = agent!(&failing(machine, "import_memory:5,map_block:9"));
        let mut exporter = agent!(machine);
        let old = exporter.ok("share-blocks old 3 4096 1");
        let new = exporter.ok("share-blocks new 3 4096 1");
        importer.ok(&format!("open m {old} reserved=1"));
        // The second of three is not imported; later the third of three is not mapped.
        let text = importer.fails(&format!("replace m {new}"), "InBundle");
        assert!(text.contains("tensor \"t1\""), "{text}");
        let opens = importer.counter("driver_opens_total") - importer.counter("driver_closes_total");
        assert_eq!(opens, 3, "{machine}");
        importer.ok(&format!("replace m {new}"));
        importer.fails(&format!("replace m {old}"), "Vendor");
        are_held(&mut exporter, (0, 1));
        importer.ok("tensor-bytes m t2");
        importer.ok("drop m");
        eventually("mapped bytes", 0, || importer.counter("mapped_bytes"));
        for name in ["old", "new"] {
            exporter.ok(&format!("close {name} 10000"));
        }
    }
}

/// The callback for the drop of an export ends with its lease, and the next version has its own.
#[test]
fn drop_of_a_replaced_export_is_not_reported() {
    let machine = PINNING;
    let (mut importer, mut exporter) = (agent!(machine), agent!(machine));
    open_reserved(&mut importer, &mut exporter, machine, "old");
    importer.ok("on-dropped m");
    let new = share(&mut exporter, machine, "new");
    importer.ok(&format!("replace m {new}"));
    exporter.ok("drop old");
    importer.ok("on-dropped m");
    exporter.ok("drop new");
    importer.event("dropped m");
    assert_eq!(importer.take_events(), Vec::<String>::new());
    // It stays mapped, as any mapping of a dropped export.
    assert_eq!(importer.ok("touch m"), "1");
    importer.fails(&format!("replace m {new}"), "ExportDropped");
    assert_eq!(importer.ok("touch m"), "2");
}

/// The timeline of a version ends when another one takes its place: no stream waits for ever.
#[test]
fn timeline_of_a_replaced_version_ends() {
    let machine = PINNING;
    let (mut importer, mut exporter) = (agent!(machine), agent!(machine));
    open_reserved(&mut importer, &mut exporter, machine, "old");
    importer.ok("timeline m");
    exporter.ok("timelines old 1 10000");
    exporter.ok("wait old 1");
    exporter.send("sync");
    let new = exporter_of_other(&mut importer);
    let answer = exporter.receive();
    assert_eq!(answer, Answer::Done(String::new()));
    exporter.fails("check old", "LeaseEnded");
    drop(new);
}

/// Another exporter, whose export takes the addresses of the mapping `m`.
fn exporter_of_other(importer: &mut Child) -> Child {
    let mut other = agent!(PINNING);
    let new = other.share("new 8192");
    importer.ok(&format!("replace m {new}"));
    other
}

/// The death of the exporter of the mapped version revokes or keeps the bytes as for other mappings.
#[test]
fn exporter_death_is_that_of_any_mapping() {
    // Ascend's memory of this kind is pinned.
    for machine in MACHINES.into_iter().filter(|machine| *machine != ASCEND) {
        let (mut importer, mut exporter) = (agent!(machine), agent!(machine));
        open_reserved(&mut importer, &mut exporter, machine, "old");
        importer.ok("on-gone m");
        exporter.kill();
        importer.event("gone m ExporterGone");
        let touched = matches!(importer.ask("touch m"), Answer::Done(_));
        assert_eq!(touched, !revokes(machine), "{machine}");
        importer.ok("drop m");
        eventually("mapped bytes", 0, || importer.counter("mapped_bytes"));
    }
}

/// A grant opens the next version also after its export was dropped, once.
#[test]
fn grant_opens_the_next_version_of_a_dropped_export() {
    for machine in MACHINES {
        let (mut importer, mut exporter) = (agent!(machine), agent!(machine));
        open_reserved(&mut importer, &mut exporter, machine, "old");
        let new = share(&mut exporter, machine, "new");
        let third = share(&mut exporter, machine, "third");
        let [grant, spare, unused] =
            ["new", "third", "old"].map(|of| exporter.ok(&format!("grant {of} 600000")));
        exporter.ok("drop new");
        exporter.ok("drop third");
        importer.fails(&format!("replace m {new}"), "ExportDropped");
        let text = importer.fails(&format!("replace-by m {new} {unused}"), "Descriptor");
        assert!(text.contains("another descriptor"), "{text}");
        assert_eq!(importer.ok("touch m"), "2", "{machine}: the old version");
        importer.ok(&format!("replace-by m {new} {grant}"));
        assert_eq!(importer.ok("touch m"), "1", "{machine}: the new version");
        importer.ok("suspend m");
        importer.fails(&format!("replace-by m {new} {grant}"), "GrantEnded");
        importer.ok(&format!("replace-by m {third} {spare}"));
        assert_eq!(importer.ok("touch m"), "1", "{machine}: the third version");
        eventually("exports", 2, || exporter.counter("exports"));
    }
}
