//! The options of an end that listening and connecting have in common.

use std::time::Duration;

use device_ipc_tcp::Key;

use super::handshake::Hello;
use super::limits::Limits;
use crate::model::error::Result;
use crate::model::placement::DeviceMap;
use crate::os::Backoff;
use crate::sharing::{Ipc, Runtime, RuntimeRef};

/// Default maximum size of a message in bytes.
const DEFAULT_MESSAGE_LIMIT: u64 = 64 * 1024 * 1024;

/// The pauses between attempts to connect. The start of a listener wakes no process.
pub(super) const RETRY: Backoff = Backoff::doubling(Duration::from_millis(1), Duration::from_millis(32));

/// A builder for one end of a [`Channel`](crate::Channel): [`ListenBuilder`](crate::ListenBuilder) or
/// [`ConnectBuilder`](crate::ConnectBuilder).
#[must_use = "a builder does nothing before `start`"]
#[derive(Debug)]
pub struct ChannelBuilder<'a, E> {
    pub(super) ipc: &'a Ipc,
    pub(super) name: &'a str,
    /// The key of the processes of other hosts, whose listener has an address, which is the name.
    pub(super) key: Option<&'a Key>,
    map: DeviceMap,
    limit: u64,
    limits: Limits,
    /// The options of the listening end or of the connecting end.
    pub(super) end: E,
}

/// This process as one end of the channels of a builder.
#[derive(Clone, Debug)]
pub(super) struct LocalEnd {
    pub(super) runtime: RuntimeRef,
    pub(super) ipc: Ipc,
    pub(super) hello: Hello,
    /// The limits of the messages that this end sends.
    pub(super) limits: Limits,
}

impl<'a, E> ChannelBuilder<'a, E> {
    pub(super) const fn of(ipc: &'a Ipc, name: &'a str, end: E) -> Self {
        Self {
            ipc,
            name,
            key: None,
            map: DeviceMap::new(),
            limit: DEFAULT_MESSAGE_LIMIT,
            limits: Limits::DEFAULT,
            end,
        }
    }

    /// Uses TCP, between processes that know the key. The name is an address.
    pub(crate) const fn with_key(mut self, key: &'a Key) -> Self {
        self.key = Some(key);
        self
    }

    /// Sets the devices on which the peer opens memory of this process.
    ///
    /// Memory from the peer uses the peer's map, or the inverse of this map if the peer has none.
    pub fn device_map(mut self, map: DeviceMap) -> Self {
        self.map = map;
        self
    }

    /// Sets the maximum size of a message in bytes, by default 64 MiB. A channel uses the smaller limit of its two ends.
    pub const fn message_limit(mut self, bytes: u64) -> Self {
        self.limit = bytes;
        self
    }

    /// Sets the maximum number of messages that this process has sent and the peer has not received, by default 128.
    ///
    /// At the limit, [`Channel::send`](crate::Channel::send) waits and [`Channel::try_send`](crate::Channel::try_send) returns
    /// the message. At least one message can always be sent.
    pub const fn max_messages_in_flight(mut self, messages: u64) -> Self {
        self.limits.messages = messages;
        self
    }

    /// Sets the maximum number of bytes of the messages that this process has sent and the peer has not received, by default
    /// 256 MiB.
    ///
    /// The bytes of a message are its payload and the memory of its exports, which stays allocated until the peer has received
    /// the message and opened or discarded it. A message larger than the limit is sent when no other message is in flight.
    pub const fn max_bytes_in_flight(mut self, bytes: u64) -> Self {
        self.limits.bytes = bytes;
        self
    }

    /// Describes this process. Its device map has to name devices of this process.
    pub(super) fn local_end(&self) -> Result<LocalEnd> {
        let runtime = Runtime::get()?;
        let hello = Hello::own(self.ipc, runtime.identity, &self.map, self.limit)?;
        Ok(LocalEnd { runtime: runtime.for_guard(), ipc: self.ipc.clone(), hello, limits: self.limits })
    }
}
