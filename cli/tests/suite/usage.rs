//! The command line: options that every command takes, exit codes, completions, manual pages, and the mistakes of a user.

use std::os::unix::process::CommandExt;
use std::path::Path;

use crate::support::{
    CommandResult, Directory, Terminal, copy_program, device_ipc, run, send_by_file, start,
};
use data_encoding::BASE64URL_NOPAD;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::Signal;
use serde_json::Value;

const COMMANDS: [&str; 10] =
    ["devices", "demo", "ps", "send", "recv", "attach", "keep", "doctor", "completions", "man"];

fn with_variables(arguments: &[&str], variables: &[(&str, &str)]) -> CommandResult {
    let mut command = device_ipc();
    command.args(arguments).envs(variables.iter().copied());
    Terminal::start(command).wait()
}

fn json_lines(text: &str) -> Vec<Value> {
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect()
}

/// Asserts that a command failed with this exit code, and with one line that contains these texts.
#[track_caller]
fn fails(result: &CommandResult, code: i32, texts: &[&str]) {
    assert_eq!(result.status.code(), Some(code), "{result:?}");
    let line =
        result.err.lines().find(|line| line.starts_with("error: ")).unwrap_or_else(|| panic!("{result:?}"));
    assert_eq!(result.err.matches("error: ").count(), 1, "{result:?}");
    // clap prints its hints below the error.
    let said = if code == 2 { &*result.err } else { line };
    for text in texts {
        assert!(said.contains(text), "{text:?} is missing: {result:?}");
    }
}

/// Each mistake has an exit code and an error that names the value and the remedy.
#[test]
fn each_mistake_of_a_user_has_an_exit_code_and_a_remedy() {
    let directory = Directory::new();
    let (sender, file) = send_by_file(&directory, &["--receivers", "0"]);
    let missing = directory.text("missing.ipc");
    let text = std::fs::read_to_string(&file).unwrap();
    let damaged = directory.file("damaged.ipc", &damaged_in_the_middle(&text));
    let fifo = directory.text("fifo");
    mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();

    // 1. An unknown backend, as an option and as a variable.
    let unknown = run(["demo", "--backend", "cdua"]);
    fails(&unknown, 2, &["'cdua'", "a similar value exists: 'cuda'", "possible values: cuda, ascend, mock"]);
    let unknown = with_variables(&["demo"], &[("DEVICE_IPC_BACKEND", "cdua")]);
    fails(&unknown, 2, &["\"cdua\"", "cuda", "mock"]);
    // 2. A backend that is unavailable here, asked for by name.
    let no_library = [("DEVICE_IPC_CUDA_LIBRARY", "/nowhere/libcuda.so.1")];
    for arguments in [&["demo", "--backend", "cuda"][..], &["send", "--print", "--backend", "cuda"]] {
        fails(&with_variables(arguments, &no_library), 1, &["cuda", "/nowhere/libcuda.so.1"]);
    }
    let listed = with_variables(&["devices", "--backend", "cuda"], &no_library);
    fails(&listed, 1, &["the backend cuda is unavailable"]);
    assert!(listed.out.contains("/nowhere/libcuda.so.1"), "{listed:?}");
    let cuda = [no_library[0], ("DEVICE_IPC_BACKEND", "cuda")];
    fails(&with_variables(&["demo"], &cuda), 1, &["/nowhere/libcuda.so.1"]);
    // 3. An unknown element type.
    let unknown = run(["send", "--print", "--dtype", "flaot32"]);
    fails(&unknown, 2, &["'flaot32'", "a similar value exists: 'float32'"]);
    // 4. A file that does not exist.
    let absent = run(["attach", &format!("@{missing}"), "read"]);
    fails(&absent, 1, &["missing.ipc", "No such file"]);
    let absent = run(["recv", "--file", &missing, "--timeout", "100ms"]);
    fails(&absent, 1, &["missing.ipc", "100ms", "check that 'device-ipc send --file"]);
    // 5. A damaged descriptor.
    for arguments in [["recv", "--file", &damaged], ["attach", &format!("@{damaged}"), "info"]] {
        fails(&run(arguments), 1, &["damaged"]);
    }
    // 6. A duration without a unit.
    let no_unit = run(["recv", "--file", &file, "--timeout", "10"]);
    fails(&no_unit, 2, &["'10'", "--timeout", "500ms, 10s"]);
    // 7. An export that does not exist any longer, and a tensor that the export does not have.
    let none = run(["attach", &format!("@{file}"), "read", "--tensor", "w"]);
    fails(&none, 1, &["--tensor w", "remove --tensor"]);
    let misspelt = run(["attach", &text.trim()["dipc".len()..], "info"]);
    fails(&misspelt, 2, &["expected the prefix", "use @FILE"]);
    let damaged_text = std::fs::read_to_string(&damaged).unwrap();
    let on_the_line = run(["attach", damaged_text.trim(), "info"]);
    fails(&on_the_line, 2, &["error: the descriptor is damaged"]);
    assert!(!on_the_line.err.contains("@FILE"), "{on_the_line:?}");
    // Values that are no numbers. The tensor is not opened for them.
    for (arguments, texts) in [
        (&["recv", "--file", &missing, "--add", "x"][..], ["'x'", "a number is required"]),
        (&["attach", "@missing", "add", "x"], ["'x'", "a number is required"]),
        (&["attach", "@missing", "fill", "256"], ["'256'", "0 to 255"]),
        (&["recv", "--file", &missing, "--device", "two"], ["'two'", "device-ipc devices"]),
        (&["send", "--print", "--shape", "4x5"], ["'4x5'", "separated by commas: 4,5"]),
    ] {
        let result = run(arguments);
        fails(&result, 2, &texts);
        assert!(result.out.is_empty(), "{result:?}");
    }
    // 8. A pipe where a file is required.
    fails(&run(["send", "--file", &fifo]), 1, &["fifo", "not a regular file", "choose another path"]);
    // 9. An unknown device.
    let unknown = run(["recv", "--file", &file, "--device", "9"]);
    fails(&unknown, 1, &["--device 9 is out of range", "has 2 device(s)", "device-ipc devices"]);
    // 10. A stale descriptor.
    let kept = directory.file("kept.ipc", text.as_bytes());
    sender.kill();
    fails(&run(["recv", "--file", &kept]), 1, &["share the memory again, and use the new descriptor"]);
    fails(&run(["attach", &format!("@{kept}"), "info"]), 1, &["has exited"]);
}

