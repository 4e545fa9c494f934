//! The cases of channels between hosts that need an engine.

use device_ipc_test_process::Process;

use crate::{Start, eventually};

const KEY: &str = "the-key-of-these-tests";

/// The processes at both ends of a channel.
#[derive(Debug)]
pub struct Ends {
    /// Listens.
    pub near: Process,
    /// Connects.
    pub far: Process,
}

impl Ends {
    /// Connects two processes.
    pub fn connect(mut near: Process, mut far: Process) -> Self {
        let address = near.ask(&format!("listen {KEY}"));
        near.ask("begin accept 60000");
        let connected = far.ask(&format!("connect {address} {KEY} 60000"));
        assert!(connected.ends_with(" on 127.0.0.1"), "{connected}");
        let accepted = near.ask("end");
        assert!(accepted.ends_with(" on 127.0.0.1"), "{accepted}");
        Self { near, far }
    }

    /// Starts two processes, and connects them.
    pub fn start(start: Start) -> Option<Self> {
        Some(Self::connect(start("channel_end", "")?, start("channel_end", "")?))
    }
}

/// Memory of a message is copied by the receiver after its sender has dropped the export, and is freed then.
pub fn dropped_export_of_a_message_is_pulled(mut ends: Ends, mode: &str) {
    for (seed, length) in [1, 5000, 8 << 20].into_iter().enumerate() {
        assert_eq!(ends.near.ask(&format!("export {length} {seed} late")), "sent");
        assert_eq!(ends.far.ask("receive 60000"), "export");
        assert_eq!(ends.near.ask("exports"), "1", "the message keeps it");
        assert_eq!(ends.far.ask(&format!("open {mode} {seed}")), format!("{length} B right, copied"));
        // Before the message is dropped.
        eventually(&mut ends.near, "exports", "0");
        assert_eq!(ends.far.ask("reply thanks"), "replied");
        assert_eq!(ends.near.ask("receive 60000"), "thanks");
    }
    ends.near.finish();
    ends.far.finish();
}
