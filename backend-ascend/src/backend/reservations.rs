//! Memory at addresses that the importer keeps.

use device_ipc_core::backend::{DeviceReservations, Imported, ReceivedHandle};
use device_ipc_core::{Access, DeviceOrdinal, DevicePtr, DeviceRange, Result};

use super::ascend::AscendBackend;

impl DeviceReservations for AscendBackend {
    fn reserve(&self, on: DeviceOrdinal, bytes: u64) -> Result<DeviceRange> {
        self.reservations.reserve(on, bytes)
    }

    fn unreserve(&self, reserved: DeviceRange) -> Result<()> {
        self.reservations.unreserve(reserved)
    }

    fn import(&self, handles: Vec<ReceivedHandle>, on: DeviceOrdinal, access: Access) -> Result<Imported> {
        self.reservations.import(&handles, on, access)
    }

    fn map(&self, imported: &Imported, at: DevicePtr) -> Result<()> {
        self.reservations.map(imported, at)
    }

    fn unmap(&self, imported: &Imported) -> Result<()> {
        self.reservations.unmap(imported)
    }

    fn release(&self, imported: Imported) -> Result<()> {
        self.reservations.release(&imported)
    }
}
