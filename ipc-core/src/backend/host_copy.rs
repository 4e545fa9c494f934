//! Elements of device memory, copied to the host.

#![allow(
    unsafe_code,
    reason = "a read fills host elements of any plain type; the caller keeps the range mapped"
)]

use crate::backend::DeviceMemory;
use crate::backend::stream::BorrowedStream;
use crate::model::address::DeviceRange;
use crate::model::error::{Error, Result};
use crate::model::tensor::{Element, TensorLayout};

/// Copies whole elements to the host after all earlier work of the stream, and waits for the copy.
///
/// # Safety
///
/// The range stays mapped during the call, and no unordered work writes it meanwhile.
///
/// # Errors
///
/// The vendor's error; [`Error::Io`] if the host has no memory for the elements.
pub(crate) unsafe fn read_elements<T: Element>(
    memory: &dyn DeviceMemory,
    range: DeviceRange,
    stream: BorrowedStream<'_>,
) -> Result<Vec<T>> {
    let mut elements = zeroed::<T>(range.len / size_of::<T>() as u64)?;
    if !elements.is_empty() {
        // SAFETY: as the caller promised.
        unsafe { memory.read(range, bytes_of(&mut elements), stream)? };
    }
    Ok(elements)
}

/// Copies the elements of a tensor to the host in row-major order, after all earlier work of the stream, and waits.
///
/// `range` begins at the first element and ends with the last one. `T` is the type of the elements, or `u8` for their bytes.
///
/// # Safety
///
/// As for [`read_elements`].
///
/// # Errors
///
/// As for [`read_elements`]; [`Error::Layout`] for a tensor that repeats elements and would exceed the limit.
pub(crate) unsafe fn read_tensor<T: Element>(
    memory: &dyn DeviceMemory,
    range: DeviceRange,
    layout: &TensorLayout,
    stream: BorrowedStream<'_>,
) -> Result<Vec<T>> {
    if layout.is_contiguous() {
        // SAFETY: as the caller promised.
        return unsafe { read_elements(memory, range, stream) };
    }
    // Before any allocation: the exporter states the layout.
    let bytes = layout.gathered_bytes()?;
    // SAFETY: as the caller promised.
    let source = unsafe { read_elements::<u8>(memory, range, stream)? };
    let mut gathered = zeroed::<T>(bytes / size_of::<T>() as u64)?;
    layout.gather(&source, bytes_of(&mut gathered));
    Ok(gathered)
}

/// Elements whose bytes are 0. The device can have more memory than the host, so the lack of memory is an error.
fn zeroed<T: Element>(count: u64) -> Result<Vec<T>> {
    let mut elements = Vec::<T>::new();
    let reserved = usize::try_from(count).ok().and_then(|count| {
        elements.try_reserve_exact(count).ok()?;
        Some(count)
    });
    let Some(count) = reserved else {
        let what = format!("reserving host memory for {count} elements of {} B", size_of::<T>());
        return Err(Error::io(what, std::io::ErrorKind::OutOfMemory));
    };
    // SAFETY: the capacity is at least `count` elements; all of their bytes are set, and every bit pattern is a value.
    unsafe {
        elements.as_mut_ptr().write_bytes(0, count);
        elements.set_len(count);
    }
    Ok(elements)
}

/// The bytes of elements, for writing.
fn bytes_of<T: Element>(elements: &mut [T]) -> &mut [u8] {
    // SAFETY: elements have no padding, and every bit pattern is a value.
    unsafe { std::slice::from_raw_parts_mut(elements.as_mut_ptr().cast::<u8>(), size_of_val(elements)) }
}

#[cfg(test)]
mod tests;
