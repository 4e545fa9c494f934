//! Descriptors whose exporter is not there, not any longer, or somewhere else: each gets its own error, or works.

use device_ipc_broker_tests::{
    Child, DESCRIPTORS, Directory, Forged, Identity, PINNING, agent, can_start_through, eventually,
};

#[test]
fn dropped_export_is_gone_in_its_own_process() {
    let mut process = agent!(PINNING);
    let descriptor = process.share("x 4096");
    let altered = Forged::of(&descriptor).with_token([3; 16]).finish();
    process.fails(&format!("open y {altered}"), "NotPermitted");
    process.ok("drop x");
    process.fails(&format!("open y {descriptor}"), "ExportDropped");
}

#[test]
fn mappings_that_share_a_lease_keep_their_own_descriptors() {
    for machine in [PINNING, DESCRIPTORS] {
        let (mut exporter, mut importer) = (agent!(machine), agent!(machine));
        let descriptor = exporter.share("x 4096");
        let whole = importer.ok(&format!("open whole {descriptor}"));
        let part = Forged::of(&descriptor).with_region(1024, 512).finish();
        let opened = importer.ok(&format!("open part {part}"));
        let place = |answer: &str| {
            let (address, len) = answer.split_once(' ').expect("an address and a length");
            let address = address.strip_prefix("0x").expect("in hexadecimal");
            (u64::from_str_radix(address, 16).expect("a number"), len.parse::<u64>().expect("a number"))
        };
        let (base, len) = place(&whole);
        assert_eq!((len, place(&opened)), (4096, (base + 1024, 512)), "{machine}");
        assert_eq!(importer.ok(&format!("open again {descriptor}")), whole, "{machine}");
        for (name, expected) in [("whole", &descriptor), ("part", &part), ("again", &descriptor)] {
            assert_eq!(importer.ok(&format!("descriptor {name}")), expected.to_string(), "{machine} {name}");
        }
        let guess = Forged::of(&descriptor).with_token([3; 16]).finish();
        importer.fails(&format!("open guess {guess}"), "NotPermitted");
        assert_eq!((importer.calls("open"), exporter.holders("x")), (1, 1), "{machine}: one lease");
    }
}

#[test]
fn reused_process_id_is_not_taken_for_the_exporter() {
    let mut exporter = agent!(PINNING);
    let mut importer = agent!(PINNING);
    let descriptor = exporter.share("x 4096");
    let forged = Forged::of(&descriptor);
    let identity = forged.exporter();
    let earlier = Identity { start_time: identity.start_time - 1, ..identity };
    importer.fails(&format!("open x {}", forged.clone().with_exporter(earlier).finish()), "ExporterGone");
    // Somebody else's process id, also the importer's own.
    for pid in [std::process::id(), importer.id()] {
        let other = Identity { pid, start_time: 1, ..identity };
        importer.fails(&format!("open x {}", forged.clone().with_exporter(other).finish()), "ExporterGone");
    }
    // The importer cannot see the difference; the exporter reports it before it receives the token.
    let elsewhere = Identity { pid_namespace: 1, ..earlier };
    importer.fails(&format!("open x {}", forged.clone().with_exporter(elsewhere).finish()), "ExporterGone");
    importer.ok(&format!("open x {descriptor}"));
    assert_eq!(exporter.ok("holders x").split(' ').nth(1), Some("opened=1"));
}

#[test]
fn other_boot_and_other_host_are_distinguished() {
    let mut exporter = agent!(PINNING);
    let mut importer = agent!(PINNING);
    let forged = Forged::of(&exporter.share("x 4096"));
    let identity = forged.exporter();
    let rebooted = Identity { boot: [1; 16], ..identity };
    let text =
        importer.fails(&format!("open x {}", forged.clone().with_exporter(rebooted).finish()), "Rebooted");
    assert!(text.contains("new one"), "{text}");
    let elsewhere = Identity { boot: [1; 16], host: [2; 16], ..identity };
    let text =
        importer.fails(&format!("open x {}", forged.clone().with_exporter(elsewhere).finish()), "OtherHost");
    assert!(text.contains("02020202-0202"), "{text}");
    // Containers of one machine may have different machine ids: the boot id counts.
    let container = Identity { host: [2; 16], ..identity };
    importer.fails(&format!("open x {}", forged.with_exporter(container).finish()), "ExporterGone");
}

#[test]
fn other_network_namespace_fails_with_a_remedy_that_works() {
    if !can_start_through(&["unshare", "--net"]) {
        return;
    }
    let mut exporter = agent!(PINNING);
    let mut importer = agent!(PINNING);
    importer.ok("leave-network");
    let descriptor = exporter.share("x 4096");
    let text = importer.fails(&format!("open x {descriptor}"), "OtherNetworkNamespace");
    assert!(text.contains("DEVICE_IPC_SOCKET_DIR"), "{text}");
    let directory = Directory::new("network");
    exporter.ok(&directory.ipc());
    let descriptor = exporter.share("y 4096");
    assert_eq!(directory.entries(), 1);
    importer.ok(&format!("open y {descriptor}"));
    assert_eq!(importer.ok("touch y"), "1");
    assert_eq!(exporter.holders("y"), 1);
    importer.kill();
    eventually("holders", 0, || exporter.holders("y"));
}

#[test]
fn missing_socket_directory_is_named() {
    let directory = Directory::new("unmounted");
    let mut exporter = agent!(PINNING);
    exporter.ok(&directory.ipc());
    let descriptor = exporter.share("x 4096");
    let mut importer = agent!(PINNING);
    importer.ok(&format!("open x {descriptor}"));
    drop(directory);
    let text = agent!(PINNING).fails(&format!("open x {descriptor}"), "Io");
    assert!(text.contains("mounted"), "{text}");
    importer.ok("touch x");
}

