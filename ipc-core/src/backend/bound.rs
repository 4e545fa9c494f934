//! Values of the caller that are used and dropped with the context of a device current.

use std::fmt;
use std::sync::Arc;

use super::{DeviceIpc, with_device_context};
use crate::backend::interop::Region;
use crate::model::device::DeviceOrdinal;
use crate::os::process::Owner;

/// An owner of device memory, or a callback that may hold one, that is dropped with the context of its device current, on
/// whichever thread: vendors free memory by the current context (`cuMemFreeAsync` on the default stream fails
/// without one, and the memory leaks). The thread has its own context back afterwards.
pub(crate) struct DeviceBound<T> {
    /// `None` once it was taken.
    value: Option<T>,
    /// `None` where the value is of another backend.
    place: Option<(Arc<dyn DeviceIpc>, DeviceOrdinal)>,
    process: Owner,
}

impl<T> DeviceBound<T> {
    /// Binds a value to a device.
    pub(crate) fn new(backend: &Arc<dyn DeviceIpc>, device: DeviceOrdinal, value: T) -> Self {
        let place = Some((Arc::clone(backend), device));
        Self { value: Some(value), place, process: Owner::current() }
    }

    /// Binds an owner to the device of its region; to none where the region is of another backend.
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

    /// Returns the value, for use in whatever context is current.
    pub(crate) fn get_mut(&mut self) -> Option<&mut T> {
        self.value.as_mut()
    }

    /// Uses the value with the context current.
    pub(crate) fn with<R>(&self, body: impl FnOnce(&T) -> R) -> Option<R> {
        let value = self.value.as_ref()?;
        Some(in_context(self.place.as_ref(), || body(value)))
    }

    /// Consumes the value with the context current.
    pub(crate) fn consume<R>(mut self, body: impl FnOnce(T) -> R) -> Option<R> {
        let value = self.value.take()?;
        Some(in_context(self.place.as_ref(), || body(value)))
    }

    /// Gives the value back, which is bound no longer.
    pub(crate) fn into_inner(mut self) -> T {
        self.value.take().expect("it is taken once, by a call that consumes this")
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
