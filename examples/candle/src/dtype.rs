//! Element types that candle and device-ipc have in common.

use candle_core::DType;
use device_ipc::Dtype;

/// The element types of candle with those of device-ipc.
const PAIRS: [(DType, Dtype); 9] = [
    (DType::U8, Dtype::U8),
    (DType::U32, Dtype::U32),
    (DType::I16, Dtype::I16),
    (DType::I32, Dtype::I32),
    (DType::I64, Dtype::I64),
    (DType::F16, Dtype::F16),
    (DType::BF16, Dtype::BF16),
    (DType::F32, Dtype::F32),
    (DType::F64, Dtype::F64),
];

#[cfg(feature = "cuda")]
pub(crate) fn to_ours(dtype: DType) -> Option<Dtype> {
    PAIRS.iter().find(|(candle, _)| *candle == dtype).map(|(_, ours)| *ours)
}

pub(crate) fn to_candle(dtype: Dtype) -> Option<DType> {
    PAIRS.iter().find(|(_, ours)| *ours == dtype).map(|(candle, _)| *candle)
}

/// Returns the lengths of the dimensions as candle has them.
pub(crate) fn shape_of(shape: &[u64]) -> anyhow::Result<Vec<usize>> {
    shape.iter().map(|size| Ok(usize::try_from(*size)?)).collect()
}

/// Runs `$body` with `$T` as the Rust type of `$dtype`, one of the list above.
#[cfg(feature = "cuda")]
macro_rules! with_type {
    ($dtype:expr, $T:ident => $body:expr) => {{
        use candle_core::DType;
        match $dtype {
            DType::U8 => {
                type $T = u8;
                $body
            }
            DType::U32 => {
                type $T = u32;
                $body
            }
            DType::I16 => {
                type $T = i16;
                $body
            }
            DType::I32 => {
                type $T = i32;
                $body
            }
            DType::I64 => {
                type $T = i64;
                $body
            }
            DType::F16 => {
                type $T = half::f16;
                $body
            }
            DType::BF16 => {
                type $T = half::bf16;
                $body
            }
            DType::F32 => {
                type $T = f32;
                $body
            }
            DType::F64 => {
                type $T = f64;
                $body
            }
            other => anyhow::bail!("tensors of {} are not supported by this example", other.as_str()),
        }
    }};
}

#[cfg(feature = "cuda")]
pub(crate) use with_type;
