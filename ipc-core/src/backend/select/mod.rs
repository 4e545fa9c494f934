//! Registration, availability and selection of backends.

mod choose;
mod registry;

pub use crate::model::availability::{BackendStatus, Unavailable};
pub use choose::{BACKEND_VARIABLE, Backends};
pub use registry::{Rank, Registered, Registration};

/// Registers a backend of another crate, so that [`Backends::registered`] lists it.
///
/// The linker drops the registration if the program uses nothing else of its crate, so offer a plain constructor or a public
/// [`Registration`] as well.
///
/// ```
/// # use std::sync::Arc;
/// # use device_ipc_core::backend::{DeviceIpc, Rank, Registration, Unavailable};
/// # fn load() -> Result<Arc<dyn DeviceIpc>, Unavailable> { Err(Unavailable::NoDevice { detail: "none".into() }) }
/// device_ipc_core::backend::register_backend!(Registration::new("acme", Rank::THIRD_PARTY, load));
/// ```
#[doc(hidden)]
#[macro_export]
macro_rules! register_backend {
    ($registration:expr) => {
        $crate::__private::inventory::submit! { $crate::__private::Registered($registration) }
    };
}
pub use register_backend;
