//! Gathering of the elements of a strided tensor.

use super::numbers::MAX_REPEATED_BYTES;
use super::{LayoutError, TensorLayout};

impl TensorLayout {
    /// Returns the size of the gathered elements in bytes. The exporter states the layout, so the size is limited: by the
    /// memory of the tensor, or by [`MAX_REPEATED_BYTES`] for a tensor that repeats elements.
    pub(crate) fn gathered_bytes(&self) -> Result<u64, LayoutError> {
        if self.is_empty() {
            return Ok(0);
        }
        let element = self.dtype().bytes().ok_or(LayoutError::UnknownDtype(self.dtype().code()))?;
        let bytes = self.elements().checked_mul(element).ok_or(LayoutError::Overflow)?;
        let memory = self.span_bytes() - self.start_bytes();
        if bytes > memory.max(MAX_REPEATED_BYTES) {
            let (shape, strides) = (self.shape().to_vec(), self.strides().to_vec());
            return Err(LayoutError::Repeated { bytes, memory, shape, strides });
        }
        Ok(bytes)
    }

    /// Copies the elements to `target` in row-major order, without gaps.
    ///
    /// `source` begins at the first element and ends with the last one; `target` has the bytes of all elements.
    ///
    /// # Panics
    ///
    /// If either length is wrong.
    pub(crate) fn gather(&self, source: &[u8], target: &mut [u8]) {
        if self.is_empty() {
            return;
        }
        let element = self.dtype().bytes().expect("a layout has a known element type") as usize;
        assert_eq!(target.len(), self.elements() as usize * element, "the target has all elements");
        // Dimensions of size 1 have no distance; inner dimensions that are contiguous form one run.
        let mut outer: Vec<(usize, usize)> = self
            .shape()
            .iter()
            .zip(self.strides())
            .filter(|(size, _)| **size > 1)
            .map(|(size, stride)| (*size as usize, *stride as usize * element))
            .collect();
        let mut run = element;
        while let Some(&(size, stride)) = outer.last()
            && stride == run
        {
            run *= size;
            outer.pop();
        }
        let mut index = vec![0; outer.len()];
        let mut start = 0;
        for piece in target.chunks_exact_mut(run) {
            piece.copy_from_slice(&source[start..start + run]);
            for (place, (size, stride)) in index.iter_mut().zip(&outer).rev() {
                *place += 1;
                start += stride;
                if *place < *size {
                    break;
                }
                start -= *place * stride;
                *place = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests;
