//! The actions of `attach`: info, read, fill and add.

use crate::support::{Directory, Terminal, device_ipc, run, send_by_file};
use device_ipc::{Access, Buffer, Dtype, Error, Ipc, MemoryUse, TensorLayout, mock::MockBackend};
use rustix::process::Signal;
use serde_json::Value;

fn attach(file: &str, action: &[&str]) -> String {
    run(["attach", &format!("@{file}")].iter().chain(action)).good()
}

#[test]
fn read_fill_and_add_modify_a_shared_buffer() {
    let directory = Directory::new();
    let arguments = ["--dtype", "uint8", "--shape", "1024", "--value", "1", "--receivers", "0"];
    let (sender, file) = send_by_file(&directory, &arguments);
    assert!(attach(&file, &["read"]).contains("mean=1.000000"));
    assert!(attach(&file, &["fill", "8"]).contains("set every byte to 8"));
    let added = attach(&file, &["add", "3"]);
    assert!(added.contains("added 3 through the host") && added.contains("mean=11.000000"), "{added}");
    assert!(attach(&file, &["add", "250"]).contains("values=[5, 5, 5"), "bytes wrap around");
    let out = directory.text("out");
    attach(&file, &["read", "--out", &out]);
    assert_eq!(std::fs::read(out).unwrap(), [5; 1024]);
    sender.signal(Signal::INT);
    sender.wait().good();
}

#[test]
fn add_uses_device_for_float32_and_host_for_others() {
    let directory = Directory::new();
    for (dtype, way) in
        [("float32", "on the device"), ("float16", "through the host"), ("float64", "through the host")]
    {
        let (sender, file) = send_by_file(&directory, &["--dtype", dtype, "--value", "2.5"]);
        let added = attach(&file, &["add", "-0.5"]);
        assert!(
            added.contains(&format!("added -0.5 {way}")) && added.contains("values=[2.0, 2.0"),
            "{added}"
        );
        assert!(sender.wait().good().contains("mean delta=-0.500000"));
    }
}

#[test]
fn unsupported_actions_are_rejected_without_changes() {
    let directory = Directory::new();
    let (sender, file) =
        send_by_file(&directory, &["--dtype", "bool", "--value", "true", "--receivers", "0"]);
    let at = format!("@{file}");
    assert!(run(["attach", &at, "add", "1"]).bad().contains("elements of bool"));
    assert!(run(["attach", &at, "--device", "5", "read"]).bad().contains("--device 5"));
    assert_eq!(run(["attach", &at, "fill", "256"]).status.code(), Some(2));
    assert!(run(["attach", &file, "read"]).usage().contains("@FILE"));
    assert!(attach(&file, &["read"]).contains("values=[01, 01"));
    sender.signal(Signal::TERM);
    assert!(sender.wait().good().contains("the export is closed"));
}

#[test]
fn info_omits_the_token_and_reports_the_exporter() {
    let directory = Directory::new();
    let (sender, file) = send_by_file(&directory, &["--shape", "2,3", "--receivers", "0"]);
    let text = attach(&file, &["info", "--json"]);
    let info: Value = serde_json::from_str(&text).expect("one JSON document");
    assert_eq!(info["descriptor"]["tensor"]["shape"], serde_json::json!([2, 3]));
    assert_eq!(info["descriptor"]["length_bytes"], 24);
    assert_eq!(
        (info["exporter"]["state"].as_str(), info["exporter"]["pid"].as_u64()),
        (Some("sharing"), Some(sender.pid().into()))
    );
    assert_eq!(info["exporter"]["export"]["opened"], 0, "info does not open the tensor");
    let line = std::fs::read_to_string(&file).unwrap();
    assert!(!text.contains("token") && !text.contains(line.trim().trim_start_matches("dipc1:")), "{text}");

    let kept = directory.file("kept", line.as_bytes());
    sender.signal(Signal::TERM);
    sender.wait().good();
    let info: Value = serde_json::from_str(&attach(&kept, &["info", "--offline", "--json"])).unwrap();
    assert!(info["descriptor"]["backend"] == "mock" && info.get("exporter").is_none(), "{info}");
    let result = run(["attach", &format!("@{kept}"), "info", "--json"]);
    assert!(result.out.contains("\"no answer\""), "{result:?}");
    assert!(result.bad().contains("no process answers for this descriptor"));
    for action in [&["read"][..], &["fill", "0"], &["add", "1"]] {
        let error = run(["attach", &format!("@{kept}")].iter().chain(action)).bad();
        assert!(error.contains("has terminated; its exports have ended"), "{error}");
    }
}

