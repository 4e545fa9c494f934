//! The storages of PyTorch that `torch.multiprocessing` passes through this library: the three methods that
//! `device_ipc/_torch_install.py` replaces, without Python code for each storage.
//!
//! Storages in one block of the allocator have one export, that of the block. A storage has a ticket in a table of claims, and each
//! payload of it has one: a receiver that has the block open claims the storage and releases the payload by changes of words in shared
//! memory. A storage has an export of its own if it lies in several blocks, or if its bytes were not ready when it was sent.
//!
//! No lock is held while Python code runs, an object is dropped or the interpreter lock is released.

mod block;
mod claim;
mod payload;
mod place;
mod received;
mod shared;
mod sweep;

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use device_ipc::DeviceOrdinal;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

pub(crate) use claim::Claim;
use payload::Right;
use place::Place;
use received::ReceivedStorages;
use shared::SharedStorages;

use crate::error::OrRaise as _;
use crate::wait;

/// Storages to look at in each call of `share`: more than one, so that fewer have ended unnoticed than are in use.
const LOOKS: usize = 2;

/// The storages that this process has shared or received. Those that it has shared are kept until no process uses them.
#[pyclass(frozen, module = "device_ipc")]
pub(crate) struct Storages {
    shared: SharedStorages,
    received: ReceivedStorages,
    lifetime: Mutex<f64>,
}

impl Storages {
    fn lifetime(&self) -> PyResult<Duration> {
        wait::limit(Some(self.payload_lifetime()))
    }

    /// Gives the right of a payload back that is not used, or no longer needed.
    fn give_back(&self, py: Python<'_>, right: Option<Right<'_>>) -> PyResult<()> {
        match right {
            Some(Right::Ticket { table, ticket }) => {
                let is_of_peer = self.received.release_payload(table, ticket);
                // That of another process of which this one has no storages ends at its time limit.
                if !is_of_peer {
                    self.shared.withdraw_payload(table, ticket);
                }
            }
            Some(Right::Grant(grant)) => parse_grant(py, grant)?.give_back(),
            Some(Right::GrantOfBlock(grant)) => parse_grant(py, grant)?.give_back_soon(),
            None => {}
        }
        Ok(())
    }
}

#[pymethods]
impl Storages {
    /// Creates a record of storages. `wake` is called, without arguments, when there is something to look at.
    #[new]
    fn new(wake: Py<PyAny>) -> Self {
        Self {
            shared: SharedStorages::new(wake),
            received: ReceivedStorages::default(),
            lifetime: Mutex::new(600.0),
        }
    }

    /// Seconds for which a payload that no process opens keeps its memory.
    #[getter]
    fn payload_lifetime(&self) -> f64 {
        *self.lifetime.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[setter]
    fn set_payload_lifetime(&self, seconds: f64) {
        *self.lifetime.lock().unwrap_or_else(PoisonError::into_inner) = seconds;
    }

    /// Returns the part of a payload that names the storage, of this size in bytes: what PyTorch's own method returns.
    #[expect(clippy::type_complexity, reason = "a tuple of PyTorch")]
    fn share<'py>(
        &self,
        storage: &Bound<'py, PyAny>,
        nbytes: u64,
    ) -> PyResult<(u32, Py<PyBytes>, u64, u64, Bound<'py, PyBytes>, u64, Bound<'py, PyBytes>, bool)> {
        let py = storage.py();
        let place = Place::of(storage, nbytes)?;
        let lifetime = self.lifetime()?;
        let (handle, right) = match self.received.share(py, &place, lifetime)? {
            Some(sent_on) => sent_on,
            None => self.shared.share(storage, &place, lifetime)?,
        };
        self.shared.look_at(py, LOOKS)?;
        Ok((place.device.get(), handle, place.nbytes, 0, right, 0, PyBytes::new(py, b""), false))
    }

    /// Returns a storage in the memory that a payload names. `make` makes one of a tensor, for frameworks without functions for it.
    fn open(
        &self,
        py: Python<'_>,
        device: u32,
        handle: &Bound<'_, PyBytes>,
        nbytes: u64,
        right: &Bound<'_, PyBytes>,
        make: &Bound<'_, PyAny>,
    ) -> PyResult<Py<PyAny>> {
        let device = DeviceOrdinal::new(device);
        let right = Right::parse(right.as_bytes())?;
        if let Some(storage) = self.shared.find(py, handle.as_bytes(), device) {
            // A payload of this process.
            self.give_back(py, right)?;
            return Ok(storage);
        }
        let opened = match payload::InBlock::parse(handle.as_bytes()) {
            Some(place) => {
                let claimed = self.received.open_in_block(py, device, &place?, nbytes);
                // What the payload keeps is kept by the claim now, or gone.
                self.give_back(py, right)?;
                claimed?
            }
            None => {
                let grant = match right {
                    Some(Right::Grant(grant)) => Some(parse_grant(py, grant)?),
                    _ => None,
                };
                received::open_export(py, device, handle.as_bytes(), grant.as_ref())?
            }
        };
        self.received.make(py, opened, handle, nbytes, make)
    }

    /// Gives the right of a payload back whose storage this process has already.
    fn release(&self, py: Python<'_>, right: &Bound<'_, PyBytes>) -> PyResult<()> {
        self.give_back(py, Right::parse(right.as_bytes())?)
    }

    /// Looks at some of the storages, and ends the exports of those that no process uses.
    fn look(&self, py: Python<'_>, count: usize) -> PyResult<()> {
        self.shared.look(py, count)
    }

    /// Ends the exports of all storages that are no longer used.
    fn collect(&self, py: Python<'_>) -> PyResult<()> {
        self.shared.look_at_all(py)
    }

    /// The devices of the storages in memory of other processes.
    fn devices(&self, py: Python<'_>) -> Vec<String> {
        self.received.devices(py)
    }

    /// The number of storages that this process has shared.
    fn __len__(&self) -> usize {
        self.shared.len()
    }
}

fn parse_grant(py: Python<'_>, grant: &[u8]) -> PyResult<device_ipc::Grant> {
    device_ipc::Grant::from_bytes(grant).or_raise(py)
}
