//! The Python extension module `device_ipc._native`; the package around it is `python/device_ipc`.
//!
//! Every call that may reach a driver or wait releases the interpreter lock, except for the query of an event, which waits for
//! nothing. Waits run in short slices, between which pending signals are handled, so that Ctrl-C ends each of them.

mod backend;
mod block_numbers;
mod blocks;
mod buffer;
mod channel;
mod claims;
mod counters;
mod cuda_array_interface;
mod devices;
mod dlpack;
mod dtype;
mod error;
mod exchange;
mod export;
mod grant;
mod keeper;
mod log;
mod managed_views;
mod mapping;
mod mapping_inner;
mod memory;
mod named_tensors;
mod open;
mod owner;
mod pull;
mod recent;
mod release_wait;
mod remedy;
mod reservation;
mod ring;
mod session;
mod share;
mod storages;
mod stream;
mod tensor;
mod timeline;
mod torch_pool;
mod uses;
mod views;
mod wait;

use pyo3::prelude::*;

/// Registers classes and functions. Loads no driver and starts no thread.
#[pymodule(gil_used = false)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    remedy::install();
    module.add_class::<block_numbers::_BlockPool>()?;
    module.add_class::<blocks::_BlockCopy>()?;
    module.add_class::<blocks::_BlockReader>()?;
    module.add_class::<blocks::_CopyQueue>()?;
    module.add_class::<blocks::_SubmittedCopies>()?;
    module.add_class::<channel::Channel>()?;
    module.add_class::<claims::_ClaimTable>()?;
    module.add_class::<claims::_Claims>()?;
    module.add_class::<channel::Listener>()?;
    module.add_class::<channel::Received>()?;
    module.add_class::<channel::ReceivedExport>()?;
    module.add_class::<devices::Device>()?;
    module.add_class::<export::Changes>()?;
    module.add_class::<export::Descriptor>()?;
    module.add_class::<grant::Grant>()?;
    module.add_class::<export::Export>()?;
    module.add_class::<export::Holder>()?;
    module.add_class::<keeper::Keeper>()?;
    module.add_class::<mapping::Mapping>()?;
    module.add_class::<reservation::Reservation>()?;
    module.add_class::<ring::ReaderPosition>()?;
    module.add_class::<ring::Ring>()?;
    module.add_class::<ring::RingReadSlot>()?;
    module.add_class::<ring::RingReader>()?;
    module.add_class::<ring::RingReaders>()?;
    module.add_class::<ring::RingWriteSlot>()?;
    module.add_class::<storages::Storages>()?;
    module.add_class::<stream::Stream>()?;
    module.add_class::<tensor::Tensor>()?;
    module.add_class::<timeline::Timeline>()?;
    module.add_function(wrap_pyfunction!(backend::_backends, module)?)?;
    module.add_function(wrap_pyfunction!(block_numbers::_pack_blocks, module)?)?;
    module.add_function(wrap_pyfunction!(channel::connect, module)?)?;
    module.add_function(wrap_pyfunction!(channel::listen, module)?)?;
    module.add_function(wrap_pyfunction!(counters::close_unused, module)?)?;
    module.add_function(wrap_pyfunction!(counters::counters, module)?)?;
    module.add_function(wrap_pyfunction!(counters::list_exports, module)?)?;
    module.add_function(wrap_pyfunction!(counters::shutdown, module)?)?;
    module.add_function(wrap_pyfunction!(devices::available, module)?)?;
    module.add_function(wrap_pyfunction!(devices::devices, module)?)?;
    module.add_function(wrap_pyfunction!(keeper::keep, module)?)?;
    module.add_function(wrap_pyfunction!(log::_log_level, module)?)?;
    module.add_function(wrap_pyfunction!(log::_log_start, module)?)?;
    module.add_function(wrap_pyfunction!(log::_log_stop, module)?)?;
    module.add_function(wrap_pyfunction!(log::_log_take, module)?)?;
    module.add_function(wrap_pyfunction!(memory::_empty_block, module)?)?;
    module.add_function(wrap_pyfunction!(memory::empty, module)?)?;
    module.add_function(wrap_pyfunction!(open::open, module)?)?;
    module.add_function(wrap_pyfunction!(pull::pull_into, module)?)?;
    module.add_function(wrap_pyfunction!(remedy::_remedies, module)?)?;
    module.add_function(wrap_pyfunction!(ring::join, module)?)?;
    module.add_function(wrap_pyfunction!(session::enable_remote, module)?)?;
    module.add_function(wrap_pyfunction!(share::share, module)?)?;
    module.add_function(wrap_pyfunction!(torch_pool::_pool_blocks, module)?)?;
    module.add_function(wrap_pyfunction!(torch_pool::_pool_prepare, module)?)?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    Ok(())
}
