//! From memory as it was put into a bundle to the allocations that it lies in, each of them once.

use std::sync::Arc;

use super::binary::MAX_BUNDLE_ALLOCATIONS;
use crate::address::{DevicePtr, DeviceRange, Extent};
use crate::backend::DeviceIpc;
use crate::descriptor::{DescribedExtent, DescribedRegions, MAX_EXTENTS};
use crate::device::DeviceOrdinal;
use crate::error::{Error, Result};
use crate::export::{Allocation, check_region, extents_by_driver};
use crate::interop::Region;
use crate::runtime::Runtime;

/// Where all the memory of a bundle lies.
#[derive(Debug)]
pub(super) struct Gathered {
    /// One for each device.
    pub(super) parts: Vec<GatheredPart>,
    /// Of each piece of memory, in the order in which they were given.
    pub(super) places: Vec<Place>,
}

/// What lies on one device.
#[derive(Debug)]
pub(super) struct GatheredPart {
    pub(super) device: DeviceOrdinal,
    /// The allocations of all regions, one region after the other. Those of a region lie side by side: what one piece of
    /// memory lies in, or several that share allocations.
    pub(super) allocations: Vec<Extent>,
    /// Where each region ends among them.
    ends: Vec<usize>,
    /// Bytes that were given, those given twice counted once.
    pub(super) bytes: u64,
    /// The regions in this process's address space.
    pub(super) ranges: Arc<[DeviceRange]>,
    /// The regions as a descriptor states them.
    pub(super) described: Arc<DescribedRegions>,
}

/// Where a piece of memory lies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) part: usize,
    pub(super) region: usize,
    /// From the start of the region's first allocation, in bytes.
    pub(super) offset: u64,
}

/// The handles of a part's allocations, of those that an export keeps allocated.
pub(super) type Kept = Vec<Option<Arc<Allocation>>>;

impl GatheredPart {
    pub(super) fn regions(&self) -> usize {
        self.ends.len()
    }

    /// The region that an allocation is of, by its position among all of them.
    pub(super) fn region_of(&self, allocation: usize) -> usize {
        self.ends.partition_point(|end| *end <= allocation)
    }

    fn new(device: DeviceOrdinal) -> Self {
        let (allocations, ends, ranges) = (Vec::new(), Vec::new(), [].into());
        Self { device, allocations, ends, bytes: 0, ranges, described: Arc::default() }
    }

    /// Describes the regions, once all of them are there: for all bundles of the same memory.
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
    /// Do the pieces of memory lie at the same places in the same regions?
    pub(super) fn lies_as(&self, other: &Self) -> bool {
        let regions = |gathered: &Self| gathered.parts.iter().map(GatheredPart::regions).collect::<Vec<_>>();
        self.places == other.places && regions(self) == regions(other)
    }

    /// The region that a piece of memory lies in, counted through all parts.
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

/// Asks the driver for the allocations, once for each that no export keeps; an error comes with the position of the memory
/// that it concerns.
pub(super) fn gather(
    backend: &Arc<dyn DeviceIpc>,
    memories: &[Region],
) -> Result<(Gathered, Vec<Kept>), (usize, Error)> {
    let mut order: Vec<usize> = (0..memories.len()).collect();
    order.sort_by_key(|index| (memories[*index].range.device, memories[*index].range.ptr));
    let runtime = Runtime::get().map_err(|error| (0, error))?;
    let ranges = order.iter().map(|index| memories[*index].range);
    let kept = runtime.exports.kept_allocations(backend, ranges);
    let mut gathering = Gathering {
        runtime,
        backend,
        parts: Vec::new(),
        kept: Vec::new(),
        given_until: DevicePtr::NULL,
        allocations: 0,
    };
    let mut places = vec![Place::default(); memories.len()];
    for (index, kept) in order.into_iter().zip(kept) {
        places[index] = gathering.add(&memories[index], kept).map_err(|error| (index, error))?;
    }
    gathering.parts.iter_mut().for_each(GatheredPart::describe);
    Ok((Gathered { parts: gathering.parts, places }, gathering.kept))
}

struct Gathering<'a> {
    runtime: &'a Runtime,
    backend: &'a Arc<dyn DeviceIpc>,
    parts: Vec<GatheredPart>,
    kept: Vec<Kept>,
    /// The end of the memory that has been counted in the last part.
    given_until: DevicePtr,
    allocations: usize,
}

impl Gathering<'_> {
    /// Adds a piece of memory that begins behind the start of the last one; `kept` is the allocation that it lies in, where
    /// an export keeps that.
    fn add(&mut self, memory: &Region, kept: Option<Arc<Allocation>>) -> Result<Place> {
        check_region(self.backend.info().name, memory)?;
        let range = memory.range;
        if self.parts.last().is_none_or(|part| part.device != range.device) {
            self.parts.push(GatheredPart::new(range.device));
            self.kept.push(Kept::new());
            self.given_until = DevicePtr::NULL;
        }
        let part = self.parts.len() - 1;
        // What lies in an allocation that is known needs no further question.
        if !self.parts[part].last_region().is_some_and(|last| whole(last).contains(&range)) {
            let stated = |extent: &Extent| memory.allocation.is_none_or(|stated| stated == extent.allocation);
            match kept.filter(|kept| stated(kept.extent())) {
                Some(kept) => self.add_allocations(&[*kept.extent()], Some(&kept))?,
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
        Ok(Place { part, region: gathered.regions() - 1, offset })
    }

    fn add_allocations(&mut self, extents: &[Extent], kept: Option<&Arc<Allocation>>) -> Result<()> {
        let part = self.parts.last_mut().expect("one was added");
        let all_kept = self.kept.last_mut().expect("one was added");
        let overlapped = part
            .last_region()
            .filter(|region| whole(region).end().is_some_and(|end| extents[0].allocation.ptr < end));
        let further = match overlapped {
            None => {
                part.ends.push(part.allocations.len());
                extents
            }
            Some(region) => {
                let first = region.iter().position(|extent| *extent == extents[0]);
                let shared = first.map_or(0, |first| region.len() - first);
                if shared == 0 || !region.ends_with(&extents[..shared.min(extents.len())]) {
                    return Err(Error::InvalidRegion(
                        "its allocation is said to overlap that of other memory in the bundle".into(),
                    ));
                }
                &extents[shared.min(extents.len())..]
            }
        };
        part.allocations.extend_from_slice(further);
        all_kept.extend(further.iter().map(|_| kept.cloned()));
        if let Some(end) = part.ends.last_mut() {
            *end = part.allocations.len();
        }
        self.allocations += further.len();
        let of_the_region = part.last_region().map_or(0, <[Extent]>::len);
        if of_the_region > MAX_EXTENTS || self.allocations > MAX_BUNDLE_ALLOCATIONS {
            return Err(Error::InvalidRegion(format!(
                "a bundle has at most {MAX_BUNDLE_ALLOCATIONS} allocations, and {MAX_EXTENTS} side by side"
            )));
        }
        Ok(())
    }
}

/// All bytes of allocations that lie side by side.
fn whole(region: &[Extent]) -> DeviceRange {
    let len = region.iter().map(|extent| extent.allocation.len).fold(0, u64::saturating_add);
    DeviceRange { len, ..region[0].allocation }
}
