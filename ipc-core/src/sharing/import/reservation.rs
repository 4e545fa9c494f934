//! Address ranges that the user keeps: several exports side by side in one range, and one range in several processes.

use std::sync::Arc;

use super::mapping::Mapping;
use super::place::{Place, ReservedRange, operations};
use super::tensor::Tensor;
use super::view_owner::ViewOwner;
use crate::backend::DeviceIpc;
use crate::model::address::{DevicePtr, DeviceRange};
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Remedy, Result};
use crate::model::tensor::TensorLayout;
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
        let range = layout.elements_in(self.range())?;
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
