//! One-line summaries of tensors: the mean and the first values.

use std::fmt;

use anyhow::Result;
use device_ipc::{Dtype, TensorLayout};
use serde_json::{Value, json};

use super::{DeviceBytes, values};

/// Maximum number of values shown.
const SHOWN: usize = 8;

/// Maximum size of a tensor whose mean is computed: more takes too long for a summary.
const MAX_MEAN_BYTES: u64 = 1024 * 1024 * 1024;

/// The mean of a tensor and its first values.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Summary {
    /// `None` for element types without a numeric value, for a tensor with gaps, and for one larger than 1 GiB.
    pub(crate) mean: Option<f64>,
    first: Vec<String>,
    more: bool,
}

impl Summary {
    /// Reads the elements, the first of which is at the start of the range. Without a layout, or with gaps between the
    /// elements, the bytes are shown instead.
    pub(crate) fn of(bytes: &DeviceBytes<'_>, layout: Option<&TensorLayout>) -> Result<Self> {
        match layout {
            Some(layout) if layout.is_contiguous() => Self::of_numbers(bytes, layout.dtype(), true),
            Some(_) => Self::of_numbers(bytes, Dtype::U8, false),
            None => Self::of_numbers(bytes, Dtype::U8, true),
        }
    }

    fn of_numbers(bytes: &DeviceBytes<'_>, dtype: Dtype, with_mean: bool) -> Result<Self> {
        let element = dtype.bytes().unwrap_or(1) as usize;
        let with_mean = with_mean && bytes.len() <= MAX_MEAN_BYTES;
        let (mut sum, mut count, mut first) = (with_mean.then_some(0.0), 0, Vec::new());
        let read = if with_mean { bytes.len() } else { bytes.len().min((SHOWN * element) as u64) };
        bytes.slice(0, read)?.read(|piece| {
            sum = sum.and_then(|sum| Some(sum + values::sum(dtype, piece)?));
            count += piece.len() / element;
            if first.is_empty() {
                first = values::show(dtype, &piece[..piece.len().min(SHOWN * element)]);
            }
            Ok(())
        })?;
        let mean = sum.filter(|_| count > 0).map(|sum| sum / count as f64);
        Ok(Self { mean, more: bytes.len() > (first.len() * element) as u64, first })
    }
}

impl Summary {
    /// Returns the same as its text for programs; the values are text, because JSON has no infinity and no 64-bit integer.
    pub(crate) fn report(&self) -> Value {
        json!({ "mean": self.mean, "values": self.first, "more_values": self.more })
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(mean) = self.mean {
            // Six decimal places show nothing of a very small or very large mean.
            if mean == 0.0 || (1e-5..1e16).contains(&mean.abs()) {
                write!(f, "mean={mean:.6} ")?;
            } else {
                write!(f, "mean={mean:.6e} ")?;
            }
        }
        let more = if self.more { ", …" } else { "" };
        write!(f, "values=[{}{more}]", self.first.join(", "))
    }
}
