//! The examples that start their own processes, run as they stand: on an accelerator where there is one, else on the mock.
//!
//! `cargo test` builds them beforehand; with `--test suite` alone, `cargo build --examples` does.

use std::process::Command;

use device_ipc_test_process::Process;

fn runs(name: &str) {
    let tests = std::env::current_exe().expect("this program has a path");
    let built = tests.ancestors().nth(2).expect("it lies two folders below the profile's");
    let path = built.join("examples").join(name);
    assert!(path.exists(), "{} is missing; build it by 'cargo build --examples'", path.display());
    Process::start(name, &mut Command::new(path)).finish();
}

#[test]
fn queue() {
    runs("queue");
}

#[test]
fn state_dict_ring() {
    runs("state_dict_ring");
}

#[test]
fn ring_readers() {
    runs("ring_readers");
}

#[test]
fn weight_versions() {
    runs("weight_versions");
}

#[test]
fn kv_cache() {
    runs("kv_cache");
}

#[test]
fn channel_server() {
    runs("channel_server");
}

#[test]
fn ping_pong() {
    runs("ping_pong");
}
