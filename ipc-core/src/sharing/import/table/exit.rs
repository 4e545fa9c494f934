//! The exit of the process: device work that uses imported memory finishes before the leases end.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::time::Duration;

use super::ImportTable;
use crate::backend::DeviceIpc;
use crate::model::device::DeviceOrdinal;
use crate::model::error::Result;
use crate::os::{clock, spawn_without_signals};

/// Interval at which the releases that wait for a stream are counted.
const POLL: Duration = Duration::from_millis(1);

impl ImportTable {
    /// Waits for the device work on memory of other processes, for `limit` at most. Returns whether it has finished.
    ///
    /// Waits on a thread of its own: a device that hangs must not keep the process.
    pub(crate) fn finish_device_work(&'static self, limit: Duration) -> bool {
        // The worker calls the driver for no further one, while the driver ends with the process.
        self.return_unopened(None);
        if !self.may_have_work() {
            return true;
        }
        let (done, finished) = channel();
        let spawned = spawn_without_signals("device-ipc-exit", move || {
            let _ = done.send(self.wait_for_devices());
        });
        let error = match spawned.map(|()| clock::receive(&finished, limit)) {
            Ok(Ok(Ok(()))) => return true,
            Ok(Ok(Err(error))) | Err(error) => error.to_string(),
            Ok(Err(_)) => format!("not finished after {} s", limit.as_secs()),
        };
        tracing::warn!(target: crate::os::log::IMPORT, exports = self.exports_in_use(), error, "this process exits before its device work on imported memory has finished; the exporters report its leases as those of a dead process");
        false
    }

    /// Returns whether this process may have leases of other processes.
    pub(crate) fn has_links(&self) -> bool {
        // A thread that holds the lock may be making one.
        self.links.try_lock().map_or(true, |links| !links.is_empty())
    }

    fn may_have_work(&self) -> bool {
        self.releasing.load(Ordering::Acquire) > 0
            || self.leases.open().iter().any(|lease| lease.may_have_work())
    }

    /// Waits for the devices of all leases that are in use or draining, and for the releases that wait for a stream.
    fn wait_for_devices(&self) -> Result<()> {
        let mut finished: Vec<(Arc<dyn DeviceIpc>, DeviceOrdinal)> = Vec::new();
        for lease in self.leases.open() {
            let (backend, device) = (lease.backend(), lease.mapped()[0].device);
            let is_known = finished.iter().any(|(known, on)| Arc::ptr_eq(known, backend) && *on == device);
            if lease.may_have_work() && !is_known {
                backend.synchronize_device(device)?;
                finished.push((Arc::clone(backend), device));
            }
        }
        // A stream of another context than the device's own.
        while self.releasing.load(Ordering::Acquire) > 0 {
            clock::sleep(POLL);
        }
        Ok(())
    }

    /// Returns the exports whose leases are in use or draining, as text.
    fn exports_in_use(&self) -> String {
        let open = self.leases.open();
        let used = open.iter().filter(|lease| lease.may_have_work());
        let names: Vec<_> = used
            .take(8)
            .map(|lease| {
                let (pid, export) = (lease.key().exporter.pid, lease.key().export);
                format!("{export} of process {pid} on device {}", lease.mapped()[0].device)
            })
            .collect();
        names.join(", ")
    }
}
