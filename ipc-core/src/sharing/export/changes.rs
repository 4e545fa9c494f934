//! A descriptor for changes of an export's holders.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;

use crate::model::error::{Error, Result};
use crate::os::Readiness;
use crate::sharing::RuntimeRef;
use crate::wire::descriptor::ExportId;

/// A descriptor ([`AsFd`]) that becomes readable with every change of an export's holders: when a process has opened the
/// export, released it, joined its ring, or terminated, and when the export has ended.
///
/// It stays readable until [`clear`](Self::clear). Each value has a descriptor, so several event loops and threads can wait for
/// changes of one export: clear, check the condition, wait, in a loop.
///
/// # Examples
///
/// ```
/// # fn main() -> device_ipc_core::Result<()> {
/// # let backend = device_ipc_mock::MockBackend::from_spec("devices=1").expect("a valid specification");
/// # let ipc = device_ipc_core::Ipc::with_backend(backend);
/// # let export = ipc.share(ipc.allocate(0, 1024)?).start()?;
/// let changes = export.changes();
/// # let mapping = ipc.open(export.descriptor()).at_home()?;
/// loop {
///     changes.clear();
///     if export.holders().opened() > 0 {
///         break;
///     }
///     // Wait until the descriptor of `changes` is readable.
/// }
/// # drop(mapping);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct ExportChanges {
    /// `None` if the system has created no descriptor, or in a forked child: then the descriptor is always readable.
    readiness: Option<Arc<Readiness>>,
    runtime: RuntimeRef,
}

impl ExportChanges {
    /// Creates a descriptor that is readable.
    pub(super) fn of(exports: impl Iterator<Item = ExportId>, runtime: RuntimeRef) -> Self {
        Self::try_of(exports, runtime).unwrap_or(Self { readiness: None, runtime })
    }

    /// Creates a descriptor that is readable, or returns an error if the system creates none, or in a forked child.
    pub(super) fn try_of(exports: impl Iterator<Item = ExportId>, runtime: RuntimeRef) -> Result<Self> {
        let table = &runtime.check()?.exports;
        let readiness = Readiness::new().map_err(|error| Error::io("creating an eventfd", error))?;
        let readiness = Arc::new(readiness);
        exports.for_each(|export| table.report_changes(export, &readiness));
        Ok(Self { readiness: Some(readiness), runtime })
    }

    /// Makes the descriptor unreadable until the next change. Call it before the state is read, so that no change is lost.
    pub fn clear(&self) {
        if let Some(readiness) = self.readiness.as_deref().filter(|_| self.runtime.is_here()) {
            readiness.clear();
        }
    }
}

impl AsFd for ExportChanges {
    fn as_fd(&self) -> BorrowedFd<'_> {
        if let Some(readiness) = self.readiness.as_deref() {
            readiness.as_fd()
        } else {
            self.runtime.always_ready()
        }
    }
}

impl AsRawFd for ExportChanges {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}
