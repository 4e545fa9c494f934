//! Element types: all types of PyTorch 2.11.

#![allow(unsafe_code, reason = "a promise about the layout of plain types")]

use std::any::TypeId;
use std::fmt;

use serde::{Serialize, Serializer};

use super::Bool;

/// The type of a tensor's elements. Unknown codes of newer versions are preserved.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Dtype(u8);

macro_rules! dtypes {
    ($($(#[$doc:meta])* $constant:ident = $code:literal, $name:literal, $bytes:literal;)*) => {
        impl Dtype {
            $($(#[$doc])* pub const $constant: Self = Self($code);)*

            /// Every type that this version knows.
            pub const ALL: &'static [Self] = &[$(Self::$constant),*];

            /// Returns the name, as in PyTorch.
            pub const fn name(self) -> Option<&'static str> {
                match self.0 { $($code => Some($name),)* _ => None }
            }

            /// Returns the size of an element in bytes, or `None` for an unknown type.
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
    /// Two 4-bit floats in a byte, 2 exponent bits and 1 mantissa bit each, finite.
    F4_E2M1FN_X2 = 22, "float4_e2m1fn_x2", 1;
    /// Signed 1-bit integer in a byte.
    I1 = 23, "int1", 1;
    /// Signed 2-bit integer in a byte.
    I2 = 24, "int2", 1;
    /// Signed 3-bit integer in a byte.
    I3 = 25, "int3", 1;
    /// Signed 4-bit integer in a byte.
    I4 = 26, "int4", 1;
    /// Signed 5-bit integer in a byte.
    I5 = 27, "int5", 1;
    /// Signed 6-bit integer in a byte.
    I6 = 28, "int6", 1;
    /// Signed 7-bit integer in a byte.
    I7 = 29, "int7", 1;
    /// Unsigned 1-bit integer in a byte.
    U1 = 30, "uint1", 1;
    /// Unsigned 2-bit integer in a byte.
    U2 = 31, "uint2", 1;
    /// Unsigned 3-bit integer in a byte.
    U3 = 32, "uint3", 1;
    /// Unsigned 4-bit integer in a byte.
    U4 = 33, "uint4", 1;
    /// Unsigned 5-bit integer in a byte.
    U5 = 34, "uint5", 1;
    /// Unsigned 6-bit integer in a byte.
    U6 = 35, "uint6", 1;
    /// Unsigned 7-bit integer in a byte.
    U7 = 36, "uint7", 1;
    /// Quantized unsigned 8-bit integer.
    QUINT8 = 37, "quint8", 1;
    /// Quantized signed 8-bit integer.
    QINT8 = 38, "qint8", 1;
    /// Quantized signed 32-bit integer.
    QINT32 = 39, "qint32", 4;
    /// Two quantized unsigned 4-bit integers in a byte.
    QUINT4X2 = 40, "quint4x2", 1;
    /// Four quantized unsigned 2-bit integers in a byte.
    QUINT2X4 = 41, "quint2x4", 1;
    /// Eight times 1 bit in a byte.
    BITS1X8 = 42, "bits1x8", 1;
    /// Four times 2 bits in a byte.
    BITS2X4 = 43, "bits2x4", 1;
    /// Twice 4 bits in a byte.
    BITS4X2 = 44, "bits4x2", 1;
    /// 8 uninterpreted bits.
    BITS8 = 45, "bits8", 1;
    /// 16 uninterpreted bits.
    BITS16 = 46, "bits16", 2;
}

impl Dtype {
    /// Creates the type of a descriptor's code, which may be unknown to this version.
    pub(crate) const fn from_code(code: u8) -> Self {
        Self(code)
    }

    /// Returns the type of a PyTorch name, with or without `torch.` before it.
    pub fn from_name(name: &str) -> Option<Self> {
        let name = name.strip_prefix("torch.").unwrap_or(name);
        Self::ALL.iter().copied().find(|dtype| dtype.name() == Some(name))
    }

    /// Returns the code in a descriptor.
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
/// | Rust type | element type | feature |
/// |---|---|---|
/// | `u8` to `u64`, `i8` to `i64`, `f32`, `f64` | the same | |
/// | [`Bool`] | [`Dtype::BOOL`] | |
/// | `half::f16`, `half::bf16` | [`Dtype::F16`], [`Dtype::BF16`] | `half` |
/// | `float8::F8E4M3`, `float8::F8E5M2` | [`Dtype::F8_E4M3FN`], [`Dtype::F8_E5M2`] | `float8` |
///
/// A tensor of any other type is accessed by its bytes ([`Tensor::view_bytes`](crate::Tensor::view_bytes),
/// [`Tensor::to_host_bytes`](crate::Tensor::to_host_bytes)).
///
/// # Safety
///
/// The type is plain data of [`Dtype::bytes`] bytes: every bit pattern is a value, and it has no padding. `bool` and enums
/// are no elements: another process may write any byte.
pub unsafe trait Element: Copy + Send + Sync + 'static {
    /// The element type.
    const DTYPE: Dtype;
}

macro_rules! elements {
    ($($(#[$feature:meta])? $rust:ty => $dtype:ident),* $(,)?) => {
        $(
            $(#[$feature])?
            // SAFETY: plain numbers, or a transparent wrapper of one: no padding, and every bit pattern is a value.
            unsafe impl Element for $rust { const DTYPE: Dtype = Dtype::$dtype; }
            $(#[$feature])?
            const _: () = assert!(size_of::<$rust>() as u64 == Dtype::$dtype.bytes().unwrap());
        )*

        impl Dtype {
            /// Returns the element type of a Rust type: of every [`Element`], and of `bool`.
            ///
            /// For implementations of [`DeviceOwner`](crate::DeviceOwner) that are generic over their elements.
            ///
            /// # Examples
            ///
            /// ```
            /// use device_ipc_core::Dtype;
            ///
            /// assert_eq!(Dtype::of::<f32>(), Some(Dtype::F32));
            /// assert_eq!(Dtype::of::<bool>(), Some(Dtype::BOOL));
            /// assert_eq!(Dtype::of::<[f32; 4]>(), None);
            /// ```
            pub fn of<T: 'static>() -> Option<Self> {
                let id = TypeId::of::<T>();
                $(
                    $(#[$feature])?
                    if id == TypeId::of::<$rust>() {
                        return Some(Self::$dtype);
                    }
                )*
                (id == TypeId::of::<bool>()).then_some(Self::BOOL)
            }
        }
    };
}

elements! {
    u8 => U8, i8 => I8, u16 => U16, i16 => I16, u32 => U32, i32 => I32, u64 => U64, i64 => I64,
    f32 => F32, f64 => F64, Bool => BOOL,
    #[cfg(feature = "half")] half::f16 => F16,
    #[cfg(feature = "half")] half::bf16 => BF16,
    #[cfg(feature = "float8")] float8::F8E4M3 => F8_E4M3FN,
    #[cfg(feature = "float8")] float8::F8E5M2 => F8_E5M2,
}

#[cfg(test)]
mod tests;
