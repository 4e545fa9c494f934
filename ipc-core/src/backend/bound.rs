//! Values of the caller that the library uses and drops with a device context current.

use std::fmt;
use std::sync::Arc;

use super::{DeviceIpc, with_device_context};
use crate::backend::interop::Region;
use crate::model::device::DeviceOrdinal;
use crate::os::process::Owner;

/// An owner of device memory, or a callback that may contain one, dropped with the context of its device current.
///
/// Any thread may drop it: vendors free memory in the current context (without one, `cuMemFreeAsync` on the default stream
/// fails, and the memory leaks). The drop restores the thread's previous context.
pub(crate) struct DeviceBound<T> {
    /// `None` after the value was taken.
    value: Option<T>,
    /// `None` if the value belongs to another backend.
    place: Option<(Arc<dyn DeviceIpc>, DeviceOrdinal)>,
    process: Owner,
}

impl<T> DeviceBound<T> {
    /// Binds a value to a device.
    pub(crate) fn new(backend: &Arc<dyn DeviceIpc>, device: DeviceOrdinal, value: T) -> Self {
        let place = Some((Arc::clone(backend), device));
        Self { value: Some(value), place, process: Owner::current() }
    }

    /// Binds an owner to the device of its region, or to no device if the region belongs to another backend.
    pub(crate) fn of_region(backend: &Arc<dyn DeviceIpc>, region: &Region, owner: T) -> Self {
        let mut bound = Self::new(backend, region.range.device, owner);
        bound.place.take_if(|(backend, _)| backend.info().name != region.backend);
        bound
    }

    /// Binds a value to no device.
    pub(crate) fn unbound(value: T) -> Self {
        Self { value: Some(value), place: None, process: Owner::current() }
    }

    /// Returns whether the value is bound to this device.
    pub(crate) fn is_on(&self, device: DeviceOrdinal) -> bool {
        self.place.as_ref().is_some_and(|(_, bound)| *bound == device)
    }

    /// Returns the value, for use in the current context.
    pub(crate) fn get_mut(&mut self) -> Option<&mut T> {
        self.value.as_mut()
    }

    /// Runs `body` on the value with the device context current.
    pub(crate) fn with<R>(&self, body: impl FnOnce(&T) -> R) -> Option<R> {
        let value = self.value.as_ref()?;
        Some(in_context(self.place.as_ref(), || body(value)))
    }

    /// Consumes the value by `body` with the device context current.
    pub(crate) fn consume<R>(mut self, body: impl FnOnce(T) -> R) -> Option<R> {
        let value = self.value.take()?;
        Some(in_context(self.place.as_ref(), || body(value)))
    }

    /// Returns the value, no longer bound to the device.
    pub(crate) fn into_inner(mut self) -> T {
        self.value.take().expect("the value is taken only by calls that consume the guard")
    }
}

impl<T> Drop for DeviceBound<T> {
    fn drop(&mut self) {
        let Some(value) = self.value.take() else { return };
        // In a forked child the driver's state is the parent's.
        if std::mem::needs_drop::<T>() && self.process.is_here() {
            in_context(self.place.as_ref(), || drop(value));
        }
    }
}

fn in_context<R>(place: Option<&(Arc<dyn DeviceIpc>, DeviceOrdinal)>, body: impl FnOnce() -> R) -> R {
    match place {
        Some((backend, device)) => with_device_context(&**backend, *device, body),
        None => body(),
    }
}

impl<T> fmt::Debug for DeviceBound<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let device = self.place.as_ref().map(|(_, device)| device);
        f.debug_struct("DeviceBound").field("device", &device).finish_non_exhaustive()
    }
}
