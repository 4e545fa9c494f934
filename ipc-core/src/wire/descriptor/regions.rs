//! The allocations of an export, grouped by region.

use std::sync::Arc;

use crate::model::address::Extent;

/// One allocation of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DescribedExtent {
    /// Size of the whole allocation in bytes.
    pub(crate) size: u64,
    /// The vendor's generation of the allocation, or 0.
    pub(crate) generation: u64,
}

impl DescribedExtent {
    pub(crate) fn of(extent: &Extent) -> Self {
        let generation = extent.generation.map_or(0, |generation| generation.0);
        Self { size: extent.allocation.len, generation }
    }
}

/// The allocations of all regions in one list, so that a thousand regions need no thousand lists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DescribedRegions {
    extents: Vec<DescribedExtent>,
    /// The end of each region in the list.
    ends: Vec<u32>,
}

/// Borrowed [`RegionList`]s, or the allocations of one region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Regions<'a> {
    extents: &'a [DescribedExtent],
    /// `None` if all allocations belong to one region.
    ends: Option<&'a [u32]>,
}

/// The regions of a part.
#[derive(Clone, Debug)]
pub(crate) enum PartRegions {
    One(Vec<DescribedExtent>),
    /// Shared by the exports of the same memory.
    Many(Arc<DescribedRegions>),
}

impl PartRegions {
    pub(crate) fn as_regions(&self) -> Regions<'_> {
        match self {
            Self::One(extents) => Regions::one(extents),
            Self::Many(regions) => regions.as_regions(),
        }
    }
}

/// Equal contents are equal, however they are stored.
impl PartialEq for PartRegions {
    fn eq(&self, other: &Self) -> bool {
        self.as_regions().iter().eq(other.as_regions().iter())
    }
}

impl Eq for PartRegions {}

impl DescribedRegions {
    /// Adds a region with the allocations that `add` appends.
    pub(crate) fn add<E>(
        &mut self,
        add: impl FnOnce(&mut Vec<DescribedExtent>) -> Result<(), E>,
    ) -> Result<(), E> {
        add(&mut self.extents)?;
        self.ends.push(self.extents.len() as u32);
        Ok(())
    }

    pub(crate) fn as_regions(&self) -> Regions<'_> {
        Regions { extents: &self.extents, ends: Some(&self.ends) }
    }
}

impl<R: IntoIterator<Item = DescribedExtent>> FromIterator<R> for DescribedRegions {
    fn from_iter<I: IntoIterator<Item = R>>(regions: I) -> Self {
        let mut all = Self::default();
        for region in regions {
            all.extents.extend(region);
            all.ends.push(all.extents.len() as u32);
        }
        all
    }
}

impl<'a> Regions<'a> {
    /// Returns the regions of a part with one region.
    pub(crate) const fn one(extents: &'a [DescribedExtent]) -> Self {
        Self { extents, ends: None }
    }

    pub(crate) fn len(&self) -> usize {
        self.ends.map_or(1, <[u32]>::len)
    }

    /// Returns the allocations of each region.
    pub(crate) fn iter(self) -> impl ExactSizeIterator<Item = &'a [DescribedExtent]> {
        let mut begin = 0;
        (0..self.len()).map(move |region| {
            let end = self.ends.map_or(self.extents.len(), |ends| ends[region] as usize);
            let extents = &self.extents[begin..end];
            begin = end;
            extents
        })
    }

    /// Returns the number of allocations of all regions.
    pub(crate) const fn allocations(&self) -> usize {
        self.extents.len()
    }

    pub(crate) fn to_owned(self) -> DescribedRegions {
        let ends = self.ends.map_or_else(|| vec![self.extents.len() as u32], <[u32]>::to_vec);
        DescribedRegions { extents: self.extents.to_vec(), ends }
    }
}

#[cfg(test)]
mod tests;
