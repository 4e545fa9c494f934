//! Writes `corpus/` anew: what the fuzzer starts from. Run it after a change of a format, and commit what it writes:
//!
//! ```console
//! cargo run --manifest-path fuzz/Cargo.toml --example seeds
//! ```
//!
//! An example and no program, as cargo-fuzz takes every program here for a target.

use std::fs;
use std::io::Result;
use std::path::Path;

use device_ipc_core::fuzzing;

fn main() -> Result<()> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    let targets = [
        ("descriptor", fuzzing::descriptor_seeds()),
        ("protocol_request", named(fuzzing::request_seeds())),
        ("protocol_reply", named(fuzzing::reply_seeds())),
        ("channel", named(fuzzing::channel_seeds())),
        ("remote", named(fuzzing::remote_seeds())),
        ("hostile_exporter", named(fuzzing::page_seeds())),
        ("tcp", named(device_ipc_tcp::fuzzing::tcp_seeds())),
    ];
    for (target, seeds) in targets {
        let folder = corpus.join(target);
        if folder.exists() {
            fs::remove_dir_all(&folder)?;
        }
        fs::create_dir_all(&folder)?;
        for (name, bytes) in seeds {
            fs::write(folder.join(name), bytes)?;
        }
    }
    Ok(())
}

fn named(seeds: Vec<fuzzing::Seed>) -> Vec<(String, Vec<u8>)> {
    seeds.into_iter().map(|(name, bytes)| (name.to_owned(), bytes)).collect()
}
