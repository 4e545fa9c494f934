//! The command `keep`: weights that outlive the processes that use them.

mod support;

use std::collections::HashMap;

use rustix::process::Signal;
use safetensors::tensor::{Dtype, TensorView};
use support::{Directory, Terminal, device_ipc, run, start};

/// Writes a safetensors file of `float32` tensors with these names and values.
fn model(directory: &Directory, file: &str, tensors: &[(&str, &[f32])]) -> String {
    let bytes: Vec<Vec<u8>> = tensors
        .iter()
        .map(|(_, values)| values.iter().flat_map(|value| value.to_le_bytes()).collect())
        .collect();
    let views: HashMap<_, _> = tensors
        .iter()
        .zip(&bytes)
        .map(|((name, values), bytes)| {
            (*name, TensorView::new(Dtype::F32, vec![values.len()], bytes).expect("a tensor"))
        })
        .collect();
    let serialized = safetensors::serialize(views, None).expect("a file");
    directory.file(file, &serialized)
}

/// Returns a name that no other test of this process, or of another one, uses.
fn name(test: &str) -> String {
    format!("{test}-{}", std::process::id())
}

/// Starts a keeper and waits until it answers.
fn keep(arguments: &[&str]) -> Terminal {
    let mut keeper = start(["keep"].iter().chain(arguments));
    keeper.until("keeps version");
    keeper
}

#[test]
fn kept_tensor_is_read_by_name_until_the_keeper_stops() {
    let directory = Directory::new();
    let file = model(&directory, "m.safetensors", &[("norm", &[1.0, 2.0, 3.0]), ("bias", &[-1.0])]);
    let name = name("basic");
    let keeper = keep(&[&file, "--name", &name]);
    let at = format!("keeper:{name}");
    for _ in 0..2 {
        let read = run(["attach", &at, "read", "--tensor", "norm"]).good();
        assert!(read.contains("shape=[3] dtype=float32") && read.contains("mean=2.0"), "{read}");
    }
    keeper.signal(Signal::TERM);
    let stopped = keeper.wait().good();
    assert!(stopped.contains("stopped by SIGTERM"), "{stopped}");
    let error = run(["attach", &at, "read", "--tensor", "norm", "--timeout", "100ms"]).bad();
    assert!(error.contains("no keeper of") && error.contains("--list"), "{error}");
}

#[test]
fn kept_tensor_cannot_be_written() {
    let directory = Directory::new();
    let file = model(&directory, "m.safetensors", &[("w", &[1.0])]);
    let name = name("readonly");
    let _keeper = keep(&[&file, "--name", &name]);
    let error = run(["attach", &format!("keeper:{name}"), "add", "1", "--tensor", "w"]).bad();
    assert!(error.contains("read-only"), "{error}");
}