/// Exports that `send` does not create: without a layout, with gaps between the elements, read-only.
#[test]
fn exports_without_layout_with_gaps_or_read_only_work() {
    let machine = "devices=1;handles=fds";
    let ipc = Ipc::with_backend(MockBackend::from_spec(machine).unwrap());
    let attach = |descriptor: &str, action: &[&str]| {
        let mut command = device_ipc();
        command.args(["attach", descriptor]).args(action).env("DEVICE_IPC_MOCK", machine);
        Terminal::start(command).wait()
    };

    let bytes = ipc.share(ipc.allocate(0, 7).unwrap()).start().unwrap();
    let at = bytes.descriptor().to_string();
    assert!(attach(&at, &["fill", "254"]).good().contains("7 bytes device=mock:0"));
    assert!(attach(&at, &["add", "3"]).good().contains("values=[1, 1, 1, 1, 1, 1, 1]"), "bytes are uint8");

    for dtype in [Dtype::F32, Dtype::I32] {
        let layout = ipc.share(ipc.allocate(0, 32).unwrap()).dtype(dtype).shape([2, 2]).strides([4, 1]);
        let gaps = layout.start().unwrap();
        let at = gaps.descriptor().to_string();
        let read = attach(&at, &["read"]).good();
        assert!(read.contains("shape=[2, 2]") && !read.contains("mean"), "{read}");
        let error = attach(&at, &["add", "1"]).bad();
        assert!(error.contains("gaps between its elements"), "{error}");
    }

    let memory = ipc.allocate_for(0, 64, MemoryUse::new().read_only_importers()).unwrap();
    let read_only = ipc.share(memory).access(Access::ReadOnly).start().map_err(Error::from).unwrap();
    let at = read_only.descriptor().to_string();
    assert!(attach(&at, &["read"]).good().contains("64 bytes"));
    for action in [&["fill", "1"][..], &["add", "1"]] {
        let error = attach(&at, action).bad();
        assert!(error.contains("read-write access denied: the memory is read-only"), "{error}");
    }
}

/// Returns an exporter on a mock machine, and a function that runs the program on the same machine.
fn machine(spec: &str) -> (Ipc, impl Fn(&[&str]) -> crate::support::CommandResult + '_) {
    let ipc = Ipc::with_backend(MockBackend::from_spec(spec).unwrap());
    let program = move |arguments: &[&str]| {
        let mut command = device_ipc();
        command.args(arguments).env("DEVICE_IPC_MOCK", spec);
        Terminal::start(command).wait()
    };
    (ipc, program)
}

fn buffer(ipc: &Ipc, device: u32, bytes: &[u8]) -> Buffer {
    let buffer = ipc.allocate(device, bytes.len() as u64).unwrap();
    let stream = ipc.create_stream(device).unwrap();
    buffer.view_mut::<u8, _>(&stream).unwrap().copy_from(bytes).unwrap();
    stream.synchronize().unwrap();
    buffer
}

fn bytes_of(ipc: &Ipc, buffer: &Buffer) -> Vec<u8> {
    buffer.view::<u8, _>(&ipc.create_stream(buffer.range().device).unwrap()).unwrap().to_vec().unwrap()
}

