//! Memory at addresses that the importer keeps.

use device_ipc_core::backend::{DeviceReservations, Imported, ReceivedHandle, ReservationGranularity};
use device_ipc_core::{Access, DeviceOrdinal, DevicePtr, DeviceRange, Result};

use super::cuda::CudaBackend;

impl DeviceReservations for CudaBackend {
    fn granularity(&self, on: DeviceOrdinal) -> Result<ReservationGranularity> {
        self.reservations.granularity(on)
    }

    fn reserve(&self, on: DeviceOrdinal, bytes: u64, at: Option<DevicePtr>) -> Result<DeviceRange> {
        self.reservations.reserve(on, bytes, at)
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
