//! Everything of a process that must not grow.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result, bail};
use device_ipc::{Ipc, counters};
use device_ipc_test_process::Heap;

/// The measured sizes, by name. The process itself measures them all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sizes(BTreeMap<String, i64>);

/// How much a number may grow: allocators keep pages, messages in flight at a time need objects, and other processes use the
/// device too. A leak at each hand-over, or at each hundredth, exceeds all of them.
const SLACK: [(&str, i64); 4] =
    [("resident_kib", 8192), ("heap_bytes", 64 << 10), ("mappings", 64), ("device_kib", 4096)];

impl Sizes {
    /// Of this process, and of the device's memory in use.
    pub(crate) fn take(ipc: &Ipc, device: u32) -> Result<Self> {
        // Streams that were destroyed while they had work are gone after this.
        ipc.backend().synchronize_device(device.into())?;
        let mut sizes = BTreeMap::new();
        let mut put = |name: &str, number: i64| sizes.insert(name.to_owned(), number);
        let status = fs::read_to_string("/proc/self/status").context("reading /proc/self/status")?;
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
        put("resident_kib", resident.trim().trim_end_matches(" kB").parse()?);
        put("heap_bytes", i64::try_from(Heap::now().bytes)?);
        put("descriptors", count("/proc/self/fd")? - 1); // without the one that lists them
        put("threads", count("/proc/self/task")?);
        let maps = fs::read_to_string("/proc/self/maps").context("reading /proc/self/maps")?;
        put("mappings", i64::try_from(maps.lines().count())?);
        let memory = ipc.backend().memory().memory_info(device.into())?;
        put("device_kib", ((memory.total_bytes - memory.free_bytes) >> 10).try_into()?);
        let gauges = counters();
        put("exports", gauges.exports.try_into()?);
        put("exported_bytes", gauges.exported_bytes.try_into()?);
        put("leases", gauges.leases.try_into()?);
        put("mapped_bytes", gauges.mapped_bytes.try_into()?);
        put("staging_bytes", gauges.staging_bytes.try_into()?);
        Ok(Self(sizes))
    }

    /// One number.
    pub(crate) fn get(&self, name: &str) -> i64 {
        self.0.get(name).copied().unwrap_or_default()
    }

    /// The numbers of descriptors, threads and mappings.
    pub(crate) fn objects(&self) -> [i64; 3] {
        ["descriptors", "threads", "mappings"].map(|name| self.get(name))
    }

    /// The numbers that have grown since `before` by more than they may.
    pub(crate) fn grown_since(&self, before: &Self) -> Vec<String> {
        let grown = |(name, after): (&String, &i64)| {
            let (before, slack) = (before.get(name), slack(name));
            (*after > before + slack).then(|| format!("{name} grew from {before} to {after}"))
        };
        self.0.iter().filter_map(grown).collect()
    }

    /// One line of text, for the other process.
    pub(crate) fn to_line(&self) -> String {
        self.0.iter().map(|(name, number)| format!("{name}={number}")).collect::<Vec<_>>().join(" ")
    }

    /// Reads [`to_line`](Self::to_line).
    pub(crate) fn from_line(line: &str) -> Result<Self> {
        let mut sizes = BTreeMap::new();
        for pair in line.split_whitespace() {
            let Some((name, number)) = pair.split_once('=') else { bail!("{pair:?} is not NAME=NUMBER") };
            sizes.insert(name.to_owned(), number.parse()?);
        }
        Ok(Self(sizes))
    }
}

fn slack(name: &str) -> i64 {
    SLACK.iter().find(|(known, _)| *known == name).map_or(0, |(_, slack)| *slack)
}

fn count(folder: &str) -> Result<i64> {
    let entries = fs::read_dir(folder).with_context(|| format!("listing {folder}"))?;
    Ok(i64::try_from(entries.count())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(line: &str) -> Sizes {
        Sizes::from_line(line).unwrap()
    }

    #[test]
    fn growth_beyond_the_slack_is_reported_by_name() {
        let before = sizes("descriptors=14 heap_bytes=1000 leases=0");
        assert_eq!(sizes(&before.to_line()), before);
        assert_eq!(sizes("descriptors=13 heap_bytes=66536 leases=0").grown_since(&before), [""; 0]);
        let grown = sizes("descriptors=15 heap_bytes=66537 leases=0").grown_since(&before);
        assert_eq!(grown, ["descriptors grew from 14 to 15", "heap_bytes grew from 1000 to 66537"]);
    }
}
