//! Processes whose user, program, process id or start time is not what it seems.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::process::Command;

use device_ipc_broker_tests::{
    Answer, CUDA, Child, Connection, DEADLINE, DESCRIPTORS, Directory, FakeServer, Forged, NOBODY, PINNING,
    Received, Setup, ToExporter, agent, agent_program, can_start_through, eventually, is_root, open_request,
};
use device_ipc_core::Descriptor;

/// Removes the entries of a directory.
fn clear(directory: &Directory) {
    for entry in fs::read_dir(directory.path()).expect("it is there").flatten() {
        fs::remove_file(entry.path()).expect("it is ours");
    }
}

/// Returns whether a set-user-id copy of the agent at this path changes its user.
fn changes_user(program: &Path) -> bool {
    let flags = rustix::fs::statvfs(program).expect("it is there").f_flag;
    !flags.contains(rustix::fs::StatVfsMountFlags::NOSUID)
}

#[test]
fn set_user_id_program_ignores_the_socket_directory_variable() {
    let (programs, sockets) = (Directory::new("programs"), Directory::new("sockets"));
    let program = programs.path().join("agent");
    // Written by another process: one that another thread starts meanwhile would inherit the descriptor, and keep the file busy.
    let copied =
        Command::new("cp").arg(agent_program(env!("CARGO_BIN_EXE_broker-agent"))).arg(&program).status();
    assert!(copied.expect("cp starts").success());
    fs::set_permissions(sockets.path(), fs::Permissions::from_mode(0o777)).expect("it is ours");
    let variable = format!("DEVICE_IPC_SOCKET_DIR={}", sockets.path().display());
    let user = [format!("--reuid={NOBODY}"), format!("--regid={NOBODY}")];
    let through = ["env", &variable, "setpriv", &user[0], &user[1], "--clear-groups"];
    if !is_root() || !can_start_through(&through) {
        return;
    }
    if !changes_user(&program) {
        println!("skipped: {} is mounted nosuid", programs.path().display());
        return;
    }
    // Owned by root and started by the user nobody: with the bit it runs as root, and the starter controls the variable.
    chown(&program, Some(0), Some(0)).expect("root may");
    let program = program.to_str().expect("a path in UTF-8");
    for (mode, used) in [(0o755, 1), (0o4755, 0)] {
        fs::set_permissions(program, fs::Permissions::from_mode(mode)).expect("root may");
        let setup = Setup { program, machine: PINNING, through: &through, ..Default::default() };
        let mut exporter = Child::start(&setup);
        exporter.share("x 4096");
        assert_eq!(sockets.entries(), used, "mode {mode:o}");
        clear(&sockets);
    }
}

/// The allow list is one of an `Ipc`, the connection to an exporter is the process's.
#[test]
fn strict_ipc_opens_nothing_over_the_connection_of_a_lax_one() {
    if !is_root() {
        return;
    }
    let mut exporter = agent!(DESCRIPTORS);
    exporter.ok(&format!("ipc allow-uid={NOBODY}"));
    let [x, y] = ["x 4096", "y 4096"].map(|what| exporter.share(what));
    let mut importer = agent!(DESCRIPTORS);
    importer.ok(&format!("become {NOBODY} {NOBODY}"));
    importer.ok("ipc allow-uid=0");
    importer.ok(&format!("open lax {x}"));
    importer.ok("ipc");
    for (what, descriptor) in [("an export that is open", &x), ("another one", &y)] {
        for copying in ["never", "always"] {
            let text = importer.fails(&format!("open strict {descriptor} copying={copying}"), "NotPermitted");
            assert!(text.contains("is served by user 0"), "{what}, copying={copying}: {text}");
        }
    }
    // The mappings of the lax `Ipc` stay open, for it alone.
    importer.ok("touch lax");
    importer.ok("ipc allow-uid=0");
    importer.ok(&format!("open again {x}"));
}

/// A user namespace that maps one user, under the number that stands for all that it does not map.
const AS_OVERFLOW_USER: [&str; 4] = ["unshare", "--user", "--map-user=65534", "--map-group=65534"];

