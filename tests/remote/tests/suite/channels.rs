//! Channels between hosts: order, grants, the deaths of both processes, and peers that do not follow the protocol.

#[path = "channels/hostile.rs"]
mod hostile;

use std::process::Command;
use std::time::{Duration, Instant};

use device_ipc_remote_tests::{
    Ends, Resources, dropped_export_of_a_message_is_pulled, eventually, eventually_files, socket_engine,
};
use device_ipc_test_process::{Process, command_of_test};

const KEY: &str = "the-key-of-these-tests";

device_ipc_remote_tests::processes! {
    channel_end: channel_end, || socket_engine("sockets");
}

fn process() -> Process {
    start("channel_end", "").expect("the engine needs nothing")
}

fn start(role: &str, arguments: &str) -> Option<Process> {
    let mut process = Process::of_test(&format!("{}::{role}", module_path!()), &[]);
    assert_eq!(process.ask(&format!("load {arguments}")), "loaded");
    Some(process)
}

fn connected() -> (Process, Process) {
    let Ends { near, far } = Ends::start(start).expect("the engine needs nothing");
    (near, far)
}

/// A shell of other namespaces that runs a script, and then the command behind the arguments.
fn shell(namespaces: &[&str], script: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(namespaces[0]);
    command
        .args(&namespaces[1..])
        .args(["sh", "-c", &format!("{script} && exec \"$@\""), "sh"])
        .args(arguments);
    command
}

/// Starts a process by a script in a user namespace. `None`, with the reason, if the system does not permit the script.
fn scripted(namespaces: &[&str], script: &str, arguments: &[&str]) -> Option<Process> {
    let tried = shell(namespaces, script, arguments).arg("true").output();
    if !tried.as_ref().is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: {namespaces:?} is not permitted here: {tried:?}");
        return None;
    }
    Some(started(shell(namespaces, script, arguments)))
}

/// Starts a process by a shell.
fn started(mut shell: Command) -> Process {
    let test = command_of_test(&format!("{}::channel_end", module_path!()));
    shell.arg(test.get_program()).args(test.get_args()).env("RUST_TEST_THREADS", "2");
    let mut process = Process::start("a process of other namespaces", &mut shell);
    assert_eq!(process.ask("load "), "loaded");
    process
}

