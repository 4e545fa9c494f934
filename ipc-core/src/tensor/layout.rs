//! Where the elements of a tensor lie.

use serde::Serialize;

use super::{Dtype, LayoutError};

/// The most dimensions that a layout may have (NumPy's and PyTorch's limit is 64).
pub const MAX_DIMENSIONS: usize = 64;

/// Element type, shape, strides and offset of a tensor in a region.
///
/// Element `[i, j, …]` lies `offset + i * strides[0] + j * strides[1] + …` elements behind the start of the region, as
/// with PyTorch's `storage_offset` and `stride`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TensorLayout {
    dtype: Dtype,
    shape: Vec<u64>,
    strides: Vec<u64>,
    offset: u64,
}

impl TensorLayout {
    /// A tensor at the start of its region whose last dimension is contiguous (row-major, C order).
    ///
    /// # Errors
    ///
    /// [`LayoutError`] for too many dimensions, an unknown type, or a size that does not fit 64 bits.
    pub fn contiguous(dtype: Dtype, shape: impl Into<Vec<u64>>) -> Result<Self, LayoutError> {
        let shape = shape.into();
        let mut strides = vec![1; shape.len()];
        for index in (1..shape.len()).rev() {
            let stride: u64 = strides[index];
            strides[index - 1] = stride.checked_mul(shape[index].max(1)).ok_or(LayoutError::Overflow)?;
        }
        Self::strided(dtype, shape, strides)
    }

    /// A tensor at the start of its region with strides in elements.
    ///
    /// # Errors
    ///
    /// As [`contiguous`](Self::contiguous), and for a number of strides that is not that of the dimensions.
    pub fn strided(
        dtype: Dtype,
        shape: impl Into<Vec<u64>>,
        strides: impl Into<Vec<u64>>,
    ) -> Result<Self, LayoutError> {
        let layout = Self { dtype, shape: shape.into(), strides: strides.into(), offset: 0 };
        if layout.shape.len() > MAX_DIMENSIONS {
            return Err(LayoutError::TooManyDimensions(layout.shape.len()));
        }
        if layout.strides.len() != layout.shape.len() {
            return Err(LayoutError::Strides {
                dimensions: layout.shape.len(),
                strides: layout.strides.len(),
            });
        }
        layout.span_bytes()?;
        Ok(layout)
    }

    /// The same tensor, its first element so many elements behind the start of the region.
    ///
    /// # Errors
    ///
    /// [`LayoutError::Overflow`] for an end that does not fit 64 bits.
    pub fn with_offset(mut self, elements: u64) -> Result<Self, LayoutError> {
        self.offset = elements;
        self.start_bytes()?;
        self.span_bytes()?;
        Ok(self)
    }

    /// The type of the elements.
    pub const fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The size of each dimension, in elements.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// The distance between neighbours in each dimension, in elements.
    pub fn strides(&self) -> &[u64] {
        &self.strides
    }

    /// Where the first element lies, in elements from the start of the region.
    pub const fn offset(&self) -> u64 {
        self.offset
    }

    /// Where the first element lies, in bytes from the start of the region.
    ///
    /// # Errors
    ///
    /// [`LayoutError`] for an unknown type, or a number that does not fit 64 bits.
    pub fn start_bytes(&self) -> Result<u64, LayoutError> {
        self.offset.checked_mul(self.element_bytes()?).ok_or(LayoutError::Overflow)
    }

    fn element_bytes(&self) -> Result<u64, LayoutError> {
        self.dtype.bytes().ok_or(LayoutError::UnknownDtype(self.dtype.code()))
    }

    /// The number of elements.
    pub fn elements(&self) -> u64 {
        // The sizes of an empty tensor's other dimensions may be anything, and their product too.
        if self.is_empty() { 0 } else { self.shape.iter().product() }
    }