#[test]
fn overflow_user_of_a_namespace_is_not_every_unmapped_user() {
    if !is_root() || !can_start_through(&AS_OVERFLOW_USER) {
        return;
    }
    // For the process inside, user 1000 is user 65534, and so is it itself.
    let mut stranger = agent!(DESCRIPTORS);
    stranger.ok("become 1000 1000");
    stranger.ok("ipc allow-uid=0");
    let descriptor = stranger.share("x 4096");
    for allow in ["", "allow-uid=65534", "allow-gid=65534"] {
        let mut inside = agent!(DESCRIPTORS, through: &AS_OVERFLOW_USER);
        inside.ok(&format!("ipc {allow}"));
        let text = inside.fails(&format!("open x {descriptor}"), "NotPermitted");
        assert!(text.contains("65534") && text.contains("user namespace"), "{allow}: {text}");
    }
    // The other way round.
    let mut inside = agent!(DESCRIPTORS, through: &AS_OVERFLOW_USER);
    let descriptor = inside.share("x 12288");
    let text = stranger.fails(&format!("open y {descriptor}"), "NotPermitted");
    assert!(text.contains("does not allow user"), "{text}");
    assert_eq!(inside.holders("x"), 0);
    let listed = stranger.ok("list");
    assert!(listed.contains(":4096:") && !listed.contains(":12288:"), "{listed}");
}

#[test]
fn overflow_user_outside_a_namespace_is_a_user_like_others() {
    if !is_root() {
        return;
    }
    let [mut exporter, mut importer] = [agent!(DESCRIPTORS), agent!(DESCRIPTORS)];
    for child in [&mut exporter, &mut importer] {
        child.ok(&format!("become {NOBODY} {NOBODY}"));
        child.ok("ipc");
    }
    let descriptor = exporter.share("x 4096");
    importer.ok(&format!("open x {descriptor}"));
    assert_eq!(importer.ok("touch x"), "1");
}

/// `/proc` shows the importer no process of other users.
const HIDDEN: [&str; 5] =
    ["unshare", "-m", "sh", "-c", "mount -t proc -o hidepid=2 proc /proc && exec \"$0\" \"$@\""];

#[test]
fn exporter_that_proc_hides_is_not_taken_for_dead() {
    if !is_root() || !can_start_through(&HIDDEN) {
        return;
    }
    let mut exporter = agent!(DESCRIPTORS);
    exporter.ok(&format!("ipc allow-uid={NOBODY}"));
    let descriptor = exporter.share("x 4096");
    let mut importer = agent!(DESCRIPTORS, through: &HIDDEN);
    importer.ok(&format!("become {NOBODY} {NOBODY}"));
    importer.ok("ipc allow-uid=0");
    importer.ok(&format!("open x {descriptor}"));
    assert_eq!(importer.ok("touch x"), "1");
    importer.ok("on-gone x");
    exporter.kill();
    importer.event("gone x ExporterGone");
    importer.fails(&format!("open y {descriptor}"), "ExporterGone");
}

/// An export that is open: of an exporter outside and an importer that `through` starts, then of the reverse.
fn opened_both_ways(through: &[&str]) -> impl Iterator<Item = (Child, Child, Descriptor)> {
    [(&[][..], through), (through, &[][..])].into_iter().map(|(exporter_through, importer_through)| {
        let mut exporter = agent!(DESCRIPTORS, through: exporter_through);
        let mut importer = agent!(DESCRIPTORS, through: importer_through);
        let descriptor = exporter.share("x 4096");
        importer.ok(&format!("open x {descriptor}"));
        assert_eq!(importer.ok("touch x"), "1");
        (exporter, importer, descriptor)
    })
}

/// A process for which the machine was started at another time.
const OTHER_TIME: [&str; 6] = ["unshare", "--time", "--boottime", "100000", "--fork", "--kill-child"];

#[test]
fn exporter_in_another_time_namespace_is_not_taken_for_dead() {
    if !can_start_through(&OTHER_TIME) {
        return;
    }
    for (mut exporter, mut importer, descriptor) in opened_both_ways(&OTHER_TIME) {
        importer.ok("on-gone x");
        exporter.kill();
        importer.event("gone x ExporterGone");
        importer.fails(&format!("open y {descriptor}"), "ExporterGone");
    }
}

/// The same user outside, user 0 inside.
const AS_ROOT: [&str; 2] = ["unshare", "--map-root-user"];

#[test]
fn process_in_a_namespace_that_maps_its_user_is_the_same_user() {
    if !can_start_through(&AS_ROOT) {
        return;
    }
    opened_both_ways(&AS_ROOT).for_each(drop);
}

