//! Places in reserved address ranges, each of one import.
//!
//! A range is freed by its last reference, of which each place in it has one.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::backend::{DeviceIpc, DeviceReservations};
use crate::model::address::DeviceRange;
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Result};
use crate::os::process::Owner;

/// The range of a reservation. Its last reference frees it.
#[derive(Debug)]
pub(super) struct ReservedRange {
    pub(super) backend: Arc<dyn DeviceIpc>,
    pub(super) range: DeviceRange,
    /// The unit of places in bytes; 1 for the range of a single import.
    pub(super) unit: u64,
    /// The length of each place, by its offset.
    places: Mutex<BTreeMap<u64, u64>>,
    pub(super) owner: Owner,
}

/// The addresses of one import in a reserved range. No two places overlap.
#[derive(Debug)]
pub(super) struct Place {
    reserved: Arc<ReservedRange>,
    /// The addresses of the import, without those behind it that fill up the last unit.
    pub(super) range: DeviceRange,
}

impl Drop for ReservedRange {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            // A forked child: the addresses are the parent's.
            return;
        }
        let freed = operations(&*self.backend).and_then(|operations| operations.unreserve(self.range));
        if let Err(error) = freed {
            tracing::warn!(target: crate::os::log::IMPORT, %error, "a reserved address range could not be freed");
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let offset = self.range.ptr.get() - self.reserved.range.ptr.get();
        self.reserved.places().remove(&offset);
    }
}

impl ReservedRange {
    fn places(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn new(backend: &Arc<dyn DeviceIpc>, range: DeviceRange, unit: u64) -> Arc<Self> {
        let (places, owner) = (Mutex::default(), Owner::current());
        Arc::new(Self { backend: Arc::clone(backend), range, unit, places, owner })
    }

    /// Takes the addresses from `offset` on for an import of `bytes` bytes.
    pub(super) fn place(self: &Arc<Self>, offset: u64, bytes: u64) -> Result<Arc<Place>> {
        let Self { unit, range: whole, .. } = **self;
        if !offset.is_multiple_of(unit) {
            return Err(Error::InvalidRegion(format!(
                "cannot map an allocation at offset {offset} B of a reservation: offsets are multiples of {unit} B, the last \
                 one before it is {} B",
                offset - offset % unit
            )));
        }
        let place = bytes.checked_next_multiple_of(unit).filter(|length| *length > 0);
        let Some((length, _)) = place.and_then(|length| Some((length, whole.slice(offset, length)?))) else {
            return Err(Error::InvalidRegion(format!(
                "cannot map {bytes} B at offset {offset} B of a reservation of {} B; reserve more",
                whole.len
            )));
        };
        let range = whole.slice(offset, bytes).expect("it is a part of the place");
        let mut places = self.places();
        let before = places.range(..offset + length).next_back().map(|(other, length)| (*other, *length));
        if let Some((other, others)) = before.filter(|(other, length)| other + length > offset) {
            return Err(Error::AddressesInUse {
                range,
                detail: format!(
                    "offset {offset} B, length {length} B of the reservation overlap a mapping at offset {other} B, length {others} \
                     B; release that one, and the work on it, or open at another offset"
                ),
            });
        }
        places.insert(offset, length);
        drop(places);
        Ok(Arc::new(Place { reserved: Arc::clone(self), range }))
    }
}

impl Place {
    /// Reserves a range for one import.
    pub(super) fn alone(backend: &Arc<dyn DeviceIpc>, on: DeviceOrdinal, bytes: u64) -> Result<Arc<Self>> {
        let range = operations(&**backend)?.reserve(on, bytes, None)?;
        ReservedRange::new(backend, range, 1).place(0, bytes)
    }
}

/// Returns the backend's operations on reserved ranges.
///
/// # Errors
///
/// [`Error::Unsupported`] if it has none.
pub(super) fn operations(backend: &dyn DeviceIpc) -> Result<&dyn DeviceReservations> {
    backend.reservations().ok_or_else(|| Error::Unsupported {
        backend: backend.info().name,
        what: "map memory at addresses that the importer keeps".into(),
        why: "it has no reserved address ranges; open the export without a reservation".into(),
    })
}
