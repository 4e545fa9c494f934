//! Input that never comes, text that acts on a terminal, and an environment that is an attacker's.

mod support;

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FileType, Mode, StatVfsMountFlags, mknodat, statvfs};
use rustix::process::Signal;
use support::{Folder, Terminal, device_ipc, run, send_by_file};

/// The user and group nobody.
const NOBODY: u32 = 65534;

fn pipe(folder: &Folder, name: &str) -> String {
    let path = folder.text(name);
    mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a pipe");
    path
}

#[test]
fn pipe_that_no_process_writes_to_is_an_error_in_time() {
    let folder = Folder::new();
    let fifo = pipe(&folder, "pipe");
    let at = format!("@{fifo}");
    let cases: [&[&str]; 4] = [
        &["recv", "--file", &fifo, "--timeout", "1"],
        &["recv", "--descriptor", &at, "--timeout", "1"],
        &["attach", &at, "--timeout", "1", "read"],
        &["recv", "--connect", "127.0.0.1:1", "--key-file", &fifo, "--timeout", "1"],
    ];
    for arguments in cases {
        let since = Instant::now();
        let error = run(arguments).bad();
        assert!(error.contains("timed out after 1.0 s"), "{arguments:?}: {error}");
        assert!(since.elapsed() < Duration::from_secs(20), "{arguments:?}");
    }
}

#[test]
fn pipe_in_place_of_a_regular_file_is_refused() {
    let folder = Folder::new();
    let fifo = pipe(&folder, "pipe");
    let error = run(["send", "--file", &fifo]).bad();
    assert!(error.contains("no regular file"), "{error}");
    let error = run(["send", "--file", &folder.text("w.ipc"), "--in", &fifo]).bad();
    assert!(error.contains("no regular file"), "{error}");
    let (sender, file) = send_by_file(&folder, &["--receivers", "0"]);
    let error = run(["recv", "--file", &file, "--out", &fifo]).bad();
    assert!(error.contains("no process reads from"), "{error}");
    // A sender that ends looks whether the file is still its own.
    fs::remove_file(&file).expect("it is ours");
    pipe(&folder, "w.ipc");
    sender.signal(Signal::TERM);
    sender.end().good();
    assert!(Path::new(&file).exists(), "it was another process's");
}

#[test]
fn descriptor_is_read_from_a_pipe_and_from_standard_input() {
    let folder = Folder::new();
    let (sender, file) = send_by_file(&folder, &["--receivers", "0", "--value", "2"]);
    let fifo = pipe(&folder, "pipe");
    let mut command = device_ipc();
    command.args(["attach", &format!("@{fifo}"), "read"]);
    let attached = Terminal::start(command);
    // Opens when the other process has opened it.
    let mut writer = File::options().write(true).open(&fifo).expect("it is read");
    writer.write_all(&fs::read(&file).expect("it is there")).expect("it is read");
    drop(writer);
    let ended = attached.end();
    assert!(!ended.err.contains("warning"), "{ended:?}");
    assert!(ended.good().contains("mean=2.0"));
    for arguments in [["attach", "-", "read"], ["recv", "--descriptor", "-"]] {
        let mut command = device_ipc();
        command.args(arguments).stdin(File::open(&file).expect("it is there"));
        let output = command.output().expect("it runs");
        let out = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && out.contains("mean=2.0"), "{output:?}");
        assert!(output.stderr.is_empty(), "{output:?}");
    }
    sender.signal(Signal::TERM);
    sender.end().good();
}

#[test]
fn descriptor_on_the_command_line_is_warned_of() {
    let folder = Folder::new();
    let (sender, file) = send_by_file(&folder, &["--receivers", "0"]);
    let text = fs::read_to_string(&file).expect("it is there");
    for arguments in [["attach", text.trim(), "read"], ["recv", "--descriptor", text.trim()]] {
        let ended = run(arguments);
        assert!(ended.err.contains("warning: every user of this machine can read"), "{ended:?}");
        assert!(!ended.err.contains(text.trim()), "the warning shows the descriptor");
        ended.good();
    }
    sender.signal(Signal::TERM);
    sender.end().good();
}

#[test]
fn holder_with_escape_sequences_in_its_name_is_listed_harmlessly() {
    let folder = Folder::new();
    let (mut sender, file) = send_by_file(&folder, &["--receivers", "1"]);
    let mut command = device_ipc();
    command.args(["recv", "--file", &file, "--hold", "60"]).arg0("/x/\u{1b}[2J\u{9b}31m\u{202e}evil\r");
    let mut holder = Terminal::start(command);
    holder.until("holding it");
    let table = run(["ps"]).good();
    assert!(table.contains("[2J\u{fffd}31m\u{fffd}evil"), "{table:?}");
    let json = run(["ps", "--json"]).good();
    assert!(json.contains("evil"));
    sender.signal(Signal::TERM);
    let stopped = sender.until("it was still held");
    for text in [table, json, stopped] {
        let harmful = |c: char| c.is_control() && c != '\n' || c == '\u{202e}';
        assert!(!text.contains(harmful), "{text:?}");
    }
}

/// The set-user-id copy of the program is root's, and the environment is nobody's.
#[test]
fn set_user_id_program_loads_no_library_that_a_variable_names() {
    let test = "set_user_id_program_loads_no_library_that_a_variable_names";
    if !rustix::process::geteuid().is_root() {
        println!("{test} is skipped: only root can make a set-user-id program of another user");
        return;
    }
    let folder = Folder::new();
    let (directory, program) = (folder.path(""), folder.path("device-ipc"));
    fs::copy(device_ipc().get_program(), &program).expect("it can be copied");
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o755)).expect("it is ours");
    if statvfs(&program).expect("it is there").f_flag.contains(StatVfsMountFlags::NOSUID) {
        println!("{test} is skipped: {} is mounted nosuid", directory.display());
        return;
    }
    chown(&program, Some(0), Some(0)).expect("root may");
    let library = folder.text("of-an-attacker.so");
    for (mode, named) in [(0o755, true), (0o4755, false)] {
        fs::set_permissions(&program, fs::Permissions::from_mode(mode)).expect("root may");
        let mut command = Command::new(&program);
        command.arg("devices").uid(NOBODY).gid(NOBODY);
        for variable in ["DEVICE_IPC_CUDA_LIBRARY", "DEVICE_IPC_ASCEND_LIBRARY"] {
            command.env(variable, &library);
        }
        command.env("DEVICE_IPC_MOCK", "devices=3");
        let ended = Terminal::start(command).end();
        let said = format!("{}{}", ended.out, ended.err);
        assert_eq!(said.matches(&library).count() >= 2, named, "mode {mode:o}: {said}");
        assert_eq!(said.contains(&library), named, "mode {mode:o}: {said}");
        assert_eq!(said.contains("Mock Device 2"), named, "mode {mode:o}: {said}");
    }
}
