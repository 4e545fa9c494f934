//! Conditions of the host. A test that they exclude is skipped, and says so.

use std::process::Command;

/// The user and the group nobody, which the kernel also shows for users that a namespace does not map.
pub const NOBODY: u32 = 65534;

/// Returns whether this process can become another user. If not, the test that calls this is skipped.
pub fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        skipped("only root can become another user");
    }
    root
}

/// Returns whether this process can start programs through another program, which containers often may not. If not, the
/// test that calls this is skipped.
pub fn can_start_through(program: &[&str]) -> bool {
    let made = Command::new(program[0]).args(&program[1..]).arg("true").output();
    let permitted = made.as_ref().is_ok_and(|made| made.status.success());
    if !permitted {
        skipped(&format!("{program:?} is not permitted here: {made:?}"));
    }
    permitted
}

fn skipped(why: &str) {
    // The harness runs each test on a thread of its name.
    println!("{} is skipped: {why}", std::thread::current().name().unwrap_or("the test"));
}