/// Starts a process that has another host id and boot id, in a mount namespace. `None`, with the reason, if the system does not
/// permit that.
fn process_of_another_host() -> Option<Process> {
    const OTHERS: &str = "mount --bind \"$1\" /etc/machine-id && mount --bind \"$2\" /proc/sys/kernel/random/boot_id && shift 2";
    let directory = std::env::temp_dir().join(format!("device-ipc-channels-{}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("a directory for temporary files");
    let files =
        [("host", "00112233445566778899aabbccddeeff\n"), ("boot", "00112233-4455-6677-8899-aabbccddeeff\n")];
    let files = files.map(|(name, text)| {
        let file = directory.join(name);
        std::fs::write(&file, text).expect("it can be written");
        file
    });
    let files = files.each_ref().map(|file| file.to_str().expect("a path of text"));
    scripted(&["unshare", "--user", "--map-root-user", "--mount"], OTHERS, &files)
}

#[test]
fn messages_arrive_in_order_and_unchanged_in_both_directions() {
    let (mut near, mut far) = connected();
    for end in [&mut near, &mut far] {
        assert_eq!(end.ask("begin check 10000"), "begun");
        end.send("numbered 10000 60000");
    }
    for end in [&mut near, &mut far] {
        assert_eq!(end.receive(), "sent");
        assert_eq!(end.ask("end"), "right");
    }
    assert_eq!(near.ask("close 60000"), "closed");
    far.finish();
    near.finish();
}

/// No message of the other direction wakes the threads of the relays, and the sender needs to learn of receipts.
#[test]
fn one_direction_alone_carries_more_messages_than_may_be_on_the_way() {
    for listener_sends in [true, false] {
        let (near, far) = connected();
        let (mut sender, mut receiver) = if listener_sends { (near, far) } else { (far, near) };
        assert_eq!(receiver.ask("begin check 200"), "begun");
        assert_eq!(sender.ask("numbered 200 10000"), "sent");
        assert_eq!(receiver.ask("end"), "right");
        sender.finish();
        receiver.finish();
    }
}

#[test]
fn export_of_another_host_is_pulled_after_its_sender_dropped_it() {
    let (Some(near), Some(far)) = (process_of_another_host(), Some(process())) else { return };
    let mut ends = Ends::connect(near, far);
    assert_eq!(ends.near.ask("export 64 1"), "sent");
    assert_eq!(ends.far.ask("receive 60000"), "export");
    let error = ends.far.ask("open never 1");
    assert!(error.starts_with("OtherHost"), "{error}");
    assert_eq!(ends.far.ask("open pulled-if-needed 1"), "64 B right, copied");
    eventually(&mut ends.near, "exports", "0");
    dropped_export_of_a_message_is_pulled(ends, "pulled-if-needed");
}

#[test]
fn export_of_the_same_host_is_opened_or_pulled() {
    let (mut near, mut far) = connected();
    assert_eq!(near.ask("export 5000 3"), "sent");
    assert_eq!(far.ask("receive 60000"), "export");
    assert_eq!(far.ask("open pulled-if-needed 3"), "5000 B right, opened");
    assert_eq!(far.ask("discard"), "discarded");
    eventually(&mut near, "exports", "0");
    dropped_export_of_a_message_is_pulled(Ends { near, far }, "pulled");
}

#[test]
fn discarded_exports_are_freed() {
    let (mut near, mut far) = connected();
    // Of a message that was received.
    assert_eq!(near.ask("export 64 1"), "sent");
    assert_eq!(far.ask("receive 60000"), "export");
    assert_eq!(near.ask("exports"), "1");
    assert_eq!(far.ask("discard"), "discarded");
    eventually(&mut near, "exports", "0");
    // Of messages that were not, when the channel is dropped: in the socket, and behind it.
    near.ask("begin exports-many 100");
    assert_eq!(near.ask("end"), "sent");
    assert_eq!(near.ask("exports"), "100");
    assert_eq!(far.ask("drop"), "dropped");
    eventually(&mut near, "exports", "0");
    let error = near.ask("send late 1000");
    assert!(error.starts_with("ChannelClosed"), "{error}");
}

#[test]
fn exports_that_no_receiver_takes_are_freed_while_the_channel_lives() {
    let (mut near, mut far) = connected();
    // More than may be on the way.
    assert_eq!(near.ask("exports-many 100"), "sent");
    assert_eq!(near.ask("exports"), "100");
    assert_eq!(far.ask("deafen"), "deaf");
    eventually(&mut near, "exports", "0");
    let error = near.ask("send late 1000");
    assert!(error.starts_with("ChannelClosed"), "{error}");
    assert_eq!(far.ask("send-half one"), "sent");
    assert_eq!(near.ask("receive 60000"), "one");
}

#[test]
fn close_waits_until_the_peer_has_opened_or_discarded() {
    let (mut near, mut far) = connected();
    assert_eq!(near.ask("export 64 1"), "sent");
    near.ask("begin close 60000");
    assert_eq!(far.ask("receive 60000"), "export");
    assert_eq!(far.ask("open pulled 1"), "64 B right, copied");
    assert_eq!(near.ask("end"), "closed");
    let error = far.ask("receive 1000");
    assert!(error.starts_with("ChannelClosed"), "{error}");
    // A peer that does neither.
    let (mut near, mut far) = connected();
    assert_eq!(near.ask("export 64 1"), "sent");
    assert_eq!(far.ask("receive 60000"), "export");
    let error = near.ask("close 300");
    assert!(error.starts_with("Timeout") && error.contains("0 of 1 tensors"), "{error}");
}

#[test]
fn messages_of_a_process_that_exits_arrive() {
    for _ in 0..10 {
        let (mut near, mut far) = connected();
        near.send("exit 60");
        assert_eq!(far.ask("check 60"), "right");
        let error = far.ask("receive 60000");
        assert!(error.starts_with("ChannelClosed"), "{error}");
    }
}

#[test]
fn death_of_either_process_ends_the_channel() {
    for listens in [true, false] {
        let (near, far) = connected();
        let (mut dying, mut other) = if listens { (near, far) } else { (far, near) };
        assert_eq!(other.ask("export 64 1"), "sent");
        assert_eq!(dying.ask("send last 1000"), "sent");
        assert_eq!(other.ask("receive 60000"), "last");
        assert_eq!(other.ask("exports"), "1");
        other.ask("begin receive 60000");
        let begun = Instant::now();
        dying.kill();
        let error = other.ask("end");
        assert!(error.starts_with("PeerGone"), "{error}");
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
        let error = other.ask("send late 1000");
        assert!(error.starts_with("PeerGone"), "{error}");
        eventually(&mut other, "exports", "0");
    }
}

#[test]
fn messages_of_a_killed_process_arrive_whole() {
    let (mut near, mut far) = connected();
    assert_eq!(near.ask("numbered 40 60000"), "sent");
    // The process is killed while it sends, and the receiver has received nothing.
    near.ask("begin numbered 10000 60000");
    assert_eq!(far.ask("check 40"), "right");
    near.kill();
    let mut received = 0;
    let error = loop {
        let answer = far.ask("receive 60000");
        if answer.starts_with("PeerGone") {
            break answer;
        }
        assert!(!answer.starts_with("Protocol"), "{answer}");
        received += 1;
    };
    assert!(received < 10_000, "{error}");
}

#[test]
fn calls_with_a_suspended_peer_end_by_their_timeout() {
    let (mut near, mut far) = connected();
    far.suspend();
    let error = near.ask("receive 300");
    assert!(error.starts_with("Timeout"), "{error}");
    let error = near.ask("numbered 10000 500");
    assert!(error.starts_with("Timeout") && error.contains("in flight"), "{error}");
    let error = near.ask("close 300");
    assert!(error.starts_with("Timeout"), "{error}");
    far.resume();
    // It continues, receives the messages that were sent, and then the end.
    assert_eq!(far.ask("check 60"), "right");
    let end = loop {
        let answer = far.ask("receive 60000");
        if answer.starts_with("ChannelClosed") || answer.starts_with("PeerGone") {
            break answer;
        }
    };
    assert!(end.starts_with("ChannelClosed"), "{end}");
}

#[test]
fn suspended_peer_continues_the_channel() {
    let (mut near, mut far) = connected();
    far.suspend();
    assert_eq!(near.ask("send one 1000"), "sent");
    let error = near.ask("receive 300");
    assert!(error.starts_with("Timeout"), "{error}");
    far.resume();
    assert_eq!(far.ask("receive 60000"), "one");
    assert_eq!(far.ask("reply two"), "replied");
    assert_eq!(near.ask("poll 60000"), "two");
    assert_eq!(near.ask("poll 100"), "no message, 0 readable");
}

#[test]
fn connecting_waits_for_a_listener_and_for_its_accept() {
    let (mut near, mut far) = (process(), process());
    let begun = Instant::now();
    let error = far.ask(&format!("connect 127.0.0.1:1 {KEY} 300"));
    assert!(error.starts_with("NoListener") && error.contains("127.0.0.1:1: "), "{error}");
    assert!(begun.elapsed() >= Duration::from_millis(300));
    let address = near.ask(&format!("listen {KEY}"));
    let error = far.ask(&format!("connect {address} {KEY} 300"));
    assert!(error.starts_with("Timeout") && error.contains("has not called accept"), "{error}");
    // The connection that was given up is accepted, and ends.
    near.ask("accept 10000");
    let error = near.ask("receive 10000");
    assert!(error.starts_with("PeerGone"), "{error}");
    let error = far.ask(&format!("connect nowhere.invalid:80 {KEY} 300"));
    assert!(error.starts_with("Io") && error.contains("nowhere.invalid"), "{error}");
    let error = near.ask("accept 100");
    assert!(error.starts_with("Timeout"), "{error}");
}

#[test]
fn many_messages_with_exports_leave_nothing_over() {
    let (mut near, mut far) = connected();
    let mut round = |count: usize| {
        far.send(&format!("receive-many {count}"));
        assert_eq!(near.ask(&format!("exports-many {count}")), "sent");
        assert_eq!(far.receive(), "right");
        eventually(&mut near, "exports", "0");
        [&mut near, &mut far].map(Resources::of)
    };
    round(500);
    let before = round(500);
    round(10_000);
    for (end, before) in [&mut near, &mut far].into_iter().zip(before) {
        // The connections of pulls stay for a while on the exporter's side.
        before.eventually_left_with_files(70, end);
    }
    assert_eq!(near.ask("close 60000"), "closed");
}

#[test]
fn many_channels_leave_nothing_over() {
    let (mut near, mut far) = (process(), process());
    let address = near.ask(&format!("listen {KEY}"));
    let round = |near: &mut Process, far: &mut Process, count: usize| {
        for _ in 0..count {
            near.ask("begin accept 60000");
            far.ask(&format!("connect {address} {KEY} 60000"));
            near.ask("end");
            assert_eq!(near.ask("send one 60000"), "sent");
            assert_eq!(far.ask("receive 60000"), "one");
            far.ask("discard");
            far.ask("drop");
            near.ask("drop");
        }
    };
    round(&mut near, &mut far, 5);
    let files = [near.ask("files"), far.ask("files")];
    round(&mut near, &mut far, 100);
    eventually_files(&mut near, &files[0]);
    eventually_files(&mut far, &files[1]);
}

#[test]
fn vanished_host_ends_the_channel() {
    // Two network namespaces with a cable between them, whose far end is unplugged.
    const NEAR: &str = "ip link set lo up && ip link add near type veth peer name far && \
                        ip addr add 10.99.0.1/24 dev near && ip link set near up";
    const FAR: &str = "ip link set lo up && nsenter --target $1 --net ip link set far netns $$ && \
                       ip addr add 10.99.0.2/24 dev far && ip link set far up && shift";
    let Some(mut near) = scripted(&["unshare", "--user", "--map-root-user", "--net"], NEAR, &[]) else {
        return;
    };
    let pid = near.id().to_string();
    let entered = ["nsenter", "--target", &pid, "--user", "--preserve-credentials", "unshare", "--net"];
    let mut far = started(shell(&entered, FAR, &[&pid]));
    let address = near.ask(&format!("listen {KEY} 10.99.0.1:0"));
    near.ask("begin accept 20000");
    assert!(far.ask(&format!("connect {address} {KEY} 20000")).ends_with(" on 10.99.0.1"));
    assert!(near.ask("end").ends_with(" on 10.99.0.2"));
    assert_eq!(near.ask("export 64 1"), "sent");
    assert_eq!(far.ask("receive 20000"), "export");

    let pid = far.id().to_string();
    let mut unplug = Command::new("nsenter");
    unplug.args([
        "--target",
        &pid,
        "--user",
        "--net",
        "--preserve-credentials",
        "ip",
        "link",
        "set",
        "far",
        "down",
    ]);
    assert!(unplug.status().expect("it starts").success());
    let begun = Instant::now();
    let error = near.ask("receive 300");
    assert!(error.starts_with("Timeout"), "{error}");
    // One side has sent something that is not acknowledged, and the other one is idle.
    assert_eq!(near.ask("send late 1000"), "sent");
    for end in [&mut near, &mut far] {
        end.ask("begin receive 80000");
    }
    for end in [&mut near, &mut far] {
        let error = end.ask("end");
        assert!(error.starts_with("PeerGone"), "{error}");
        assert!(begun.elapsed() < Duration::from_secs(40), "{:?}", begun.elapsed());
    }
    eventually(&mut near, "exports", "0");
}
