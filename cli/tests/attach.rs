//! The roles of `attach`: describe, read, fill, add.

mod support;

use device_ipc::{Access, Dtype, Error, Ipc, mock::MockBackend};
use rustix::process::Signal;
use serde_json::Value;
use support::{Folder, Terminal, device_ipc, run, send_by_file};

fn attach(file: &str, action: &[&str]) -> String {
    run(["attach", &format!("@{file}")].iter().chain(action)).good()
}

#[test]
fn three_roles_print_fill_and_add_as_on_the_tutorials_buffer() {
    let folder = Folder::new();
    let arguments = ["--dtype", "uint8", "--shape", "1024", "--value", "1", "--receivers", "0"];
    let (sender, file) = send_by_file(&folder, &arguments);
    assert!(attach(&file, &["read"]).contains("mean=1.000000"));
    assert!(attach(&file, &["fill", "8"]).contains("set every byte to 8"));
    let added = attach(&file, &["add", "3"]);
    assert!(added.contains("added 3 through the host") && added.contains("mean=11.000000"), "{added}");
    assert!(attach(&file, &["add", "250"]).contains("values=[5, 5, 5"), "bytes wrap around");
    let out = folder.text("out");
    attach(&file, &["read", "--out", &out]);
    assert_eq!(std::fs::read(out).unwrap(), [5; 1024]);
    sender.signal(Signal::INT);
    sender.end().good();
}

#[test]
fn floats_are_added_to_on_the_device_and_halves_through_the_host() {
    let folder = Folder::new();
    for (dtype, way) in
        [("float32", "on the device"), ("float16", "through the host"), ("float64", "through the host")]
    {
        let (sender, file) = send_by_file(&folder, &["--dtype", dtype, "--value", "2.5"]);
        let added = attach(&file, &["add", "-0.5"]);
        assert!(
            added.contains(&format!("added -0.5 {way}")) && added.contains("values=[2.0, 2.0"),
            "{added}"
        );
        assert!(sender.end().good().contains("mean delta=-0.500000"));
    }
}

#[test]
fn what_cannot_be_added_is_refused_and_nothing_is_changed() {
    let folder = Folder::new();
    let (sender, file) = send_by_file(&folder, &["--dtype", "bool", "--value", "true", "--receivers", "0"]);
    let at = format!("@{file}");
    assert!(run(["attach", &at, "add", "1"]).bad().contains("elements of bool"));
    assert!(run(["attach", &at, "--device", "5", "read"]).bad().contains("--device 5"));
    assert_eq!(run(["attach", &at, "fill", "256"]).status.code(), Some(2));
    assert!(run(["attach", &file, "read"]).bad().contains("@FILE"));
    assert!(attach(&file, &["read"]).contains("values=[01, 01"));
    sender.signal(Signal::TERM);
    assert!(sender.end().good().contains("the export has ended"));
}

#[test]
fn a_descriptor_is_described_without_its_secret_with_and_without_its_exporter() {
    let folder = Folder::new();
    let (sender, file) = send_by_file(&folder, &["--shape", "2,3", "--receivers", "0"]);
    let text = attach(&file, &["info"]);
    let info: Value = serde_json::from_str(&text).expect("one JSON document");
    assert_eq!(info["descriptor"]["tensor"]["shape"], serde_json::json!([2, 3]));
    assert_eq!(info["descriptor"]["length_bytes"], 24);
    assert_eq!(
        (info["exporter"]["state"].as_str(), info["exporter"]["pid"].as_u64()),
        (Some("sharing"), Some(sender.pid().into()))
    );
    assert_eq!(info["exporter"]["export"]["opened"], 0, "asking opened the tensor");
    let line = std::fs::read_to_string(&file).unwrap();
    assert!(!text.contains("token") && !text.contains(line.trim().trim_start_matches("dipc.")), "{text}");

    let kept = folder.file("kept", line.as_bytes());
    sender.signal(Signal::TERM);
    sender.end().good();
    let info: Value = serde_json::from_str(&attach(&kept, &["info", "--offline"])).unwrap();
    assert!(info["descriptor"]["backend"] == "mock" && info.get("exporter").is_none(), "{info}");
    let ended = run(["attach", &format!("@{kept}"), "info"]);
    assert!(ended.out.contains("\"no answer\""), "{ended:?}");
    assert!(ended.bad().contains("no process answers for this descriptor"));
    for action in [&["read"][..], &["fill", "0"], &["add", "1"]] {
        let error = run(["attach", &format!("@{kept}")].iter().chain(action)).bad();
        assert!(error.contains("has ended, and its exports with it"), "{error}");
    }
}

/// Of a program that is not ours: without a layout, with gaps between the elements, read-only.
#[test]
fn what_other_programs_share_is_taken_as_they_share_it() {
    let machine = "devices=1;handles=fds";
    let ipc = Ipc::with_backend(MockBackend::from_spec(machine).unwrap());
    let attach = |descriptor: &str, action: &[&str]| {
        let mut command = device_ipc();
        command.args(["attach", descriptor]).args(action).env("DEVICE_IPC_MOCK", machine);
        Terminal::start(command).end()
    };

    let bytes = ipc.share(ipc.allocate(0, 7).unwrap()).start().unwrap();
    let at = bytes.descriptor().to_string();
    assert!(attach(&at, &["fill", "254"]).good().contains("7 bytes device=mock:0"));
    assert!(attach(&at, &["add", "3"]).good().contains("values=[1, 1, 1, 1, 1, 1, 1]"), "they are uint8");

    for (dtype, said) in [(Dtype::F32, "not contiguous"), (Dtype::I32, "gaps between its elements")] {
        let layout = ipc.share(ipc.allocate(0, 32).unwrap()).dtype(dtype).shape([2, 2]).strides([4, 1]);
        let gaps = layout.start().unwrap();
        let at = gaps.descriptor().to_string();
        let read = attach(&at, &["read"]).good();
        assert!(read.contains("shape=[2, 2]") && !read.contains("mean"), "{read}");
        let error = attach(&at, &["add", "1"]).bad();
        assert!(error.contains(said), "{error}");
    }

    let kind = ipc
        .backend()
        .handle_kinds()
        .into_iter()
        .find(|kind| kind.read_only)
        .expect("one that can be read-only");
    let memory = ipc.allocate_as(0, 64, kind.kind).unwrap();
    let read_only = ipc.share(memory).access(Access::ReadOnly).start().map_err(Error::from).unwrap();
    let at = read_only.descriptor().to_string();
    assert!(attach(&at, &["read"]).good().contains("64 bytes"));
    for action in [&["fill", "1"][..], &["add", "1"]] {
        let error = attach(&at, action).bad();
        assert!(error.contains("shared read-only, and read-write was asked for"), "{error}");
    }
}
