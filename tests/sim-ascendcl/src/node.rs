//! Nodes: the exports of a process, which other processes look up by a number.
//!
//! A key of the vendor is a name. The driver knows whether it exists and which processes may open it. Here a memory
//! file of the exporter has this information, which other processes open through `/proc`. Nothing is stored in a
//! file system, and all of it disappears with the process.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::fcntl_dupfd_cloexec;

const MAGIC: [u8; 8] = *b"SIMACL\x00\x01";
const NAME: &str = "device-ipc-sim-ascendcl";
const HEADER: usize = 120;
const ENTRY: usize = 16;

/// The lowest descriptor number of a node, above the numbers that other code uses.
const FIRST_SLOT: i32 = 4096;

/// Bits of a reference with the descriptor of the memory file; the others count exports.
const SLOT_BITS: u32 = 20;

static EXPORTS: AtomicU64 = AtomicU64::new(1);

/// The kind of an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Kind {
    Memory = 1,
    Event = 2,
    Notify = 3,
    Block = 4,
}

/// The properties of an export.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Record {
    pub(crate) kind: Kind,
    /// Physical id of the device.
    pub(crate) physical: u32,
    /// Size of the exported memory in bytes.
    pub(crate) size: u64,
    /// Page size in bytes.
    pub(crate) page: u64,
    /// Whether other devices can use the memory, where that requires a policy.
    pub(crate) for_peers: bool,
    /// Whether only listed processes may open it.
    pub(crate) listed_only: bool,
    /// The engine's handle.
    pub(crate) handle: [u8; 64],
}

/// An export, in the process that created it.
#[derive(Debug)]
pub(crate) struct Node {
    file: File,
    pub(crate) reference: u64,
    listed: Vec<i32>,
}

/// An export, as another process finds it.
#[derive(Debug)]
pub(crate) struct FoundNode {
    pub(crate) record: Record,
    listed: Vec<(i32, u64)>,
}

impl Node {
    pub(crate) fn publish(record: &Record) -> std::io::Result<Self> {
        let low = memfd_create(NAME, MemfdFlags::CLOEXEC)?;
        let file: OwnedFd = fcntl_dupfd_cloexec(&low, FIRST_SLOT)?;
        let slot = u64::from(file.as_raw_fd().unsigned_abs());
        if slot >= 1 << SLOT_BITS {
            return Err(std::io::Error::other("too many open files for an export"));
        }
        let reference = EXPORTS.fetch_add(1, Ordering::Relaxed) << SLOT_BITS | slot;
        let mut bytes = Vec::with_capacity(HEADER);
        bytes.extend(MAGIC);
        bytes.extend(reference.to_le_bytes());
        bytes.extend((record.kind as u32).to_le_bytes());
        bytes.extend(record.physical.to_le_bytes());
        bytes.extend(record.size.to_le_bytes());
        bytes.extend(u32::from(record.for_peers).to_le_bytes());
        bytes.extend(u32::from(record.listed_only).to_le_bytes());
        bytes.extend(record.handle);
        bytes.extend(record.page.to_le_bytes());
        bytes.extend(0_u64.to_le_bytes());
        let file = File::from(file);
        file.write_all_at(&bytes, 0)?;
        Ok(Self { file, reference, listed: Vec::new() })
    }

    /// Lists the process that has this pid now. A later process with the same pid is not listed.
    pub(crate) fn list(&mut self, pid: i32) -> std::io::Result<()> {
        let index = self.listed.iter().position(|&listed| listed == pid).unwrap_or(self.listed.len());
        let mut entry = [0; ENTRY];
        entry[..4].copy_from_slice(&pid.to_le_bytes());
        entry[8..].copy_from_slice(&ticks_since_boot().to_le_bytes());
        self.file.write_all_at(&entry, (HEADER + index * ENTRY) as u64)?;
        if index == self.listed.len() {
            self.listed.push(pid);
            self.file.write_all_at(&(self.listed.len() as u64).to_le_bytes(), (HEADER - 8) as u64)?;
        }
        Ok(())
    }

    pub(crate) fn count_listed(&self) -> usize {
        self.listed.len()
    }
}

