//! Numbers of blocks: as a text, and of an engine's block objects.
//!
//! A request has thousands of blocks. Python would make an object of each number, several times.

use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::blocks::outside;

/// The digits of a run: 8 of its first number, and 8 of its count, which is negative for descending numbers.
const RUN_DIGITS: usize = 16;

/// Returns block numbers as a text: the number of zeros at the beginning, the number of the others, and these as runs of consecutive
/// numbers, each one of 16 hexadecimal digits.
///
/// Engines free the blocks of a request from its last one to its first one, so runs descend as often as not.
#[pyfunction]
pub(crate) fn _pack_blocks(numbers: Vec<u32>) -> (usize, usize, String) {
    let zeros = numbers.iter().take_while(|&&number| number == 0).count();
    let numbers = &numbers[zeros..];
    let (mut text, mut left) = (String::new(), numbers);
    while let [first, ..] = left {
        let steps = |step: i64| {
            let pairs = left.windows(2).take(i32::MAX as usize - 1);
            1 + pairs.take_while(|pair| i64::from(pair[1]) - i64::from(pair[0]) == step).count()
        };
        let (up, down) = (steps(1), steps(-1));
        let count = if up >= down { up as i32 } else { -(down as i32) };
        text.push_str(&format!("{first:08x}{count:08x}"));
        left = &left[up.max(down)..];
    }
    (zeros, numbers.len(), text)
}

/// Returns `count` of the block numbers in a text of [`_pack_blocks`], behind the first `skipped`. The text comes from another process.
///
/// Raises `ValueError` for another text or too few numbers, and `IndexError` for a number that is not below `limit`.
pub(crate) fn unpack(text: &str, skipped: usize, count: usize, limit: u64) -> PyResult<Vec<u32>> {
    let invalid =
        || PyValueError::new_err(format!("{:?} is no list of blocks", text.get(..64).unwrap_or(text)));
    let digits = |digits: &str| u32::from_str_radix(digits, 16).map_err(|_| invalid());
    if !text.len().is_multiple_of(RUN_DIGITS) || !text.is_ascii() {
        return Err(invalid());
    }
    let (mut found, mut skipped) = (Vec::with_capacity(count), skipped);
    for run in (0..text.len()).step_by(RUN_DIGITS) {
        if found.len() == count {
            break;
        }
        let (first, steps) = text[run..run + RUN_DIGITS].split_at(RUN_DIGITS / 2);
        let (first, steps) = (digits(first)?, digits(steps)? as i32);
        let len = steps.unsigned_abs();
        let last = match (len.checked_sub(1), steps > 0) {
            (None, _) => return Err(invalid()),
            (Some(distance), true) => first.checked_add(distance),
            (Some(distance), false) => first.checked_sub(distance),
        };
        let last = last.ok_or_else(invalid)?;
        let largest = first.max(last);
        if u64::from(largest) >= limit {
            return Err(outside("source", largest, limit));
        }
        if skipped >= len as usize {
            skipped -= len as usize;
            continue;
        }
        let (behind, room) = (std::mem::take(&mut skipped) as u32, count - found.len());
        if steps > 0 {
            found.extend((first + behind..=last).take(room));
        } else {
            found.extend((last..=first - behind).rev().take(room));
        }
    }
    if found.len() == count {
        return Ok(found);
    }
    Err(PyValueError::new_err(format!("{} source blocks and {count} destination blocks", found.len())))
}

/// Objects of a pool whose addresses have equal distances, and whose numbers are consecutive.
#[derive(Clone, Copy)]
struct Segment {
    start: usize,
    /// At least 1.
    stride: usize,
    first: u32,
    count: u32,
}

impl Segment {
    /// Returns the number of the object at an address.
    fn number(&self, address: usize) -> Option<u32> {
        let distance = address.checked_sub(self.start)?;
        let index = u32::try_from(distance / self.stride).ok()?;
        (index < self.count && distance.is_multiple_of(self.stride)).then(|| self.first + index)
    }
}

