//! Bundles whose descriptors arrive over a raw socket.

use anyhow::Result;
use device_ipc::{Descriptor, Ipc};

use super::echo::Socket;
use crate::wait::settle;

/// Length of a message that is a request to keep only the first bundles, not a descriptor.
const KEEP_BYTES: usize = 8;

/// Opens each bundle, accesses its tensors, keeps it and acknowledges it; without `ipc` only acknowledges.
pub(super) fn receive(ipc: Option<&Ipc>, socket: &Socket) -> Result<()> {
    let (mut bytes, mut kept) = (Vec::new(), Vec::new());
    while socket.receive_pieces(&mut bytes)? {
        let mut tensors = 0_u32;
        if let Ok(count) = <[u8; KEEP_BYTES]>::try_from(bytes.as_slice()) {
            kept.truncate(usize::try_from(u64::from_le_bytes(count))?);
            // The next open of their memory must be a first open.
            settle()?;
        } else if let Some(ipc) = ipc {
            let bundle = ipc.open(&Descriptor::from_bytes(&bytes)?).at_home()?;
            tensors = bundle.tensors().map(|(_, tensor)| u32::from(tensor.range().len > 0)).sum();
            kept.push(bundle);
        }
        socket.send(&tensors.to_le_bytes())?;
    }
    Ok(())
}

/// Makes the receiver close all bundles except the first `count`.
pub(crate) fn keep(socket: &Socket, count: u64) -> Result<()> {
    socket.send_in_pieces(&count.to_le_bytes())?;
    wait_acknowledgement(socket).map(|_| ())
}

/// Waits for an acknowledgement and returns the number of tensors that the receiver opened.
pub(crate) fn wait_acknowledgement(socket: &Socket) -> Result<u32> {
    let mut answer = [0; 4];
    let received = socket.receive(&mut answer)?;
    anyhow::ensure!(received == answer.len(), "protocol violation: the receiver did not acknowledge");
    Ok(u32::from_le_bytes(answer))
}