    /// Are there no elements?
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// Do the elements lie side by side in row-major order? Those of an empty tensor do.
    pub fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        self.is_empty()
            || self.shape.iter().zip(&self.strides).rev().all(|(&size, &stride)| {
                let fits = size == 1 || stride == expected;
                expected *= size;
                fits
            })
    }

    /// How many bytes of the region the tensor needs, counted from the region's start: up to the end of its last element.
    /// A tensor without elements needs none.
    ///
    /// # Errors
    ///
    /// [`LayoutError`] for an unknown type, or a size that does not fit 64 bits.
    pub fn span_bytes(&self) -> Result<u64, LayoutError> {
        let element = self.element_bytes()?;
        if self.is_empty() {
            return Ok(0);
        }
        let mut elements: u64 = 1;
        let mut last = self.offset;
        for (&size, &stride) in self.shape.iter().zip(&self.strides) {
            elements = elements.checked_mul(size).ok_or(LayoutError::Overflow)?;
            let reach = (size - 1).checked_mul(stride).ok_or(LayoutError::Overflow)?;
            last = last.checked_add(reach).ok_or(LayoutError::Overflow)?;
        }
        elements.checked_mul(element).ok_or(LayoutError::Overflow)?;
        last.checked_add(1).and_then(|count| count.checked_mul(element)).ok_or(LayoutError::Overflow)
    }

    /// Checks that the tensor lies inside a region of `region_bytes`.
    ///
    /// # Errors
    ///
    /// [`LayoutError::TooLarge`].
    pub fn check_fits(&self, region_bytes: u64) -> Result<(), LayoutError> {
        let needed = self.span_bytes()?;
        if needed > region_bytes {
            return Err(LayoutError::TooLarge { needed, region: region_bytes });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_contiguous_layout_spans_its_elements() {
        let layout = TensorLayout::contiguous(Dtype::F32, [4, 5]).unwrap();
        assert_eq!(layout.strides(), [5, 1]);
        assert_eq!(layout.span_bytes(), Ok(80));
        assert_eq!(layout.elements(), 20);
        assert!(layout.is_contiguous());
        assert!(layout.check_fits(80).is_ok());
        assert_eq!(layout.check_fits(79), Err(LayoutError::TooLarge { needed: 80, region: 79 }));
    }

    #[test]
    fn a_scalar_is_one_element_and_an_empty_tensor_none() {
        assert_eq!(TensorLayout::contiguous(Dtype::F64, []).unwrap().span_bytes(), Ok(8));
        assert_eq!(TensorLayout::contiguous(Dtype::F64, [3, 0, 2]).unwrap().span_bytes(), Ok(0));
    }

    #[test]
    fn an_offset_counts_in_elements_from_the_start_of_the_region() {
        let layout = TensorLayout::contiguous(Dtype::F32, [4, 5]).unwrap().with_offset(3).unwrap();
        assert_eq!((layout.offset(), layout.start_bytes(), layout.span_bytes()), (3, Ok(12), Ok(92)));
        assert!(layout.is_contiguous());
        assert_eq!(layout.check_fits(91), Err(LayoutError::TooLarge { needed: 92, region: 91 }));
        let scalar = |offset| TensorLayout::contiguous(Dtype::F32, []).unwrap().with_offset(offset);
        assert_eq!(scalar(u64::MAX / 4), Err(LayoutError::Overflow));
        assert_eq!(scalar(u64::MAX / 4 - 1).unwrap().span_bytes(), Ok(u64::MAX - 3));
    }

    #[test]
    fn a_transposed_layout_is_not_contiguous() {
        let layout = TensorLayout::strided(Dtype::U8, [4, 5], [1, 4]).unwrap();
        assert!(!layout.is_contiguous());
        assert_eq!(layout.span_bytes(), Ok(20));
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused_and_do_not_wrap() {
        let huge = u64::MAX / 2;
        assert_eq!(TensorLayout::contiguous(Dtype::U8, [huge, 3]), Err(LayoutError::Overflow));
        assert_eq!(TensorLayout::contiguous(Dtype::F32, [huge]), Err(LayoutError::Overflow));
        assert_eq!(TensorLayout::strided(Dtype::U8, [2, 2], [u64::MAX, 1]), Err(LayoutError::Overflow));
        assert_eq!(
            TensorLayout::strided(Dtype::U8, [2], [1, 1]),
            Err(LayoutError::Strides { dimensions: 1, strides: 2 })
        );
        assert_eq!(TensorLayout::contiguous(Dtype::U8, vec![1; 65]), Err(LayoutError::TooManyDimensions(65)));
        assert_eq!(TensorLayout::contiguous(Dtype::from_code(250), [1]), Err(LayoutError::UnknownDtype(250)));
    }
}
