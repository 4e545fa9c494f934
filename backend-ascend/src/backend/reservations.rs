//! Memory at addresses that the importer keeps.

use device_ipc_core::backend::{DeviceReservations, Imported, ReceivedHandle, ReservationGranularity};
use device_ipc_core::{Access, DeviceOrdinal, DevicePtr, DeviceRange, Result};

use super::ascend::AscendBackend;

/// The unit of addresses that a caller chooses (manual of CANN 8.5, `aclrtReserveMemAddress`). Manuals of other versions have
/// smaller units, of which it is a multiple.
const CHOSEN_ADDRESSES: u64 = 1 << 30;

impl DeviceReservations for AscendBackend {
    fn granularity(&self, on: DeviceOrdinal) -> Result<ReservationGranularity> {
        Ok(ReservationGranularity { place: self.memory.granularity_of(on)?, address: CHOSEN_ADDRESSES })
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
