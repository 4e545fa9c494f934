//! A peer that dies at every point of the protocol.

use device_ipc_broker_tests::{
    Answer, Before, Child, DEADLINE, PINNING, REVOKING, agent, eventually, kill_points, kill_rounds, within,
};

use super::{connect, name};

/// The contents of the messages.
#[derive(Clone, Copy, Debug)]
enum What {
    Tensor,
    /// Of two devices, so that it has two grants.
    Bundle,
}

impl What {
    /// Shares it, and says how it is sent.
    fn share(self, child: &mut Child) -> &'static str {
        match self {
            Self::Tensor => {
                child.share("x 8192");
                "of=x"
            }
            Self::Bundle => {
                child.ok("share-blocks x 4 8192 devices=2");
                "of=x"
            }
        }
    }

    /// The command that opens it.
    fn open(self, arguments: &str) -> String {
        match self {
            Self::Tensor => format!("open-received {arguments} place=stream:0"),
            Self::Bundle => format!("open-received {arguments} place=home"),
        }
    }
}

/// A survivor that has done everything once, and accepts connections.
fn survivor(machine: &str, under: &str) -> (Child, Before) {
    let mut survivor = agent!(machine);
    survivor.ok("cache 0 0");
    survivor.ok(&format!("listen {under}"));
    let mut other = agent!(machine);
    other.ok("cache 0 0");
    connect(&mut survivor, &mut other, under);
    for (from, to) in [(0, 1), (1, 0)] {
        let [one, two] = [&mut survivor, &mut other];
        let (from, to) = if (from, to) == (0, 1) { (one, two) } else { (two, one) };
        from.share("warm 4096");
        from.ok("send c 100000 20000 of=warm drops=1 ready-on=0");
        assert_eq!(to.ok("receive c m 20000"), "100000 1");
        to.ok("open-received m warm place=stream:0");
        to.ok("touch warm");
        to.ok("drop warm");
        to.ok("discard m");
        let (sent, open, close) = (What::Bundle.share(from), What::Bundle.open("m warm"), "drop warm");
        from.ok(&format!("send c 5 20000 {sent} drops=1 ready-on=0"));
        assert_eq!(to.ok("receive c m 20000"), "5 1");
        to.ok(&open);
        to.ok(close);
        to.ok("discard m");
    }
    survivor.ok("drop-channel c");
    drop(other);
    let before = Before::of(&mut survivor);
    (survivor, before)
}

/// Kills the peer at every point, round after round, under one survivor.
fn others_die(machine: &str) {
    let under = name(if machine == PINNING { "pinning" } else { "revoking" });
    let (mut survivor, before) = survivor(machine, &under);
    for point in kill_points("", "channel-") {
        for round in 0..kill_rounds(3) {
            let what = if round % 2 == 0 { What::Tensor } else { What::Bundle };
            let when = format!("{machine} {point} round {round}, a {what:?}");
            let mut victim = agent!(machine, dies_at: Some(point));
            victim.ok("cache 0 0");
            within(DEADLINE, &when, || one_dies(point, what, &under, &mut survivor, &mut victim));
            drop(victim);
            before.is_now(&when, &mut survivor);
        }
    }
}

fn one_dies(point: &str, what: What, under: &str, survivor: &mut Child, victim: &mut Child) {
    let (role, _) = point.split_once(':').expect("the role stands first");
    match role {
        "connector" => {
            victim.send(&format!("connect {under} c 20000"));
            if point == "connector:channel-welcomed" {
                survivor.ok(&format!("accept {under} c 20000"));
                return ends(survivor, "PeerGone");
            }
            victim.is_killed();
            // A connector that said hello may be accepted before its death is noticed.
            match survivor.ask(&format!("accept {under} c 200")) {
                Answer::Done(_) => ends(survivor, "PeerGone"),
                Answer::Failed(failure) => assert_eq!(failure.kind, "Timeout", "{}", failure.text),
                Answer::Ended(_) => panic!("the survivor survives"),
            }
        }
        "acceptor" => {
            let other = format!("{under}-victim");
            victim.ok(&format!("listen {other}"));
            victim.send(&format!("accept {other} c 20000"));
            match survivor.ask(&format!("connect {other} c 1000")) {
                Answer::Done(_) => ends(survivor, "PeerGone"),
                Answer::Failed(failure) => assert_eq!(failure.kind, "NoListener", "{}", failure.text),
                Answer::Ended(_) => panic!("the survivor survives"),
            }
            victim.is_killed();
        }
        "sender" => {
            connect(survivor, victim, under);
            survivor.ok("on-gone c");
            let sent = what.share(victim);
            victim.send(&format!("send c 5 20000 {sent} drops=1 ready-on=0"));
            victim.is_killed();
            assert_eq!(survivor.event("gone"), "gone c PeerGone");
            if ["sender:channel-put", "sender:channel-sent"].contains(&point) {
                assert_eq!(survivor.ok("receive c m 5000"), "5 1");
                let error = survivor.ask(&what.open("m x"));
                let gone = |failure: &str| matches!(failure, "ExporterGone" | "PeerGone");
                assert!(matches!(&error, Answer::Failed(failure) if gone(&failure.kind)), "{error:?}");
                survivor.ok("discard m");
            }
            ends(survivor, "PeerGone");
        }
        "receiver" => {
            connect(survivor, victim, under);
            let sent = what.share(survivor);
            if point == "receiver:channel-looked" {
                // Later messages use the socket.
                survivor.ok("send c 1 20000");
            }
            survivor.ok(&format!("send c 5 20000 {sent} drops=1 ready-on=0"));
            let open = what.open("m x");
            let commands: &[&str] = match point {
                "receiver:channel-received" => &["receive c m 20000"],
                "receiver:channel-looked" | "receiver:channel-sleeping" => {
                    &["receive c m 20000", "receive c n 20000"]
                }
                "receiver:channel-discarding" => &["receive c m 20000", "discard m"],
                _ => &["receive c m 20000", &open],
            };
            let (last, first) = commands.split_last().expect("there is one");
            first.iter().for_each(|command| drop(victim.ok(command)));
            victim.send(last);
            victim.is_killed();
            ends(survivor, "PeerGone");
        }
        "closer" => {
            connect(survivor, victim, under);
            let sent = what.share(survivor);
            survivor.ok(&format!("send c 5 20000 {sent} drops=1 ready-on=0"));
            victim.ok("send c 3 20000");
            victim.send("drop-channel c");
            victim.is_killed();
            // It had said that nothing more comes.
            assert_eq!(survivor.ok("receive c m 5000"), "3 0");
            survivor.ok("discard m");
            ends(survivor, "ChannelClosed");
        }
        other => panic!("no test for the points of the {other}"),
    }
}

/// Asserts that every call on the survivor's channel fails with this error.
fn ends(survivor: &mut Child, variant: &str) {
    survivor.fails("receive c m 20000", variant);
    eventually(
        "sends fail",
        true,
        || matches!(survivor.ask("send c 1 20000"), Answer::Failed(failure) if failure.kind == variant),
    );
    survivor.ok("drop-channel c");
}

#[test]
fn channel_deaths_with_pinned_memory_leave_nothing() {
    others_die(PINNING);
}

#[test]
fn channel_deaths_with_revocable_memory_leave_nothing() {
    others_die(REVOKING);
}
