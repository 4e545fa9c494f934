//! The kinds of memory of a machine: its own, or those of a vendor.
//!
//! A vendor's profile has the kinds of the vendor's backend, with the same names, numbers and properties, and the rules that
//! a program meets: the pages of an allocation, what importers reach, read-only access. Each table is compared with the
//! backend on the vendor's simulator by `mock_profiles` in `tests/sim-support`.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use device_ipc_core::backend::{HandleKind, HandleKindInfo, Lifetime};

use crate::kinds::{BYTES, FD};
use crate::spec::HandleForm;

/// The size of a page that the vendors' drivers share as a whole.
const HUGE_PAGE: u64 = 2 << 20;

/// The inode of a machine's initial pid namespace: `PROC_PID_INIT_INO` of Linux.
const INITIAL_PID_NAMESPACE: u64 = 0xEFFF_FFFC;

/// The vendor that a machine imitates: `like=cuda` or `like=ascend`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vendor {
    /// NVIDIA CUDA.
    Cuda,
    /// Huawei Ascend.
    Ascend,
}

/// The parts of a handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// Bytes, the same ones for every export.
    Bytes,
    /// Bytes of one export only, which is revoked separately.
    SeparateBytes,
    /// Bytes and a file descriptor.
    Fds,
}

/// The memory that an importer can access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// The allocation.
    Allocation,
    /// The pages of this size that contain the allocation.
    Pages(u64),
    /// The vendor does not report it.
    Unknown,
}

/// The result of opening memory whose home device is hidden from the importer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HiddenHome {
    /// The memory is opened.
    Opens,
    /// The backend refuses.
    Unsupported,
    /// The driver fails.
    Fails,
}

/// A kind of memory.
#[derive(Clone, Debug)]
pub(crate) struct MemoryKind {
    pub(crate) info: HandleKindInfo,
    pub(crate) form: Form,
    /// Allocations are rounded up to a multiple of this number of bytes.
    pub(crate) granularity: u64,
    pub(crate) reach: Reach,
    /// Whether a region may extend over several allocations.
    pub(crate) neighbours: bool,
    /// The reason why no memory of this kind can be allocated.
    pub(crate) unavailable: Option<&'static str>,
    /// The result of opening it in a process that does not see the home device.
    pub(crate) hidden_home: HiddenHome,
}

impl MemoryKind {
    fn new(kind: HandleKind, name: &'static str, form: Form) -> Self {
        let mut info = HandleKindInfo::new(kind, name);
        info.carries_fds = form == Form::Fds;
        info.one_open_per_process = form == Form::SeparateBytes;
        info.isolated = true;
        info.across_pid_namespaces = true;
        Self {
            info,
            form,
            granularity: 1,
            reach: Reach::Allocation,
            neighbours: false,
            unavailable: None,
            hidden_home: HiddenHome::Opens,
        }
    }

    /// Returns the alignment of an allocation of this length: whole pages begin at a page.
    pub(crate) fn alignment(&self, bytes: u64) -> u64 {
        match self.reach {
            Reach::Pages(page) if bytes >= page => page,
            _ => self.granularity,
        }
    }
}

/// The kinds of memory of a machine, and the kind of each allocation.
#[derive(Debug)]
pub(crate) struct Kinds {
    /// The first one is the preferred one.
    kinds: Vec<MemoryKind>,
    /// The kind of each allocation of another kind than the first, by its base.
    allocations: Mutex<HashMap<u64, HandleKind>>,
}

impl Kinds {
    /// Creates the kinds of the machine's own: one, of handles of this form.
    pub(crate) fn own(form: HandleForm, revokes: bool, neighbours: bool) -> Self {
        let mut kind = match form {
            HandleForm::Bytes => MemoryKind::new(BYTES, "bytes", Form::Bytes),
            HandleForm::Fds => MemoryKind::new(FD, "file descriptor", Form::Fds),
        };
        kind.info.read_only = true;
        kind.info.remappable = true;
        kind.info.across_pid_namespaces = form == HandleForm::Fds;
        if revokes && form == HandleForm::Bytes {
            kind.info.lifetime = Lifetime::Revokes;
        }
        kind.neighbours = neighbours;
        Self::of(vec![kind])
    }

