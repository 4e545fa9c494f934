//! The registration of backends.

use std::sync::Arc;

use crate::backend::DeviceIpc;
use crate::backend::select::Unavailable;

/// A backend that can be loaded, registered with [`register_backend!`](crate::register_backend) or passed to
/// [`Backends::with`](crate::Backends::with).
#[derive(Clone, Copy, Debug)]
pub struct Registration {
    pub(super) name: &'static str,
    pub(super) rank: Rank,
    pub(super) load: fn() -> Result<Arc<dyn DeviceIpc>, Unavailable>,
}

impl Registration {
    /// Creates a registration. `load` finds the vendor's library and creates the backend; it creates no context and starts
    /// no thread.
    pub const fn new(
        name: &'static str,
        rank: Rank,
        load: fn() -> Result<Arc<dyn DeviceIpc>, Unavailable>,
    ) -> Self {
        Self { name, rank, load }
    }

    /// Returns the backend's name.
    pub const fn name(&self) -> &'static str {
        self.name
    }
}

/// The element of the list that [`register_backend!`](crate::register_backend) fills, so that [`Registration`] does not
/// depend on how the list is made.
pub struct Registered(pub Registration);

inventory::collect!(Registered);

/// The priority of a backend in [`Backends::auto`](crate::Backends::auto); lower ranks are tried first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank(pub u16);

impl Rank {
    /// NVIDIA CUDA.
    pub const CUDA: Self = Self(100);
    /// Huawei Ascend.
    pub const ASCEND: Self = Self(200);
    /// Backends of other crates.
    pub const THIRD_PARTY: Self = Self(1000);
    /// Simulated backends: selected only by name, or if the caller allows them.
    pub const SIMULATED: Self = Self(u16::MAX);
}
