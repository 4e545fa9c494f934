//! Address ranges that this process keeps, and memory of other processes that is mapped in them.

use std::fmt;

use super::ReceivedHandle;
use crate::model::access::Access;
use crate::model::address::{DevicePtr, DeviceRange};
use crate::model::device::DeviceOrdinal;
use crate::model::error::Result;

/// Reserved address ranges, in which memory of other processes is mapped, unmapped and replaced while addresses stay.
///
/// The library keeps a range as long as a mapping of the user exists, and maps one import after the other in it. Between two
/// imports nothing is mapped there, and device work on the addresses fails. Only kinds with
/// [`remappable`](super::HandleKindInfo::remappable) are imported.
///
/// An import keeps the memory as an open does, mapped or not. So the library can import new memory before it unmaps the old,
/// and map the old again if the new cannot be mapped.
pub trait DeviceReservations: fmt::Debug + Send + Sync {
    /// Returns the units of addresses and lengths in reserved ranges.
    ///
    /// # Errors
    ///
    /// The vendor's error.
    fn granularity(&self, on: DeviceOrdinal) -> Result<ReservationGranularity>;

    /// Reserves `bytes` addresses in the address space of `on`: the length of an import, or whole units of places. Uses no memory.
    ///
    /// With `at`, a multiple of the unit of addresses, the range begins there. If these addresses are not free, the driver's choice
    /// is returned; the library frees it and reports that the addresses are in use.
    ///
    /// # Errors
    ///
    /// [`Error::Vendor`](crate::Error::Vendor) if the address space has no such range.
    fn reserve(&self, on: DeviceOrdinal, bytes: u64, at: Option<DevicePtr>) -> Result<DeviceRange>;

    /// Frees a range of [`reserve`](Self::reserve), in which nothing is mapped. The library passes each range once.
    ///
    /// # Errors
    ///
    /// The vendor's error; the addresses may stay reserved.
    fn unreserve(&self, reserved: DeviceRange) -> Result<()>;

    /// Imports the handles of one or more allocations, without an address. Checks and errors are those of
    /// [`DeviceIpc::open`](super::DeviceIpc::open), and [`Error::Unsupported`](crate::Error::Unsupported) for a kind that is not
    /// remappable. This process may have the same handles open or imported already; a vendor that imports a handle once for a
    /// device returns [`Error::OverlapsInUse`](crate::Error::OverlapsInUse) then, also in `open`.
    ///
    /// # Errors
    ///
    /// Those of `open`. Nothing stays imported after an error.
    fn import(&self, handles: Vec<ReceivedHandle>, on: DeviceOrdinal, access: Access) -> Result<Imported>;

    /// Maps an import at an address, side by side in the order of the handles, with the access of the import for its device.
    ///
    /// The range lies in a reserved one, a multiple of the unit of places behind its start, and nothing is mapped there; other
    /// imports may be mapped next to it. The import is not mapped yet; an import is mapped, unmapped
    /// and mapped again any number of times. Does not wait for work on other memory.
    ///
    /// # Errors
    ///
    /// The vendor's error. Nothing of the import is mapped after an error.
    fn map(&self, imported: &Imported, at: DevicePtr) -> Result<()>;

    /// Unmaps an import and keeps it. All device work of this process that uses the range has finished.
    ///
    /// # Errors
    ///
    /// The vendor's error; parts of the import may be unmapped.
    fn unmap(&self, imported: &Imported) -> Result<()>;

    /// Releases an import, and unmaps it if it is mapped. The device frees the memory once its owner has freed it and the last
    /// importer has closed it. The library passes each import once.
    ///
    /// # Errors
    ///
    /// The vendor's error; the import is released nevertheless.
    fn release(&self, imported: Imported) -> Result<()>;
}

/// The units of reserved ranges, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(
    clippy::exhaustive_structs,
    reason = "a new field is a new question that every backend has to answer"
)]
pub struct ReservationGranularity {
    /// The unit of places: imports are mapped at multiples of it from the start of a range, and each takes whole units. The library
    /// reserves whole units for several imports.
    pub place: u64,
    /// The unit of the addresses that a caller can choose.
    pub address: u64,
}

/// Memory of another process that [`DeviceReservations::import`] has imported; [`DeviceReservations::release`] releases it.
#[derive(Debug)]
#[expect(
    clippy::exhaustive_structs,
    reason = "a new field is a new question that every backend has to answer"
)]
pub struct Imported {
    /// The device that it is imported for.
    pub device: DeviceOrdinal,
    /// The length of all allocations in bytes, as the driver maps them.
    pub len: u64,
    /// The backend's key, opaque to the library.
    pub cookie: u64,
}
