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
mod tests {
    use super::*;
    use crate::backend::{HandleBytes, HandleKind};
    use crate::wire::AllocationId;

    fn handles(count: usize, bytes: usize) -> Vec<WireHandle> {
        let handle = |index| WireHandle {
            allocation: AllocationId(index as u64),
            kind: HandleKind(1),
            bytes: HandleBytes::new(vec![0; bytes]),
            fds: 0,
            size: 1,
            generation: None,
        };
        (0..count).map(handle).collect()
    }

    #[test]
    fn handles_beyond_the_maximum_are_rejected() {
        let mut arrived = Arrived::default();
        arrived.add(handles(MAX_HANDLES - 1, 0), ReceivedFds::default()).unwrap();
        arrived.add(handles(1, 0), ReceivedFds::default()).unwrap();
        assert!(matches!(arrived.add(handles(1, 0), ReceivedFds::default()), Err(Error::Protocol(_))));
        assert_eq!(arrived.handles.len(), MAX_HANDLES);
        let mut large = Arrived::default();
        large.add(handles(16, MAX_HANDLE_BYTES / 16), ReceivedFds::default()).unwrap();
        assert!(matches!(large.add(handles(1, 1), ReceivedFds::default()), Err(Error::Protocol(_))));
    }
}
