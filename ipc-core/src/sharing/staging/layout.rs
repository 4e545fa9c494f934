//! Which bytes of an export a copy contains, and where they lie in the importer's buffer.
//!
//! Named tensors lie in allocations that may be far larger than they are, so a copy contains the bytes of the tensors only.
//! Tensors that overlap share bytes: those are copied once, and the tensors still overlap in the copy.

use super::Segments;
use crate::model::address::DeviceRange;
use crate::model::error::{Error, Result};
use crate::model::tensor::{LayoutError, NamedTensor};
use crate::wire::descriptor::Contents;
use crate::wire::{MAX_SPANS, Span};

/// The bytes of a copy keep their offset within this many bytes, so that tensors stay aligned as in the original.
const ALIGNMENT: u64 = 512;

/// The layout of a copy of the memory that an export has on one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CopyLayout {
    /// In the order of their regions and offsets. They do not overlap.
    spans: Vec<Span>,
    /// The offset of each span in the buffer.
    offsets: Vec<u64>,
    /// Whether the spans are all regions, completely.
    is_whole: bool,
    buffer_bytes: u64,
}

impl CopyLayout {
    /// Returns the layout of a copy of a single region.
    pub(crate) fn of_region(len: u64) -> Self {
        let spans = vec![Span { region: 0, offset: 0, len }];
        Self { spans, offsets: vec![0], is_whole: true, buffer_bytes: len }
    }

    /// Returns the layout of a copy of the named tensors of a part.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidRegion`] for regions that are larger than 64 bits can say.
    pub(crate) fn of_tensors(contents: &Contents, part: usize) -> Result<Self> {
        let mut spans = Vec::new();
        for position in 0..contents.tensors() {
            let (lies_in, region) = contents.place(position);
            if lies_in == part
                && let Some((offset, len)) = bytes_of(&contents.tensor(position))?
            {
                spans.push(Span { region: region as u32, offset, len });
            }
        }
        spans.sort_unstable_by_key(|span| (span.region, span.offset));
        merge(&mut spans, 0);
        if spans.is_empty() {
            // A request names at least one byte, by which the exporter checks that it still shares the memory.
            spans.push(Span { region: 0, offset: 0, len: 1 });
        }
        if let Some(gap) = widest_gap_to_close(&spans, MAX_SPANS) {
            merge(&mut spans, gap);
        }
        let is_whole = spans.len() > MAX_SPANS;
        if is_whole {
            let sizes = contents.named(part).regions().iter();
            let sizes =
                sizes.map(|region| region.iter().map(|extent| extent.size).fold(0, u64::saturating_add));
            spans = sizes.zip(0..).map(|(len, region)| Span { region, offset: 0, len }).collect();
        }
        Self::placed(spans, is_whole)
    }

    fn placed(spans: Vec<Span>, is_whole: bool) -> Result<Self> {
        let mut offsets = Vec::with_capacity(spans.len());
        let mut end = 0_u64;
        for span in &spans {
            let begin = end.checked_next_multiple_of(ALIGNMENT);
            let begin = begin.and_then(|begin| begin.checked_add(span.offset % ALIGNMENT));
            let placed = begin.and_then(|begin| Some((begin, begin.checked_add(span.len)?)));
            let Some((begin, placed_end)) = placed else {
                return Err(Error::InvalidRegion(
                    "the descriptor names more bytes than 64 bits can count".into(),
                ));
            };
            offsets.push(begin);
            end = placed_end;
        }
        Ok(Self { spans, offsets, is_whole, buffer_bytes: end })
    }

    /// Returns the spans to request; none if the copy contains all bytes of all regions.
    pub(crate) fn requested(&self) -> &[Span] {
        if self.is_whole { &[] } else { &self.spans }
    }

    /// Returns the spans to copy with their offsets in the buffer.
    pub(crate) fn spans(&self) -> impl Iterator<Item = (&Span, u64)> {
        self.spans.iter().zip(self.offsets.iter().copied())
    }

    /// Returns the number of bytes that are copied.
    pub(crate) fn bytes(&self) -> u64 {
        self.spans.iter().map(|span| span.len).sum()
    }