/// A process keeps its id and its start time when it runs another program, and none of its exports.
#[test]
fn exports_of_a_process_end_when_it_runs_another_program() {
    let [mut exporter, mut importer] = [agent!(CUDA), agent!(CUDA)];
    // The mock's driver distinguishes processes by id and start time alone.
    let share = format!("x 4096 kind={}", device_ipc_cuda::VIRTUAL_MEMORY.0);
    let before = exporter.share(&share);
    importer.ok(&format!("open before {before}"));
    importer.ok("on-gone before");
    exporter.ok("exec");
    exporter.ok(&format!("ipc machine={CUDA}"));
    importer.event("gone before ExporterGone");
    assert_eq!(importer.ok("touch before"), "1", "the importer pins what it has open");
    let after = exporter.share(&share);
    let forged = [&before, &after].map(Forged::of);
    assert_eq!(forged[0].export(), forged[1].export(), "the new program counts from the start");
    // Although a mapping of the old program's export has the same process and number.
    importer.ok(&format!("open after {after}"));
    assert_eq!(importer.ok("touch after"), "1", "other memory");
    assert_eq!(importer.ok("touch before"), "2");
    importer.fails(&format!("open again {before}"), "ExporterGone");
    exporter.fails(&format!("open own {before}"), "ExporterGone");
}

/// An exporter disconnects a process that guesses tokens. Forged descriptors that a third party sends must not cause that.
#[test]
fn forged_descriptors_of_an_open_export_end_no_lease() {
    let [mut exporter, mut importer] = [agent!(PINNING), agent!(PINNING)];
    let descriptor = exporter.share("x 4096");
    importer.ok(&format!("open x {descriptor}"));
    importer.ok("on-gone x");
    let forged = Forged::of(&descriptor).with_token([3; 16]).finish();
    for _ in 0..40 {
        let text = importer.fails(&format!("open forged {forged}"), "NotPermitted");
        assert!(text.contains("token"), "{text}");
    }
    importer.ok(&format!("open again {descriptor}"));
    assert_eq!((importer.ok("touch x").as_str(), exporter.holders("x")), ("1", 1));
    assert_eq!(importer.take_events(), Vec::<String>::new());
}

#[test]
fn program_name_of_a_peer_cannot_act_on_a_terminal() {
    let mut exporter = agent!(PINNING);
    let descriptor = Forged::of(&exporter.share("x 4096"));
    let connection = Connection::to(descriptor.address()).expect("it listens");
    let program = "\u{1b}]0;a\u{7}\u{1b}[2Jb\r\nc\u{9b}1md\u{202e}e\u{2066}f\u{200b}".to_owned();
    connection.send(&ToExporter::Hello { protocol: 1, program }).expect("it reads");
    connection.receive_message();
    connection.send(&open_request(&descriptor, 1)).expect("it reads");
    eventually("holders", 1, || exporter.holders("x"));
    let holders = exporter.ok("holders x");
    let Answer::Failed(failure) = exporter.ask("wait-released x 1") else { panic!("it is held") };
    for text in [holders, failure.text] {
        let harmful = |c: &char| c.is_control() || ['\u{202e}', '\u{2066}', '\u{200b}'].contains(c);
        assert_eq!(text.chars().find(harmful), None, "{text:?}");
        assert!(text.contains("]0;a"), "the rest is shown: {text:?}");
    }
}

/// As `token_is_not_sent_to_a_server_of_another_user`, where the socket is a file.
#[test]
fn server_of_another_user_at_a_socket_path_receives_nothing() {
    if !is_root() {
        return;
    }
    let directory = Directory::new("path");
    let path = directory.path().join("device-ipc-1-0123456789abcdef");
    let server = FakeServer::at_path(&path);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).expect("it is ours");
    let mut exporter = agent!(PINNING);
    let descriptor = Forged::of(&exporter.share("x 4096")).with_path(&path);
    let mut importer = agent!(PINNING);
    importer.ok(&format!("become {NOBODY} {NOBODY}"));
    importer.send(&format!("open x {}", descriptor.finish()));
    importer.receive_failure("the open", "NotPermitted");
    match server.accept().receive(DEADLINE) {
        Received::Closed => {}
        other => panic!("not even hello is said to a stranger: {other:?}"),
    }
}
