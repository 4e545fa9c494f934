//! What keeps the memory of a bundle allocated.

use std::any::Any;

use crate::device::DeviceOrdinal;

/// The owners of memory, by its device; those of one type in one list, so that each needs no allocation of its own.
#[derive(Default)]
pub(super) struct Owners {
    lists: Vec<(DeviceOrdinal, Box<dyn Any + Send>)>,
}

impl Owners {
    pub(super) fn add<O: Any + Send>(&mut self, device: DeviceOrdinal, owner: O) {
        let of_the_device = self.lists.iter_mut().filter(|(of, _)| *of == device);
        match of_the_device.rev().find_map(|(_, list)| list.downcast_mut::<Vec<O>>()) {
            Some(list) => list.push(owner),
            None => self.lists.push((device, Box::new(vec![owner]))),
        }
    }

    /// Those of the memory on a device.
    pub(super) fn take(&mut self, device: DeviceOrdinal) -> Vec<Box<dyn Any + Send>> {
        self.lists.extract_if(.., |(of, _)| *of == device).map(|(_, list)| list).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn owners_of_a_device_are_taken_together_and_dropped_once() {
        let (one, other) = (Arc::new(1_u8), Arc::new(2_u16));
        let devices = [0, 1].map(DeviceOrdinal::new);
        let mut owners = Owners::default();
        for device in [0, 1, 0, 0] {
            owners.add(devices[device], Arc::clone(&one));
            owners.add(devices[device], Arc::clone(&other));
        }
        assert_eq!((Arc::strong_count(&one), Arc::strong_count(&other)), (5, 5));
        let first = owners.take(devices[0]);
        assert_eq!(first.len(), 2, "a list for each type");
        drop(first);
        assert_eq!((Arc::strong_count(&one), Arc::strong_count(&other)), (2, 2));
        assert!(owners.take(devices[0]).is_empty());
        drop(owners);
        assert_eq!((Arc::strong_count(&one), Arc::strong_count(&other)), (1, 1));
    }
}
