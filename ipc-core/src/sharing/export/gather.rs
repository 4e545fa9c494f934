//! The allocations that memory lies in, each of them once, and their handles.

use std::sync::Arc;

use crate::backend::interop::Region;
use crate::backend::{DeviceIpc, check_backend, with_device_context};
use crate::model::address::{DevicePtr, DeviceRange, Extent};
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Result};
use crate::sharing::Runtime;
use crate::sharing::export::shared::{Allocation, Handles};
use crate::wire::descriptor::{DescribedExtent, DescribedRegions, MAX_EXTENTS, MAX_REGIONS_ALLOCATIONS};

/// The places of all memories of named tensors.
#[derive(Debug)]
pub(super) struct Gathered {
    /// One part for each device.
    pub(super) parts: Vec<GatheredPart>,
    /// The place of each memory, in the order in which they were added.
    pub(super) places: Vec<MemoryPlace>,
}

/// The memory on one device.
#[derive(Debug)]
pub(super) struct GatheredPart {
    pub(super) device: DeviceOrdinal,
    /// The allocations of all regions, in order. The allocations of a region are adjacent: they contain one memory, or several
    /// that share allocations.
    pub(super) allocations: Vec<Extent>,
    /// The end of each region in the list.
    ends: Vec<usize>,
    /// The number of bytes in the memories; overlaps count once.
    pub(super) bytes: u64,
    /// The regions in the address space of this process.
    pub(super) ranges: Arc<[DeviceRange]>,
    /// The regions in the form of a descriptor.
    pub(super) described: Arc<DescribedRegions>,
}

/// The place of a memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct MemoryPlace {
    pub(super) part: usize,
    pub(super) region: usize,
    /// The offset from the start of the region's first allocation, in bytes.
    pub(super) offset: u64,
}

impl GatheredPart {
    pub(super) fn regions(&self) -> usize {
        self.ends.len()
    }

    /// Returns the region of an allocation.
    pub(super) fn region_of(&self, allocation: usize) -> usize {
        self.ends.partition_point(|end| *end <= allocation)
    }

    fn new(device: DeviceOrdinal) -> Self {
        let (allocations, ends, ranges) = (Vec::new(), Vec::new(), [].into());
        Self { device, allocations, ends, bytes: 0, ranges, described: Arc::default() }
    }

    /// Converts the regions to the form of a descriptor, once for all exports of the same memory.
    fn describe(&mut self) {
        let regions = (0..self.regions()).map(|region| self.region(region));
        let ranges = regions.clone().map(whole).collect();
        let described = regions.map(|region| region.iter().map(DescribedExtent::of)).collect();
        (self.ranges, self.described) = (ranges, Arc::new(described));
    }

    fn region(&self, region: usize) -> &[Extent] {
        let begin = if region == 0 { 0 } else { self.ends[region - 1] };
        &self.allocations[begin..self.ends[region]]
    }

    fn last_region(&self) -> Option<&[Extent]> {
        self.regions().checked_sub(1).map(|last| self.region(last))
    }
}

impl Gathered {
    /// Returns whether the memories have the same places in the same regions.
    pub(super) fn has_same_places(&self, other: &Self) -> bool {
        let regions = |gathered: &Self| gathered.parts.iter().map(GatheredPart::regions).collect::<Vec<_>>();
        self.places == other.places && regions(self) == regions(other)
    }

    /// Returns the allocations of a memory.
    pub(super) fn extents_of(&self, memory: usize, range: DeviceRange) -> Vec<Extent> {
        let MemoryPlace { part, region, .. } = self.places[memory];
        let extents = self.parts[part].region(region).iter();
        let lies_in = |extent: &&Extent| {
            let allocation = extent.allocation;
            let (Some(end), Some(range_end)) = (allocation.end(), range.end()) else { return false };
            range.ptr < end && allocation.ptr < range_end
        };
        extents.filter(lies_in).copied().collect()
    }

    /// Returns the region of a memory, numbered over all parts.
    pub(super) fn regions(&self) -> Vec<u32> {
        let mut before = Vec::with_capacity(self.parts.len());
        let mut regions = 0;
        for part in &self.parts {
            before.push(regions);
            regions += part.regions();
        }
        self.places.iter().map(|place| (before[place.part] + place.region) as u32).collect()
    }
}