/// Returns the text of a descriptor with one changed bit in a length.
fn damaged_in_the_middle(text: &str) -> Vec<u8> {
    let mut bytes = BASE64URL_NOPAD.decode(text.trim().trim_start_matches("dipc1:").as_bytes()).unwrap();
    bytes[9] ^= 0x40;
    format!("dipc1:{}\n", BASE64URL_NOPAD.encode(&bytes)).into_bytes()
}

/// A damaged length, character, prefix or end is reported as damage.
#[test]
fn damaged_descriptor_is_reported_as_damaged() {
    let directory = Directory::new();
    let (sender, file) = send_by_file(&directory, &["--receivers", "0"]);
    let text = std::fs::read_to_string(&file).unwrap().trim().to_owned();
    sender.signal(Signal::TERM);
    sender.wait().good();
    let changed = |position: usize, character: &str| {
        let mut text = text.clone();
        text.replace_range(position..=position, character);
        text
    };
    for damaged in [
        // The magic number, the length and a character that is no Base64.
        changed(7, if text.as_bytes()[7] == b'Z' { "Y" } else { "Z" }),
        changed(18, if text.as_bytes()[18] == b'B' { "C" } else { "B" }),
        changed(40, "%"),
    ] {
        let damaged = directory.file("damaged", damaged.as_bytes());
        fails(&run(["attach", &format!("@{damaged}"), "info"]), 1, &["damaged"]);
    }
    let cut = directory.file("cut", &text.as_bytes()[..text.len() - 5]);
    fails(&run(["attach", &format!("@{cut}"), "info"]), 1, &["cut off"]);
}

#[test]
fn refused_user_gets_an_error_and_allowed_user_opens() {
    const NOBODY: u32 = 65534;
    const DAEMON: u32 = 1;
    let test = "refused_user_gets_an_error_and_allowed_user_opens";
    if !rustix::process::geteuid().is_root() {
        println!("{test} is skipped: only root can start a process of another user");
        return;
    }
    let unknown = run(["send", "--print", "--allow-user", "no-such-user"]);
    fails(&unknown, 2, &["'no-such-user'", "id -u no-such-user"]);
    // Another user can neither enter the directory of the build, nor read the file of the sender.
    let directory = Directory::new();
    let program = directory.path("device-ipc");
    copy_program(&program);
    let open_to_all = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(directory.path(""), open_to_all).unwrap();
    let machine = "devices=2;handles=fds";
    let as_user = |uid: u32, arguments: &[&str], descriptor: &str| {
        let mut command = std::process::Command::new(&program);
        command.args(arguments).uid(uid).gid(uid).env("DEVICE_IPC_DESCRIPTOR", descriptor);
        command.env("DEVICE_IPC_BACKEND", "mock").env("DEVICE_IPC_MOCK", machine);
        Terminal::start(command).wait()
    };
    assert_ne!(DAEMON, NOBODY);
    let mut command = device_ipc();
    command
        .args(["send", "--print", "--receivers", "0", "--allow-user", "daemon"])
        .env("DEVICE_IPC_MOCK", machine);
    let mut sender = Terminal::start(command);
    let descriptor = sender.until("dipc1:");
    // Both sides have to allow each other: neither of these does.
    let refused = as_user(NOBODY, &["recv", "--allow-user", "root"], &descriptor);
    fails(&refused, 1, &["not permitted"]);
    let refused = as_user(DAEMON, &["recv"], &descriptor);
    fails(&refused, 1, &["user 0"]);
    let received = as_user(DAEMON, &["recv", "--allow-user", "root", "--add", "1"], &descriptor);
    assert!(received.good().contains("mean=2.000000"));
    let listed = as_user(DAEMON, &["ps", "--timeout", "30s", "--json", "--allow-user", "0"], "").good();
    assert!(listed.contains(&format!("\"pid\": {}", sender.pid())), "{listed}");
    sender.signal(Signal::TERM);
    let sent = sender.wait();
    assert!(sent.err.contains("WARN") && sent.err.contains("uid=65534"), "{sent:?}");
    sent.good();
}

