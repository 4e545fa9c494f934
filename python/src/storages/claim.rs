//! Claims of this process on storages of others: each is released when device work with the storage has ended.

use std::collections::HashMap;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use std::{iter, thread};

use device_ipc::front_end::Claims;
use device_ipc::{DeviceOrdinal, Error, Ipc, Result};

/// Claims that end within this time are released together.
const TOGETHER: Duration = Duration::from_millis(1);

/// The claims of this process on storages of one other.
pub(super) struct Peer {
    claims: Claims,
    ipc: Ipc,
    /// The number of storages of this process for each ticket, which have one claim. PyTorch's cache of received storages keeps it at
    /// one as long as nothing clears that cache.
    open: Mutex<HashMap<u64, usize>>,
    ended: Sender<Ended>,
}

impl Peer {
    pub(super) fn new(claims: Claims, ipc: Ipc, releases: &Releases) -> Result<Arc<Self>> {
        Ok(Arc::new(Self { claims, ipc, open: Mutex::default(), ended: releases.sender()? }))
    }

    fn open(&self) -> MutexGuard<'_, HashMap<u64, usize>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Claims a storage. `None` if its process does not offer it any longer.
    pub(super) fn claim(self: &Arc<Self>, ticket: u64, device: DeviceOrdinal) -> Option<Claim> {
        let mut open = self.open();
        let count = open.entry(ticket).or_default();
        if *count == 0 && !self.claims.claim(ticket) {
            open.remove(&ticket);
            return None;
        }
        *count += 1;
        Some(Claim { peer: Arc::clone(self), ticket, device })
    }

    /// Reports that the payload of this ticket was opened.
    pub(super) fn release_payload(&self, ticket: u64) {
        self.claims.release(ticket);
    }

    fn release(&self, ticket: u64) {
        let mut open = self.open();
        let Some(count) = open.get_mut(&ticket) else { return };
        *count -= 1;
        if *count == 0 {
            open.remove(&ticket);
            self.claims.release(ticket);
        }
    }
}

/// The claim of a storage of this process. Its drop does not wait: a thread releases the claim after the device work that was submitted
/// before, which may use the storage.
pub(crate) struct Claim {
    peer: Arc<Peer>,
    ticket: u64,
    device: DeviceOrdinal,
}

impl Drop for Claim {
    fn drop(&mut self) {
        // In a forked child there is no thread to receive it, and the claim is its parent's.
        let _ = self.peer.ended.send(Ended {
            peer: Arc::clone(&self.peer),
            ticket: self.ticket,
            device: self.device,
        });
    }
}

/// A claim whose storage was dropped.
struct Ended {
    peer: Arc<Peer>,
    ticket: u64,
    device: DeviceOrdinal,
}

/// The thread that releases claims. It begins with the first peer.
#[derive(Default)]
pub(super) struct Releases(Mutex<Option<Sender<Ended>>>);

impl Releases {
    fn sender(&self) -> Result<Sender<Ended>> {
        let mut sender = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(sender) = &*sender {
            return Ok(sender.clone());
        }
        let (ended, received) = mpsc::channel();
        let run = move || release(&received);
        thread::Builder::new().name("device-ipc-claims".into()).spawn(run).map_err(|cause| Error::Io {
            what: "starting the thread that releases storages".into(),
            cause: Arc::new(cause),
        })?;
        Ok(sender.insert(ended).clone())
    }
}

/// Releases claims, after the device work so far.
fn release(ended: &Receiver<Ended>) {
    while let Ok(first) = ended.recv() {
        // Most storages are dropped together, and each wait for the device takes a call of the driver.
        thread::sleep(TOGETHER);
        let all: Vec<_> = iter::once(first).chain(ended.try_iter()).collect();
        let mut waited: Vec<(&'static str, DeviceOrdinal)> = Vec::new();
        for one in &all {
            let backend = one.peer.ipc.backend();
            let device = (backend.info().name, one.device);
            if !waited.contains(&device) {
                waited.push(device);
                if let Err(error) = backend.synchronize_device(one.device) {
                    tracing::warn!(target: "device_ipc::import", %error, "the device could not be waited for before storages were released");
                }
            }
        }
        for one in all {
            one.peer.release(one.ticket);
        }
    }
}
