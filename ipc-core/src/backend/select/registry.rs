//! How a backend makes itself known.

use std::sync::Arc;

use crate::backend::DeviceIpc;
use crate::backend::select::Unavailable;

/// A backend that can be loaded: by [`register_backend!`](crate::register_backend), or handed to
/// [`Backends::with`](crate::Backends::with).
#[derive(Clone, Copy, Debug)]
pub struct Registration {
    pub(super) name: &'static str,
    pub(super) rank: Rank,
    pub(super) load: fn() -> Result<Arc<dyn DeviceIpc>, Unavailable>,
}

impl Registration {
    /// A backend called `name`. `load` finds the vendor's library and makes the backend; it creates no context and
    /// starts no thread.
    pub const fn new(
        name: &'static str,
        rank: Rank,
        load: fn() -> Result<Arc<dyn DeviceIpc>, Unavailable>,
    ) -> Self {
        Self { name, rank, load }
    }

    /// The backend's name.
    pub const fn name(&self) -> &'static str {
        self.name
    }
}

inventory::collect!(Registration);

/// The place of a backend when the first that has a device is taken: lower ranks first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank(pub u16);

impl Rank {
    /// NVIDIA CUDA.
    pub const CUDA: Self = Self(100);
    /// Huawei Ascend.
    pub const ASCEND: Self = Self(200);
    /// Backends of other crates.
    pub const THIRD_PARTY: Self = Self(1000);
    /// Backends without hardware: taken only when asked for by name, or where the caller allows it.
    pub const SIMULATED: Self = Self(u16::MAX);
}
