//! Values of element types: parsing, addition and formatting.

use anyhow::{Context, Result, bail};
use device_ipc::Dtype;
use half::{bf16, f16};

use crate::output::as_usage;

/// Returns the element type with this PyTorch name.
pub(crate) fn dtype_of_name(name: &str) -> Result<Dtype, String> {
    Dtype::from_name(name).ok_or_else(|| {
        let names: Vec<&str> = Dtype::ALL.iter().filter_map(|dtype| dtype.name()).collect();
        format!("element type {name:?} not found; supported: {}", names.join(", "))
    })
}

/// A number in its in-memory representation.
trait Number: Copy {
    const BYTES: usize;
    /// Reads exactly [`Self::BYTES`] bytes in native byte order.
    fn read(bytes: &[u8]) -> Self;
    fn write(self, bytes: &mut [u8]);
    /// Parses a value; fails if it is out of range.
    fn parse(text: &str) -> Result<Self>;
    /// Parses a summand; an integer type takes any integer and uses its low bits.
    fn parse_summand(text: &str) -> Result<Self>;
    /// Adds; integers wrap around.
    fn plus(self, other: Self) -> Self;
    fn value(self) -> f64;
    fn show(self) -> String;
}

macro_rules! read_and_write {
    ($type:ty) => {
        const BYTES: usize = size_of::<$type>();

        fn read(bytes: &[u8]) -> Self {
            Self::from_ne_bytes(bytes.try_into().expect("as many bytes as the type has"))
        }

        fn write(self, bytes: &mut [u8]) {
            bytes.copy_from_slice(&self.to_ne_bytes());
        }
    };
}

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl Number for $type {
            read_and_write!($type);

            fn parse(text: &str) -> Result<Self> {
                let whole = whole_number(text)?;
                Self::try_from(whole).with_context(|| {
                    format!("{text} is out of range: the element type holds values from {} to {}", Self::MIN, Self::MAX)
                })
            }

            fn parse_summand(text: &str) -> Result<Self> {
                Ok(whole_number(text)? as Self)
            }

            fn plus(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            fn value(self) -> f64 {
                self as f64
            }

            fn show(self) -> String {
                self.to_string()
            }
        }
    )*};
}

macro_rules! floats {
    ($($type:ty: $parsed:ty, $from:expr, $to:expr;)*) => {$(
        impl Number for $type {
            read_and_write!($type);

            fn parse(text: &str) -> Result<Self> {
                let parsed: $parsed = text.parse().with_context(|| format!("{text:?} is not a number"))?;
                Ok($from(parsed))
            }

            fn parse_summand(text: &str) -> Result<Self> {
                Self::parse(text)
            }

            fn plus(self, other: Self) -> Self {
                $from($to(self) + $to(other))
            }

            fn value(self) -> f64 {
                f64::from($to(self))
            }

            fn show(self) -> String {
                format!("{:?}", $to(self))
            }
        }
    )*};
}

integers!(u8, i8, u16, i16, u32, i32, u64, i64);
floats! {
    f32: f32, std::convert::identity, std::convert::identity;
    f64: f64, std::convert::identity, std::convert::identity;
    f16: f32, f16::from_f32, f16::to_f32;
    bf16: f32, bf16::from_f32, bf16::to_f32;
}

/// Parses an integer; also accepts `4.0`.
fn whole_number(text: &str) -> Result<i128> {
    if let Ok(whole) = text.parse() {
        return Ok(whole);
    }
    match text.parse::<f64>() {
        // f64 represents every integer up to 2^53 exactly.
        Ok(value) if value.fract() == 0.0 && value.abs() <= 9_007_199_254_740_992.0 => Ok(value as i128),
        _ => bail!("{text:?} is not an integer, which the element type requires"),
    }
}

/// Evaluates an expression with the Rust type of a numeric element type, and another one for the other types.
macro_rules! for_number {
    ($dtype:expr, $T:ident => $then:expr, _ => $otherwise:expr) => {
        for_number!(@ $dtype, $T, $then, $otherwise;
            U8 u8, I8 i8, U16 u16, I16 i16, U32 u32, I32 i32, U64 u64, I64 i64, F16 f16, BF16 bf16, F32 f32, F64 f64)
    };
    (@ $dtype:expr, $T:ident, $then:expr, $otherwise:expr; $($name:ident $type:ty),*) => {
        match $dtype {
            $(Dtype::$name => { type $T = $type; $then })*
            _ => $otherwise,
        }
    };
}

/// Returns the bytes of one element with this value.
pub(crate) fn bytes_of_value(dtype: Dtype, text: &str) -> Result<Vec<u8>> {
    if dtype == Dtype::BOOL {
        return match text {
            "true" | "1" => Ok(vec![1]),
            "false" | "0" => Ok(vec![0]),
            _ => bail!("{text:?} is not a value of bool: use true or false"),
        };
    }
    for_number!(dtype, T => {
        let mut bytes = vec![0; T::BYTES];
        T::parse(text)?.write(&mut bytes);
        Ok(bytes)
    }, _ => bail!("values of {dtype} have no text form; provide the bytes with --in FILE"))
}

