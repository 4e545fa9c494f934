//! Two terminals and a file, an environment variable or an argument.

mod support;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use data_encoding::BASE64URL_NOPAD;
use rustix::process::Signal;
use support::{Folder, Terminal, device_ipc, run, send_by_file, start};

#[test]
fn a_receiver_changes_the_tensor_in_place_and_the_sender_sees_it() {
    let folder = Folder::new();
    let (sender, file) = send_by_file(&folder, &["--shape", "4,5", "--value", "1.5"]);
    let mode = std::fs::metadata(&file).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "others could read the descriptor");
    let received = run(["recv", "--file", &file, "--device", "1", "--add", "1"]).good();
    for said in [
        "shape=[4, 5] dtype=float32 device=mock:1 (across cards)",
        "mean=1.5",
        "added 1 on the device, mean=2.5",
    ] {
        assert!(received.contains(said), "{said:?} is missing in:\n{received}");
    }
    let sent = sender.end().good();
    for said in ["device=mock:0, 80 B", "mean=1.500000", "afterwards: mean=2.500000", "mean delta=1.000000"] {
        assert!(sent.contains(said), "{said:?} is missing in:\n{sent}");
    }
    assert!(!Path::new(&file).exists(), "the file was left behind");
}

#[test]
fn the_sender_serves_until_all_its_receivers_are_done() {
    let folder = Folder::new();
    let (sender, file) = send_by_file(&folder, &["--receivers", "3", "--dtype", "int32", "--value", "-2"]);
    for device in ["0", "1", "0"] {
        run(["recv", "--file", &file, "--device", device, "--add", "5"]).good();
    }
    assert!(sender.end().good().contains("afterwards: mean=13.0"));
}

#[test]
fn raw_bytes_arrive_as_they_were() {
    let folder = Folder::new();
    let bytes: Vec<u8> = (0..100_003_u32).map(|index| (index * 7 % 251) as u8).collect();
    let input = folder.file("in.bin", &bytes);
    let (sender, file) = send_by_file(&folder, &["--in", &input, "--receivers", "2"]);
    let out = folder.text("out.bin");
    let received = run(["recv", "--file", &file, "--out", &out]).good();
    assert!(received.contains("shape=[100003] dtype=uint8"), "{received}");
    assert_eq!(std::fs::read(&out).unwrap(), bytes);
    let mut command = device_ipc();
    let piped = command.args(["recv", "--file", &file, "--out", "-"]).output().unwrap();
    assert!(piped.status.success() && piped.stdout == bytes, "{}", String::from_utf8_lossy(&piped.stderr));
    sender.end().good();
}

#[test]
fn a_receiver_waits_for_the_file_and_says_so() {
    let folder = Folder::new();
    let file = folder.text("w.ipc");
    // As a shell makes it before the sender has printed anything.
    std::fs::write(&file, "").unwrap();
    let mut receiver = start(["recv", "--file", &file]);
    receiver.until("waiting up to 60 s for a sender to write");
    std::fs::remove_file(&file).unwrap();
    let (sender, _) = send_by_file(&folder, &[]);
    receiver.end().good();
    sender.end().good();
}

#[test]
fn a_file_that_never_comes_is_an_error_that_names_it() {
    let folder = Folder::new();
    let error = run(["recv", "--file", &folder.text("w.ipc"), "--timeout", "1"]).bad();
    assert!(
        error.contains("w.ipc is not there after 1 s") && error.contains("device-ipc send --file"),
        "{error}"
    );
    let garbage = folder.file("garbage", b"dipc.garbage");
    assert!(run(["recv", "--file", &garbage]).bad().contains("garbage holds no descriptor"));
    let huge = folder.file("huge", &vec![b'x'; 1 << 20]);
    assert!(run(["recv", "--file", &huge]).bad().contains("no descriptor is as long"));
}

#[test]
fn a_file_that_is_somebody_elses_is_left_as_it_is() {
    let folder = Folder::new();
    let precious = folder.file("precious", b"precious");
    let error = run(["send", "--file", &precious]).bad();
    assert!(error.contains("holds no descriptor, so it is left as it is"), "{error}");
    assert_eq!(std::fs::read(&precious).unwrap(), b"precious");

    let (sender, file) = send_by_file(&folder, &[]);
    let error = run(["send", "--file", &file]).bad();
    assert!(error.contains(&format!("process {} shares by", sender.pid())), "{error}");
    sender.kill();
    assert!(Path::new(&file).exists(), "a process that is killed leaves its file");
    let error = run(["recv", "--file", &file]).bad();
    assert!(error.contains("has ended"), "{error}");
    let (sender, file) = send_by_file(&folder, &[]);
    run(["recv", "--file", &file]).good();
    sender.end().good();
}

