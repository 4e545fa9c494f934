//! Channels whose peer dies at every point of the protocol, lies, is stopped, forks, or is another process.

mod deaths;
mod inbox;
mod messages;
mod raw;

use device_ipc_broker_tests::{Answer, Child, Directory, PINNING, agent, is_root};

use crate::fork::Stray;

/// A name that no other test has.
fn name(what: &str) -> String {
    format!("broker-{}-{what}", std::process::id())
}

/// Connects the two; `survivor` listens.
fn connect(survivor: &mut Child, other: &mut Child, under: &str) {
    other.send(&format!("connect {under} c 20000"));
    survivor.ok(&format!("accept {under} c 20000"));
    assert!(matches!(other.receive(), Answer::Done(_)));
}

/// A forked child has no copies: the channel closes with its parent, and every call in the child returns an error.
#[test]
fn forked_child_keeps_no_channel_open() {
    let mut stray = Stray::default();
    let mut near = agent!(PINNING);
    let mut far = agent!(PINNING);
    let under = name("fork");
    near.ok(&format!("listen {under}"));
    connect(&mut near, &mut far, &under);
    near.share("x 4096");
    near.ok("send c 3 20000 of=x");
    assert_eq!(far.ok("receive c m 20000"), "3 1");
    far.ok("listen far");
    let events = stray.forked_by(&mut far);
    for what in ["listen", "connect", "accept", "reply", "open-received", "send", "receive", "close-channel"]
    {
        let told = format!("child {what} Forked");
        assert!(events.contains(&told), "{told} is not among {events:?}");
    }
    // The parent's channel works, and closes with the parent although the child lives.
    far.ok("send c 4 20000");
    assert_eq!(near.ok("receive c m 20000"), "4 0");
    far.kill();
    near.fails("receive c m 20000", "PeerGone");
}

/// A name that another user has taken is noticed before anything is said.
#[test]
fn channel_squatter_receives_nothing() {
    if !is_root() {
        return;
    }
    let (mut squatter, mut victim) = (agent!(PINNING), agent!(PINNING));
    let under = name("squat");
    squatter.ok("become 65534 65534");
    squatter.ok(&format!("squat {under}"));
    let text = victim.fails(&format!("connect {under} c 1000"), "NotPermitted");
    assert!(text.contains("user 65534") && text.contains("IpcBuilder::allow"), "{text}");
    assert_eq!(squatter.ok("squatted"), "0");
    // A user that both sides allow is accepted.
    let (mut stranger, mut allowing) = (agent!(PINNING), agent!(PINNING));
    stranger.ok("become 65534 65534");
    stranger.ok("ipc allow-uid=0");
    stranger.ok(&format!("listen {under}"));
    stranger.send(&format!("accept {under} c 20000"));
    victim.fails(&format!("connect {under} c 1000 user=65534"), "NotPermitted");
    allowing.ok("ipc allow-uid=65534");
    allowing.ok(&format!("connect {under} c 20000 user=65534"));
    assert!(matches!(stranger.receive(), Answer::Done(_)));
    allowing.ok("send c 2 1000");
    assert_eq!(stranger.ok("receive c m 20000"), "2 0");
}

/// A user who is not allowed gets an error, and the listener continues.
#[test]
fn channel_connect_by_a_stranger_is_refused() {
    if !is_root() {
        return;
    }
    let (mut listener, mut stranger, mut friend) = (agent!(PINNING), agent!(PINNING), agent!(PINNING));
    let under = name("stranger");
    listener.ok(&format!("listen {under}"));
    stranger.ok("become 65534 65534");
    stranger.ok("ipc allow-uid=0");
    listener.send(&format!("accept {under} c 20000"));
    let text = stranger.fails(&format!("connect {under} c 5000 user=0"), "NotPermitted");
    assert!(text.contains("does not allow user 65534"), "{text}");
    friend.ok(&format!("connect {under} c 20000"));
    assert_eq!(listener.receive(), Answer::Done(friend.id().to_string()));
}

/// In a directory the socket is a file: one that a dead process left is taken over, a living one's is not, and it goes with
/// its listener.
#[test]
fn listen_over_the_file_of_a_dead_listener_succeeds() {
    let directory = Directory::new("listen");
    let (mut first, mut second, mut client) = (agent!(PINNING), agent!(PINNING), agent!(PINNING));
    for child in [&mut first, &mut second, &mut client] {
        child.ok(&directory.ipc());
    }
    first.ok("listen files");
    let text = second.fails("listen files", "ChannelNameInUse");
    assert!(text.contains(&first.id().to_string()), "{text}");
    first.kill();
    second.ok("listen files");
    client.send("connect files c 20000");
    second.ok("accept files c 20000");
    assert_eq!(client.receive(), Answer::Done(second.id().to_string()));
    second.ok("unlisten files");
    let left: Vec<_> = std::fs::read_dir(directory.path()).expect("it is there").flatten().collect();
    assert!(left.iter().all(|entry| !entry.file_name().to_string_lossy().contains("files")), "{left:?}");
}
