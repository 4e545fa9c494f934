//! The example `cuda_hand_over` in two processes, where there is a GPU.

#[path = "../../examples/cuda_hand_over.rs"]
mod example;

use std::path::Path;

use super::roles::{argument, no_cuda, role as this_role, start};

#[test]
fn cudarc_slice_handed_over_is_changed_in_place() {
    if let Some(reason) = no_cuda() {
        eprintln!("skipped: {reason}");
        return;
    }
    let path = std::env::temp_dir().join(format!("device-ipc-hand-over-{}", std::process::id()));
    let arguments = [("PATH", path.to_str().expect("a plain path"))];
    let mut sender = start(module_path!(), "send", &arguments);
    while !path.exists() {
        sender.assert_running();
        std::thread::yield_now();
    }
    start(module_path!(), "receive", &arguments).finish();
    sender.finish();
    std::fs::remove_file(&path).expect("the file is ours");
}

#[test]
#[ignore = "a role of the test above"]
fn role() {
    let path = argument("PATH");
    if this_role() == "send" {
        assert_eq!(example::sender(Path::new(&path)).expect("the sender works"), [2.0; 20]);
    } else {
        example::receiver(Path::new(&path)).expect("the receiver works");
    }
}
