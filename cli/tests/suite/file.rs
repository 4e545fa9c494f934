//! `send` and `recv` by a file, an environment variable or an argument.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::support::{Directory, Terminal, altered, device_ipc, host, run, send_by_file, start};
use rustix::process::Signal;

#[test]
fn receiver_modifies_the_tensor_in_place() {
    let directory = Directory::new();
    let (sender, file) = send_by_file(&directory, &["--shape", "4,5", "--value", "1.5"]);
    let mode = std::fs::metadata(&file).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "other users cannot read the descriptor");
    let received = run(["recv", "--file", &file, "--device", "1", "--add", "1"]).good();
    for expected in [
        "shape=[4, 5] dtype=float32 device=mock:1 (across cards)",
        "mean=1.5",
        "added 1 on the device, mean=2.5",
    ] {
        assert!(received.contains(expected), "{expected:?} not found in:\n{received}");
    }
    let sent = sender.wait().good();
    for expected in
        ["device=mock:0, 80 B", "mean=1.500000", "afterwards: mean=2.500000", "mean delta=1.000000"]
    {
        assert!(sent.contains(expected), "{expected:?} not found in:\n{sent}");
    }
    assert!(!Path::new(&file).exists(), "the file was left behind");
}

#[test]
fn sender_exits_after_its_last_receiver() {
    let directory = Directory::new();
    let (sender, file) = send_by_file(&directory, &["--receivers", "3", "--dtype", "int32", "--value", "-2"]);
    for device in ["0", "1", "0"] {
        run(["recv", "--file", &file, "--device", device, "--add", "5"]).good();
    }
    assert!(sender.wait().good().contains("afterwards: mean=13.0"));
}

#[test]
fn raw_bytes_are_preserved() {
    let directory = Directory::new();
    let bytes: Vec<u8> = (0..100_003_u32).map(|index| (index * 7 % 251) as u8).collect();
    let input = directory.file("in.bin", &bytes);
    let (sender, file) = send_by_file(&directory, &["--in", &input, "--receivers", "2"]);
    let out = directory.text("out.bin");
    let received = run(["recv", "--file", &file, "--out", &out]).good();
    assert!(received.contains("shape=[100003] dtype=uint8"), "{received}");
    assert_eq!(std::fs::read(&out).unwrap(), bytes);
    let mut command = device_ipc();
    let piped = command.args(["recv", "--file", &file, "--out", "-"]).output().unwrap();
    assert!(piped.status.success() && piped.stdout == bytes, "{}", String::from_utf8_lossy(&piped.stderr));
    sender.wait().good();
}

#[test]
fn receiver_waits_for_the_file() {
    let directory = Directory::new();
    let file = directory.text("w.ipc");
    // A shell redirection creates the file before the sender prints the descriptor.
    std::fs::write(&file, "").unwrap();
    let mut receiver = start(["recv", "--file", &file]);
    receiver.until("waiting up to 1m for a sender to write");
    std::fs::remove_file(&file).unwrap();
    let (sender, _) = send_by_file(&directory, &[]);
    receiver.wait().good();
    sender.wait().good();
}

#[test]
fn missing_or_invalid_descriptor_file_is_an_error() {
    let directory = Directory::new();
    let error = run(["recv", "--file", &directory.text("w.ipc"), "--timeout", "1s"]).bad();
    assert!(error.contains("w.ipc does not exist") && error.contains("device-ipc send --file"), "{error}");
    let garbage = directory.file("garbage", b"dipc1:garbage");
    assert!(run(["recv", "--file", &garbage]).bad().contains("garbage contains no valid descriptor"));
    let huge = directory.file("huge", &vec![b'x'; 1 << 20]);
    assert!(run(["recv", "--file", &huge]).bad().contains("longer than the maximum"));
}

#[test]
fn file_of_another_process_is_not_replaced() {
    let directory = Directory::new();
    let precious = directory.file("precious", b"precious");
    let error = run(["send", "--file", &precious]).bad();
    assert!(error.contains("does not contain a descriptor, so it is not replaced"), "{error}");
    assert_eq!(std::fs::read(&precious).unwrap(), b"precious");

    let (sender, file) = send_by_file(&directory, &[]);
    let error = run(["send", "--file", &file]).bad();
    assert!(error.contains(&format!("in use by process {}", sender.pid())), "{error}");
    sender.kill();
    assert!(Path::new(&file).exists(), "a killed process leaves its file");
    let error = run(["recv", "--file", &file]).bad();
    assert!(error.contains("has terminated"), "{error}");
    let (sender, file) = send_by_file(&directory, &[]);
    run(["recv", "--file", &file]).good();
    sender.wait().good();
}

