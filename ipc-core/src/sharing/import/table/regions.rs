//! The driver's mappings that a lease holds, one for each region.

use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::ImportTable;
use super::range::HeldRange;
use crate::model::address::DeviceRange;

/// The driver's mappings of the regions. They stay in place where the holds on them have been given up.
#[derive(Debug)]
pub(super) enum Regions {
    One(HeldRange),
    /// Of this lease, and of others that have the same.
    Many(Arc<ManyRegions>),
}

#[derive(Debug)]
pub(super) struct ManyRegions {
    ranges: Box<[HeldRange]>,
    mapped: Box<[DeviceRange]>,
    /// Who has not given them up yet.
    sharers: AtomicUsize,
}

impl From<Vec<HeldRange>> for Regions {
    fn from(mut ranges: Vec<HeldRange>) -> Self {
        if ranges.len() == 1 {
            return Self::One(ranges.remove(0));
        }
        let mapped = ranges.iter().map(|open| open.range).collect();
        Self::Many(Arc::new(ManyRegions { ranges: ranges.into(), mapped, sharers: AtomicUsize::new(1) }))
    }
}

impl Regions {
    /// The first of them: there is one at least.
    pub(super) fn first(&self) -> &HeldRange {
        match self {
            Self::One(range) => range,
            Self::Many(many) => &many.ranges[0],
        }
    }

    /// The allocations of each region as the driver mapped them.
    pub(super) fn mapped(&self) -> &[DeviceRange] {
        match self {
            Self::One(range) => slice::from_ref(&range.range),
            Self::Many(many) => &many.mapped,
        }
    }

    /// The same, for one more to give up. None for a single one, and where the last has given them up.
    fn share(&self) -> Option<Self> {
        let Self::Many(many) = self else { return None };
        let one_more = |sharers| if sharers == 0 { None } else { Some(sharers + 1) };
        many.sharers.fetch_update(Ordering::AcqRel, Ordering::Relaxed, one_more).ok()?;
        Some(Self::Many(Arc::clone(many)))
    }

    /// Gives them up, once. The holds that have to be let go of now: none where others share them.
    pub(super) fn give_up(&self) -> &[HeldRange] {
        match self {
            Self::One(range) => slice::from_ref(range),
            Self::Many(many) if many.sharers.fetch_sub(1, Ordering::AcqRel) == 1 => &many.ranges,
            Self::Many(_) => &[],
        }
    }
}

/// Regions that no lease has yet. They are given up unless one takes them.
pub(super) struct Untaken<'a> {
    table: &'a ImportTable,
    regions: Option<Regions>,
}

impl<'a> Untaken<'a> {
    pub(super) fn new(table: &'a ImportTable, regions: Regions) -> Self {
        Self { table, regions: Some(regions) }
    }

    /// Those of a lease, for another one.
    pub(super) fn of(table: &'a ImportTable, regions: &Regions) -> Option<Self> {
        Some(Self::new(table, regions.share()?))
    }

    /// The same, for one more.
    pub(super) fn share(&self) -> Option<Self> {
        Self::of(self.table, self.regions.as_ref()?)
    }

    pub(super) fn take(mut self) -> Regions {
        self.regions.take().expect("taken once")
    }
}

impl Drop for Untaken<'_> {
    fn drop(&mut self) {
        if let Some(regions) = &self.regions {
            self.table.release_ranges(regions.give_up());
        }
    }
}
