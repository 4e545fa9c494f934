//! A program that uses candle and device-ipc gets one cudarc with the features of both.
//!
//! Some of these exclude each other: cudarc's build script refuses `dynamic-linking`, which candle asks for, beside
//! `dynamic-loading`, and accepts it beside the `fallback-dynamic-loading` that device-ipc asks for. That this crate
//! compiles proves that the two can be used together. It is checked and never linked: with `dynamic-linking` the
//! linker needs the CUDA libraries.

use cudarc::driver::CudaSlice;
use device_ipc::{Ipc, ShareBuilder};

/// Shares what lies under a candle tensor on a CUDA device. It compiles only if candle's `CudaSlice` and the one that
/// device-ipc knows are the same type.
pub fn share_storage(ipc: &Ipc, storage: CudaSlice<f32>) -> ShareBuilder<'_, CudaSlice<f32>> {
    ipc.share(storage)
}
