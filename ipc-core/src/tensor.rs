//! Element types and the layout of a tensor in a region.

#![allow(unsafe_code, reason = "a promise about the layout of plain types")]

use std::fmt;

use serde::{Serialize, Serializer};

/// The most dimensions that a layout may have (NumPy's and PyTorch's limit is 64).
pub const MAX_DIMENSIONS: usize = 64;

/// The type of a tensor's elements. A number, so that a descriptor of a newer version can be carried on.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Dtype(u8);

macro_rules! dtypes {
    ($($(#[$doc:meta])* $constant:ident = $code:literal, $name:literal, $bytes:literal;)*) => {
        impl Dtype {
            $($(#[$doc])* pub const $constant: Self = Self($code);)*

            /// Every type that this version knows.
            pub const ALL: &'static [Self] = &[$(Self::$constant),*];

            /// The name, as PyTorch writes it.
            pub const fn name(self) -> Option<&'static str> {
                match self.0 { $($code => Some($name),)* _ => None }
            }

            /// The size of one element in bytes, or `None` for a type that this version does not know.
            pub const fn bytes(self) -> Option<u64> {
                match self.0 { $($code => Some($bytes),)* _ => None }
            }
        }
    };
}

dtypes! {
    /// Unsigned 8-bit integer.
    U8 = 1, "uint8", 1;
    /// Signed 8-bit integer.
    I8 = 2, "int8", 1;
    /// Unsigned 16-bit integer.
    U16 = 3, "uint16", 2;
    /// Signed 16-bit integer.
    I16 = 4, "int16", 2;
    /// Unsigned 32-bit integer.
    U32 = 5, "uint32", 4;
    /// Signed 32-bit integer.
    I32 = 6, "int32", 4;
    /// Unsigned 64-bit integer.
    U64 = 7, "uint64", 8;
    /// Signed 64-bit integer.
    I64 = 8, "int64", 8;
    /// IEEE 754 half precision.
    F16 = 9, "float16", 2;
    /// Brain floating point.
    BF16 = 10, "bfloat16", 2;
    /// IEEE 754 single precision.
    F32 = 11, "float32", 4;
    /// IEEE 754 double precision.
    F64 = 12, "float64", 8;
    /// One byte, 0 or 1.
    BOOL = 13, "bool", 1;
    /// Two halves: real, imaginary.
    COMPLEX32 = 14, "complex32", 4;
    /// Two singles: real, imaginary.
    COMPLEX64 = 15, "complex64", 8;
    /// Two doubles: real, imaginary.
    COMPLEX128 = 16, "complex128", 16;
    /// 8-bit float, 4 exponent and 3 mantissa bits, finite.
    F8_E4M3FN = 17, "float8_e4m3fn", 1;
    /// 8-bit float, 5 exponent and 2 mantissa bits.
    F8_E5M2 = 18, "float8_e5m2", 1;
    /// 8-bit float, 4 exponent and 3 mantissa bits, finite, no negative zero.
    F8_E4M3FNUZ = 19, "float8_e4m3fnuz", 1;
    /// 8-bit float, 5 exponent and 2 mantissa bits, finite, no negative zero.
    F8_E5M2FNUZ = 20, "float8_e5m2fnuz", 1;
    /// 8-bit float, exponent only.
    F8_E8M0FNU = 21, "float8_e8m0fnu", 1;
}

impl Dtype {
    /// The type of this code in a descriptor, whether this version knows it or not.
    pub const fn from_code(code: u8) -> Self {
        Self(code)
    }

    /// The code in a descriptor.
    pub const fn code(self) -> u8 {
        self.0
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "dtype {}", self.0),
        }
    }
}

impl fmt::Debug for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl Serialize for Dtype {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A Rust type that is the element of a tensor.
///
/// # Safety
///
/// The type is plain data of [`Dtype::bytes`] bytes: every bit pattern is a value, and it has no padding.
pub unsafe trait Element: Copy + Send + Sync + 'static {
    /// The element type.
    const DTYPE: Dtype;
}

macro_rules! elements {
    ($($rust:ty => $dtype:ident),* $(,)?) => {
        // SAFETY: the primitive numbers have no padding, and every bit pattern is a value.
        $(unsafe impl Element for $rust { const DTYPE: Dtype = Dtype::$dtype; })*
    };
}

elements! {
    u8 => U8, i8 => I8, u16 => U16, i16 => I16, u32 => U32, i32 => I32, u64 => U64, i64 => I64,
    f32 => F32, f64 => F64,
}

/// Element type, shape and strides of a tensor that begins at the start of its region.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TensorLayout {
    dtype: Dtype,
    shape: Vec<u64>,
    strides: Vec<u64>,
}

