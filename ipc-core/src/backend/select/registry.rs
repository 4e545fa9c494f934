//! The registration of backends.

use std::sync::Arc;

use crate::backend::select::Unavailable;
use crate::backend::{DeviceIpc, Diagnosis};

/// A backend that can be loaded, registered with [`register_backend!`](crate::backend::register_backend) or passed to
/// [`Backends::with`](crate::backend::Backends::with).
///
/// It also states what programs and bindings have to know of the backend before they load it: they name no vendor.
#[derive(Clone, Copy, Debug)]
pub struct Registration {
    pub(super) name: &'static str,
    pub(super) rank: Rank,
    pub(super) load: fn() -> Result<Arc<dyn DeviceIpc>, Unavailable>,
    device_kind: &'static str,
    dlpack_device_type: Option<i32>,
    diagnosis: Option<&'static dyn Diagnosis>,
}

impl Registration {
    /// Creates a registration. `load` finds the vendor's library and creates the backend; it creates no context and starts
    /// no thread.
    pub const fn new(
        name: &'static str,
        rank: Rank,
        load: fn() -> Result<Arc<dyn DeviceIpc>, Unavailable>,
    ) -> Self {
        Self { name, rank, load, device_kind: name, dlpack_device_type: None, diagnosis: None }
    }

    /// Sets the name that Python frameworks have for this kind of device, as in the device `"npu:0"` of PyTorch: `torch.npu` is its
    /// module, and `npu_stream` the attribute of a stream there that has the vendor's handle. Without it, it is the backend's name.
    pub const fn with_device_kind(mut self, device_kind: &'static str) -> Self {
        self.device_kind = device_kind;
        self
    }

    /// Sets the `DLDeviceType` of the memory (`dlpack.h`), with which Python frameworks exchange it. The type 1, `kDLCPU`, states that
    /// the host accesses the memory at the addresses of the device. Without a type, frameworks cannot use the memory.
    pub const fn with_dlpack_device_type(mut self, number: i32) -> Self {
        self.dlpack_device_type = Some(number);
        self
    }

    /// Sets the checks of the vendor's driver and devices for `device-ipc doctor`.
    pub const fn with_diagnosis(mut self, diagnosis: &'static dyn Diagnosis) -> Self {
        self.diagnosis = Some(diagnosis);
        self
    }

    /// Returns the backend's name.
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// Returns whether the backend only simulates devices.
    pub fn is_simulated(&self) -> bool {
        self.rank == Rank::SIMULATED
    }

    /// Returns the name that Python frameworks have for this kind of device.
    pub const fn device_kind(&self) -> &'static str {
        self.device_kind
    }

    /// Returns the `DLDeviceType` of the memory.
    pub const fn dlpack_device_type(&self) -> Option<i32> {
        self.dlpack_device_type
    }

    /// Returns the checks of the vendor's driver and devices.
    pub const fn diagnosis(&self) -> Option<&'static dyn Diagnosis> {
        self.diagnosis
    }
}

/// The element of the list that [`register_backend!`](crate::backend::register_backend) fills, so that [`Registration`] does not
/// depend on how the list is made.
pub struct Registered(pub Registration);

inventory::collect!(Registered);

/// The priority of a backend in [`Backends::auto`](crate::backend::Backends::auto); lower ranks are tried first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank(pub u16);

impl Rank {
    /// Backends of other crates. Those of this project have lower ranks.
    pub const THIRD_PARTY: Self = Self(1000);
    /// Simulated backends: selected only by name, or if the caller allows them.
    pub const SIMULATED: Self = Self(u16::MAX);
}