/// Asks the driver for the allocations and their handles: once for each allocation that no export keeps, and in one device
/// context for all of a device. An error contains the index of the memory concerned.
pub(super) fn gather(
    runtime: &'static Runtime,
    backend: &Arc<dyn DeviceIpc>,
    memories: &[Region],
    is_borrowed: impl Fn(usize) -> bool,
) -> Result<(Gathered, Vec<Handles>), (usize, Error)> {
    let mut order: Vec<usize> = (0..memories.len()).collect();
    order.sort_by_key(|index| (memories[*index].range.device, memories[*index].range.ptr));
    let ranges = order.iter().map(|index| memories[*index].range);
    let kept = runtime.exports.kept_allocations(backend, ranges);
    let mut gathering = Gathering {
        runtime,
        backend,
        parts: Vec::new(),
        handles: Vec::new(),
        given_until: DevicePtr::NULL,
        allocations: 0,
    };
    let mut places = vec![MemoryPlace::default(); memories.len()];
    let mut kept = kept.into_iter();
    for of_a_device in order.chunk_by(|one, next| memories[*one].range.device == memories[*next].range.device)
    {
        with_device_context(&**backend, memories[of_a_device[0]].range.device, || {
            of_a_device.iter().zip(&mut kept).try_for_each(|(index, kept)| {
                // An export keeps no allocation of memory that it borrows.
                let kept = kept.filter(|_| !is_borrowed(*index));
                places[*index] = gathering.add(&memories[*index], kept).map_err(|error| (*index, error))?;
                Ok(())
            })
        })?;
    }
    let Gathering { mut parts, handles, .. } = gathering;
    parts.iter_mut().for_each(GatheredPart::describe);
    Ok((Gathered { parts, places }, handles.into_iter().map(Handles::from).collect()))
}

struct Gathering<'a> {
    runtime: &'a Runtime,
    backend: &'a Arc<dyn DeviceIpc>,
    parts: Vec<GatheredPart>,
    /// For each part.
    handles: Vec<Vec<Arc<Allocation>>>,
    /// The end of the memory that is counted already in the last part.
    given_until: DevicePtr,
    allocations: usize,
}

impl Gathering<'_> {
    /// Adds a memory that begins after the start of the last one; `kept` is its allocation, if an export keeps that.
    fn add(&mut self, memory: &Region, kept: Option<Arc<Allocation>>) -> Result<MemoryPlace> {
        check_region(self.backend.info().name, memory)?;
        let range = memory.range;
        if self.parts.last().is_none_or(|part| part.device != range.device) {
            self.parts.push(GatheredPart::new(range.device));
            self.handles.push(Vec::new());
            self.given_until = DevicePtr::NULL;
        }
        let part = self.parts.len() - 1;
        // Memory in a known allocation needs no call of the driver.
        if !self.parts[part].last_region().is_some_and(|last| whole(last).contains(&range)) {
            let stated = |extent: &Extent| memory.allocation.is_none_or(|stated| stated == extent.allocation);
            match kept.filter(|kept| stated(kept.extent())) {
                Some(kept) => self.add_allocations(&[*kept.extent()], Some(kept))?,
                None => {
                    let extents = extents_by_driver(self.runtime, self.backend, memory)?;
                    self.add_allocations(&extents, None)?;
                }
            }
        }
        let start = range.ptr.max(self.given_until);
        let end = range.end().unwrap_or(range.ptr);
        let gathered = &mut self.parts[part];
        gathered.bytes += end.offset_from(start).unwrap_or(0);
        self.given_until = end.max(self.given_until);
        let begin = gathered.last_region().map_or(range.ptr, |last| last[0].allocation.ptr);
        let offset = range.ptr.offset_from(begin);
        let offset = offset.ok_or_else(|| Error::InvalidRegion("it lies before its allocation".into()))?;
        Ok(MemoryPlace { part, region: gathered.regions() - 1, offset })
    }

    /// Adds allocations that are new; `kept` is the only one if it has a handle already.
    fn add_allocations(&mut self, extents: &[Extent], kept: Option<Arc<Allocation>>) -> Result<()> {
        let part = self.parts.last_mut().expect("one was added");
        let overlapped = part
            .last_region()
            .filter(|region| whole(region).end().is_some_and(|end| extents[0].allocation.ptr < end));
        let further = match overlapped {
            None => extents,
            Some(region) => {
                let first = region.iter().position(|extent| *extent == extents[0]);
                let shared = first.map_or(0, |first| region.len() - first);
                if shared == 0 || !region.ends_with(&extents[..shared.min(extents.len())]) {
                    return Err(Error::InvalidRegion(
                        "its allocation is said to overlap that of other memory in the set".into(),
                    ));
                }
                &extents[shared.min(extents.len())..]
            }
        };
        let of_the_region = overlapped.map_or(0, <[Extent]>::len) + further.len();
        self.allocations += further.len();
        check_counts(of_the_region, self.allocations)?;
        let is_new = overlapped.is_none();
        let handles = self.handles.last_mut().expect("one was added");
        match kept {
            Some(kept) => handles.extend(further.first().map(|_| kept)),
            None => {
                for extent in further {
                    handles.push(self.runtime.exports.allocation(self.backend, extent)?);
                }
            }
        }
        part.allocations.extend_from_slice(further);
        match part.ends.last_mut() {
            Some(end) if !is_new => *end = part.allocations.len(),
            _ => part.ends.push(part.allocations.len()),
        }
        Ok(())
    }
}

