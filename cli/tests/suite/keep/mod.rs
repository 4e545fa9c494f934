//! The command `keep`: weights that outlive the processes that use them.

mod backends;
mod files;
mod hand_over;
mod load;
mod names;
mod readers;
mod versions;

use std::collections::HashMap;
use std::sync::LazyLock;
use std::time::Duration;

use crate::support::{Directory, Terminal, start};
use device_ipc::mock::MockBackend;
use device_ipc::{Ipc, Mapping, Result};
use safetensors::tensor::{Dtype, TensorView};

/// Timeout of one step of a test.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Returns a safetensors file of `float32` tensors with these names and values.
fn safetensors(tensors: &[(&str, &[f32])]) -> Vec<u8> {
    let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>();
    let bytes: Vec<_> = tensors.iter().map(|(_, values)| bytes(values)).collect();
    let views = tensors.iter().zip(&bytes).map(|((name, values), bytes)| {
        (*name, TensorView::new(Dtype::F32, vec![values.len()], bytes).expect("a tensor"))
    });
    safetensors::serialize(views.collect::<HashMap<_, _>>(), None).expect("a file")
}

/// Writes a model.
fn model(directory: &Directory, file: &str, tensors: &[(&str, &[f32])]) -> String {
    directory.file(file, &safetensors(tensors))
}

/// Replaces a model that a keeper may be reading.
fn replace_model(directory: &Directory, file: &str, tensors: &[(&str, &[f32])]) {
    let new = model(directory, &format!("{file}.new"), tensors);
    std::fs::rename(new, directory.path(file)).expect("renaming a file");
}

/// Returns a name that no other test of this process, or of another one, uses.
fn unique(test: &str) -> String {
    format!("{test}-{}", std::process::id())
}

/// Starts a keeper and waits until it answers.
fn keep(arguments: &[&str]) -> Terminal {
    let mut keeper = start(["keep"].iter().chain(arguments));
    keeper.until("keeps version");
    keeper
}

/// Returns an entry point of this process on the machine of the keepers.
fn ipc() -> Ipc {
    static IPC: LazyLock<Ipc> = LazyLock::new(|| {
        Ipc::with_backend(MockBackend::from_spec("devices=2").expect("a valid specification"))
    });
    IPC.clone()
}

/// Opens what a keeper keeps, and returns its version.
fn open(ipc: &Ipc, name: &str) -> Result<(u64, Mapping)> {
    let kept = ipc.find(name, TIMEOUT)?;
    Ok((kept.version(), kept.open().at_home()?))
}

/// Returns the values of a tensor.
fn values(ipc: &Ipc, mapping: &Mapping, tensor: &str) -> Vec<f32> {
    let tensor = mapping.get(tensor).expect("the tensor exists");
    tensor.to_host(&ipc.create_stream(tensor.device()).expect("a stream")).expect("the values")
}

/// Releases a mapping on a stream, so that its lease ends at once.
fn release(ipc: &Ipc, mapping: Mapping) {
    let stream = ipc.create_stream(mapping.device()).expect("a stream");
    mapping.release(&stream).map_err(device_ipc::Error::from).expect("released");
}
