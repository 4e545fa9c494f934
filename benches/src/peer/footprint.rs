//! What the library holds in a process that has nothing else to do.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use device_ipc::{Export, Ipc, Mapping};

use super::Remote;
use super::message::Footprint;
use crate::counting;
use crate::wait::TIMEOUT;

/// Prefix of the names of the library's threads.
const THREADS: &str = "device-ipc-";

/// Bytes of each export: large enough that allocations of their own do not differ by it.
const BYTES: u64 = 4096;

/// Shares and opens so many of everything, in a second process of the second process.
pub(super) fn measure(ipc: &Ipc, device: u32, count: usize) -> Result<Footprint> {
    let block = Arc::new(ipc.allocate(device, BYTES)?);
    let share = || Ok::<Export, anyhow::Error>(ipc.share(Arc::clone(&block)).start()?);
    let first = share()?;
    let mut exports = Vec::with_capacity(count);
    let per_export = counting::held_by(count, || {
        for _ in 0..count {
            exports.push(share()?);
        }
        Ok(())
    })?;
    let mut remote = Remote::start(ipc.backend().info().name, device, &[])?;
    let descriptors = remote.share(1, BYTES, count + 2)?;
    // The link, the range and the tables are there before the first that counts.
    let warm: Vec<Mapping> =
        descriptors[..2].iter().map(|one| Ok(ipc.open(one).at_home()?)).collect::<Result<_>>()?;
    let mut mappings = Vec::with_capacity(2 * count);
    let per_lease = counting::held_by(count, || {
        for descriptor in &descriptors[2..] {
            mappings.push(ipc.open(descriptor).at_home()?);
        }
        Ok(())
    })?;
    let per_mapping = counting::held_by(count, || {
        for _ in 0..count {
            mappings.push(ipc.open(&descriptors[0]).at_home()?);
        }
        Ok(())
    })?;
    drop((mappings, warm));
    // By now both threads have had something to do.
    device_ipc::close_unused(TIMEOUT)?;
    let threads = threads()?;
    drop((exports, first));
    remote.finish()?;
    let guard = size_of::<Mapping>() as f64;
    Ok(Footprint {
        bytes_per_export: per_export + size_of::<Export>() as f64,
        bytes_per_mapping: per_mapping + guard,
        bytes_per_lease: per_lease + guard,
        threads,
    })
}

/// Returns the number of the library's threads in this process.
fn threads() -> Result<f64> {
    // The name of this program begins with the same prefix, and threads without a name inherit it.
    let program =
        std::fs::read_to_string("/proc/self/comm").context("cannot read the name of this process")?;
    let tasks = std::fs::read_dir("/proc/self/task").context("cannot list the threads of this process")?;
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    Ok(names.filter(|name| name.starts_with(THREADS) && *name != program).count() as f64)
}

/// The first look for backends, which finds no device where the variables say so.
pub(super) fn start_up() -> f64 {
    let begin = Instant::now();
    let found = Ipc::available();
    let took = begin.elapsed();
    drop(found);
    took.as_nanos() as f64
}