#[test]
fn a_descriptor_travels_by_the_environment_and_as_an_argument() {
    let mut sender = start(["send", "--print", "--receivers", "2"]);
    let descriptor = sender.until("dipc.");
    let mut command = device_ipc();
    command.arg("recv").env("DEVICE_IPC_DESCRIPTOR", &descriptor);
    let received = Terminal::start(command).end().good();
    assert!(received.contains("mean=1.000000"), "{received}");
    run(["recv", "--descriptor", &descriptor]).good();
    let sent = sender.end();
    assert!(sent.err.contains("afterwards"), "{sent:?}");
    assert_eq!(sent.good(), format!("{descriptor}\n"), "standard output is the descriptor's alone");

    let error = run(["recv"]).bad();
    assert!(error.contains("--connect HOST:PORT") && error.contains("DEVICE_IPC_DESCRIPTOR"), "{error}");
    let mut command = device_ipc();
    command.arg("recv").env("DEVICE_IPC_DESCRIPTOR", "nonsense");
    let error = Terminal::start(command).end().bad();
    assert!(error.contains("DEVICE_IPC_DESCRIPTOR"), "{error}");
}

#[test]
fn a_sender_that_is_stopped_ends_cleanly_and_names_who_held_the_tensor() {
    let folder = Folder::new();
    for (signal, name) in [(Signal::INT, "SIGINT"), (Signal::TERM, "SIGTERM")] {
        let (sender, file) = send_by_file(&folder, &["--receivers", "0"]);
        sender.signal(signal);
        let sent = sender.end().good();
        assert!(sent.contains(&format!("stopped by {name}")), "{sent}");
        assert!(sent.contains("no process has opened it yet; the export has ended"), "{sent}");
        assert!(!Path::new(&file).exists(), "the file was left behind");
    }

    let (sender, file) = send_by_file(&folder, &[]);
    let mut receiver = start(["recv", "--file", &file, "--hold", "60"]);
    receiver.until("holding it");
    let pid = receiver.pid();
    sender.signal(Signal::INT);
    let sent = sender.end().good();
    assert!(
        sent.contains(&format!("still held: process {pid} (device-ipc)")) && sent.contains("80 bytes"),
        "{sent}"
    );
    assert!(receiver.end().bad().contains("has ended"));
}

#[test]
fn the_death_of_either_side_is_seen_by_the_other() {
    let folder = Folder::new();
    let (sender, file) = send_by_file(&folder, &[]);
    let mut receiver = start(["recv", "--file", &file, "--hold", "60"]);
    receiver.until("holding it");
    let pid = sender.pid();
    sender.kill();
    let error = receiver.end().bad();
    assert!(error.contains(&format!("the exporting process {pid} has ended")), "{error}");

    let (sender, file) = send_by_file(&folder, &[]);
    let mut receiver = start(["recv", "--file", &file, "--hold", "60"]);
    receiver.until("holding it");
    receiver.kill();
    assert!(sender.end().good().contains("afterwards"));
}

#[test]
fn what_cannot_be_sent_or_opened_is_refused_before_anything_is_shared() {
    let folder = Folder::new();
    let five = folder.file("five", b"12345");
    for (arguments, said) in [
        (&["--device", "7"][..], "--device 7: the backend mock has 2 device(s)"),
        (
            &["--value", "300", "--dtype", "uint8"],
            "300 does not fit: the smallest value is 0, the largest 255",
        ),
        (&["--value", "1", "--dtype", "complex64"], "--in FILE"),
        (&["--shape", "0"], "no elements to share"),
        (&["--shape", "99999999999999,99999999999999"], "does not fit 64 bits"),
        (&["--in", &five, "--dtype", "float32"], "holds 5 bytes, and float32 of shape [1] has 4"),
        (&["--in", &folder.text("nothing")], "opening"),
        (&["--backend", "acme"], "no backend is called \"acme\""),
    ] {
        let file = folder.text("w.ipc");
        let error = run(["send", "--file", &file].iter().chain(arguments)).bad();
        assert!(error.to_lowercase().contains(&said.to_lowercase()), "{arguments:?}: {error}");
        assert!(!Path::new(&file).exists());
    }
    let usage = run(["send", "--print", "--dtype", "float31"]);
    assert!(usage.status.code() == Some(2) && usage.err.contains("float16, bfloat16"), "{usage:?}");
    assert_eq!(run(["send"]).status.code(), Some(2), "a road is needed");

    let (sender, file) = send_by_file(&folder, &[]);
    let error = run(["recv", "--file", &file, "--device", "2"]).bad();
    assert!(error.contains("--device 2: the backend mock has 2 device(s)"), "{error}");
    let error = run(["recv", "--file", &file, "--backend", "acme"]).bad();
    assert!(error.contains("no backend is called \"acme\""), "{error}");
    // None of them had it open.
    sender.signal(Signal::TERM);
    assert!(sender.end().good().contains("no process has opened it yet"));
}

