//! Address ranges that the user keeps: several exports side by side in one range, and one range in several processes.
//!
//! A range is freed by its last reference, of which each mapping in it has one for each region.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::mapping::Mapping;
use super::table::operations;
use super::tensor::{Tensor, elements_of};
use super::view_owner::ViewOwner;
use crate::backend::DeviceIpc;
use crate::model::address::{DevicePtr, DeviceRange};
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Remedy, Result};
use crate::model::tensor::TensorLayout;
use crate::os::process::Owner;
use crate::sharing::Ipc;
use crate::wire::descriptor::{Contents, DescribedExtent};

/// A range of addresses of this process on one device, in which exports are opened side by side
/// ([`OpenBuilder::reserved_in`](crate::OpenBuilder::reserved_in)); see [`Ipc::reserve`](crate::Ipc::reserve) and
/// [`Ipc::reserve_at`](crate::Ipc::reserve_at).
///
/// It uses addresses and no memory. The addresses stay reserved until this value, its clones and all mappings in the range have
/// been dropped.
///
/// # Examples
///
/// Two owners' experts as one tensor:
///
/// ```no_run
/// use device_ipc_core::{Descriptor, Dtype, Ipc, Result, Stream, TensorLayout};
///
/// # fn gather(ipc: &Ipc, stream: &Stream, first: &Descriptor, second: &Descriptor) -> Result<()> {
/// let stride = 8 << 20; // what each owner has shared, in bytes
/// let reservation = ipc.reserve(0, 2 * stride)?;
/// let owners = [
///     &ipc.open(first).reserved_in(&reservation, 0).on(stream)?,
///     &ipc.open(second).reserved_in(&reservation, stride).on(stream)?,
/// ];
/// let layout = TensorLayout::contiguous(Dtype::F32, [16, 1 << 18])?; // 8 experts of each owner
/// let experts = reservation.tensor(&owners, &layout)?.view::<f32, _>(stream)?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Reservation {
    reserved: Arc<ReservedRange>,
}

/// The range of a reservation. Its last reference frees it.
#[derive(Debug)]
struct ReservedRange {
    backend: Arc<dyn DeviceIpc>,
    range: DeviceRange,
    /// The unit of places in bytes; 1 for the range of a single import.
    unit: u64,
    /// The length of each place, by its offset.
    places: Mutex<BTreeMap<u64, u64>>,
    owner: Owner,
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

    fn new(backend: &Arc<dyn DeviceIpc>, range: DeviceRange, unit: u64) -> Arc<Self> {
        let (places, owner) = (Mutex::default(), Owner::current());
        Arc::new(Self { backend: Arc::clone(backend), range, unit, places, owner })
    }

