//! Device maps of a channel, resolved to device identities.

use crate::model::device::{DeviceIdentity, DeviceOrdinal};
use crate::model::error::{Error, Result};
use crate::model::placement::{DeviceMap, DeviceName};

/// The owner of the own map, in errors.
const OWN: &str = "this process's";

/// The devices of one end, indexed by ordinal, and the map of memory that it sends.
#[derive(Clone, Copy, Debug)]
pub(super) struct EndDevices<'a> {
    pub(super) devices: &'a [DeviceIdentity],
    pub(super) map: &'a DeviceMap,
}

/// A map from devices of the sender to devices of the receiver.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ResolvedMap {
    pairs: Vec<(DeviceIdentity, DeviceIdentity)>,
}

impl ResolvedMap {
    /// Returns the receiver's device for memory on a home device.
    pub(super) fn get(&self, home: DeviceIdentity) -> Option<DeviceIdentity> {
        self.pairs.iter().find(|(from, _)| *from == home).map(|(_, to)| *to)
    }

    pub(super) fn inverse(&self) -> Self {
        Self { pairs: self.pairs.iter().map(|(from, to)| (*to, *from)).collect() }
    }
}

/// The maps of a channel from the view of one end; `None` if neither end has stated a map.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Maps {
    pub(super) outgoing: Option<ResolvedMap>,
    pub(super) incoming: Option<ResolvedMap>,
    /// The map of sent replies: the inverse of the map of the message that they answer.
    pub(super) replying: Option<ResolvedMap>,
    /// The map of received replies.
    pub(super) replied: Option<ResolvedMap>,
}

impl Maps {
    /// Resolves the maps of both ends. An end without a map sends by the inverse of the other end's map.
    pub(super) fn resolve(own: EndDevices<'_>, peer: EndDevices<'_>) -> Result<Self> {
        let resolve = |from: EndDevices<'_>, to: EndDevices<'_>, whose: &'static str| {
            (!from.map.pairs().is_empty()).then(|| resolve(from, to.devices, whose)).transpose()
        };
        let own_map = resolve(own, peer, OWN)?;
        let peer_map = resolve(peer, own, "the peer's")?;
        let inverse = |map: &Option<ResolvedMap>| map.as_ref().map(ResolvedMap::inverse);
        let outgoing = own_map.clone().or_else(|| inverse(&peer_map));
        let incoming = peer_map.or_else(|| inverse(&own_map));
        Ok(Self { replying: inverse(&incoming), replied: inverse(&outgoing), outgoing, incoming })
    }
}

fn resolve(from: EndDevices<'_>, to: &[DeviceIdentity], whose: &str) -> Result<ResolvedMap> {
    let mut resolved: Vec<(DeviceIdentity, DeviceIdentity)> = Vec::new();
    for (one, other) in from.map.pairs() {
        let find = |name, devices, side| {
            find(name, devices).ok_or_else(|| unknown((one, other), name, devices, whose, side))
        };
        let pair = (find(one, from.devices, "sender")?, find(other, to, "receiver")?);
        if resolved.iter().any(|known| known.0 == pair.0 || known.1 == pair.1) {
            return Err(Error::InvalidDeviceMap(format!(
                "device {one} to {other} of {whose} map names a device by its ordinal that another pair names by its identity; \
                 each device may occur only once per side"
            )));
        }
        resolved.push(pair);
    }
    Ok(ResolvedMap { pairs: resolved })
}

/// Checks that this process has the devices that its own map sends from.
pub(super) fn check_own(own: EndDevices<'_>) -> Result<()> {
    for (one, other) in own.map.pairs() {
        find(one, own.devices).ok_or_else(|| unknown((one, other), one, own.devices, OWN, "sender"))?;
    }
    Ok(())
}

fn find(name: &DeviceName, devices: &[DeviceIdentity]) -> Option<DeviceIdentity> {
    match name {
        DeviceName::Ordinal(ordinal) => devices.get(ordinal.index()).copied(),
        DeviceName::Identity(identity) => devices.iter().find(|one| *one == identity).copied(),
    }
}

fn unknown(
    (one, other): (&DeviceName, &DeviceName),
    name: &DeviceName,
    devices: &[DeviceIdentity],
    whose: &str,
    side: &str,
) -> Error {
    Error::InvalidDeviceMap(format!(
        "device {one} to {other} of {whose} map: the {side} sees no device {name}, it sees {} device(s){}",
        devices.len(),
        if matches!(name, DeviceName::Ordinal(_)) { ", numbered from 0" } else { "" }
    ))
}

/// Returns the ordinal of a device identity.
pub(super) fn position(devices: &[DeviceIdentity], identity: DeviceIdentity) -> Option<DeviceOrdinal> {
    devices.iter().position(|device| *device == identity).map(|position| DeviceOrdinal::new(position as u32))
}

#[cfg(test)]
mod tests;