#[test]
fn tensor_with_offset_is_accessed_within_its_bounds() {
    let (ipc, program) = machine("devices=1");
    let floats = |values: &[f32]| values.iter().flat_map(|value| value.to_ne_bytes()).collect::<Vec<u8>>();
    let memory = std::sync::Arc::new(buffer(&ipc, 0, &floats(&[9.0, 9.0, 1.0, 2.0, 3.0, 9.0])));
    let share = ipc
        .share(std::sync::Arc::clone(&memory))
        .dtype(Dtype::F32)
        .shape([3])
        .element_offset(2)
        .start()
        .unwrap();
    let at = share.descriptor().to_string();
    assert!(program(&["attach", &at, "read"]).good().contains("mean=2.000000 values=[1.0, 2.0, 3.0]"));
    assert!(program(&["recv", "--descriptor", &at, "--add", "1"]).good().contains("values=[2.0, 3.0, 4.0]"));
    let directory = Directory::new();
    let out = directory.text("out");
    program(&["attach", &at, "read", "--out", &out]).good();
    assert_eq!(std::fs::read(out).unwrap(), floats(&[2.0, 3.0, 4.0]));
    program(&["attach", &at, "fill", "0"]).good();
    assert_eq!(bytes_of(&ipc, &memory), floats(&[9.0, 9.0, 0.0, 0.0, 0.0, 9.0]));

    let halves = std::sync::Arc::new(buffer(&ipc, 0, &[7; 10]));
    let share = ipc
        .share(std::sync::Arc::clone(&halves))
        .dtype(Dtype::I16)
        .shape([2])
        .element_offset(1)
        .start()
        .unwrap();
    let added = program(&["attach", &share.descriptor().to_string(), "add", "1"]).good();
    assert!(added.contains("values=[1800, 1800]"), "{added}");
    assert_eq!(bytes_of(&ipc, &halves), [7, 7, 8, 7, 8, 7, 7, 7, 7, 7]);

    // A tensor with gaps is not filled, because other data may be between its elements.
    let gaps = ipc.share(ipc.allocate(0, 32).unwrap()).dtype(Dtype::I32).shape([2, 2]).strides([4, 1]);
    let gaps = gaps.start().unwrap();
    assert!(program(&["attach", &gaps.descriptor().to_string(), "fill", "1"]).bad().contains("gaps between"));
    let empty = ipc.share(ipc.allocate(0, 32).unwrap()).dtype(Dtype::F32).shape([0]).start().unwrap();
    for action in [&["read"][..], &["fill", "1"], &["add", "1"]] {
        let said = program(&[&["attach", &empty.descriptor().to_string()], action].concat()).good();
        assert!(said.contains("values=[]"), "{said}");
    }
}

#[test]
fn actions_apply_to_one_tensor_of_a_bundle() {
    let (ipc, program) = machine("devices=2");
    let packed = std::sync::Arc::new(buffer(&ipc, 0, &[5; 16]));
    let other = std::sync::Arc::new(buffer(&ipc, 1, &[6; 4]));
    let mut bundle = ipc.tensors();
    let memory = bundle.memory(std::sync::Arc::clone(&packed));
    bundle.tensor("a", memory, 0, TensorLayout::contiguous(Dtype::U8, [8]).unwrap()).unwrap();
    bundle.tensor("b", memory, 8, TensorLayout::contiguous(Dtype::U8, [4]).unwrap()).unwrap();
    let layout = TensorLayout::contiguous(Dtype::U8, [4]).unwrap();
    bundle.owned("c", std::sync::Arc::clone(&other), Some(layout)).unwrap();
    let export = ipc.share_all(bundle).start().map_err(Error::from).unwrap();
    let directory = Directory::new();
    let file = directory.file("bundle", export.descriptor().to_string().as_bytes());
    let at = format!("@{file}");

    let text = program(&["attach", &at, "info", "--json"]).good();
    let info: Value = serde_json::from_str(&text).expect("one JSON document");
    assert_eq!(
        (info["kind"].as_str(), info["exporter"]["state"].as_str()),
        (Some("bundle"), Some("sharing"))
    );
    assert_eq!(info["descriptor"]["tensors"][2]["name"], "c");
    assert_eq!(info["exporter"]["exports"].as_array().map(Vec::len), Some(2), "one export per device");
    assert!(!text.contains("token"), "{text}");

    let read = program(&["attach", &at, "read", "--tensor", "c"]).good();
    assert!(
        read.contains("shape=[4] dtype=uint8 device=mock:1 (its home)") && read.contains("mean=6"),
        "{read}"
    );
    let read = program(&["attach", &at, "--device", "1", "read", "--tensor", "b"]).good();
    assert!(read.contains("device=mock:1 (across cards)") && read.contains("mean=5"), "{read}");
    let read = program(&["attach", &at, "--copy", "staged", "--device", "1", "read", "--tensor", "b"]).good();
    assert!(read.contains("a copy") && read.contains("mean=5"), "{read}");
    program(&["attach", &at, "add", "2", "--tensor", "a"]).good();
    program(&["attach", &at, "fill", "1", "--tensor", "b"]).good();
    let expected = [vec![7; 8], vec![1; 4], vec![5; 4]].concat();
    assert_eq!(bytes_of(&ipc, &packed), expected, "the other bytes are unchanged");
    assert_eq!(bytes_of(&ipc, &other), [6; 4]);

    for (arguments, expected) in [
        (&["attach", &at, "read"][..], "select one of its tensors with --tensor: a, b, c"),
        (&["attach", &at, "read", "--tensor", "d"], "has no tensor of this name; it has a, b, c"),
        (&["recv", "--file", &file], "attach @FILE read --tensor NAME"),
    ] {
        let error = program(arguments).bad();
        assert!(error.contains(expected), "{error}");
    }
    drop(export);
    let dropped = program(&["attach", &at, "info", "--json"]);
    assert!(dropped.out.contains("\"dropped\""), "{dropped:?}");
    assert!(dropped.bad().contains("has dropped this bundle"));
}