/// Adds a value to every element. Integers wrap around: 250 plus 10 is 4 in `uint8`.
pub(crate) fn add_to_bytes(dtype: Dtype, bytes: &mut [u8], summand: &str) -> Result<()> {
    for_number!(dtype, T => {
        let summand = T::parse_summand(summand).map_err(as_usage)?;
        for element in bytes.chunks_exact_mut(T::BYTES) {
            T::read(element).plus(summand).write(element);
        }
        Ok(())
    }, _ => bail!(
        "addition is not supported for elements of {dtype}; write the bytes to a file with 'attach … read --out FILE', or \
         set them with 'attach … fill'"
    ))
}

/// Returns the sum of the elements, or `None` for an element type without a numeric value.
pub(super) fn sum(dtype: Dtype, bytes: &[u8]) -> Option<f64> {
    for_number!(dtype, T => {
        Some(bytes.chunks_exact(T::BYTES).map(|element| T::read(element).value()).sum())
    }, _ => None)
}

/// Formats the elements: as numbers, or as hexadecimal bytes for other element types.
pub(super) fn show(dtype: Dtype, bytes: &[u8]) -> Vec<String> {
    for_number!(dtype, T => {
        bytes.chunks_exact(T::BYTES).map(|element| T::read(element).show()).collect()
    }, _ => {
        let element = dtype.bytes().map_or(1, |bytes| bytes as usize);
        bytes.chunks_exact(element).map(hexadecimal).collect()
    })
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum_of(dtype: Dtype, value: &str, summand: &str) -> Vec<String> {
        let mut bytes = bytes_of_value(dtype, value).unwrap();
        add_to_bytes(dtype, &mut bytes, summand).unwrap();
        show(dtype, &bytes)
    }

    #[test]
    fn addition_wraps_integers_and_rounds_floats() {
        for (dtype, value, summand, sum) in [
            (Dtype::U8, "250", "10", "4"),
            (Dtype::U8, "2", "-3", "255"),
            (Dtype::U8, "8", "259", "11"),
            (Dtype::I8, "127", "1", "-128"),
            (Dtype::U64, "18446744073709551615", "1", "0"),
            (Dtype::I64, "-9223372036854775808", "-1", "9223372036854775807"),
            (Dtype::I32, "4.0", "3", "7"),
            (Dtype::F32, "1.5", "0.25", "1.75"),
            (Dtype::F64, "0.1", "0.2", "0.30000000000000004"),
            (Dtype::F16, "2048", "1", "2048.0"),
            (Dtype::BF16, "1", "0.5", "1.5"),
        ] {
            assert_eq!(sum_of(dtype, value, summand), [sum], "{value} + {summand} as {dtype}");
        }
    }

    #[test]
    fn out_of_range_value_is_rejected_with_its_bounds() {
        let rejected = |dtype, text| format!("{:#}", bytes_of_value(dtype, text).unwrap_err());
        assert!(rejected(Dtype::U8, "256").contains("from 0 to 255"));
        assert!(rejected(Dtype::U8, "1.5").contains("not an integer"));
        assert!(rejected(Dtype::I64, "1e300").contains("not an integer"));
        assert!(rejected(Dtype::F32, "one").contains("not a number"));
        assert!(rejected(Dtype::BOOL, "2").contains("true or false"));
        assert!(rejected(Dtype::COMPLEX64, "1").contains("--in FILE"));
        let error = add_to_bytes(Dtype::BOOL, &mut [1], "1").unwrap_err();
        assert!(error.to_string().contains("bool"), "{error}");
        assert!(add_to_bytes(Dtype::I32, &mut [0; 4], "0.5").is_err());
    }

    #[test]
    fn non_numeric_types_are_shown_as_bytes() {
        assert_eq!(show(Dtype::BOOL, &[1, 0]), ["01", "00"]);
        assert_eq!(show(Dtype::COMPLEX32, &[1, 2, 3, 4]), ["01020304"]);
        assert_eq!(sum(Dtype::COMPLEX32, &[0; 4]), None);
        assert_eq!(sum(Dtype::U8, &[1, 2, 250]), Some(253.0));
    }

    #[test]
    fn dtype_of_name_finds_every_type() {
        for dtype in Dtype::ALL {
            assert_eq!(dtype_of_name(dtype.name().unwrap()), Ok(*dtype));
        }
        let unknown = dtype_of_name("float31").unwrap_err();
        assert!(unknown.contains("\"float31\"") && unknown.contains("bfloat16"), "{unknown}");
    }
}
