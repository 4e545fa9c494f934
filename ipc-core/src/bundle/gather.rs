//! From memory as it was put into a bundle to the allocations that it lies in, each of them once.

use super::binary::MAX_BUNDLE_ALLOCATIONS;
use crate::address::{DevicePtr, DeviceRange, Extent};
use crate::backend::DeviceIpc;
use crate::descriptor::MAX_EXTENTS;
use crate::device::DeviceOrdinal;
use crate::error::{Error, Result};
use crate::export::{check_region, extents_of};
use crate::interop::Region;
use crate::runtime::Runtime;
use std::sync::Arc;

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
    /// The allocations of each region, side by side: what one piece of memory lies in, or several that share allocations.
    pub(super) regions: Vec<Vec<Extent>>,
    /// Bytes that were given, those given twice counted once.
    pub(super) bytes: u64,
}

/// Where a piece of memory lies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) part: usize,
    pub(super) region: usize,
    /// From the start of the region's first allocation, in bytes.
    pub(super) offset: u64,
}

impl GatheredPart {
    /// The regions in this process's address space.
    pub(super) fn ranges(&self) -> Box<[DeviceRange]> {
        self.regions.iter().map(|region| whole(region)).collect()
    }
}

/// Asks the driver for the allocations, once for each; an error comes with the position of the memory that it concerns.
pub(super) fn gather(backend: &Arc<dyn DeviceIpc>, memories: &[Region]) -> Result<Gathered, (usize, Error)> {
    let mut order: Vec<usize> = (0..memories.len()).collect();
    order.sort_by_key(|index| (memories[*index].range.device, memories[*index].range.ptr));
    let mut gathering =
        Gathering { backend, parts: Vec::new(), given_until: DevicePtr::NULL, allocations: 0 };
    let mut places = vec![Place::default(); memories.len()];
    for index in order {
        places[index] = gathering.add(&memories[index]).map_err(|error| (index, error))?;
    }
    Ok(Gathered { parts: gathering.parts, places })
}

struct Gathering<'a> {
    backend: &'a Arc<dyn DeviceIpc>,
    parts: Vec<GatheredPart>,
    /// The end of the memory that has been counted in the last part.
    given_until: DevicePtr,
    allocations: usize,
}

impl Gathering<'_> {
    /// Adds a piece of memory that begins behind the start of the last one.
    fn add(&mut self, memory: &Region) -> Result<Place> {
        check_region(self.backend.info().name, memory)?;
        let range = memory.range;
        if self.parts.last().is_none_or(|part| part.device != range.device) {
            self.parts.push(GatheredPart { device: range.device, regions: Vec::new(), bytes: 0 });
            self.given_until = DevicePtr::NULL;
        }
        let part = self.parts.len() - 1;
        let last = self.parts[part].regions.last().map(|region| whole(region));
        // What lies in an allocation that is known needs no further question.
        if !last.is_some_and(|last| last.contains(&range)) {
            self.add_allocations(memory)?;
        }
        let start = range.ptr.max(self.given_until);
        let end = range.end().unwrap_or(range.ptr);
        self.parts[part].bytes += end.offset_from(start).unwrap_or(0);
        self.given_until = end.max(self.given_until);
        let regions = &self.parts[part].regions;
        let region = regions.len() - 1;
        let offset = range.ptr.offset_from(regions[region][0].allocation.ptr);
        let offset = offset.ok_or_else(|| Error::InvalidRegion("it lies before its allocation".into()))?;
        Ok(Place { part, region, offset })
    }

    fn add_allocations(&mut self, memory: &Region) -> Result<()> {
        let extents = extents_of(Runtime::get()?, self.backend, memory)?;
        let regions = &mut self.parts.last_mut().expect("one was added").regions;
        let overlapped = regions
            .last_mut()
            .filter(|region| whole(region).end().is_some_and(|end| extents[0].allocation.ptr < end));
        let new = match overlapped {
            None => {
                self.allocations += extents.len();
                regions.push(extents);
                regions.last().map_or(0, Vec::len)
            }
            Some(region) => {
                let first = region.iter().position(|extent| *extent == extents[0]);
                let shared = first.map_or(0, |first| region.len() - first);
                if shared == 0 || !region.ends_with(&extents[..shared.min(extents.len())]) {
                    return Err(Error::InvalidRegion(
                        "its allocation is said to overlap that of other memory in the bundle".into(),
                    ));
                }
                let further = &extents[shared.min(extents.len())..];
                self.allocations += further.len();
                region.extend_from_slice(further);
                region.len()
            }
        };
        if new > MAX_EXTENTS || self.allocations > MAX_BUNDLE_ALLOCATIONS {
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