    /// Takes the addresses from `offset` on for an import of `bytes` bytes.
    fn place(self: &Arc<Self>, offset: u64, bytes: u64) -> Result<Arc<Place>> {
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

impl Reservation {
    /// Reserves a range of a device, at the address if there is one.
    pub(crate) fn new(ipc: &Ipc, device: DeviceOrdinal, bytes: u64, at: Option<DevicePtr>) -> Result<Self> {
        let backend = ipc.backend();
        let (name, count) = (backend.info().name, ipc.devices()?.len());
        if device.index() >= count {
            return Err(Error::NoSuchDevice { backend: name, ordinal: device, count });
        }
        let operations = operations(&**backend)?;
        let unit = operations.granularity(device)?;
        let whole = bytes.checked_next_multiple_of(unit.place).filter(|whole| *whole > 0);
        let whole =
            whole.ok_or_else(|| Error::InvalidRegion(format!("cannot reserve {bytes} B of addresses")))?;
        let Some(at) = at else {
            let range = operations.reserve(device, whole, None)?;
            return Ok(Self { reserved: ReservedRange::new(backend, range, unit.place) });
        };
        let wanted = DeviceRange::new(device, at, whole);
        if at.is_null() || !at.get().is_multiple_of(unit.address) || wanted.end().is_none() {
            return Err(Error::InvalidRegion(format!(
                "cannot reserve {whole} B at {at}: addresses on device {device} are multiples of {} B ({name}), and not null",
                unit.address
            )));
        }
        let range = operations.reserve(device, whole, Some(at))?;
        // Frees another range, which the driver has chosen.
        let reserved = ReservedRange::new(backend, range, unit.place);
        if range == wanted {
            return Ok(Self { reserved });
        }
        Err(Error::AddressesInUse {
            range: wanted,
            detail: format!("the driver cannot reserve them in this process; {}", Remedy::ReserveElsewhere),
        })
    }

    /// Returns the addresses of the range. Its length is that of the request, rounded up to a multiple of
    /// [`granularity`](Self::granularity).
    pub fn range(&self) -> DeviceRange {
        self.reserved.range
    }

    /// Returns the unit of places in bytes: allocations begin at multiples of it and fill whole units.
    pub fn granularity(&self) -> u64 {
        self.reserved.unit
    }

    /// Returns a tensor in the range, over the memory of all mappings that it lies in. The layout's
    /// [offset](TensorLayout::element_offset) counts from the start of the range.
    ///
    /// A view waits until the bytes of each mapping are ready, and has the least access of them.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidRegion`] for a byte between the first element and the last in which no mapping has memory, with its offset;
    /// [`Error::Suspended`] for a suspended mapping; [`Error::Layout`] for a layout that exceeds the range.
    pub fn tensor<'m>(&self, mappings: &'m [&'m Mapping], layout: &'m TensorLayout) -> Result<Tensor<'m>> {
        let range = elements_of(layout, self.range())?;
        let mut mapped = Vec::with_capacity(mappings.len());
        for mapping in mappings {
            mapping.check_mapped()?;
            mapped.extend(mapping.parts.iter().flat_map(|part| part.regions().iter().copied()));
        }
        mapped.sort_unstable_by_key(|found| found.ptr);
        let mut next = range.ptr;
        for found in mapped {
            if found.device == range.device && found.ptr <= next {
                next = next.max(found.end().unwrap_or(next));
            }
        }
        if mappings.is_empty() || Some(next) < range.end() {
            return Err(Error::InvalidRegion(format!(
                "the tensor has the bytes from {} to {} of the reservation, and none of the mappings has memory at {}; open an \
                 export there",
                range.ptr.get() - self.range().ptr.get(),
                range.ptr.get() - self.range().ptr.get() + range.len,
                next.get() - self.range().ptr.get(),
            )));
        }
        Ok(Tensor::at(ViewOwner::SideBySide(mappings), range, layout))
    }

    /// Fails unless the memory can be opened on this device by this backend.
    pub(super) fn check_place(&self, backend: &dyn DeviceIpc, device: DeviceOrdinal) -> Result<()> {
        let (ours, name) = (self.reserved.backend.info().name, backend.info().name);
        if ours != name {
            let (what, found, expected) = ("the reservation", ours.to_owned(), name.to_owned());
            return Err(Error::WrongBackend { what, found, expected });
        }
        if self.range().device != device {
            return Err(Error::InvalidRegion(format!(
                "the memory is opened on device {device}, and the reservation is on device {}; open it there, or reserve on \
                 device {device}",
                self.range().device
            )));
        }
        Ok(())
    }

    /// Takes the addresses for the regions of each part of a descriptor, one behind the other. The first byte of the memory, as
    /// [`Mapping::regions`] returns it, lies at the offset.
    pub(super) fn places(&self, contents: &Contents, offset: u64) -> Result<Vec<Vec<Arc<Place>>>> {
        self.reserved.owner.check()?;
        let mut next = match contents.region().map_or(0, |region| region.offset) {
            0 => offset,
            before => offset.checked_sub(before).ok_or_else(|| {
                Error::InvalidRegion(format!(
                    "the memory begins {before} B behind the start of its allocation, which does not fit in the {offset} B before it"
                ))
            })?,
        };
        let mut place = |extents: &[DescribedExtent]| {
            let bytes = extents.iter().map(|extent| extent.size).fold(0, u64::saturating_add);
            let place = self.reserved.place(next, bytes)?;
            next += bytes.next_multiple_of(self.reserved.unit);
            Ok(place)
        };
        let parts = contents.parts.iter();
        parts.map(|part| part.regions.as_regions().iter().map(&mut place).collect()).collect()
    }
}
