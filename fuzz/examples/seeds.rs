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
        ("descriptor_binary", fuzzing::descriptor_seeds()),
        ("descriptor_text", fuzzing::descriptor_text_seeds()),
        ("protocol_request", fuzzing::request_seeds()),
        ("protocol_reply", fuzzing::reply_seeds()),
        ("channel", fuzzing::channel_seeds()),
        ("bundle_binary", fuzzing::bundle_seeds()),
        ("bundle_text", fuzzing::bundle_text_seeds()),
        ("tensor_table", fuzzing::tensor_table_seeds()),
        ("ring_binary", fuzzing::ring_seeds()),
        ("ring_text", fuzzing::ring_text_seeds()),
        ("hostile_exporter", fuzzing::page_seeds()),
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
