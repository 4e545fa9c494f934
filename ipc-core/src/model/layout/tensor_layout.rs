//! Where the elements of a tensor lie.

use std::fmt;

use serde::ser::{Serialize, SerializeStruct as _, Serializer};

use super::numbers::Numbers;
use super::{Dtype, LayoutError};

/// The most dimensions that a layout may have (NumPy's and PyTorch's limit is 64).
pub const MAX_DIMENSIONS: usize = 64;

/// Element type, shape, strides and offset of a tensor in a region.
///
/// Element `[i, j, …]` lies `offset + i * strides[0] + j * strides[1] + …` elements behind the start of the region, as
/// with PyTorch's `storage_offset` and `stride`.
#[derive(Clone, PartialEq, Eq)]
pub struct TensorLayout {
    dtype: Dtype,
    numbers: Numbers,
    offset: u64,
    /// What [`span_bytes`](Self::span_bytes) says.
    span: u64,
}

impl TensorLayout {
    /// A tensor at the start of its region whose last dimension is contiguous (row-major, C order).
    ///
    /// # Errors
    ///
    /// [`LayoutError`] for too many dimensions, an unknown type, or a size that does not fit 64 bits.
    pub fn contiguous(dtype: Dtype, shape: impl AsRef<[u64]>) -> Result<Self, LayoutError> {
        let shape = shape.as_ref();
        check_dimensions(shape.len())?;
        let mut numbers = Numbers::of(shape.len());
        let (sizes, strides) = numbers.as_mut_slice().split_at_mut(shape.len());
        sizes.copy_from_slice(shape);
        let mut stride: u64 = 1;
        for (index, place) in strides.iter_mut().enumerate().rev() {
            *place = stride;
            if index > 0 {
                stride = stride.checked_mul(shape[index].max(1)).ok_or(LayoutError::Overflow)?;
            }
        }
        let span = span_of(dtype, &numbers, 0)?;
        Ok(Self { dtype, numbers, offset: 0, span })
    }

    /// A tensor at the start of its region with strides in elements.
    ///
    /// # Errors
    ///
    /// As [`contiguous`](Self::contiguous), and for a number of strides that is not that of the dimensions.
    pub fn strided(
        dtype: Dtype,
        shape: impl AsRef<[u64]>,
        strides: impl AsRef<[u64]>,
    ) -> Result<Self, LayoutError> {
        let (shape, strides) = (shape.as_ref(), strides.as_ref());
        check_dimensions(shape.len())?;
        if strides.len() != shape.len() {
            return Err(LayoutError::Strides { dimensions: shape.len(), strides: strides.len() });
        }
        let mut numbers = Numbers::of(shape.len());
        let (sizes, places) = numbers.as_mut_slice().split_at_mut(shape.len());
        sizes.copy_from_slice(shape);
        places.copy_from_slice(strides);
        let span = span_of(dtype, &numbers, 0)?;
        Ok(Self { dtype, numbers, offset: 0, span })
    }

    /// From the sizes of the dimensions and behind them the strides, as many as there are places for, and the offset.
    pub(crate) fn from_numbers(
        dtype: Dtype,
        dimensions: usize,
        values: impl Iterator<Item = u64>,
        offset: u64,
    ) -> Result<Self, LayoutError> {
        check_dimensions(dimensions)?;
        let mut numbers = Numbers::of(dimensions);
        numbers.as_mut_slice().iter_mut().zip(values).for_each(|(place, value)| *place = value);
        let span = span_of(dtype, &numbers, offset)?;
        Ok(Self { dtype, numbers, offset, span })
    }

    /// The same tensor, its first element so many elements behind the start of the region.
    ///
    /// # Errors
    ///
    /// [`LayoutError::Overflow`] for an end that does not fit 64 bits.
    pub fn with_offset(self, elements: u64) -> Result<Self, LayoutError> {
        let span = span_of(self.dtype, &self.numbers, elements)?;
        Ok(Self { offset: elements, span, ..self })
    }

    /// The type of the elements.
    pub const fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The size of each dimension, in elements.
    pub fn shape(&self) -> &[u64] {
        self.numbers.halves().0
    }

    /// The distance between neighbours in each dimension, in elements.
    pub fn strides(&self) -> &[u64] {
        self.numbers.halves().1
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
        self.offset.checked_mul(element_bytes(self.dtype)?).ok_or(LayoutError::Overflow)
    }