#[test]
fn a_sender_that_stands_still_is_told_from_one_that_has_ended() {
    let folder = Folder::new();
    let (sender, file) = send_by_file(&folder, &["--receivers", "0"]);
    sender.signal(Signal::STOP);
    let error = run(["recv", "--file", &file, "--timeout", "1"]).bad();
    assert!(error.contains("did not happen within 1000 ms") && error.contains("is process"), "{error}");
    let at = format!("@{file}");
    let info = run(["attach", &at, "info"]);
    assert!(info.out.contains("\"silent\""), "{info:?}");
    assert!(
        info.bad().contains(&format!("process {}, the exporter, lives and does not answer", sender.pid()))
    );
    let error = run(["send", "--file", &file]).bad();
    assert!(error.contains(&format!("process {} shares by", sender.pid())), "{error}");
    sender.signal(Signal::CONT);
    run(["recv", "--file", &file]).good();
    sender.signal(Signal::TERM);
    sender.end().good();
}

/// The descriptor with other bytes at this place, and a checksum that fits.
fn altered(file: &str, place: std::ops::Range<usize>) -> String {
    let text = std::fs::read_to_string(file).unwrap();
    let mut bytes = BASE64URL_NOPAD.decode(text.trim().trim_start_matches("dipc.").as_bytes()).unwrap();
    bytes[place].iter_mut().for_each(|byte| *byte ^= 0x5a);
    let end = bytes.len() - 4;
    let checksum = crc32fast::hash(&bytes[..end]).to_le_bytes();
    bytes[end..].copy_from_slice(&checksum);
    format!("dipc.{}", BASE64URL_NOPAD.encode(&bytes))
}

#[test]
fn a_descriptor_of_another_host_or_with_another_token_is_refused_with_the_reason() {
    let folder = Folder::new();
    let (sender, file) = send_by_file(&folder, &["--receivers", "0"]);
    // Places as in docs/spec/descriptor.md: host and boot id, then the token.
    let elsewhere = altered(&file, 33..65);
    let error = run(["recv", "--descriptor", &elsewhere]).bad();
    assert!(error.contains("made on another host"), "{error}");
    let forged = altered(&file, 101..117);
    let error = run(["recv", "--descriptor", &forged]).bad();
    assert!(error.contains("does not know the descriptor's token"), "{error}");
    sender.signal(Signal::TERM);
    assert!(sender.end().good().contains("no process has opened it yet"));
}

#[test]
fn devices_are_numbered_by_each_side_and_the_bytes_stay_where_they_are() {
    let folder = Folder::new();
    let (sender, file) = send_by_file(&folder, &["--device", "1", "--receivers", "1"]);
    let seeing = |visible: &str, arguments: &[&str]| {
        let mut command = device_ipc();
        command.args(["recv", "--file", &file]).args(arguments);
        command.env("DEVICE_IPC_MOCK", format!("devices=2;visible={visible}"));
        Terminal::start(command).end()
    };
    let error = seeing("0", &[]).bad();
    assert!(error.contains("which this process does not see"), "{error}");
    let received = seeing("1", &[]).good();
    assert!(received.contains("device=mock:0 (its home)"), "{received}");
    sender.end().good();
}

#[test]
fn a_sender_in_a_socket_directory_is_found_by_its_descriptor() {
    let folder = Folder::new();
    let file = folder.text("w.ipc");
    let mut command = device_ipc();
    command.args(["send", "--file", &file, "--receivers", "2"]).env("DEVICE_IPC_SOCKET_DIR", folder.path(""));
    let mut sender = Terminal::start(command);
    sender.until("wrote");
    let at = format!("@{file}");
    assert!(run(["attach", &at, "info"]).good().contains("\"sharing\""));
    let error = run(["send", "--file", &file]).bad();
    assert!(error.contains(&format!("process {} shares by", sender.pid())), "{error}");
    run(["attach", &at, "fill", "0"]).good();
    run(["recv", "--file", &file]).good();
    assert!(sender.end().good().contains("afterwards: mean=0.000000"));
}