impl FoundNode {
    /// Looks up an export. `None` if it does not exist, is of another kind, or belongs to another user.
    pub(crate) fn look_up(pid: u32, reference: u64, kind: Kind) -> Option<Self> {
        let slot = reference & ((1 << SLOT_BITS) - 1);
        let path = format!("/proc/{pid}/fd/{slot}");
        // The number may refer to anything by now. Only memory files of the simulator are opened.
        let target = std::fs::read_link(&path).ok()?;
        if !target.to_string_lossy().starts_with(&format!("/memfd:{NAME}")) {
            return None;
        }
        let mut file = File::open(&path).ok()?;
        file.seek(SeekFrom::Start(0)).ok()?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).ok()?;
        Self::parse(&bytes, reference, kind)
    }

    fn parse(bytes: &[u8], reference: u64, kind: Kind) -> Option<Self> {
        let u32_at = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let u64_at = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        if bytes.get(..8)? != MAGIC || u64_at(8)? != reference || u32_at(16)? != kind as u32 {
            return None;
        }
        let record = Record {
            kind,
            physical: u32_at(20)?,
            size: u64_at(24)?,
            for_peers: u32_at(32)? != 0,
            listed_only: u32_at(36)? != 0,
            handle: bytes.get(40..104)?.try_into().ok()?,
            page: u64_at(104)?,
        };
        let count = usize::try_from(u64_at(HEADER - 8)?).ok()?;
        let entry = |index: usize| {
            let at = HEADER + index * ENTRY;
            Some((u32_at(at)?.cast_signed(), u64_at(at + 8)?))
        };
        let listed = (0..count).map(entry).collect::<Option<Vec<_>>>()?;
        Some(Self { record, listed })
    }

    /// Returns whether this process may open the export.
    pub(crate) fn permits_this_process(&self) -> bool {
        if !self.record.listed_only {
            return true;
        }
        let pid = std::process::id().cast_signed();
        let listed = self.listed.iter().find(|(listed, _)| *listed == pid);
        listed.is_some_and(|&(_, at)| started_at().is_some_and(|start| start <= at))
    }
}

/// Returns the start time of this process, in clock ticks since boot.
fn started_at() -> Option<u64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The second field is the program's name in parentheses and may hold anything.
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse().ok()
}

fn ticks_since_boot() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let per_second = rustix::param::clock_ticks_per_second();
    now.tv_sec.unsigned_abs() * per_second + now.tv_nsec.unsigned_abs() * per_second / 1_000_000_000
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(listed_only: bool) -> Record {
        let handle = std::array::from_fn(|at| at as u8);
        Record { kind: Kind::Memory, physical: 3, size: 77, page: 4096, for_peers: true, listed_only, handle }
    }

    #[test]
    fn export_is_found_by_number_and_kind_until_destroyed() {
        let node = Node::publish(&record(false)).expect("published");
        let (pid, reference) = (std::process::id(), node.reference);
        let found = FoundNode::look_up(pid, reference, Kind::Memory).expect("the export exists");
        let record = found.record;
        assert_eq!((record.physical, record.size, record.page, record.handle[63]), (3, 77, 4096, 63));
        assert!(found.permits_this_process());
        assert!(FoundNode::look_up(pid, reference, Kind::Event).is_none(), "of another kind");
        assert!(FoundNode::look_up(pid, reference + (1 << SLOT_BITS), Kind::Memory).is_none(), "a later one");
        drop(node);
        assert!(FoundNode::look_up(pid, reference, Kind::Memory).is_none());
    }

    #[test]
    fn only_process_alive_at_listing_is_permitted() {
        let mut node = Node::publish(&record(true)).expect("published");
        let pid = std::process::id();
        let look =
            |node: &Node| FoundNode::look_up(pid, node.reference, Kind::Memory).expect("the export exists");
        assert!(!look(&node).permits_this_process());
        node.list(pid.cast_signed() + 1).expect("listed");
        assert!(!look(&node).permits_this_process());
        node.list(pid.cast_signed()).expect("listed");
        assert!(look(&node).permits_this_process());
        let mut early = look(&node);
        early.listed[1].1 = started_at().expect("the start time is known") - 1;
        assert!(!early.permits_this_process(), "listed before this process started");
    }
}