#[test]
fn ring_is_described_but_not_readable() {
    let (ipc, program) = machine("devices=1");
    let ring = ipc.ring(ipc.allocate(0, 4096).unwrap()).slots(2).start().map_err(Error::from).unwrap();
    let at = ring.descriptor().to_string();
    let text = program(&["attach", &at, "info", "--json"]).good();
    let info: Value = serde_json::from_str(&text).expect("one JSON document");
    let slots = &info["descriptor"]["ring"];
    assert_eq!((&slots["slots"], &slots["slot_bytes"]), (&2.into(), &2048.into()));
    assert_eq!(info["exporter"]["export"]["bytes"], 4096);
    assert!(!text.contains("token"), "{text}");
    for arguments in [&["attach", &at, "read"][..], &["recv", "--descriptor", &at]] {
        let error = program(arguments).bad();
        assert!(error.contains("a program reads it with Ipc::open_ring"), "{error}");
    }
    let error = program(&["attach", &at[..at.len() - 9], "info"]).usage();
    assert!(error.contains("cut off"), "{error}");
}

#[test]
fn staged_copy_is_opened_on_request_and_reported() {
    let (ipc, program) = machine("devices=2;peers=0>1");
    let memory = std::sync::Arc::new(buffer(&ipc, 0, &[3; 100]));
    let share = ipc.share(std::sync::Arc::clone(&memory)).dtype(Dtype::U8).shape([100]).start().unwrap();
    let at = share.descriptor().to_string();
    let attach = |arguments: &[&str]| program(&[&["attach", &at], arguments].concat());
    let error = attach(&["--device", "1", "read"]).bad();
    assert!(error.contains("(--copy staged-if-needed opens a copy)"), "{error}");
    let copy = "(a copy: what is written to it stays here)";
    let read = attach(&["--device", "1", "--copy", "staged-if-needed", "read"]).good();
    assert!(read.contains("device=mock:1") && read.contains(copy) && read.contains("mean=3"), "{read}");
    let home = attach(&["--copy", "staged-if-needed", "read"]).good();
    assert!(home.contains("(its home)"), "{home}");
    let filled = attach(&["--copy", "staged", "fill", "9"]).good();
    assert!(filled.contains(copy) && filled.contains("mean=9"), "{filled}");
    let received = program(&[
        "recv",
        "--descriptor",
        &at,
        "--device",
        "1",
        "--copy",
        "staged-if-needed",
        "--add",
        "1",
        "--hold",
        "1s",
    ]);
    let received = received.good();
    assert!(received.contains(copy) && received.contains("mean=4"), "{received}");
    assert_eq!(bytes_of(&ipc, &memory), [3; 100], "the export is unchanged");
}