#[test]
fn options_of_attach_precede_or_follow_the_action() {
    let directory = Directory::new();
    let (sender, file) = send_by_file(&directory, &["--receivers", "0", "--dtype", "f32", "--value", "3"]);
    let at = format!("@{file}");
    for arguments in [
        ["attach", &at, "--device", "1", "--timeout", "30s", "--json", "read"],
        ["attach", &at, "read", "--device", "1", "--timeout", "30s", "--json"],
        ["--json", "attach", &at, "--device", "1", "read", "--timeout", "30s"],
        ["attach", "--device", "1", "--json", "--timeout", "30s", &at, "read"],
    ] {
        let read = &json_lines(&run(arguments).good())[0];
        assert_eq!((&read["device"], &read["mean"]), (&1.into(), &3.0.into()), "{arguments:?}: {read}");
        assert_eq!((&read["event"], &read["dtype"]), (&"read".into(), &"float32".into()));
    }
    assert!(run(["attach", &at, "read", "--copy", "staged"]).good().contains("a copy"));
    assert!(
        run(["attach", &at, "read", "--copy", "maybe"]).usage().contains("expected one of never, if-needed")
    );
    fails(&run(["attach", &at, "info", "--tensor", "w"]), 2, &["remove --tensor"]);
    sender.signal(Signal::TERM);
    sender.wait().good();
}

#[test]
fn send_and_recv_report_events_as_json() {
    let directory = Directory::new();
    let file = directory.text("w.ipc");
    let mut sender = start(["send", "--json", "--file", &file, "--dtype", "bf16", "--shape", "2,3"]);
    sender.until("\"wrote\"");
    let received =
        json_lines(&run(["recv", "--file", &file, "--add", "1", "--hold", "10ms", "--json"]).good());
    let events = |entries: &[Value]| entries.iter().map(|one| one["event"].clone()).collect::<Vec<_>>();
    assert_eq!(events(&received), ["opened", "read", "added", "holding"]);
    assert_eq!(received[0]["shape"], serde_json::json!([2, 3]));
    assert_eq!((&received[0]["dtype"], &received[2]["mean"]), (&"bfloat16".into(), &2.0.into()));
    let sent = json_lines(&sender.wait().good());
    assert_eq!(events(&sent), ["allocated", "before", "wrote", "after", "mean_delta"]);
    assert_eq!((&sent[0]["bytes"], &sent[4]["mean_delta"]), (&12.into(), &1.0.into()));

    let mut sender = start(["send", "--json", "--print", "--receivers", "0"]);
    let descriptor: Value = serde_json::from_str(&sender.until("dipc1:")).unwrap();
    assert_eq!(descriptor["event"], "descriptor");
    sender.signal(Signal::TERM);
    let sent = json_lines(&sender.wait().good());
    assert_eq!(sent.last().unwrap()["event"], "closed");
}

#[test]
fn ps_repeats_until_its_reader_closes_the_pipe() {
    let directory = Directory::new();
    let (sender, _) = send_by_file(&directory, &["--receivers", "0"]);
    let pid = sender.pid();
    let mut watched = start(["ps", "--timeout", "30s", "--watch=10ms", "--json"]);
    for _ in 0..3 {
        let list: Value = serde_json::from_str(&watched.until("processes")).unwrap();
        assert!(list["processes"].as_array().unwrap().iter().any(|one| one["pid"] == pid), "{list}");
    }
    watched.signal(Signal::TERM);
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&watched.wait().status), Some(15));
    let mut watched = start(["ps", "--timeout", "30s", "--watch=10ms"]);
    for _ in 0..3 {
        watched.until(&pid.to_string());
    }
    watched.signal(Signal::TERM);
    assert!(!watched.wait().out.contains('\u{1b}'), "no escape sequences outside a terminal");

    let mut command = device_ipc();
    command.args(["ps", "--watch=10ms"]).stdout(std::process::Stdio::piped());
    let mut child = command.spawn().unwrap();
    drop(child.stdout.take());
    // It exits by itself, because no process reads its output.
    assert_eq!(crate::support::wait(&mut child).code(), Some(1));
    for invalid in ["--watch=0s", "--watch=2"] {
        run(["ps", invalid]).usage();
    }
    sender.signal(Signal::TERM);
    sender.wait().good();
}

