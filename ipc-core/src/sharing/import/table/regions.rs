//! The driver mappings of a lease, one for each region.

use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::ImportTable;
use super::range::RangeRef;
use crate::model::address::DeviceRange;

/// The driver mappings of the regions. They stay listed after the release of their references.
#[derive(Debug)]
pub(super) enum MappedRegions {
    One(RangeRef),
    /// The mappings of this lease and of others with the same allocations.
    Many(Arc<ManyRegions>),
}

#[derive(Debug)]
pub(super) struct ManyRegions {
    ranges: Box<[RangeRef]>,
    mapped: Box<[DeviceRange]>,
    /// The number of leases that have not released them yet.
    sharers: AtomicUsize,
}

impl From<Vec<RangeRef>> for MappedRegions {
    fn from(mut ranges: Vec<RangeRef>) -> Self {
        if ranges.len() == 1 {
            return Self::One(ranges.remove(0));
        }
        let mapped = ranges.iter().map(|open| open.range).collect();
        Self::Many(Arc::new(ManyRegions { ranges: ranges.into(), mapped, sharers: AtomicUsize::new(1) }))
    }
}

impl MappedRegions {
    /// Returns the first mapping; there is at least one.
    pub(super) fn first(&self) -> &RangeRef {
        match self {
            Self::One(range) => range,
            Self::Many(many) => &many.ranges[0],
        }
    }

    /// Returns all mappings, one for each region.
    pub(super) fn ranges(&self) -> &[RangeRef] {
        match self {
            Self::One(range) => slice::from_ref(range),
            Self::Many(many) => &many.ranges,
        }
    }

    /// Returns the addresses at which the driver mapped the allocations of each region.
    pub(super) fn mapped(&self) -> &[DeviceRange] {
        match self {
            Self::One(range) => slice::from_ref(&range.range),
            Self::Many(many) => &many.mapped,
        }
    }

    /// Shares the mappings with one more lease. `None` for a single mapping, and after the last lease has released them.
    fn share(&self) -> Option<Self> {
        let Self::Many(many) = self else { return None };
        let one_more = |sharers| if sharers == 0 { None } else { Some(sharers + 1) };
        many.sharers.fetch_update(Ordering::AcqRel, Ordering::Relaxed, one_more).ok()?;
        Some(Self::Many(Arc::clone(many)))
    }

    /// Returns the references for release, once: none if other leases share them.
    pub(super) fn give_up(&self) -> &[RangeRef] {
        match self {
            Self::One(range) => slice::from_ref(range),
            Self::Many(many) if many.sharers.fetch_sub(1, Ordering::AcqRel) == 1 => &many.ranges,
            Self::Many(_) => &[],
        }
    }
}

/// Regions without a lease. Dropping them releases them.
pub(super) struct UnclaimedRegions<'a> {
    table: &'a ImportTable,
    regions: Option<MappedRegions>,
}

impl<'a> UnclaimedRegions<'a> {
    pub(super) fn new(table: &'a ImportTable, regions: MappedRegions) -> Self {
        Self { table, regions: Some(regions) }
    }

    /// Shares the regions of a lease with another one.
    pub(super) fn of(table: &'a ImportTable, regions: &MappedRegions) -> Option<Self> {
        Some(Self::new(table, regions.share()?))
    }

    /// Shares them with one more lease.
    pub(super) fn share(&self) -> Option<Self> {
        Self::of(self.table, self.regions.as_ref()?)
    }

    /// Claims them for a lease.
    pub(super) fn take(mut self) -> MappedRegions {
        self.regions.take().expect("taken once")
    }
}

impl Drop for UnclaimedRegions<'_> {
    fn drop(&mut self) {
        if let Some(regions) = &self.regions {
            self.table.release_ranges(regions.give_up());
        }
    }
}