/// Checks the number of allocations of a region, and of all regions.
fn check_counts(of_a_region: usize, of_the_set: usize) -> Result<()> {
    if of_a_region <= MAX_EXTENTS && of_the_set <= MAX_REGIONS_ALLOCATIONS {
        return Ok(());
    }
    Err(Error::InvalidRegion(format!(
        "{of_a_region} adjacent allocations, of {of_the_set} in the set; a set has at most \
         {MAX_REGIONS_ALLOCATIONS} allocations, and at most {MAX_EXTENTS} of them adjacent: split it"
    )))
}

/// Returns the range of adjacent allocations.
fn whole(region: &[Extent]) -> DeviceRange {
    let len = region.iter().map(|extent| extent.allocation.len).fold(0, u64::saturating_add);
    DeviceRange { len, ..region[0].allocation }
}

/// Returns the allocations of one region and their handles: that of an export that keeps it, unless the region is borrowed, or
/// those that the driver names. The fast path of [`gather`], without its tables.
pub(super) fn gather_one(
    runtime: &Runtime,
    backend: &Arc<dyn DeviceIpc>,
    region: &Region,
    is_borrowed: bool,
) -> Result<(Vec<Extent>, Handles)> {
    let kept = if is_borrowed { None } else { runtime.exports.kept_extent(backend, region.range) };
    match kept.filter(|extent| region.allocation.is_none_or(|stated| stated == extent.allocation)) {
        Some(extent) => with_handles(runtime, backend, vec![extent]),
        None => with_device_context(&**backend, region.range.device, || {
            with_handles(runtime, backend, extents_by_driver(runtime, backend, region)?)
        }),
    }
}

fn with_handles(
    runtime: &Runtime,
    backend: &Arc<dyn DeviceIpc>,
    extents: Vec<Extent>,
) -> Result<(Vec<Extent>, Handles)> {
    let shared = |extent| runtime.exports.allocation(backend, extent);
    let allocations = match extents.as_slice() {
        [only] => [shared(only)?].into(),
        several => several.iter().map(shared).collect::<Result<_>>()?,
    };
    Ok((extents, allocations))
}

pub(super) fn no_bytes() -> Error {
    Error::InvalidRegion(
        "it has no bytes; share at least one, or state the element type and shape of a tensor without elements".into(),
    )
}

/// Checks the region before the driver is called.
pub(super) fn check_region(backend: &str, region: &Region) -> Result<()> {
    let range = region.range;
    check_backend("the memory", region.backend, backend)?;
    if range.ptr.is_null() {
        return Err(Error::NotDeviceMemory { ptr: range.ptr, why: "it is the null address".into() });
    }
    if range.len == 0 {
        return Err(no_bytes());
    }
    if range.end().is_none() {
        return Err(Error::InvalidRegion(format!(
            "{} bytes at {} leave the address space",
            range.len, range.ptr
        )));
    }
    Ok(())
}

/// Asks the driver for the allocations.
fn extents_by_driver(
    runtime: &Runtime,
    backend: &Arc<dyn DeviceIpc>,
    region: &Region,
) -> Result<Vec<Extent>> {
    let range = region.range;
    if runtime.imports.holds(range) {
        return Err(Error::SharedOn { ptr: range.ptr });
    }
    let extents = backend.extents_of(range, region.allocation)?;
    offset_in(range, &extents)?;
    Ok(extents)
}

/// Returns the offset of the region in its first allocation, and checks the driver's answer.
pub(super) fn offset_in(range: DeviceRange, extents: &[Extent]) -> Result<u64> {
    let misfit =
        || Error::InvalidRegion(format!("{} bytes at {} leave their allocations", range.len, range.ptr));
    let first = extents.first().ok_or_else(misfit)?.allocation;
    let mut end = first.ptr;
    for extent in extents {
        if extent.allocation.ptr != end || extent.allocation.len == 0 {
            return Err(misfit());
        }
        end = extent.allocation.end().ok_or_else(misfit)?;
    }
    let offset = range.ptr.offset_from(first.ptr).filter(|offset| *offset < first.len).ok_or_else(misfit)?;
    if range.end().is_none_or(|range_end| range_end > end) {
        return Err(misfit());
    }
    Ok(offset)
}

#[cfg(test)]
mod tests;
