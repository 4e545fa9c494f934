//! Device maps: the importer's choice of a device by the home device of the memory.

use std::fmt;

use crate::model::device::{DeviceIdentity, DeviceOrdinal};
use crate::model::error::{Error, Remedy, Result};

/// The name of a device in a device map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceName {
    /// The ordinal in the process that the device belongs to: the sender on the left of a map, the receiver on the right.
    Ordinal(DeviceOrdinal),
    /// The identity, which does not depend on the numbering of any process.
    Identity(DeviceIdentity),
}

impl From<u32> for DeviceName {
    fn from(position: u32) -> Self {
        Self::Ordinal(position.into())
    }
}

impl From<DeviceOrdinal> for DeviceName {
    fn from(ordinal: DeviceOrdinal) -> Self {
        Self::Ordinal(ordinal)
    }
}

impl From<DeviceIdentity> for DeviceName {
    fn from(identity: DeviceIdentity) -> Self {
        Self::Identity(identity)
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ordinal(ordinal) => ordinal.fmt(f),
            Self::Identity(identity) => identity.fmt(f),
        }
    }
}

/// A one-to-one table from home devices of the sender to devices of the receiver.
///
/// A channel uses one for the messages that it sends ([`ConnectBuilder::device_map`](crate::ConnectBuilder::device_map),
/// [`ListenBuilder::device_map`](crate::ListenBuilder::device_map)). An importer of plain descriptors passes one to
/// [`OpenBuilder::on_mapped_devices`](crate::OpenBuilder::on_mapped_devices), and names the home devices by their identity
/// there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceMap {
    pairs: Vec<(DeviceName, DeviceName)>,
}

impl DeviceMap {
    /// Creates an empty map.
    pub const fn new() -> Self {
        Self { pairs: Vec::new() }
    }

    /// Adds a pair: memory of the sender's device `from` is opened on the receiver's device `to`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidDeviceMap`] if the map contains one of the two. A device that is named once by its ordinal and once by
    /// its identity is detected when the map is used, with the same error.
    pub fn insert(mut self, from: impl Into<DeviceName>, to: impl Into<DeviceName>) -> Result<Self> {
        let (from, to) = (from.into(), to.into());
        if let Some((known_from, known_to)) =
            self.pairs.iter().find(|(one, other)| *one == from || *other == to)
        {
            return Err(Error::InvalidDeviceMap(format!(
                "device {from} to {to} conflicts with device {known_from} to {known_to}; each device may occur only once per \
                 side"
            )));
        }
        self.pairs.push((from, to));
        Ok(self)
    }

    /// Returns the receiver's device for memory of the sender's device `from`, as the map names both.
    pub fn get(&self, from: impl Into<DeviceName>) -> Option<DeviceName> {
        let from = from.into();
        self.pairs.iter().find(|(one, _)| *one == from).map(|(_, to)| *to)
    }

    /// Returns the pairs of the sender's device and the receiver's.
    pub fn pairs(&self) -> &[(DeviceName, DeviceName)] {
        &self.pairs
    }

    pub(crate) const fn of_pairs(pairs: Vec<(DeviceName, DeviceName)>) -> Self {
        Self { pairs }
    }

    /// Returns the receiver's device for memory of `home`, if the sender's numbering is unknown.
    pub(crate) fn device_for(&self, home: DeviceIdentity) -> Result<DeviceName> {
        if let Some(device) = self.get(home) {
            return Ok(device);
        }
        let unknown = self.pairs.iter().find(|(from, _)| matches!(from, DeviceName::Ordinal(_)));
        match unknown {
            Some((from, to)) => Err(Error::InvalidDeviceMap(format!(
                "device {from} to {to} names a device by its ordinal in the sender's process, which is known only \
                 on a channel; {}",
                Remedy::NameByIdentity
            ))),
            None => Err(Error::NotInDeviceMap { home, peer: None }),
        }
    }
}

#[cfg(test)]
mod tests;
