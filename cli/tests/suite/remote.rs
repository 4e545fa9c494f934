//! Copies from other hosts: two processes of one host, whose descriptors name another one.
//!
//! Tests with NIXL are skipped unless `DEVICE_IPC_NIXL` names it; `.ci/nixl` provides it.

#![cfg(feature = "nixl")]

use std::env;

use crate::support::{Directory, Terminal, altered, device_ipc, host, run, send_by_file};
use rustix::process::Signal;

const LIBRARY: &str = "DEVICE_IPC_NIXL";

/// Starts the program with NIXL on the loopback interface, by TCP alone.
fn start(arguments: &[&str], variables: &[(&str, &str)]) -> Terminal {
    let mut command = device_ipc();
    command.args(arguments).envs([
        ("UCX_TLS", "tcp"),
        ("UCX_NET_DEVICES", "lo"),
        ("NIXL_LOG_LEVEL", "FATAL"),
    ]);
    command.envs(variables.iter().copied());
    Terminal::start(command)
}

/// Returns whether NIXL is installed for the tests; prints otherwise that a test is skipped.
fn has_nixl() -> bool {
    let is_set = env::var_os(LIBRARY).is_some();
    if !is_set {
        eprintln!("skipped: {LIBRARY} names no NIXL; `.ci/nixl` downloads it");
    }
    is_set
}

#[test]
fn tensor_is_copied_by_two_hosts() {
    if !has_nixl() {
        return;
    }
    let directory = Directory::new();
    let file = directory.text("w.ipc");
    let mut sender = start(&["send", "--file", &file, "--remote", "127.0.0.1", "--value", "1.5"], &[]);
    assert!(sender.until("receivers on other hosts copy from").contains("127.0.0.1:"));
    sender.until("wrote");
    let receive = ["recv", "--file", &file, "--copy", "pulled", "--add", "1"];
    let received = start(&receive, &[]).wait().good();
    assert!(received.contains("(a copy: what is written to it stays here)"), "{received}");
    assert!(received.contains("mean=1.500000") && received.contains("mean=2.500000"), "{received}");
    // The receiver wrote to its copy.
    assert!(sender.wait().good().contains("mean delta=0.000000"));
}

#[test]
fn memory_of_another_host_is_copied_by_policy_alone() {
    if !has_nixl() {
        return;
    }
    let directory = Directory::new();
    let here = directory.text("w.ipc");
    // The variable has the effect of the option.
    let sent = ["send", "--file", &here, "--receivers", "0", "--shape", "1000000", "--value", "3"];
    let mut sender = start(&sent, &[("DEVICE_IPC_REMOTE", "127.0.0.1")]);
    sender.until("wrote");
    let there = format!("@{}", directory.file("there.ipc", altered(&here, host).as_bytes()));

    let opened = start(&["recv", "--file", &here, "--copy", "pulled-if-needed"], &[]).wait().good();
    assert!(opened.contains("(its home)"), "{opened}");
    let out = directory.text("bytes");
    let copied = start(&["recv", "--descriptor", &there, "--copy", "pulled-if-needed", "--out", &out], &[])
        .wait()
        .good();
    assert!(copied.contains("(a copy"), "{copied}");
    let bytes = std::fs::read(&out).unwrap();
    assert!(bytes.len() == 4_000_000 && bytes.chunks(4).all(|value| value == 3.0_f32.to_ne_bytes()));
    let read = start(&["attach", &there, "read", "--copy", "pulled-if-needed"], &[]).wait().good();
    assert!(read.contains("mean=3.000000"), "{read}");

    let error = start(&["recv", "--descriptor", &there], &[]).wait().bad();
    assert!(
        error.contains("made on another host") && error.contains("(--copy pulled-if-needed opens a copy)"),
        "{error}"
    );
    let no_library = [(LIBRARY, "/nowhere/libnixl_capi.so")];
    let error =
        start(&["recv", "--descriptor", &there, "--copy", "pulled-if-needed"], &no_library).wait().bad();
    for text in ["copy memory of another host", "/nowhere/libnixl_capi.so", "pip install nixl-cu13"] {
        assert!(error.contains(text), "{text:?} is missing: {error}");
    }
    sender.signal(Signal::KILL);
    sender.wait();
    let error = start(&["recv", "--descriptor", &there, "--copy", "pulled-if-needed"], &[]).wait().bad();
    assert!(error.contains("127.0.0.1:") && error.contains("refused"), "{error}");
}

#[test]
fn missing_library_error_names_the_remedy() {
    let no_library = [(LIBRARY, "/nowhere/libnixl_capi.so")];
    let by_option = start(&["send", "--print", "--remote", "127.0.0.1"], &no_library).wait();
    let variables = [no_library[0], ("DEVICE_IPC_REMOTE", "127.0.0.1")];
    for result in [by_option, start(&["send", "--print"], &variables).wait()] {
        let error = result.bad();
        for text in ["/nowhere/libnixl_capi.so", "pip install nixl-cu13", LIBRARY] {
            assert!(error.contains(text), "{text:?} is missing: {error}");
        }
    }
}

#[test]
fn sender_without_a_network_address_is_reported() {
    let directory = Directory::new();
    let (sender, file) = send_by_file(&directory, &["--receivers", "0"]);
    // Memory of this host needs no NIXL.
    let no_library = [(LIBRARY, "/nowhere/libnixl_capi.so")];
    assert!(
        start(&["recv", "--file", &file, "--copy", "pulled-if-needed"], &no_library)
            .wait()
            .good()
            .contains("(its home)")
    );
    let error = run(["recv", "--file", &file, "--copy", "pulled"]).bad();
    assert!(error.contains("no network address") && error.contains("--remote"), "{error}");
    sender.signal(Signal::TERM);
    sender.wait().good();
}

#[test]
fn invalid_addresses_are_errors() {
    for invalid in ["localhost", "10.0.0.1:port", "nonsense"] {
        assert!(run(["send", "--print", "--remote", invalid]).usage().contains("IP or IP:PORT"), "{invalid}");
    }
    for command in ["send", "recv"] {
        let help = run([command, "--help"]).good();
        // The help is wrapped at the width of the terminal.
        let words: Vec<_> = help.split_whitespace().collect();
        assert!(words.join(" ").contains("On trusted networks only"), "{help}");
    }
}