    /// Creates the kinds of a vendor.
    pub(crate) fn like(vendor: Vendor) -> Self {
        Self::of(match vendor {
            Vendor::Cuda => cuda(),
            Vendor::Ascend => ascend(),
        })
    }

    fn of(kinds: Vec<MemoryKind>) -> Self {
        Self { kinds, allocations: Mutex::default() }
    }

    /// Returns the kinds, the preferred one first.
    pub(crate) fn all(&self) -> &[MemoryKind] {
        &self.kinds
    }

    pub(crate) fn first(&self) -> &MemoryKind {
        &self.kinds[0]
    }

    /// Returns a kind by its number.
    pub(crate) fn get(&self, kind: HandleKind) -> Option<&MemoryKind> {
        self.kinds.iter().find(|known| known.info.kind == kind)
    }

    /// Returns the unit of reserved ranges: a page, or the greatest unit of allocations that can be mapped there.
    pub(crate) fn unit_of_places(&self) -> u64 {
        let remappable = self.kinds.iter().filter(|kind| kind.info.remappable);
        remappable.map(|kind| kind.granularity).fold(rustix::param::page_size() as u64, u64::max)
    }

    /// Returns the kind of the allocation with this base.
    pub(crate) fn of_allocation(&self, base: u64) -> &MemoryKind {
        let known = self.lock().get(&base).copied();
        known.and_then(|kind| self.get(kind)).unwrap_or(self.first())
    }

    /// Records a new allocation.
    pub(crate) fn allocated(&self, base: u64, kind: HandleKind) {
        if kind != self.first().info.kind {
            self.lock().insert(base, kind);
        }
    }

    /// Removes an allocation, before its address can be given to another one.
    pub(crate) fn freed(&self, base: u64) {
        self.lock().remove(&base);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, HandleKind>> {
        self.allocations.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The kinds of the CUDA backend.
fn cuda() -> Vec<MemoryKind> {
    let mut legacy = MemoryKind::new(HandleKind(1), "legacy", Form::Bytes);
    legacy.info.isolated = false;
    legacy.info.across_pid_namespaces = false;
    legacy.reach = Reach::Pages(HUGE_PAGE);
    legacy.hidden_home = HiddenHome::Fails;
    let mut virtual_memory = MemoryKind::new(HandleKind(2), "virtual-memory", Form::Fds);
    virtual_memory.info.read_only = true;
    virtual_memory.info.remappable = true;
    virtual_memory.granularity = HUGE_PAGE;
    virtual_memory.neighbours = true;
    let mut pool = MemoryKind::new(HandleKind(3), "pool", Form::Fds);
    pool.info.isolated = false;
    pool.reach = Reach::Unknown;
    let mut fabric = MemoryKind::new(HandleKind(4), "fabric", Form::Bytes);
    fabric.info.read_only = true;
    fabric.info.remappable = true;
    fabric.unavailable = Some("the machine has no IMEX channel");
    // As the CUDA backend: a container's process may have the process id of a peer, which legacy handles contain.
    if is_initial_pid_namespace() {
        vec![legacy, virtual_memory, pool, fabric]
    } else {
        vec![virtual_memory, legacy, pool, fabric]
    }
}

/// The kinds of the Ascend backend.
fn ascend() -> Vec<MemoryKind> {
    let mut key = MemoryKind::new(HandleKind(1), "key", Form::SeparateBytes);
    key.info.lifetime = Lifetime::Revokes;
    key.info.whitelist = true;
    key.info.isolated = false;
    key.granularity = HUGE_PAGE;
    let mut shareable = MemoryKind::new(HandleKind(2), "shareable handle", Form::Bytes);
    shareable.info.whitelist = true;
    shareable.granularity = HUGE_PAGE;
    shareable.info.remappable = true;
    shareable.neighbours = true;
    shareable.hidden_home = HiddenHome::Unsupported;
    vec![key, shareable]
}

/// Returns whether this process runs in the machine's initial pid namespace. Assumes so if `/proc` is unavailable.
fn is_initial_pid_namespace() -> bool {
    std::fs::metadata("/proc/self/ns/pid").map_or(true, |namespace| namespace.ino() == INITIAL_PID_NAMESPACE)
}
