//! The allocations that a range lies in.

use device_ipc_core::backend::{Extent, HandleKind};
use device_ipc_core::{DevicePtr, DeviceRange, Error, Result};

use super::kind::{self, FABRIC, VIRTUAL_MEMORY};
use super::lookup_cache;
use super::source::MemorySource;
use crate::objects::driver::Driver;

/// Returns the allocations that `range` lies in, if they can be exported.
pub(crate) fn extents_of(
    driver: &Driver,
    range: DeviceRange,
    stated: Option<DeviceRange>,
) -> Result<Vec<Extent>> {
    driver.device(range.device)?;
    if range.ptr.is_null() {
        return Err(Error::NotDeviceMemory { ptr: range.ptr, why: "it is the null address".into() });
    }
    let Some(end) = range.end() else {
        return Err(Error::InvalidRegion(format!(
            "{} bytes at {} exceed the address space",
            range.len, range.ptr
        )));
    };
    // The driver knows addresses only while a context is current.
    let _current = driver.enter(range.device)?;
    let (first, kind) = extent_at(driver, range)?;
    let mut extents = vec![first];
    let mut covered = end_of(&first.allocation)?;
    while covered < end {
        if !matches!(kind, VIRTUAL_MEMORY | FABRIC) {
            return Err(exceeds_allocation(range, &first.allocation));
        }
        let rest = DeviceRange::new(range.device, covered, end.get() - covered.get());
        let (next, next_kind) = extent_at(driver, rest).map_err(|error| match error {
            Error::NotDeviceMemory { .. } => Error::InvalidRegion(format!(
                "{} bytes at {} are not mapped completely: no memory is mapped at {covered}",
                range.len, range.ptr
            )),
            error => error,
        })?;
        if next_kind != kind || next.allocation.ptr != covered {
            return Err(Error::InvalidRegion(format!(
                "{} bytes at {} lie in memory of several kinds: {} up to {covered}, then {}; share each range separately",
                range.len,
                range.ptr,
                kind::name(kind),
                kind::name(next_kind)
            )));
        }
        covered = end_of(&next.allocation)?;
        extents.push(next);
    }
    check_stated(stated, &extents)?;
    Ok(extents)
}

/// Returns the allocation that `range` begins in, and the kind of its handle. The device's context must be current.
fn extent_at(driver: &Driver, range: DeviceRange) -> Result<(Extent, HandleKind)> {
    let ptr = range.ptr;
    let pointer = driver.known_pointer(ptr)?;
    let source = MemorySource::of(driver, ptr, &pointer)?;
    let kind = source.choose_kind(ptr, None)?;
    if pointer.device != range.device.get() {
        return Err(Error::InvalidRegion(format!(
            "{ptr} is memory of device {}, but device {} was stated",
            pointer.device, range.device
        )));
    }
    let allocation = driver.allocation_of(range)?;
    lookup_cache::insert(allocation.ptr, source);
    Ok((Extent { allocation, generation: pointer.generation }, kind))
}

/// Returns the end of an allocation, whose base and length the driver returned.
fn end_of(allocation: &DeviceRange) -> Result<DevicePtr> {
    allocation.end().filter(|end| *end > allocation.ptr).ok_or_else(|| {
        Error::InvalidRegion(format!(
            "CUDA returned an invalid length for the allocation at {}: {} bytes",
            allocation.ptr, allocation.len
        ))
    })
}

fn exceeds_allocation(range: DeviceRange, allocation: &DeviceRange) -> Error {
    Error::InvalidRegion(format!(
        "{} bytes at {} exceed their allocation of {} bytes at {}",
        range.len, range.ptr, allocation.len, allocation.ptr
    ))
}

fn check_stated(stated: Option<DeviceRange>, extents: &[Extent]) -> Result<()> {
    let (Some(stated), Some(first)) = (stated, extents.first()) else { return Ok(()) };
    let len = extents.iter().map(|extent| extent.allocation.len).sum::<u64>();
    if stated.ptr == first.allocation.ptr && stated.len <= len {
        return Ok(());
    }
    Err(Error::InvalidRegion(format!(
        "the allocation was stated as {} bytes at {}, but CUDA reports {len} bytes at {}",
        stated.len, stated.ptr, first.allocation.ptr
    )))
}
