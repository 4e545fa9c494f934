//! Writes the seeds of the fuzz targets to `corpus/`. Run it after a change of a format, and commit its output:
//!
//! ```console
//! cargo run --manifest-path fuzz/Cargo.toml --example seeds
//! ```
//!
//! An example, because cargo-fuzz takes every program of this package for a target.

use std::error::Error;
use std::fs;
use std::path::Path;
use std::time::Duration;

use device_ipc_core::{Access, Dtype, Ipc, TensorLayout, fuzzing};
use device_ipc_mock::MockBackend;

type Seeds = Vec<(String, Vec<u8>)>;

/// Descriptors of a region, a ring and named tensors of two devices, each in both forms; a grant.
fn descriptors() -> Result<Seeds, Box<dyn Error>> {
    let ipc = Ipc::with_backend(MockBackend::from_spec("devices=2")?);
    let region = ipc
        .share(ipc.allocate(0, 4096)?)
        .dtype(Dtype::F32)
        .shape([8, 128])
        .strides([1, 8])
        .access(Access::ReadOnly);
    let region = region.start()?;
    let ring = ipc.ring(ipc.allocate(1, 65536)?).slots(4).start()?;
    let mut tensors = ipc.tensors();
    for device in [0, 1] {
        let memory = tensors.memory(ipc.allocate(device, 1 << 20)?);
        tensors.tensor(
            format!("{device}.w"),
            memory,
            0,
            TensorLayout::contiguous(Dtype::BF16, [128, 64])?,
        )?;
        tensors.tensor(format!("{device}.b"), memory, 65536, TensorLayout::contiguous(Dtype::F32, [])?)?;
    }
    let tensors = ipc.share_all(tensors).start()?;
    let mut seeds = vec![("grant".to_owned(), tensors.grant(Duration::from_secs(60))?.to_bytes())];
    for (name, read) in
        [("region", region.descriptor()), ("ring", ring.descriptor()), ("tensors", tensors.descriptor())]
    {
        seeds.push((name.to_owned(), read.to_bytes()));
        seeds.push((format!("{name}-text"), read.to_string().into_bytes()));
    }
    Ok(seeds)
}

fn named(seeds: Vec<fuzzing::Seed>) -> Seeds {
    seeds.into_iter().map(|(name, bytes)| (name.to_owned(), bytes)).collect()
}

fn main() -> Result<(), Box<dyn Error>> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    let targets = [
        ("descriptor", descriptors()?),
        ("protocol_request", named(fuzzing::request_seeds())),
        ("protocol_reply", named(fuzzing::reply_seeds())),
        ("hostile_exporter", named(fuzzing::page_seeds())),
    ];
    for (target, seeds) in targets {
        let folder = corpus.join(target);
        fs::create_dir_all(&folder)?;
        for (name, bytes) in seeds {
            fs::write(folder.join(name), bytes)?;
        }
    }
    Ok(())
}
