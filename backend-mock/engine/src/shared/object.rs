//! Shared objects: anonymous memory files.
//!
//! Memory files need no `/dev/shm` and no cleanup after a SIGKILL, and their descriptors can be passed. Other processes
//! open them as `/proc/<pid>/fd/<n>`, for which a handle of 64 bytes suffices. A descriptor number is reused after a
//! free as a driver reuses its slots, so that a stale handle can name another allocation.

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
use crate::system::{ProcessId, duplicate_from, maximum_descriptors, page_size, with_more_descriptors};

pub(crate) const NAME: &str = "device-ipc-mock";
const LINK_PREFIX: &[u8] = b"/memfd:device-ipc-mock";

/// The lowest descriptor number of an object. Other code of the process, which gets the lowest free numbers, does not
/// take a freed number before the next allocation does.
const FIRST_SLOT: i32 = 256;

/// Returns the lowest number under this process's hard limit, which may be too low for the usual one.
fn first_slot() -> i32 {
    let half = maximum_descriptors().and_then(|maximum| i32::try_from(maximum / 2).ok());
    half.map_or(FIRST_SLOT, |half| half.min(FIRST_SLOT))
}

/// A shared object, created or opened.
#[derive(Debug)]
pub(crate) struct Object {
    pub(crate) file: OwnedFd,
    pub(crate) page: Page,
    pub(crate) identity: Identity,
}

impl Object {
    /// Creates an object with `data` bytes (whole pages) after its header page. `tag` is the suffix of the file name.
    pub(crate) fn create(identity: Identity, data: u64, tag: &str) -> Result<Self, EngineError> {
        let name = if tag.is_empty() { Cow::Borrowed(NAME) } else { format!("{NAME}{tag}").into() };
        let create = || memfd_create(&*name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
        let low = with_more_descriptors(create).map_err(EngineError::system("memfd_create"))?;
        let file = duplicate_from(&low, first_slot())?;
        drop(low);
        ftruncate(&file, page_size() as u64 + data).map_err(EngineError::system("ftruncate"))?;
        // No process can cause a SIGBUS in another one by truncating the file.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(EngineError::system("fcntl(F_ADD_SEALS)"))?;
        let page = Page::map(&file, true)?;
        page.initialise(&identity);
        Ok(Self { file, page, identity })
    }

    /// Returns the number of a descriptor, for a handle.
    pub(crate) fn slot(file: &OwnedFd) -> u32 {
        file.as_raw_fd().unsigned_abs()
    }

    /// Opens the object that the descriptor in `handle` refers to now, with a new file description.
    ///
    /// # Errors
    /// `ExporterGone`, `PermissionDenied`, and `InvalidHandle` if the descriptor is not an object of the engine.
    pub(crate) fn open(handle: &Handle, kind: ObjectKind, writable: bool) -> Result<Self, EngineError> {
        let pid = handle.exporter.pid;
        let gone = EngineError::ExporterGone { pid };
        if !handle.exporter.is_alive() {
            return Err(gone);
        }
        let refused = |errno| match errno {
            Errno::ACCESS | Errno::PERM => EngineError::PermissionDenied { pid },
            _ if !handle.exporter.is_alive() => EngineError::ExporterGone { pid },
            Errno::MFILE | Errno::NFILE => EngineError::System { call: "open", errno: errno.raw_os_error() },
            _ => EngineError::InvalidHandle { reason: "the exporter has freed the object" },
        };
        let path = format!("/proc/{pid}/fd/{}", handle.fd);
        // The number may refer to anything by now, such as a pipe or a device. Only memory files are opened.
        let target = readlink(path.as_str(), Vec::new()).map_err(refused)?;
        if !target.as_bytes().starts_with(LINK_PREFIX) {
            return Err(EngineError::InvalidHandle { reason: "the exporter has freed the object" });
        }
        let access = if writable { OFlags::RDWR } else { OFlags::RDONLY };
        let flags = access | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let open_file = || rustix::fs::open(path.as_str(), flags, Mode::empty());
        let file = with_more_descriptors(open_file).map_err(refused)?;
        let object = Self::adopt(file, kind, writable && kind == ObjectKind::Event)?;
        if object.identity.owner != handle.exporter {
            return Err(EngineError::InvalidHandle { reason: "the object belongs to another process" });
        }
        Ok(object)
    }

    /// Takes ownership of a received descriptor, after checking that it is an object of the engine. The header page is
    /// mapped read-only unless `writable_page` is set.
    pub(crate) fn adopt(file: OwnedFd, kind: ObjectKind, writable_page: bool) -> Result<Self, EngineError> {
        let invalid = |reason| EngineError::InvalidHandle { reason };
        let no_object = invalid("the file descriptor is not an object of this engine");
        let sealed = fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        let length = fstat(&file).map_err(EngineError::system("fstat"))?.st_size.unsigned_abs();
        if !sealed || length < page_size() as u64 {
            return Err(no_object);
        }
        let page = Page::map(&file, writable_page)?;
        let identity = page.identity().ok_or_else(|| no_object.clone())?;
        if identity.kind != kind {
            return Err(invalid("the object is of another kind: memory instead of an event, or the reverse"));
        }
        if identity.size > length - page_size() as u64 {
            return Err(no_object);
        }
        Ok(Self { file, page, identity })
    }
}

/// Rejects a handle that this process exported.
pub(crate) fn refuse_own(exporter: ProcessId, own: ProcessId) -> Result<(), EngineError> {
    if exporter == own { Err(EngineError::OwnProcess) } else { Ok(()) }
}
