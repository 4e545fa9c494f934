//! Where a receiver wants memory of another process: by a map from home devices to its own.

use crate::device::{DeviceIdentity, DeviceOrdinal};
use crate::error::{Error, Result};

/// On which of this process's devices memory of which home is opened. One to one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceMap {
    pairs: Vec<(DeviceIdentity, DeviceOrdinal)>,
}

impl DeviceMap {
    /// An empty map.
    pub const fn new() -> Self {
        Self { pairs: Vec::new() }
    }

    /// Memory that lives on `home` is opened on `device`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidDeviceMap`] where one of them is in the map already.
    pub fn insert(mut self, home: DeviceIdentity, device: impl Into<DeviceOrdinal>) -> Result<Self> {
        let device = device.into();
        if let Some((known_home, known)) =
            self.pairs.iter().find(|(one, other)| *one == home || *other == device)
        {
            return Err(Error::InvalidDeviceMap(format!(
                "device {home} to {device} conflicts with device {known_home} to {known}; each may stand in it once"
            )));
        }
        self.pairs.push((home, device));
        Ok(self)
    }

    /// The device for memory that lives on `home`.
    pub fn get(&self, home: &DeviceIdentity) -> Option<DeviceOrdinal> {
        self.pairs.iter().find(|(one, _)| one == home).map(|(_, device)| *device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_is_one_to_one() {
        let [a, b] = [DeviceIdentity::Uuid([1; 16]), DeviceIdentity::Uuid([2; 16])];
        let map = DeviceMap::new().insert(a, 1).unwrap();
        assert_eq!(map.get(&a), Some(DeviceOrdinal::new(1)));
        assert_eq!(map.get(&b), None);
        assert!(matches!(map.clone().insert(a, 0), Err(Error::InvalidDeviceMap(_))));
        assert!(matches!(map.clone().insert(b, 1), Err(Error::InvalidDeviceMap(_))));
        assert!(map.insert(b, 0).is_ok());
    }
}
