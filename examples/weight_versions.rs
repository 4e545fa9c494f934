//! A trainer publishes versions of its weights in two blocks of device memory, written in turn, and engines follow it at addresses that
//! stay: no copy, no allocation and no new view for a version. The trainer writes a block again when all engines have left it.
//! Runs on the mock if there is no accelerator:
//!
//! ```text
//! cargo run --example weight_versions
//! ```

mod roles;

use std::io::{BufRead, stdin};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use device_ipc::{Buffer, Error, Export, Ipc, MemoryUse, Stream};
use roles::{Role, TIMEOUT};

const ELEMENTS: usize = 1 << 18;
const LAST_VERSION: u64 = 20;

fn trainer() -> Result<()> {
    let ipc = Ipc::builder().allow_simulated(true).auto()?;
    let stream = ipc.create_stream(0)?;
    let bytes = (ELEMENTS * size_of::<f32>()) as u64;
    let block = || ipc.allocate_for(0, bytes, MemoryUse::new().remappable()).map(Arc::new);
    let blocks = [block()?, block()?];

    let name = format!("weight-versions-{}", std::process::id());
    let keeper = ipc.keep(&name, 1, written(&ipc, &stream, &blocks[1], 1)?).map_err(Error::from)?;
    let engines = [start(&name)?, start(&name)?];
    for version in 2..=LAST_VERSION {
        // No process has this block: the export of version - 2 is closed.
        let next = written(&ipc, &stream, &blocks[version as usize % 2], version)?;
        let former =
            Arc::into_inner(keeper.replace(version, next)).context("the keeper has the only reference")?;
        former.close(TIMEOUT)?; // all engines have followed; otherwise the error names them
    }
    for engine in engines {
        engine.expect(&format!("reads version {LAST_VERSION}"))?;
        engine.finish()?;
    }
    Ok(())
}

/// Writes a version, and shares it. The engines wait for the stream.
fn written(ipc: &Ipc, stream: &Stream, block: &Arc<Buffer>, version: u64) -> Result<Export> {
    block.view_mut(stream)?.copy_from(&vec![version as f32; ELEMENTS])?;
    Ok(ipc.share(Arc::clone(block)).ready_on(stream).start()?)
}

/// Starts an engine and waits until it has the weights.
fn start(name: &str) -> Result<Role> {
    let mut engine = Role::start("engine")?;
    engine.send_line(name)?;
    engine.expect("reads version 1")?;
    Ok(engine)
}

fn engine() -> Result<()> {
    let mut name = String::new();
    stdin().lock().read_line(&mut name).context("cannot read the name of the keeper")?;
    let ipc = Ipc::builder().allow_simulated(true).auto()?;
    let stream = ipc.create_stream(0)?;
    let kept = ipc.find(name.trim(), TIMEOUT)?;
    let mut version = kept.version();
    let mut weights = kept.open().reserved().on(&stream)?;
    let address = weights.range();
    println!("reads version {version}");
    while version < LAST_VERSION {
        // Between two steps. Without a new version this is a read of memory.
        if let Some(next) = weights.follow_on(&stream)? {
            ensure!(next > version, "version {next} follows version {version}");
            version = next;
        }
        // A step; it may be the launch of a captured graph, since the addresses stay.
        let elements: Vec<f32> = weights.view(&stream)?.to_vec()?;
        ensure!(elements.iter().all(|element| *element == version as f32), "version {version} is torn");
    }
    ensure!(weights.range() == address, "the address has changed");
    println!("reads version {version}");
    Ok(())
}

fn main() -> Result<()> {
    match std::env::args().nth(1).as_deref() {
        None => trainer(),
        Some("engine") => engine(),
        Some(other) => bail!("role {other} not found; without an argument, the program starts all roles"),
    }
}