#[test]
fn socket_directory_keeps_no_sockets_of_dead_processes() {
    let directory = Directory::new("dead");
    let share = |name: &str| {
        let mut exporter = agent!(PINNING);
        exporter.ok(&directory.ipc());
        (exporter.share(&format!("{name} 4096")), exporter)
    };
    for _ in 0..3 {
        let (descriptor, mut exporter) = share("x");
        exporter.kill();
        agent!(PINNING).fails(&format!("open x {descriptor}"), "ExporterGone");
    }
    let (descriptor, _exporter) = share("y");
    let mut importer = agent!(PINNING);
    importer.ok(&format!("open y {descriptor}"));
    assert_eq!(directory.entries(), 1, "only the living one's is left");
}

const OWN_PIDS: &[&str] = &["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"];

fn start_time(agent: &mut Child) -> String {
    let identity = agent.ok("identity");
    identity.split_once("start_time: ").expect("it has one").1.to_owned()
}

#[test]
fn open_across_pid_namespaces_succeeds_both_ways() {
    if !can_start_through(OWN_PIDS) {
        return;
    }
    // The side that is inside sees the other as process 0; the side that is outside sees the other's number here.
    for (exporter_through, importer_through) in [(&[][..], OWN_PIDS), (OWN_PIDS, &[][..])] {
        let mut exporter = agent!(DESCRIPTORS, through: exporter_through);
        let mut importer = agent!(DESCRIPTORS, through: importer_through);
        let descriptor = exporter.share("x 4096");
        importer.ok(&format!("open x {descriptor}"));
        importer.ok("on-gone x");
        assert_eq!(importer.ok("touch x"), "1");
        let holders = exporter.ok("holders x");
        let sees_it = exporter_through.is_empty();
        assert_eq!(!holders.contains(" 0:4096:"), sees_it, "{holders}");
        // Deaths are noticed by the socket alone where there is no process to watch.
        importer.kill();
        eventually("holders", 0, || exporter.holders("x"));
        let mut importer = agent!(DESCRIPTORS, through: importer_through);
        importer.ok(&format!("open x {descriptor}"));
        importer.ok("on-gone x");
        exporter.kill();
        importer.event("gone x ExporterGone");
        importer.fails(&format!("open y {descriptor}"), "ExporterGone");
    }
}

#[test]
fn equal_pids_in_two_namespaces_are_two_processes() {
    if !can_start_through(OWN_PIDS) {
        return;
    }
    let mut exporter = agent!(DESCRIPTORS, through: OWN_PIDS);
    let started = start_time(&mut exporter);
    // The mock's machine knows a process by its number and its start alone.
    let mut importer = loop {
        let mut importer = agent!(DESCRIPTORS, through: OWN_PIDS);
        if start_time(&mut importer) != started {
            break importer;
        }
    };
    let descriptor = exporter.share("x 4096");
    assert_eq!(Forged::of(&descriptor).exporter().pid, 1);
    assert!(importer.ok("identity").contains(" pid: 1,"));
    importer.ok(&format!("open x {descriptor}"));
    assert_eq!(importer.ok("touch x"), "1");
    assert_eq!(importer.calls("open"), 1, "it is not its own memory");
    exporter.ok("drop x");
    importer.ok("drop x");
    importer.fails(&format!("open x {descriptor}"), "ExportDropped");
}

#[test]
fn exports_of_two_library_copies_in_one_process_are_distinguished() {
    let mut exporter = agent!(PINNING);
    let (second, first) = (exporter.ok("share-by-second-copy"), exporter.share("x 4096"));
    let mut importer = agent!(PINNING);
    // The two have the same process, and allocations and exports with the same numbers.
    importer.ok(&format!("open a {first}"));
    importer.ok(&format!("open b {second}"));
    assert_eq!((importer.ok("touch a").as_str(), importer.ok("touch a").as_str()), ("1", "2"));
    assert_eq!(importer.ok("touch b"), "2", "it is other memory, with floats of 1.0");
    // A grant is given back to the copy that made it.
    let grant = exporter.ok("grant x 600000");
    assert_eq!(exporter.holders("x"), 2);
    importer.ok(&format!("give-back {grant}"));
    importer.ok("drop b");
    importer.ok("drop a");
    importer.ok("close-unused 10000");
    eventually("holders", 0, || exporter.holders("x"));
    importer.ok(&format!("open b {second}"));
    assert_eq!(importer.ok("touch b"), "3");
}

#[test]
fn export_of_a_second_library_copy_opens_at_its_own_address() {
    let mut process = agent!(PINNING);
    let descriptor = process.ok("share-by-second-copy");
    // Another process need not know.
    agent!(PINNING).ok(&format!("open x {descriptor}"));
    assert_eq!(process.ok(&format!("peek a {descriptor}")), "1", "before this copy has exported");
    process.share("own 4096");
    assert_eq!(process.ok(&format!("peek b {descriptor}")), "1", "and after it");
    assert_eq!(process.calls("open"), 0, "no driver opens its own handle");
    assert!(process.ok("list").contains(":4096:"), "both are listed");
    process.fails(&format!("open c {descriptor} place=device:1"), "Unsupported");
    process.ok(&format!("open c {descriptor} place=device:1 copying=if-needed"));
    assert_eq!(process.ok("touch c"), "2", "a copy");
    process.ok("drop c");
    process.ok("drop a");
    process.ok("drop b");
    process.ok("close-unused 10000");
    assert_eq!(process.counter("leases_idle"), 0);
    assert_eq!(process.ok(&format!("peek a {descriptor}")), "1", "the export lives");
}
