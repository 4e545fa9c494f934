//! The resources of a process, as the kernel reports them.

use std::collections::BTreeMap;
use std::fs;

/// The names of the mock's memory files, and of the page on which an exporter counts drops.
const MOCK_MEMORY: &str = "memfd:device-ipc-mock";
const PAGE: &str = "memfd:device-ipc-epoch";

/// The names, as far as the kernel keeps them, of threads that do not count: those that exist while there is a descriptor to close, and
/// those of the gates of tests. The kernel may list a thread for a moment after it has been joined.
const UNCOUNTED: [&str; 2] = ["device-ipc-clos", "test-gate"];

/// The descriptors, mappings and threads of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Census {
    /// How many descriptors of which kind: `socket`, `anon_inode:[pidfd]`, `/memfd:device-ipc-mock (deleted)`, …
    pub descriptors: BTreeMap<String, usize>,
    /// Mappings of the mock's memory files: allocations, opened memory, events.
    pub mock_mappings: usize,
    /// Mappings of pages of brokers: its own, and one for each exporter that it is connected to.
    pub broker_pages: usize,
    /// How many threads of which name, without those that have closed what there was to close and are about to exit, and those of gates.
    pub threads: BTreeMap<String, usize>,
}

impl Census {
    /// Of this process.
    pub fn of(pid: u32) -> Self {
        let mut descriptors = BTreeMap::new();
        let listed = fs::read_dir(format!("/proc/{pid}/fd")).expect("the process exists");
        // Standard input is the connection to the test, which does not count.
        let own = fs::read_link(format!("/proc/{pid}/fd/0")).ok();
        for entry in listed.flatten() {
            // It may have been closed since; the listing of our own descriptors is one of them.
            let Ok(target) = fs::read_link(entry.path()) else { continue };
            if own.as_ref() == Some(&target) {
                continue;
            }
            let target = target.to_string_lossy().into_owned();
            let kind = match target.split_once(":[") {
                Some((kind @ ("socket" | "pipe"), _)) => kind.to_owned(),
                _ => target,
            };
            *descriptors.entry(kind).or_default() += 1;
        }
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("the process is there");
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("the process is there").flatten();
        let names = tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
        let mut threads = BTreeMap::new();
        for name in names.map(|name| name.trim_end().to_owned()).filter(|name| !UNCOUNTED.contains(&&**name))
        {
            *threads.entry(name).or_default() += 1;
        }
        let [mock_mappings, broker_pages] = [MOCK_MEMORY, PAGE].map(|name| maps.matches(name).count());
        Self { descriptors, mock_mappings, broker_pages, threads }
    }

    /// Returns whether this census counts more of anything than `before`. Fewer is no leak: `before` may have counted a descriptor
    /// that another thread was about to close.
    pub fn exceeds(&self, before: &Self) -> bool {
        self.mock_mappings > before.mock_mappings
            || self.broker_pages > before.broker_pages
            || self.threads.values().sum::<usize>() > before.threads.values().sum()
            || self.descriptors.iter().any(|(kind, count)| *count > before.of_kind(kind))
    }

    /// All descriptors.
    pub fn all_descriptors(&self) -> usize {
        self.descriptors.values().sum()
    }

    /// Descriptors of this kind.
    pub fn of_kind(&self, kind: &str) -> usize {
        self.descriptors.iter().filter(|(name, _)| name.contains(kind)).map(|(_, count)| count).sum()
    }
}

/// Objects of ours under `/dev/shm`, where nothing of ours ever is.
pub fn shared_memory_objects() -> Vec<String> {
    let names = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    names
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name.contains("device-ipc") || name.contains("mock"))
        .collect()
}
