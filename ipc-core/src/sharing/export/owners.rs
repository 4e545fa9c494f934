//! The owners of the memory of named tensors.

use std::any::Any;
use std::sync::Arc;

use crate::backend::interop::Region;
use crate::backend::{DeviceBound, DeviceIpc};
use crate::model::device::DeviceOrdinal;

/// The owners by device; owners of one type are in one list, so that they need no allocation each and are dropped in one device
/// context.
pub(super) struct Owners {
    backend: Arc<dyn DeviceIpc>,
    lists: Vec<DeviceBound<Box<dyn Any + Send>>>,
}

impl Owners {
    pub(super) fn new(backend: &Arc<dyn DeviceIpc>) -> Self {
        Self { backend: Arc::clone(backend), lists: Vec::new() }
    }

    pub(super) const fn backend(&self) -> &Arc<dyn DeviceIpc> {
        &self.backend
    }

    pub(super) fn add<O: Any + Send>(&mut self, region: &Region, owner: O) {
        let of_the_device = self.lists.iter_mut().filter(|list| list.is_on(region.range.device));
        let mut of_the_type = of_the_device.rev().filter_map(|list| list.get_mut()?.downcast_mut::<Vec<O>>());
        match of_the_type.next() {
            Some(list) => list.push(owner),
            None => {
                let list: Box<dyn Any + Send> = Box::new(vec![owner]);
                self.lists.push(DeviceBound::of_region(&self.backend, region, list));
            }
        }
    }

    /// Takes the owners of the memory on a device.
    pub(super) fn take(&mut self, device: DeviceOrdinal) -> Vec<DeviceBound<Box<dyn Any + Send>>> {
        self.lists.extract_if(.., |list| list.is_on(device)).collect()
    }
}