#[test]
fn log_level_follows_verbose_and_quiet() {
    let directory = Directory::new();
    let (sender, file) = send_by_file(&directory, &["--receivers", "0"]);
    let text = std::fs::read_to_string(&file).unwrap();
    let received = |option: &str| {
        let result = run(["recv", "--descriptor", text.trim(), option]);
        assert!(result.status.success() && result.out.contains("mean=1.0"), "{result:?}");
        result.err
    };
    assert!(received("--color=auto").contains("warning: every user"));
    assert_eq!(received("-q"), "");
    let debug = received("-vv");
    assert!(debug.contains("DEBUG") && !debug.contains('\u{1b}'), "{debug}");
    assert!(!debug.contains(text.trim().trim_start_matches("dipc1:")), "the log shows the descriptor");
    run(["recv", "-q", "-v", "--file", &file]).usage();
    let error = run(["recv", "-q", "--file", &directory.text("missing"), "--timeout", "10ms"]).bad();
    assert!(error.starts_with("error: ") && error.lines().count() == 1, "{error}");
    sender.signal(Signal::TERM);
    sender.wait().good();
}

#[test]
fn color_is_used_on_request_only() {
    let doctor = |option: &str, variable: &[(&str, &str)]| {
        with_variables(&["doctor", "--quick", "--backend", "mock", option], variable).out
    };
    let plain = doctor("--color=auto", &[]);
    assert!(plain.contains("ok       mock") && !plain.contains('\u{1b}'), "{plain}");
    let colored = doctor("--color=always", &[]);
    assert!(colored.contains("\u{1b}[32mok"), "{colored}");
    assert!(!doctor("--color=never", &[("CLICOLOR_FORCE", "1")]).contains('\u{1b}'));
    let error = run(["attach", "nonsense", "info", "--color=always"]).usage();
    assert!(error.contains("\u{1b}[1m\u{1b}[31merror:"), "{error:?}");
    assert!(run(["--color=always", "--help"]).good().contains('\u{1b}'));
    assert!(!run(["--color=never", "--help"]).good().contains('\u{1b}'));
}

#[test]
fn commands_of_child_processes_are_never_named() {
    for mistake in ["demo-receive", "doctor-librar", "doctor-ascen", "__demo", "doctorl"] {
        let error = run([mistake]).usage();
        for hidden in ["demo-receiver", "doctor-library", "doctor-ascend"] {
            assert!(!error.contains(hidden), "{mistake}: {error}");
        }
    }
    assert!(run(["doctro"]).usage().contains("a similar subcommand exists: 'doctor'"));
    let help = run(["--help"]).good();
    assert!(!help.contains("demo-receiver") && help.contains("Exit codes:"), "{help}");
}

#[test]
fn completion_scripts_and_manual_pages_name_every_command() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = run(["completions", shell]).good();
        for text in COMMANDS.iter().chain(&["allow-user"]) {
            assert!(script.contains(text), "{shell}: {text}");
        }
        assert!(!script.contains("demo-receiver"), "{shell}");
    }
    run(["completions", "tcsh"]).usage();
    assert!(run(["man"]).good().contains(".TH device-ipc 1"));
    let directory = Directory::new();
    run(["man", "--dir", &directory.text("")]).good();
    for page in COMMANDS
        .map(|command| format!("device-ipc-{command}.1"))
        .iter()
        .chain(&["device-ipc-attach-read.1".into()])
    {
        assert!(directory.path(page).exists(), "{page}");
    }
    let missing = directory.text("missing");
    fails(&run(["man", "--dir", &missing]), 1, &["cannot write manual pages", "missing"]);
    assert!(!Path::new(&missing).exists());
}

#[test]
fn bash_accepts_the_completion_script() {
    let script = run(["completions", "bash"]).good();
    let directory = Directory::new();
    let file = directory.file("completions.bash", script.as_bytes());
    // The script chooses the name of its function.
    let complete = format!(
        "source {file}; function=$(complete -p device-ipc); function=${{function##*-F }}; function=${{function%% *}}
         COMP_WORDS=(device-ipc send --dtype bfl); COMP_CWORD=3; $function device-ipc bfl --dtype
         echo \"${{COMPREPLY[@]}}\""
    );
    let output = std::process::Command::new("bash").args(["-c", &complete]).output();
    let Ok(output) = output else {
        println!("bash_accepts_the_completion_script is skipped: bash is not installed");
        return;
    };
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "bfloat16", "{output:?}");
}
