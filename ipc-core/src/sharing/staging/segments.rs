//! The device memory that a copy reads or writes: several ranges, copied one after the other.

use crate::model::address::DeviceRange;
use crate::model::device::DeviceOrdinal;
use crate::wire::Span;

/// At least one range of memory of one device. The bytes of a copy are those of the ranges, one range after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Segments {
    ranges: Vec<DeviceRange>,
    /// The end of each range among the bytes of the copy.
    ends: Vec<u64>,
}

impl Segments {
    /// Returns the memory of ranges whose lengths do not add up to more than 64 bits hold. `None` without any range.
    pub(crate) fn new(ranges: Vec<DeviceRange>) -> Option<Self> {
        let mut end = 0;
        let ends = ranges.iter().map(|range| {
            end += range.len;
            end
        });
        let ends = ends.collect();
        (!ranges.is_empty()).then_some(Self { ranges, ends })
    }

    /// Returns the memory that an importer has requested: spans of an export's regions, or all of them if it named no span.
    ///
    /// # Errors
    ///
    /// The reason as text: a span without bytes, outside its region, or before the end of the span before it.
    pub(crate) fn requested(regions: &[DeviceRange], spans: &[Span]) -> Result<Self, String> {
        let mut ranges = if spans.is_empty() { regions.to_vec() } else { Vec::with_capacity(spans.len()) };
        let mut last = (0, 0);
        for (index, span) in spans.iter().enumerate() {
            let Span { region, offset, len } = *span;
            let failed = |why: String| {
                Err(format!(
                    "span {index} of the request ({len} B at offset {offset} of region {region}) {why}"
                ))
            };
            let Some(whole) = regions.get(region as usize) else {
                return failed(format!("does not exist: the export has {} regions", regions.len()));
            };
            let Some(range) = whole.slice(offset, len) else {
                return failed(format!("exceeds the region of {} B", whole.len));
            };
            if len == 0 {
                return failed("has no bytes".into());
            }
            if (region, offset) < last {
                return failed("begins before the end of the span before it".into());
            }
            last = (region, offset + len);
            ranges.push(range);
        }
        Self::new(ranges).ok_or_else(|| "the export has no memory".into())
    }

    /// Returns the device of the memory.
    pub(crate) fn device(&self) -> DeviceOrdinal {
        self.ranges[0].device
    }

    /// Returns the number of bytes of the copy.
    pub(crate) fn len(&self) -> u64 {
        self.ends[self.ends.len() - 1]
    }

    /// Returns the ranges.
    pub(crate) fn ranges(&self) -> &[DeviceRange] {
        &self.ranges
    }

    /// Returns the memory of `len` bytes of the copy from byte `start` on: parts of the ranges, each with its offset from
    /// `start`.
    pub(crate) fn within(&self, start: u64, len: u64) -> impl Iterator<Item = (u64, DeviceRange)> {
        let end = start + len;
        let first = self.ends.partition_point(|end| *end <= start);
        let ranges = self.ranges[first..].iter().zip(&self.ends[first..]);
        let ranges =
            ranges.map(|(range, end)| (*range, *end - range.len)).take_while(move |(_, at)| *at < end);
        ranges.filter_map(move |(range, at)| {
            let skipped = start.saturating_sub(at);
            let begin = at + skipped;
            let part = range.slice(skipped, (range.len - skipped).min(end - begin))?;
            (part.len > 0).then_some((begin - start, part))
        })
    }
}

#[cfg(test)]
mod tests;