/// The block objects of an engine's pool, with an attribute `block_id`, which never changes. `read` finds numbers by the addresses of
/// the objects.
///
/// An object and its number are two objects, which are in no cache of the processor if the engine has thousands of them. An interpreter
/// lays objects that it makes one after the other side by side, so a table of their addresses is small.
#[pyclass(frozen, module = "device_ipc")]
pub(crate) struct _BlockPool {
    /// Keeps the addresses.
    _blocks: Vec<Py<PyAny>>,
    /// By their addresses.
    segments: Vec<Segment>,
}

#[pymethods]
impl _BlockPool {
    /// Takes the objects that are likely to be read. Others are read by their attributes.
    #[new]
    fn new(blocks: Vec<Bound<'_, PyAny>>) -> PyResult<Self> {
        let read = |block: &Bound<'_, PyAny>| Ok((block.as_ptr().addr(), block_id(block)?));
        let mut known = blocks.iter().map(read).collect::<PyResult<Vec<_>>>()?;
        known.sort_unstable();
        known.dedup();
        let mut segments: Vec<Segment> = Vec::new();
        for (address, number) in known {
            if let Some(last) = segments.last_mut()
                && last.first.checked_add(last.count) == Some(number)
            {
                let distance = address - last.start;
                if last.count == 1 {
                    last.stride = distance;
                }
                if distance == last.stride * last.count as usize {
                    last.count += 1;
                    continue;
                }
            }
            segments.push(Segment { start: address, stride: 1, first: number, count: 1 });
        }
        Ok(Self { _blocks: blocks.into_iter().map(Bound::unbind).collect(), segments })
    }

    /// Reads the numbers of `blocks[first:end]`. Returns the number of zeros at the beginning, which are no blocks, and the others as
    /// 32-bit integers.
    fn read<'py>(
        &self,
        blocks: &Bound<'py, PyAny>,
        first: usize,
        end: usize,
    ) -> PyResult<(usize, Bound<'py, PyBytes>)> {
        let end = end.min(blocks.len()?);
        let mut numbers = Vec::with_capacity(end.saturating_sub(first));
        let list = blocks.cast::<PyList>().ok();
        let mut near = Segment { start: 0, stride: 1, first: 0, count: 0 };
        for index in first..end {
            let known = list.and_then(|list| self.find(address(list, index), &mut near));
            numbers.push(known.map_or_else(|| block_id(&blocks.get_item(index)?), Ok)?);
        }
        let zeros = numbers.iter().take_while(|&&number| number == 0).count();
        let numbers = &numbers[zeros..];
        let found = PyBytes::new_with(blocks.py(), size_of_val(numbers), |bytes| {
            for (bytes, number) in bytes.chunks_exact_mut(size_of::<u32>()).zip(numbers) {
                bytes.copy_from_slice(&number.to_ne_bytes());
            }
            Ok(())
        })?;
        Ok((zeros, found))
    }
}

impl _BlockPool {
    /// Returns the number of the object at an address. Looks at `near` first, and replaces it.
    fn find(&self, address: usize, near: &mut Segment) -> Option<u32> {
        if let Some(number) = near.number(address) {
            return Some(number);
        }
        let behind = self.segments.partition_point(|segment| segment.start <= address);
        *near = *self.segments.get(behind.checked_sub(1)?)?;
        near.number(address)
    }
}

/// Returns the address of an item of a list, without a look at the item.
fn address(list: &Bound<'_, PyList>, index: usize) -> usize {
    // SAFETY: the list lives, and the reference is borrowed for its address only.
    let item = unsafe { ffi::PyList_GetItem(list.as_ptr(), index as ffi::Py_ssize_t) };
    if item.is_null() {
        // Another thread has made it shorter. The index is behind its end then also below.
        drop(PyErr::take(list.py()));
    }
    item.addr()
}

fn block_id(block: &Bound<'_, PyAny>) -> PyResult<u32> {
    block.getattr(pyo3::intern!(block.py(), "block_id"))?.extract()
}
