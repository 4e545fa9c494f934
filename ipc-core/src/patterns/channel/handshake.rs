//! What both ends say first: who they are, and which devices they have.

use serde::{Deserialize, Serialize};

use super::maps::{End, Maps};
use crate::model::device::DeviceIdentity;
use crate::model::error::{Error, Result};
use crate::model::placement::{DeviceMap, DeviceName};
use crate::os::process::ProcessIdentity;
use crate::sharing::Session;
use crate::transport::{PeerCredentials, program_name};
use crate::wire::short_name;

/// The version of channels that this library speaks. An end of another version is told so, and the connection is closed.
pub(super) const CHANNEL_VERSION: u16 = 1;

/// What every first packet begins with, whatever the version; the version follows, little-endian.
const MAGIC: [u8; 8] = *b"dipcchan";

/// How many devices an end may have.
const MAX_DEVICES: usize = 1024;

/// An end of a channel, as it describes itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) program: String,
    pub(super) backend: String,
    pub(super) process: ProcessIdentity,
    /// In the order of its numbering.
    pub(super) devices: Vec<DeviceIdentity>,
    /// For what it sends.
    map: Vec<(WireName, WireName)>,
    /// The largest message that it takes, in bytes.
    pub(super) limit: u64,
}

/// A device of a map.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
enum WireName {
    Ordinal(u32),
    Identity(DeviceIdentity),
}

/// What is said first.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Greeting {
    Hello(Hello),
    /// The connection is refused to this user.
    NotAllowed {
        uid: u32,
    },
}

impl Hello {
    /// This process.
    pub(super) fn own(ipc: &Session, process: ProcessIdentity, map: &DeviceMap, limit: u64) -> Result<Self> {
        let devices = ipc.devices()?.iter().map(|device| device.identity).collect();
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

    /// Does the other end fit? Both ends ask, and come to the same answer.
    pub(super) fn agree_with(&self, peer: &Self) -> Result<Maps> {
        if peer.backend != self.backend {
            return Err(Error::WrongBackend {
                what: "the other end of the channel",
                found: peer.backend.clone(),
                expected: self.backend.clone(),
            });
        }
        let (own_map, peer_map) = (self.map(), peer.map());
        let own = End { devices: &self.devices, map: &own_map };
        Maps::of(own, End { devices: &peer.devices, map: &peer_map })
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

    /// Reads what an end says first.
    pub(super) fn decode(packet: &[u8]) -> Result<Self> {
        let garbage = |why: String| Error::Protocol(format!("its first packet is no channel's: {why}"));
        let body = packet.strip_prefix(&MAGIC).ok_or_else(|| garbage("it begins otherwise".into()))?;
        let (version, body) = body.split_first_chunk().ok_or_else(|| garbage("it is cut off".into()))?;
        let version = u16::from_le_bytes(*version);
        if version != CHANNEL_VERSION {
            return Err(Error::Protocol(format!(
                "it speaks version {version} of channels and this process version {CHANNEL_VERSION}; update device-ipc in \
                 {}",
                if version > CHANNEL_VERSION { "this process" } else { "the other one" }
            )));
        }
        let mut greeting: Self = match postcard::take_from_bytes(body) {
            Ok((greeting, [])) => greeting,
            Ok(_) => return Err(garbage("something follows it".into())),
            Err(error) => return Err(garbage(error.to_string())),
        };
        if let Self::Hello(hello) = &mut greeting {
            if hello.devices.len() > MAX_DEVICES || hello.map.len() > MAX_DEVICES {
                return Err(garbage(format!("it speaks of more than {MAX_DEVICES} devices")));
            }
            hello.program = short_name(&hello.program);
            hello.backend = short_name(&hello.backend);
        }
        Ok(greeting)
    }
}

/// An end says who it is, and in one pid namespace the kernel says it too.
pub(super) fn check_identity(
    hello: &Hello,
    local: &ProcessIdentity,
    credentials: &PeerCredentials,
) -> Result<()> {
    if hello.process.pid_namespace == local.pid_namespace && hello.process.pid != credentials.pid {
        return Err(Error::Protocol(format!(
            "it says that it is process {}, and the kernel says that it is process {}",
            hello.process.pid, credentials.pid
        )));
    }
    Ok(())
}
