//! A program in C that uses the library by its header alone.
//!
//! The simulator is standalone: the program is compiled with `cc`, linked with the library by either name like the
//! vendor's, and run unchanged.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use device_ipc_sim_ascendcl::{Cann, MACHINE_VARIABLE, VISIBLE_VARIABLE, install};
use device_ipc_test_process::wait;

const DEADLINE: Duration = Duration::from_secs(60);

const FILES: [(&str, &str); 3] = [
    ("acl_sim.h", include_str!("c/acl_sim.h")),
    ("check.h", include_str!("c/check.h")),
    ("ipc_memory.c", include_str!("c/ipc_memory.c")),
];

/// Compiles the program, links it with the library, and runs it.
fn run(library: &str, machine: &str) {
    let directory = tempfile::tempdir().expect("a directory");
    let folder = directory.path();
    install(folder, Cann::V9_1).expect("installed");
    for (file, text) in FILES {
        std::fs::write(folder.join(file), text).expect("written");
    }
    let program = folder.join("ipc_memory");
    let compiled = Command::new("cc")
        .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1"])
        .arg(folder.join("ipc_memory.c"))
        .arg("-L")
        .arg(folder)
        .arg(format!("-l{library}"))
        .arg("-o")
        .arg(&program)
        .output()
        .expect("cc, which also links Rust programs, can be run");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    assert_eq!(output_of(&program, folder, machine), "ok\n", "{library}: it prints that it went well");
}

/// Runs a program with a deadline, and returns its standard output. Its standard error is inherited.
fn output_of(program: &Path, folder: &Path, machine: &str) -> String {
    let mut child = Command::new(program)
        .env("LD_LIBRARY_PATH", folder)
        .env(MACHINE_VARIABLE, machine)
        .env_remove(VISIBLE_VARIABLE)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts");
    let Some(status) = wait(&mut child, DEADLINE) else {
        child.kill().expect("it can be killed");
        child.wait().expect("it is reaped");
        panic!("{} did not end in time", program.display());
    };
    let mut text = String::new();
    let mut output = child.stdout.take().expect("it is piped");
    std::io::Read::read_to_string(&mut output, &mut text).expect("text");
    assert!(status.success(), "{} ended with {status}: {text}", program.display());
    text
}

#[test]
fn library_links_by_both_names() {
    run("ascendcl", "");
    run("acl_rt", "latency=0");
}

#[test]
fn concurrent_installs_fill_one_directory() {
    let directory = tempfile::tempdir().expect("a directory");
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| install(directory.path(), Cann::V8_5).expect("installed"));
        }
    });
    let names = std::fs::read_dir(directory.path()).expect("it can be read");
    let mut names: Vec<_> = names.map(|entry| entry.expect("an entry").file_name()).collect();
    names.sort();
    assert_eq!(names, ["libacl_rt.so", "libascendcl.so"]);
}

#[test]
fn older_version_has_one_name_and_lacks_symbols() {
    let directory = tempfile::tempdir().expect("a directory");
    install(directory.path(), Cann::V8_1).expect("installed");
    assert!(!directory.path().join("libacl_rt.so").exists());
    let source = directory.path().join("close.c");
    std::fs::write(
        &source,
        "int aclrtIpcMemClose(const char *key);\nint main(void) { return aclrtIpcMemClose(0); }\n",
    )
    .expect("written");
    let linked = Command::new("cc")
        .arg(&source)
        .arg("-L")
        .arg(directory.path())
        .arg("-lascendcl")
        .arg("-o")
        .arg(directory.path().join("close"))
        .output()
        .expect("cc can be run");
    let said = String::from_utf8_lossy(&linked.stderr);
    assert!(!linked.status.success() && said.contains("aclrtIpcMemClose"), "{said}");
}
