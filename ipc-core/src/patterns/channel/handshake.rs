//! The first packets of both ends: identities, devices and limits.

use serde::{Deserialize, Serialize};

use super::maps::{EndDevices, Maps, check_own};
use crate::model::device::DeviceIdentity;
use crate::model::error::{Error, ErrorKind, Result};
use crate::model::placement::{DeviceMap, DeviceName};
use crate::os::log::{self, Throttle};
use crate::os::process::ProcessIdentity;
use crate::sharing::Ipc;
use crate::transport::{PeerCredentials, program_name};
use crate::wire::short_name;

/// The version of the channel protocol. An end with another version receives this version, and the connection is closed.
pub(super) const CHANNEL_VERSION: u16 = 1;

/// The first bytes of the first packet in every protocol version, followed by the version in little-endian order.
const MAGIC: [u8; 8] = *b"dipcchan";

/// Maximum number of devices of one end.
const MAX_DEVICES: usize = 1024;

/// The self-description of one end of a channel.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) program: String,
    pub(super) backend: String,
    pub(super) process: ProcessIdentity,
    /// The devices, indexed by ordinal.
    pub(super) devices: Vec<DeviceIdentity>,
    /// The device map of memory that this end sends.
    map: Vec<(WireName, WireName)>,
    /// The maximum size of a message in bytes.
    pub(super) limit: u64,
}

/// A device in an encoded map.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
enum WireName {
    Ordinal(u32),
    Identity(DeviceIdentity),
}

/// The first packet of an end.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Greeting {
    Hello(Hello),
    /// A refusal: the listener does not allow this user.
    NotAllowed {
        uid: u32,
    },
    /// A refusal: the process, or its user, has its share of the listener's channels.
    TooManyChannels,
}

impl Hello {
    /// Describes this process, whose devices its map has to name.
    pub(super) fn own(ipc: &Ipc, process: ProcessIdentity, map: &DeviceMap, limit: u64) -> Result<Self> {
        let devices: Vec<_> = ipc.devices()?.iter().map(|device| device.identity).collect();
        check_own(EndDevices { devices: &devices, map })?;
        Ok(Self::new(ipc.backend().info().name, process, devices, map, limit))
    }

    pub(super) fn new(
        backend: &str,
        process: ProcessIdentity,
        devices: Vec<DeviceIdentity>,
        map: &DeviceMap,
        limit: u64,
    ) -> Self {
        let name = |name: &DeviceName| match name {
            DeviceName::Ordinal(ordinal) => WireName::Ordinal(ordinal.get()),
            DeviceName::Identity(identity) => WireName::Identity(*identity),
        };
        Self {
            program: program_name(),
            backend: backend.to_owned(),
            process,
            devices,
            map: map.pairs().iter().map(|(from, to)| (name(from), name(to))).collect(),
            limit,
        }
    }

    fn map(&self) -> DeviceMap {
        let name = |name: &WireName| match name {
            WireName::Ordinal(position) => (*position).into(),
            WireName::Identity(identity) => (*identity).into(),
        };
        DeviceMap::of_pairs(self.map.iter().map(|(from, to)| (name(from), name(to))).collect())
    }

    /// Checks that the peer is compatible and resolves the device maps. Both ends get the same result.
    pub(super) fn agree_with(&self, peer: &Self) -> Result<Maps> {
        if peer.backend != self.backend {
            return Err(Error::WrongBackend {
                what: "the other end of the channel",
                found: peer.backend.clone(),
                expected: self.backend.clone(),
            });
        }
        let (own_map, peer_map) = (self.map(), peer.map());
        let own = EndDevices { devices: &self.devices, map: &own_map };
        Maps::resolve(own, EndDevices { devices: &peer.devices, map: &peer_map })
    }
}

impl Greeting {
    pub(super) fn encode(&self) -> Result<Vec<u8>> {
        let mut packet = MAGIC.to_vec();
        packet.extend(CHANNEL_VERSION.to_le_bytes());
        let body = postcard::to_stdvec(self).map_err(|error| Error::Protocol(error.to_string()))?;
        packet.extend(body);
        Ok(packet)
    }

    /// Decodes a first packet.
    pub(super) fn decode(packet: &[u8]) -> Result<Self> {
        let garbage =
            |why: String| Error::Protocol(format!("its first packet is not a channel greeting: {why}"));
        let body =
            packet.strip_prefix(&MAGIC).ok_or_else(|| garbage("the magic number is missing".into()))?;
        let (version, body) = body.split_first_chunk().ok_or_else(|| garbage("it is truncated".into()))?;
        let version = u16::from_le_bytes(*version);
        if version != CHANNEL_VERSION {
            return Err(Error::Protocol(format!(
                "the peer uses version {version} of the channel protocol, but this process uses version {CHANNEL_VERSION}; \
                 update device-ipc in {}",
                if version > CHANNEL_VERSION { "this process" } else { "the peer" }
            )));
        }
        let mut greeting: Self = match postcard::take_from_bytes(body) {
            Ok((greeting, [])) => greeting,
            Ok(_) => return Err(garbage("it has trailing bytes".into())),
            Err(error) => return Err(garbage(error.to_string())),
        };
        if let Self::Hello(hello) = &mut greeting {
            if hello.devices.len() > MAX_DEVICES || hello.map.len() > MAX_DEVICES {
                return Err(garbage(format!("it lists more than {MAX_DEVICES} devices")));
            }
            hello.program = short_name(&hello.program);
            hello.backend = short_name(&hello.backend);
        }
        Ok(greeting)
    }
}

/// Checks the identity that a peer states against the kernel's credentials, within one pid namespace.
pub(super) fn check_identity(
    hello: &Hello,
    local: &ProcessIdentity,
    credentials: &PeerCredentials,
) -> Result<()> {
    if hello.process.pid_namespace == local.pid_namespace && hello.process.pid != credentials.pid {
        return Err(Error::Protocol(format!(
            "the peer claims to be process {}, but the kernel reports process {}",
            hello.process.pid, credentials.pid
        )));
    }
    Ok(())
}

/// Logs that a connection was refused if its peer is the reason, and else returns the error.
pub(super) fn refused(error: Error, peer: std::fmt::Arguments<'_>) -> Result<()> {
    let by_peer = [ErrorKind::Protocol, ErrorKind::Placement, ErrorKind::Gone, ErrorKind::Closed];
    if !by_peer.contains(&error.kind()) {
        return Err(error);
    }
    static WARNINGS: Throttle = Throttle::new();
    if let Some(count) = WARNINGS.count() {
        tracing::warn!(target: log::CHANNEL, %peer, %error, count, "a process that connected was not accepted as a channel");
    }
    Ok(())
}