#[test]
fn descriptor_is_read_from_environment_and_argument() {
    let mut sender = start(["send", "--print", "--receivers", "2"]);
    let descriptor = sender.until("dipc1:");
    let mut command = device_ipc();
    command.arg("recv").env("DEVICE_IPC_DESCRIPTOR", &descriptor);
    let received = Terminal::start(command).wait().good();
    assert!(received.contains("mean=1.000000"), "{received}");
    run(["recv", "--descriptor", &descriptor]).good();
    let sent = sender.wait();
    assert!(sent.err.contains("afterwards"), "{sent:?}");
    assert_eq!(sent.good(), format!("{descriptor}\n"), "standard output contains only the descriptor");

    let error = run(["recv"]).usage();
    assert!(error.contains("--file PATH") && error.contains("DEVICE_IPC_DESCRIPTOR"), "{error}");
    let mut command = device_ipc();
    command.arg("recv").env("DEVICE_IPC_DESCRIPTOR", "nonsense");
    let error = Terminal::start(command).wait().usage();
    assert!(error.contains("DEVICE_IPC_DESCRIPTOR"), "{error}");
}

#[test]
fn sender_with_unread_output_is_stopped_by_one_signal() {
    let directory = Directory::new();
    let mut command = device_ipc();
    command.args(["send", "--file", &directory.text("w.ipc"), "--receivers", "0"]);
    let (mut sender, _reader, _) = crate::support::start_unread(command, "wrote");
    rustix::process::kill_process(rustix::process::Pid::from_child(&sender), Signal::TERM).expect("a signal");
    assert!(crate::support::wait(&mut sender).success());
}

#[test]
fn stopped_sender_closes_the_export_and_names_holders() {
    let directory = Directory::new();
    for (signal, name) in [(Signal::INT, "SIGINT"), (Signal::TERM, "SIGTERM")] {
        let (sender, file) = send_by_file(&directory, &["--receivers", "0"]);
        sender.signal(signal);
        let sent = sender.wait().good();
        assert!(sent.contains(&format!("stopped by {name}")), "{sent}");
        assert!(sent.contains("no process has opened it yet; the export is closed"), "{sent}");
        assert!(!Path::new(&file).exists(), "the file was left behind");
    }

    let (sender, file) = send_by_file(&directory, &[]);
    let mut receiver = start(["recv", "--file", &file, "--hold", "60s"]);
    receiver.until("holding it");
    let pid = receiver.pid();
    sender.signal(Signal::INT);
    let sent = sender.wait().good();
    assert!(
        sent.contains(&format!("still held: process {pid} (device-ipc)")) && sent.contains("80 bytes"),
        "{sent}"
    );
    assert!(receiver.wait().bad().contains("has terminated"));
}

#[test]
fn termination_of_either_side_is_detected() {
    let directory = Directory::new();
    let (sender, file) = send_by_file(&directory, &[]);
    let mut receiver = start(["recv", "--file", &file, "--hold", "60s"]);
    receiver.until("holding it");
    let pid = sender.pid();
    sender.kill();
    let error = receiver.wait().bad();
    assert!(error.contains(&format!("the exporting process {pid} has terminated")), "{error}");

    let (sender, file) = send_by_file(&directory, &[]);
    let mut receiver = start(["recv", "--file", &file, "--hold", "60s"]);
    receiver.until("holding it");
    receiver.kill();
    assert!(sender.wait().good().contains("afterwards"));
}

