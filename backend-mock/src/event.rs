//! Events of the engine.

use std::sync::Arc;
use std::time::Duration;

use device_ipc_core::backend::{DeviceEvent, HandleBytes, check_stream_device};
use device_ipc_core::{BorrowedStream, DeviceOrdinal, Result};
use device_ipc_mock_engine::{EventId, Machine};

use crate::errors::{engine, timeout, unsupported};
use crate::stream::stream_of;

/// An event that this process created, for itself or for others, or opened from another process.
#[derive(Debug)]
pub(crate) struct MockEvent {
    pub(crate) machine: Arc<Machine>,
    pub(crate) event: EventId,
    pub(crate) device: DeviceOrdinal,
    /// Whether another process can open it by a handle from this one.
    pub(crate) is_exportable: bool,
}

impl DeviceEvent for MockEvent {
    fn device(&self) -> DeviceOrdinal {
        self.device
    }

    fn export(&self) -> Result<HandleBytes> {
        if !self.is_exportable {
            return Err(unsupported(
                "export an event of another process, or of this one alone",
                "forward the handle by which it was opened",
            ));
        }
        let bytes = self.machine.export_event(self.event).map_err(engine("export_event"))?;
        Ok(HandleBytes::new(bytes))
    }

    fn record(&self, stream: BorrowedStream<'_>) -> Result<()> {
        check_stream_device(stream, "recording the event", self.device)?;
        self.machine.record(self.event, stream_of(stream)?).map_err(engine("record"))
    }

    fn wait_on(&self, stream: BorrowedStream<'_>) -> Result<()> {
        self.machine.wait(stream_of(stream)?, self.event).map_err(engine("wait"))
    }

    fn query(&self) -> Result<bool> {
        self.machine.query_event(self.event).map_err(engine("query_event"))
    }

    fn synchronize(&self, limit: Duration) -> Result<()> {
        match self.machine.synchronize_event(self.event, Some(limit)).map_err(engine("synchronize_event"))? {
            true => Ok(()),
            false => Err(timeout("the event", limit)),
        }
    }
}

impl Drop for MockEvent {
    fn drop(&mut self) {
        // Fails only in a forked child; the events belong to the parent.
        let _ = self.machine.destroy_event(self.event);
    }
}