impl TensorLayout {
    /// A tensor whose last dimension is contiguous (row-major, C order).
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

    /// A tensor with strides in elements.
    ///
    /// # Errors
    ///
    /// As [`contiguous`](Self::contiguous), and for a number of strides that is not that of the dimensions.
    pub fn strided(
        dtype: Dtype,
        shape: impl Into<Vec<u64>>,
        strides: impl Into<Vec<u64>>,
    ) -> Result<Self, LayoutError> {
        let layout = Self { dtype, shape: shape.into(), strides: strides.into() };
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

    /// How many bytes of the region the tensor needs: up to the end of its last element.
    ///
    /// # Errors
    ///
    /// [`LayoutError`] for an unknown type, or a size that does not fit 64 bits.
    pub fn span_bytes(&self) -> Result<u64, LayoutError> {
        let element = self.dtype.bytes().ok_or(LayoutError::UnknownDtype(self.dtype.code()))?;
        if self.is_empty() {
            return Ok(0);
        }
        let mut elements: u64 = 1;
        let mut last: u64 = 0;
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

/// Why a layout is not one, or does not fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// The type's code is not known to this version.
    #[error("the element type {0} is not known to this version of device-ipc; update the receiver")]
    UnknownDtype(u8),
    /// Too many dimensions.
    #[error("a tensor has at most {MAX_DIMENSIONS} dimensions, not {0}")]
    TooManyDimensions(usize),
    /// The strides do not belong to the shape.
    #[error("{strides} strides were given for {dimensions} dimensions")]
    Strides {
        /// The number of dimensions.
        dimensions: usize,
        /// The number of strides.
        strides: usize,
    },
    /// The size does not fit 64 bits.
    #[error("the size of the tensor does not fit 64 bits")]
    Overflow,
    /// The tensor reaches behind the end of its region.
    #[error("the tensor needs {needed} bytes, but its region has {region} bytes")]
    TooLarge {
        /// Bytes the tensor needs.
        needed: u64,
        /// Bytes the region has.
        region: u64,
    },
    /// The owner of the memory does not say of what type its elements are.
    #[error(
        "a shape was given, but the memory does not say its element type; call ShareBuilder::dtype as well"
    )]
    NoDtype,
    /// A view of another element type than the tensor's.
    #[error("the elements are {actual}, and a view of {wanted} was asked for")]
    WrongDtype {
        /// The tensor's.
        actual: Dtype,
        /// The view's.
        wanted: Dtype,
    },
    /// A view of whole elements needs an address and a length that fit them.
    #[error("{len} bytes at {address:#x} are not whole, aligned elements of {element} bytes")]
    Misaligned {
        /// The address.
        address: u64,
        /// The length in bytes.
        len: u64,
        /// The size of an element in bytes.
        element: u64,
    },
    /// A view gives the elements side by side, and the tensor has gaps.
    #[error(
        "the tensor is not contiguous (shape {shape:?}, strides {strides:?}); take Mapping::range instead of a view"
    )]
    NotContiguous {
        /// Its shape.
        shape: Vec<u64>,
        /// Its strides, in elements.
        strides: Vec<u64>,
    },
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