#[test]
fn invalid_arguments_are_rejected_before_sharing() {
    let directory = Directory::new();
    let five = directory.file("five", b"12345");
    for (code, arguments, expected) in [
        (1, &["--device", "7"][..], "--device 7 is out of range: the backend mock has 2 device(s)"),
        (
            2,
            &["--value", "300", "--dtype", "uint8"],
            "300 is out of range: the element type holds values from 0 to 255",
        ),
        (2, &["--value", "1", "--dtype", "complex64"], "--in FILE"),
        (2, &["--shape", "0"], "no elements to share"),
        (2, &["--shape", "99999999999999,99999999999999"], "does not fit 64 bits"),
        (1, &["--in", &five, "--dtype", "float32"], "has 5 B, but float32 of shape [1] requires 4 B"),
        (1, &["--in", &directory.text("nothing")], "cannot open"),
        (2, &["--backend", "acme"], "invalid value 'acme' for '--backend <NAME>'"),
    ] {
        let file = directory.text("w.ipc");
        let failed = run(["send", "--file", &file].iter().chain(arguments));
        assert_eq!(failed.status.code(), Some(code), "{failed:?}");
        let error = failed.err;
        assert!(error.to_lowercase().contains(&expected.to_lowercase()), "{arguments:?}: {error}");
        assert!(!Path::new(&file).exists());
    }
    let usage = run(["send", "--print", "--dtype", "float31"]);
    assert!(
        usage.status.code() == Some(2) && usage.err.contains("a similar value exists: 'float32'"),
        "{usage:?}"
    );
    assert_eq!(run(["send"]).status.code(), Some(2), "a transport is required");

    let (sender, file) = send_by_file(&directory, &[]);
    let error = run(["recv", "--file", &file, "--device", "2"]).bad();
    assert!(error.contains("--device 2 is out of range: the backend mock has 2 device(s)"), "{error}");
    let error = run(["recv", "--file", &file, "--backend", "acme"]).usage();
    assert!(error.contains("[possible values: cuda, ascend, mock]"), "{error}");
    // None of the receivers opened it.
    sender.signal(Signal::TERM);
    assert!(sender.wait().good().contains("no process has opened it yet"));
}

#[test]
fn stopped_sender_is_distinguished_from_exited_sender() {
    let directory = Directory::new();
    let (sender, file) = send_by_file(&directory, &["--receivers", "0"]);
    sender.suspend();
    let error = run(["recv", "--file", &file, "--timeout", "1s"]).bad();
    assert!(error.contains("timed out after 1000 ms") && error.contains("is process"), "{error}");
    let at = format!("@{file}");
    let info = run(["attach", &at, "info", "--json"]);
    assert!(info.out.contains("\"silent\""), "{info:?}");
    assert!(
        info.bad().contains(&format!("the exporter, process {}, is alive and does not answer", sender.pid()))
    );
    let error = run(["send", "--file", &file]).bad();
    assert!(error.contains(&format!("in use by process {}", sender.pid())), "{error}");
    sender.signal(Signal::CONT);
    run(["recv", "--file", &file]).good();
    sender.signal(Signal::TERM);
    sender.wait().good();
}

#[test]
fn descriptor_of_another_host_or_token_is_rejected() {
    let directory = Directory::new();
    let (sender, file) = send_by_file(&directory, &["--receivers", "0"]);
    let elsewhere = altered(&file, host);
    let error = run(["recv", "--descriptor", &elsewhere]).bad();
    assert!(error.contains("made on another host") && error.contains("--remote"), "{error}");
    // A range of the format in docs/spec/descriptor.md.
    let token = |bytes: &[u8]| {
        let exporter = u32::from_le_bytes(bytes[16..20].try_into().unwrap()) as usize;
        20 + exporter + 16..20 + exporter + 32
    };
    let forged = altered(&file, token);
    let error = run(["recv", "--descriptor", &forged]).bad();
    assert!(error.contains("does not know the descriptor's token"), "{error}");
    sender.signal(Signal::TERM);
    assert!(sender.wait().good().contains("no process has opened it yet"));
}

#[test]
fn home_device_is_found_under_other_ordinals() {
    let directory = Directory::new();
    let (sender, file) = send_by_file(&directory, &["--device", "1", "--receivers", "1"]);
    let seeing = |visible: &str, arguments: &[&str]| {
        let mut command = device_ipc();
        command.args(["recv", "--file", &file]).args(arguments);
        command.env("DEVICE_IPC_MOCK", format!("devices=2;visible={visible}"));
        Terminal::start(command).wait()
    };
    let error = seeing("0", &[]).bad();
    assert!(error.contains("not visible to this process"), "{error}");
    let received = seeing("1", &[]).good();
    assert!(received.contains("device=mock:0 (its home)"), "{received}");
    sender.wait().good();
}

#[test]
fn exporter_in_socket_directory_is_found() {
    let directory = Directory::new();
    let file = directory.text("w.ipc");
    let mut command = device_ipc();
    command
        .args(["send", "--file", &file, "--receivers", "2"])
        .env("DEVICE_IPC_SOCKET_DIR", directory.path(""));
    let mut sender = Terminal::start(command);
    sender.until("wrote");
    let at = format!("@{file}");
    assert!(run(["attach", &at, "info"]).good().contains("state: sharing"));
    let error = run(["send", "--file", &file]).bad();
    assert!(error.contains(&format!("in use by process {}", sender.pid())), "{error}");
    run(["attach", &at, "fill", "0"]).good();
    run(["recv", "--file", &file]).good();
    assert!(sender.wait().good().contains("afterwards: mean=0.000000"));
}
