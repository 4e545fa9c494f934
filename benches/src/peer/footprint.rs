//! Memory and threads of the library in an otherwise idle process.

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

/// Size of the exported block in bytes.
const BYTES: u64 = 4096;

/// Measures `count` exports, mappings and leases; the importer leases exports of another peer process.
pub(super) fn measure(ipc: &Ipc, device: u32, count: usize) -> Result<Footprint> {
    let block = Arc::new(ipc.allocate(device, BYTES)?);
    let share = || Ok::<Export, anyhow::Error>(ipc.share(Arc::clone(&block)).start()?);
    let first = share()?;
    let mut exports = Vec::with_capacity(count);
    let per_export = counting::allocated_per_item(count, || {
        for _ in 0..count {
            exports.push(share()?);
        }
        Ok(())
    })?;
    let mut remote = Remote::start(ipc.backend().info().name, device, &[])?;
    let descriptors = remote.share(1, BYTES, count + 2)?;
    // The connection, the range and the tables must exist before the first measurement.
    let warm: Vec<Mapping> =
        descriptors[..2].iter().map(|one| Ok(ipc.open(one).at_home()?)).collect::<Result<_>>()?;
    let mut mappings = Vec::with_capacity(2 * count);
    let per_lease = counting::allocated_per_item(count, || {
        for descriptor in &descriptors[2..] {
            mappings.push(ipc.open(descriptor).at_home()?);
        }
        Ok(())
    })?;
    let per_mapping = counting::allocated_per_item(count, || {
        for _ in 0..count {
            mappings.push(ipc.open(&descriptors[0]).at_home()?);
        }
        Ok(())
    })?;
    drop((mappings, warm));
    // Both threads of the library have started now.
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

/// Measures the first search for backends in nanoseconds.
pub(super) fn start_up() -> f64 {
    let begin = Instant::now();
    let backends = Ipc::available();
    let took = begin.elapsed();
    drop(backends);
    took.as_nanos() as f64
}
