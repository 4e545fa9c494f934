//! Exposure: the bytes outside a region that importers can access.
//!
//! A handle names an allocation, or the pages that contain it: an importer's driver maps those, and its kernels can read and
//! write all of them, whatever the descriptor states. The library cannot prevent that. It can report it, refuse to share, or
//! share an isolated copy.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use super::shared::{Allocation, Handles};
use crate::backend::interop::Region;
use crate::model::address::DeviceRange;
use crate::model::error::{Error, Result};

/// The policy for regions whose importers could access more than the region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExposurePolicy {
    /// Share the region; [`Export::exposure`](super::Export::exposure) reports the reachable bytes.
    #[default]
    Allow,
    /// Refuse to share it, with [`Error::Exposes`].
    Refuse,
    /// Share a copy in an isolated allocation. Later writes on one side are not visible on the other.
    Copy,
}

/// The bytes of the exporting process that device work of importers can access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Exposure {
    /// The size of the shared region in bytes.
    pub region_bytes: u64,
    /// The size of its allocations in bytes.
    pub allocation_bytes: u64,
    /// The number of accessible bytes: the allocations, and the other contents of their pages. `None` if the vendor does not
    /// report it (blocks of a memory pool).
    pub reachable_bytes: Option<u64>,
}

impl Exposure {
    /// If the owner states that its allocation is the region, the vendor's padding belongs to no other memory.
    pub(super) fn of(region: &Region, allocations: &[Arc<Allocation>]) -> Self {
        let bytes = region.range.len;
        let owned_whole = region.allocation == Some(region.range);
        if let [only] = allocations
            && owned_whole
            && only.kind().isolated
        {
            return Self { region_bytes: bytes, allocation_bytes: bytes, reachable_bytes: Some(bytes) };
        }
        let mut reachable_bytes = Some(0_u64);
        let mut allocation_bytes = 0;
        for allocation in allocations {
            allocation_bytes += allocation.bytes();
            let reach = allocation.reach().map(|reach| reach.len.max(allocation.bytes()));
            reachable_bytes = reachable_bytes.zip(reach).and_then(|(sum, reach)| sum.checked_add(reach));
        }
        Self { region_bytes: bytes, allocation_bytes, reachable_bytes }
    }

    /// Returns the exposure of named tensors, which use `bytes` of these allocations. `owned_whole` are allocations that their
    /// owners passed as a whole.
    pub(super) fn of_tensors(bytes: u64, owned_whole: &[DeviceRange], parts: &[Handles]) -> Self {
        let owned_whole: HashMap<_, _> =
            owned_whole.iter().map(|range| ((range.device, range.ptr), range.len)).collect();
        let mut allocation_bytes = 0_u64;
        let mut reached = Some(Vec::new());
        for allocation in parts.iter().flat_map(|part| part.iter()) {
            let whole = allocation.extent().allocation;
            let given = owned_whole.get(&(whole.device, whole.ptr)).filter(|_| allocation.kind().isolated);
            let reach = match given {
                Some(len) => Some(DeviceRange { len: *len, ..whole }),
                None => {
                    allocation.reach().map(|reach| DeviceRange { len: reach.len.max(whole.len), ..reach })
                }
            };
            allocation_bytes += given.copied().unwrap_or(whole.len);
            match (&mut reached, reach) {
                (Some(all), Some(reach)) => all.push(reach),
                _ => reached = None,
            }
        }
        Self { region_bytes: bytes, allocation_bytes, reachable_bytes: reached.map(bytes_of_all) }
    }

    /// Returns whether only the region is accessible.
    pub fn is_exact(&self) -> bool {
        self.reachable_bytes == Some(self.region_bytes)
    }

    pub(super) fn check_exact(&self) -> Result<()> {
        if self.is_exact() {
            return Ok(());
        }
        let why = if self.allocation_bytes > self.region_bytes {
            "the region is a part of its allocation, and a handle is of the whole"
        } else {
            "the vendor maps whole pages, and other blocks may lie in them"
        };
        Err(Error::Exposes { region: self.region_bytes, reachable: self.additional(), why: why.into() })
    }

    /// Returns what importers reach in addition to the region.
    fn additional(&self) -> String {
        match self.reachable_bytes {
            Some(bytes) => format!("{} B", bytes - self.region_bytes.min(bytes)),
            None => "other blocks of the memory pool".into(),
        }
    }
}

/// Returns the number of bytes in any of the ranges; overlaps count once.
fn bytes_of_all(mut ranges: Vec<DeviceRange>) -> u64 {
    ranges.sort_by_key(|range| (range.device, range.ptr));
    let mut bytes = 0_u64;
    let mut until = None;
    for range in ranges {
        let end = range.ptr.get().saturating_add(range.len);
        let start = match until {
            Some((device, until)) if device == range.device => range.ptr.get().max(until),
            _ => range.ptr.get(),
        };
        bytes = bytes.saturating_add(end.saturating_sub(start));
        until = Some((range.device, end.max(start)));
    }
    bytes
}

impl fmt::Display for Exposure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_exact() {
            return f.write_str("importers can access the shared bytes only");
        }
        write!(
            f,
            "importers can access {} in addition to the {} B that are shared",
            self.additional(),
            self.region_bytes
        )
    }
}

#[cfg(test)]
mod tests;
