//! The example `cuda_hand_over` in two processes, where there is a GPU.

#[path = "../examples/cuda_hand_over.rs"]
mod example;

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

const ROLE: &str = "DEVICE_IPC_TEST_ROLE";

/// A role of the example in a process of its own, killed and reaped when it goes out of scope.
struct Role(Child);

impl Role {
    fn start(role: &str, path: &Path) -> Self {
        let program = std::env::current_exe().expect("this program has a path");
        let child = Command::new(program)
            .args(["--exact", "role", "--nocapture", "--ignored"])
            .env(ROLE, role)
            .env("DEVICE_IPC_TEST_PATH", path)
            .spawn();
        Self(child.expect("the role starts"))
    }

    fn finish(&mut self, deadline: Instant) {
        loop {
            if let Some(status) = self.0.try_wait().expect("the role can be waited for") {
                return assert!(status.success(), "a role failed: {status}");
            }
            assert!(Instant::now() < deadline, "a role did not end in time");
            std::thread::yield_now();
        }
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn cudarc_slice_handed_over_is_changed_in_place() {
    if let Err(reason) = device_ipc::Backends::registered().named("cuda") {
        eprintln!("skipped: {reason}");
        return;
    }
    let path = std::env::temp_dir().join(format!("device-ipc-hand-over-{}", std::process::id()));
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut sender = Role::start("send", &path);
    while !path.exists() {
        assert!(Instant::now() < deadline, "the sender published nothing");
        assert!(
            sender.0.try_wait().expect("the sender can be waited for").is_none(),
            "the sender ended early"
        );
        std::thread::yield_now();
    }
    Role::start("receive", &path).finish(deadline);
    sender.finish(deadline);
    std::fs::remove_file(&path).expect("the file is ours");
}

#[test]
#[ignore = "a role of the test above"]
fn role() {
    let path = PathBuf::from(std::env::var_os("DEVICE_IPC_TEST_PATH").expect("set by the test"));
    if std::env::var(ROLE).as_deref() == Ok("send") {
        assert_eq!(example::sender(&path).expect("the sender works"), [2.0; 20]);
    } else {
        example::receiver(&path).expect("the receiver works");
    }
}