    /// Checks that the exporter shares as many bytes as the copy contains.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidRegion`] if it shares more or fewer.
    pub(crate) fn check_shared(&self, shared: u64) -> Result<()> {
        let named = self.bytes();
        if shared == named {
            return Ok(());
        }
        Err(Error::InvalidRegion(format!(
            "the descriptor names {named} bytes, and the exporter shares {shared}"
        )))
    }

    /// Returns the length of the buffer, which also holds the padding between spans.
    pub(crate) const fn buffer_bytes(&self) -> u64 {
        self.buffer_bytes
    }

    /// Returns the parts of the buffer that the copied bytes fill.
    pub(crate) fn segments(&self, buffer: DeviceRange) -> Result<Segments> {
        let part = |(span, offset): (&Span, &u64)| buffer.slice(*offset, span.len);
        let parts: Option<Vec<_>> = self.spans.iter().zip(&self.offsets).map(part).collect();
        let segments = parts.and_then(Segments::new);
        segments
            .ok_or_else(|| Error::InvalidRegion(format!("a copy does not fit a buffer of {} B", buffer.len)))
    }

    /// Returns the bytes of a tensor in the buffer, from its first element to the end of its last.
    pub(crate) fn elements_of(
        &self,
        buffer: DeviceRange,
        region: usize,
        tensor: &NamedTensor<'_>,
    ) -> Result<DeviceRange> {
        let found = match bytes_of(tensor)? {
            Some((offset, len)) => self.find(region as u32, offset, len).and_then(|at| buffer.slice(at, len)),
            None => buffer.slice(0, 0),
        };
        found.ok_or_else(|| LayoutError::Overflow.into())
    }

    /// Returns the offset in the buffer of bytes of a region that lie in one span.
    fn find(&self, region: u32, offset: u64, len: u64) -> Option<u64> {
        let behind = self.spans.partition_point(|span| (span.region, span.offset) <= (region, offset));
        let index = behind.checked_sub(1)?;
        let span = &self.spans[index];
        let skipped = offset.checked_sub(span.offset)?;
        let lies_in = span.region == region && skipped.checked_add(len)? <= span.len;
        lies_in.then(|| self.offsets[index] + skipped)
    }
}

/// Returns the offset and the length of a tensor's elements in its region; `None` for a tensor without elements.
fn bytes_of(tensor: &NamedTensor<'_>) -> Result<Option<(u64, u64)>> {
    let layout = tensor.layout;
    if layout.is_empty() {
        return Ok(None);
    }
    let (start, end) = (layout.start_bytes(), layout.span_bytes());
    let offset = tensor.offset.checked_add(start).ok_or(LayoutError::Overflow)?;
    Ok(Some((offset, end - start)))
}

/// Returns the number of bytes between two spans of a region; `None` for spans of different regions.
fn gap(one: &Span, next: &Span) -> Option<u64> {
    (one.region == next.region).then(|| next.offset.saturating_sub(one.offset.saturating_add(one.len)))
}

/// Merges sorted spans of a region between which lie at most `widest` bytes.
fn merge(spans: &mut Vec<Span>, widest: u64) {
    spans.dedup_by(|next, one| {
        let merges = gap(one, next).is_some_and(|gap| gap <= widest);
        if merges {
            let end = (one.offset + one.len).max(next.offset.saturating_add(next.len));
            one.len = end - one.offset;
        }
        merges
    });
}

/// Returns the width of the gaps to close so that at most `most` sorted spans are left; `None` if there are no more, or if
/// the regions alone are more.
fn widest_gap_to_close(spans: &[Span], most: usize) -> Option<u64> {
    let surplus = spans.len().checked_sub(most).filter(|surplus| *surplus > 0)?;
    let mut gaps: Vec<_> = spans.windows(2).filter_map(|two| gap(&two[0], &two[1])).collect();
    let widest = surplus.checked_sub(1).filter(|last| *last < gaps.len())?;
    Some(*gaps.select_nth_unstable(widest).1)
}

#[cfg(test)]
mod tests;
