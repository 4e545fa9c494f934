//! Input that never arrives, control characters, and an environment that an attacker controls.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::support::{Directory, Terminal, copy_program, device_ipc, run, send_by_file};
use rustix::fs::{CWD, FileType, Mode, StatVfsMountFlags, mknodat, statvfs};
use rustix::process::Signal;

/// The user and group nobody.
const NOBODY: u32 = 65534;

fn pipe(directory: &Directory, name: &str) -> String {
    let path = directory.text(name);
    mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a pipe");
    path
}

#[test]
fn pipe_without_writer_times_out() {
    let directory = Directory::new();
    let fifo = pipe(&directory, "pipe");
    let at = format!("@{fifo}");
    let cases: [&[&str]; 3] = [
        &["recv", "--file", &fifo, "--timeout", "1s"],
        &["recv", "--descriptor", &at, "--timeout", "1s"],
        &["attach", &at, "--timeout", "1s", "read"],
    ];
    for arguments in cases {
        let since = Instant::now();
        let error = run(arguments).bad();
        assert!(error.contains("timed out after 1.0 s"), "{arguments:?}: {error}");
        assert!(since.elapsed() < Duration::from_secs(20), "{arguments:?}");
    }
}

#[test]
fn pipe_instead_of_regular_file_is_rejected() {
    let directory = Directory::new();
    let fifo = pipe(&directory, "pipe");
    let error = run(["send", "--file", &fifo]).bad();
    assert!(error.contains("not a regular file"), "{error}");
    let error = run(["send", "--file", &directory.text("w.ipc"), "--in", &fifo]).bad();
    assert!(error.contains("not a regular file"), "{error}");
    let (sender, file) = send_by_file(&directory, &["--receivers", "0"]);
    let error = run(["recv", "--file", &file, "--out", &fifo]).bad();
    assert!(error.contains("pipe without a reader"), "{error}");
    // A sender that exits does not remove a file that another process has replaced.
    fs::remove_file(&file).expect("permitted for the owner");
    pipe(&directory, "w.ipc");
    sender.signal(Signal::TERM);
    sender.wait().good();
    assert!(Path::new(&file).exists(), "the file of another process is kept");
}

#[test]
fn descriptor_is_read_from_pipe_and_standard_input() {
    let directory = Directory::new();
    let (sender, file) = send_by_file(&directory, &["--receivers", "0", "--value", "2"]);
    let fifo = pipe(&directory, "pipe");
    let mut command = device_ipc();
    command.args(["attach", &format!("@{fifo}"), "read"]);
    let attached = Terminal::start(command);
    // Blocks until the reader has opened it.
    let mut writer = File::options().write(true).open(&fifo).expect("the pipe is open");
    writer.write_all(&fs::read(&file).expect("the file exists")).expect("the pipe is open");
    drop(writer);
    let result = attached.wait();
    assert!(!result.err.contains("warning"), "{result:?}");
    assert!(result.good().contains("mean=2.0"));
    for arguments in [["attach", "-", "read"], ["recv", "--descriptor", "-"]] {
        let mut command = device_ipc();
        command.args(arguments).stdin(File::open(&file).expect("the file exists"));
        let output = command.output().expect("it runs");
        let out = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && out.contains("mean=2.0"), "{output:?}");
        assert!(output.stderr.is_empty(), "{output:?}");
    }
    sender.signal(Signal::TERM);
    sender.wait().good();
}

/// The sender keeps its end of the pipe open until the receiver has released the tensor.
#[test]
fn descriptor_is_read_from_a_sender_through_a_pipe() {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let mut send = device_ipc();
    send.args(["send", "--print", "--value", "1.5"]).stdout(writer);
    let mut sender = send.spawn().expect("it runs");
    drop(send);
    let mut receive = device_ipc();
    receive.args(["recv", "--descriptor", "-", "--add", "1"]).stdin(reader);
    let output = receive.output().expect("it runs");
    assert!(String::from_utf8_lossy(&output.stdout).contains("mean=2.5"), "{output:?}");
    assert!(crate::support::wait(&mut sender).success());
}

#[test]
fn descriptor_on_command_line_prints_a_warning() {
    let directory = Directory::new();
    let (sender, file) = send_by_file(&directory, &["--receivers", "0"]);
    let text = fs::read_to_string(&file).expect("the file exists");
    for arguments in [["attach", text.trim(), "read"], ["recv", "--descriptor", text.trim()]] {
        let result = run(arguments);
        assert!(result.err.contains("warning: every user of this machine can read"), "{result:?}");
        assert!(!result.err.contains(text.trim()), "the warning shows the descriptor");
        result.good();
    }
    sender.signal(Signal::TERM);
    sender.wait().good();
}

#[test]
fn holder_name_is_printed_without_control_characters() {
    let directory = Directory::new();
    let (mut sender, file) = send_by_file(&directory, &["--receivers", "1"]);
    let mut command = device_ipc();
    command.args(["recv", "--file", &file, "--hold", "60s"]).arg0("/x/\u{1b}[2J\u{9b}31m\u{202e}evil\r");
    let mut holder = Terminal::start(command);
    holder.until("holding it");
    let table = run(["ps", "--timeout", "30s"]).good();
    assert!(table.contains("[2J\u{fffd}31m\u{fffd}evil"), "{table:?}");
    let json = run(["ps", "--timeout", "30s", "--json"]).good();
    assert!(json.contains("evil"), "{json}");
    sender.signal(Signal::TERM);
    let stopped = sender.until("is still held");
    for text in [table, json, stopped] {
        let is_harmful = |c: char| c.is_control() && c != '\n' || c == '\u{202e}';
        assert!(!text.contains(is_harmful), "{text:?}");
    }
}

/// The set-user-id copy of the program belongs to root, and the caller is nobody.
#[test]
fn set_user_id_program_ignores_library_variables() {
    let test = "set_user_id_program_ignores_library_variables";
    if !rustix::process::geteuid().is_root() {
        println!("{test} is skipped: only root can make a set-user-id program of another user");
        return;
    }
    let directory = Directory::new();
    let (path, program) = (directory.path(""), directory.path("device-ipc"));
    copy_program(&program);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("permitted for the owner");
    if statvfs(&program).expect("the file exists").f_flag.contains(StatVfsMountFlags::NOSUID) {
        println!("{test} is skipped: {} is mounted nosuid", path.display());
        return;
    }
    chown(&program, Some(0), Some(0)).expect("permitted for root");
    let library = directory.text("of-an-attacker.so");
    for (mode, named) in [(0o755, true), (0o4755, false)] {
        fs::set_permissions(&program, fs::Permissions::from_mode(mode)).expect("permitted for root");
        let mut command = Command::new(&program);
        command.arg("devices").uid(NOBODY).gid(NOBODY);
        for variable in ["DEVICE_IPC_CUDA_LIBRARY", "DEVICE_IPC_ASCEND_LIBRARY"] {
            command.env(variable, &library);
        }
        command.env("DEVICE_IPC_MOCK", "devices=3");
        let result = Terminal::start(command).wait();
        let said = format!("{}{}", result.out, result.err);
        assert_eq!(said.matches(&library).count() >= 2, named, "mode {mode:o}: {said}");
        assert_eq!(said.contains(&library), named, "mode {mode:o}: {said}");
        assert_eq!(said.contains("Mock Device 2"), named, "mode {mode:o}: {said}");
    }
}
