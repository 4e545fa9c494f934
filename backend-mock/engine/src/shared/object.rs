//! Shared objects: memory files without a name, and the way to another process's.
//!
//! Why memory files: nothing lies in `/dev/shm`, nothing has to be swept up after
//! a SIGKILL, and a file descriptor of one can be passed. Why through
//! `/proc/<pid>/fd/<n>`: 64 bytes are then enough to open, and a descriptor
//! number is reused after a free exactly as a driver reuses its slots, which is how a
//! stale handle comes to name somebody else's block.

use std::borrow::Cow;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::fs::{
    MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
    readlink,
};
use rustix::io::Errno;

use super::handle::Handle;
use super::page::{Identity, ObjectKind, Page};
use crate::model::EngineError;
use crate::system::{ProcessId, duplicate_from, page_size, with_more_descriptors};

pub(crate) const NAME: &str = "device-ipc-mock";
const LINK_PREFIX: &[u8] = b"/memfd:device-ipc-mock";

/// Descriptors are moved to numbers from here on, where nobody else takes the lowest free one between a
/// free and the next allocation.
const FIRST_SLOT: i32 = 256;

/// A shared object, opened or made.
#[derive(Debug)]
pub(crate) struct Object {
    pub(crate) file: OwnedFd,
    pub(crate) page: Page,
    pub(crate) identity: Identity,
}

impl Object {
    /// Makes an object with `data` bytes (whole pages) after its header page. `tag` ends the file's name.
    pub(crate) fn create(identity: Identity, data: u64, tag: &str) -> Result<Self, EngineError> {
        let name = if tag.is_empty() { Cow::Borrowed(NAME) } else { format!("{NAME}{tag}").into() };
        let create = || memfd_create(&*name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
        let low = with_more_descriptors(create).map_err(EngineError::system("memfd_create"))?;
        let file = duplicate_from(&low, FIRST_SLOT)?;
        drop(low);
        ftruncate(&file, page_size() as u64 + data).map_err(EngineError::system("ftruncate"))?;
        // No process can make another one's mapping end in a SIGBUS.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(EngineError::system("fcntl(F_ADD_SEALS)"))?;
        let page = Page::map(&file, true)?;
        page.initialise(&identity);
        Ok(Self { file, page, identity })
    }

    /// Number of the descriptor, as a handle carries it.
    pub(crate) fn slot(file: &OwnedFd) -> u32 {
        file.as_raw_fd().unsigned_abs()
    }

    /// Opens what stands now behind the descriptor that `handle` names, with a file description of its own.
    ///
    /// # Errors
    /// `ExporterGone`, `PermissionDenied`, and `InvalidHandle` if nothing of the engine's is there.
    pub(crate) fn reach(handle: &Handle, kind: ObjectKind, writable: bool) -> Result<Self, EngineError> {
        let pid = handle.exporter.pid;
        let gone = EngineError::ExporterGone { pid };
        if !handle.exporter.is_alive() {
            return Err(gone);
        }
        let refused = |errno| match errno {
            Errno::ACCESS | Errno::PERM => EngineError::PermissionDenied { pid },
            _ if !handle.exporter.is_alive() => EngineError::ExporterGone { pid },
            Errno::MFILE | Errno::NFILE => EngineError::System { call: "open", errno: errno.raw_os_error() },
            _ => EngineError::InvalidHandle { reason: "its exporter has freed what it names" },
        };
        let path = format!("/proc/{pid}/fd/{}", handle.fd);
        // The number may be anything by now: a pipe, a tape drive. Only memory files are opened.
        let target = readlink(path.as_str(), Vec::new()).map_err(refused)?;
        if !target.as_bytes().starts_with(LINK_PREFIX) {
            return Err(EngineError::InvalidHandle { reason: "its exporter has freed what it names" });
        }
        let access = if writable { OFlags::RDWR } else { OFlags::RDONLY };
        let flags = access | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let open = || rustix::fs::open(path.as_str(), flags, Mode::empty());
        let file = with_more_descriptors(open).map_err(refused)?;
        let object = Self::adopt(file, kind, writable && kind == ObjectKind::Event)?;
        if object.identity.owner != handle.exporter {
            return Err(EngineError::InvalidHandle { reason: "it names an object of another process" });
        }
        Ok(object)
    }

    /// Takes over a descriptor that somebody passed on, after checking that it is one of the engine's.
    /// The page is mapped without the right to write unless asked for.
    pub(crate) fn adopt(file: OwnedFd, kind: ObjectKind, writable_page: bool) -> Result<Self, EngineError> {
        let invalid = |reason| EngineError::InvalidHandle { reason };
        let no_object = invalid("the file descriptor is no memory of this engine");
        let sealed = fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        let length = fstat(&file).map_err(EngineError::system("fstat"))?.st_size.unsigned_abs();
        if !sealed || length < page_size() as u64 {
            return Err(no_object);
        }
        let page = Page::map(&file, writable_page)?;
        let identity = page.identity().ok_or_else(|| no_object.clone())?;
        if identity.kind != kind {
            return Err(invalid("it names something of another kind: memory for an event, or the reverse"));
        }
        if identity.size > length - page_size() as u64 {
            return Err(no_object);
        }
        Ok(Self { file, page, identity })
    }
}

/// Refuses a handle of this process's own.
pub(crate) fn refuse_own(exporter: ProcessId, own: ProcessId) -> Result<(), EngineError> {
    if exporter == own { Err(EngineError::OwnProcess) } else { Ok(()) }
}
