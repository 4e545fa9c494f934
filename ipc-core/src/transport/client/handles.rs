//! A grant's handles, which arrive in several packets where they do not fit one.

use super::super::socket::ReceivedFds;
use crate::model::error::{Error, Result};
use crate::wire::{LeaseAhead, MAX_HANDLES, MAX_LEASES_AHEAD, WireHandle};

/// Maximum size of all handles of a lease, in bytes.
const MAX_HANDLE_BYTES: usize = 16 * 1024 * 1024;

/// The handles of a lease that have arrived so far. The exporter decides how many it sends, so the number is bounded.
#[derive(Default)]
pub(super) struct Arrived {
    pub(super) handles: Vec<WireHandle>,
    pub(super) fds: ReceivedFds,
    /// The leases ahead.
    pub(super) ahead: Vec<LeaseAhead>,
    bytes: usize,
}

impl Arrived {
    /// Adds the handles of a packet.
    pub(super) fn add(&mut self, handles: Vec<WireHandle>, fds: ReceivedFds) -> Result<()> {
        self.bytes += handles.iter().map(|handle| handle.bytes.as_slice().len()).sum::<usize>();
        let (count, descriptors) = (self.handles.len() + handles.len(), self.fds.len() + fds.len());
        if count > MAX_HANDLES || descriptors > MAX_HANDLES || self.bytes > MAX_HANDLE_BYTES {
            return Err(Error::Protocol(format!(
                "it sends more than {MAX_HANDLES} handles, or {MAX_HANDLE_BYTES} bytes of them"
            )));
        }
        if self.handles.is_empty() {
            // The only packet, except for regions of many allocations.
            (self.handles, self.fds) = (handles, fds);
        } else {
            self.handles.extend(handles);
            self.fds.append(fds);
        }
        Ok(())
    }

    /// Adds the leases ahead of a packet.
    pub(super) fn add_ahead(&mut self, leases: Vec<LeaseAhead>) -> Result<()> {
        self.ahead.extend(leases);
        if self.ahead.len() > MAX_LEASES_AHEAD {
            return Err(Error::Protocol(format!("it sends more than {MAX_LEASES_AHEAD} leases ahead")));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
