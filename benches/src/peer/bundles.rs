//! Bundles that come over a bare socket.

use anyhow::Result;
use device_ipc::{BundleDescriptor, Ipc};

use super::echo::Socket;
use crate::wait::settle;

/// Instead of a bundle: let go of all but so many of those that came first.
const KEEP_BYTES: usize = 8;

/// Opens what comes, takes every tensor of it, keeps it and acknowledges; or only acknowledges.
pub(super) fn receive(ipc: Option<&Ipc>, socket: &Socket) -> Result<()> {
    let (mut bytes, mut kept) = (Vec::new(), Vec::new());
    while socket.receive_pieces(&mut bytes)? {
        let mut tensors = 0_u32;
        if let Ok(keep) = <[u8; KEEP_BYTES]>::try_from(bytes.as_slice()) {
            kept.truncate(usize::try_from(u64::from_le_bytes(keep))?);
            // So that the next open of their memory is a first one.
            settle()?;
        } else if let Some(ipc) = ipc {
            let bundle = ipc.open_bundle(&BundleDescriptor::from_bytes(&bytes)?).at_home()?;
            tensors = bundle.iter().map(|(_, tensor)| u32::from(tensor.range().len > 0)).sum();
            kept.push(bundle);
        }
        socket.send(&tensors.to_le_bytes())?;
    }
    Ok(())
}

/// Has the receiver let go of all but so many of those that came first.
pub(crate) fn keep(socket: &Socket, count: u64) -> Result<()> {
    socket.send_in_pieces(&count.to_le_bytes())?;
    acknowledged(socket).map(|_| ())
}

/// How many tensors the receiver has taken.
pub(crate) fn acknowledged(socket: &Socket) -> Result<u32> {
    let mut answer = [0; 4];
    let received = socket.receive(&mut answer)?;
    anyhow::ensure!(received == answer.len(), "the receiver did not acknowledge");
    Ok(u32::from_le_bytes(answer))
}