    /// The number of elements.
    pub fn elements(&self) -> u64 {
        // The sizes of an empty tensor's other dimensions may be anything, and their product too.
        if self.is_empty() { 0 } else { self.shape().iter().product() }
    }

    /// Are there no elements?
    pub fn is_empty(&self) -> bool {
        self.shape().contains(&0)
    }

    /// Do the elements lie side by side in row-major order? Those of an empty tensor do.
    pub fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        self.is_empty()
            || self.shape().iter().zip(self.strides()).rev().all(|(&size, &stride)| {
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
    /// None: a layout is checked when it is made.
    pub const fn span_bytes(&self) -> Result<u64, LayoutError> {
        Ok(self.span)
    }

    /// Checks that the tensor lies inside a region of `region_bytes`.
    ///
    /// # Errors
    ///
    /// [`LayoutError::TooLarge`].
    pub fn check_fits(&self, region_bytes: u64) -> Result<(), LayoutError> {
        let needed = self.span;
        if needed > region_bytes {
            return Err(LayoutError::TooLarge { needed, region: region_bytes });
        }
        Ok(())
    }
}

/// Checks that elements of this type can lie at the address, from which their layout counts.
pub(crate) fn check_alignment(dtype: Dtype, address: u64) -> Result<(), LayoutError> {
    let element = element_bytes(dtype)?;
    if address.is_multiple_of(element) { Ok(()) } else { Err(LayoutError::Unaligned { address, element }) }
}

fn check_dimensions(dimensions: usize) -> Result<(), LayoutError> {
    if dimensions > MAX_DIMENSIONS { Err(LayoutError::TooManyDimensions(dimensions)) } else { Ok(()) }
}

fn element_bytes(dtype: Dtype) -> Result<u64, LayoutError> {
    dtype.bytes().ok_or(LayoutError::UnknownDtype(dtype.code()))
}

/// What [`span_bytes`](TensorLayout::span_bytes) says of such a layout, whose start fits 64 bits too.
fn span_of(dtype: Dtype, numbers: &Numbers, offset: u64) -> Result<u64, LayoutError> {
    let element = element_bytes(dtype)?;
    offset.checked_mul(element).ok_or(LayoutError::Overflow)?;
    let (shape, strides) = numbers.halves();
    if shape.contains(&0) {
        return Ok(0);
    }
    let mut elements: u64 = 1;
    let mut last = offset;
    for (&size, &stride) in shape.iter().zip(strides) {
        elements = elements.checked_mul(size).ok_or(LayoutError::Overflow)?;
        let reach = (size - 1).checked_mul(stride).ok_or(LayoutError::Overflow)?;
        last = last.checked_add(reach).ok_or(LayoutError::Overflow)?;
    }
    elements.checked_mul(element).ok_or(LayoutError::Overflow)?;
    last.checked_add(1).and_then(|count| count.checked_mul(element)).ok_or(LayoutError::Overflow)
}

impl fmt::Debug for TensorLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TensorLayout")
            .field("dtype", &self.dtype)
            .field("shape", &self.shape())
            .field("strides", &self.strides())
            .field("offset", &self.offset)
            .finish()
    }
}

impl Serialize for TensorLayout {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("TensorLayout", 4)?;
        fields.serialize_field("dtype", &self.dtype)?;
        fields.serialize_field("shape", self.shape())?;
        fields.serialize_field("strides", self.strides())?;
        fields.serialize_field("offset", &self.offset)?;
        fields.end()
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
    fn address_between_elements_is_refused_with_the_multiple() {
        for (dtype, good, bad) in [(Dtype::F32, 8, 6), (Dtype::F64, 16, 12), (Dtype::BF16, 2, 1)] {
            assert_eq!(check_alignment(dtype, 0), Ok(()));
            assert_eq!(check_alignment(dtype, good), Ok(()));
            let element = dtype.bytes().unwrap();
            let error = check_alignment(dtype, bad).unwrap_err();
            assert_eq!(error, LayoutError::Unaligned { address: bad, element });
            assert!(error.to_string().contains(&format!("a multiple of {element} bytes")), "{error}");
        }
        assert_eq!(check_alignment(Dtype::U8, 1), Ok(()));
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
