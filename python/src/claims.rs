//! Claims of importers on items of an exporter, in shared memory; see `device_ipc._kv_cache`.

use std::sync::Arc;

use device_ipc::front_end;
use pyo3::prelude::*;

use crate::channel::Channel;
use crate::error::OrRaise as _;
use crate::session::check_fork;
use crate::wait;

/// The exporter's side: the tickets that it offers.
#[pyclass(frozen, module = "device_ipc")]
pub(crate) struct _ClaimTable {
    table: front_end::ClaimTable,
}

#[pymethods]
impl _ClaimTable {
    #[new]
    fn new(py: Python<'_>) -> PyResult<Self> {
        check_fork()?;
        Ok(Self { table: front_end::ClaimTable::new().or_raise(py)? })
    }

    /// Hands the table over to the peer of a channel. Returns the number of the importer, for `dismiss` and for the peer.
    fn admit(&self, py: Python<'_>, channel: &Channel) -> PyResult<u32> {
        self.table.admit(channel.sender()?).or_raise(py)
    }

    /// Releases the claims of an importer that has ended. Returns their number.
    fn dismiss(&self, importer: u32) -> PyResult<usize> {
        check_fork()?;
        Ok(self.table.dismiss(importer))
    }

    /// Offers a ticket. Returns whether the table has room for it.
    fn offer(&self, ticket: u64) -> PyResult<bool> {
        check_fork()?;
        Ok(self.table.offer(ticket))
    }

    /// Withdraws a ticket, also if an importer claims it.
    fn withdraw(&self, ticket: u64) -> PyResult<()> {
        check_fork()?;
        self.table.withdraw(ticket);
        Ok(())
    }

    /// Takes a ticket back unless an importer claims it. Returns whether no importer can claim it any more.
    fn take_back(&self, ticket: u64) -> PyResult<bool> {
        check_fork()?;
        Ok(self.table.take_back(ticket))
    }

    /// Returns the tickets that were released and that no importer claims, each once.
    fn released(&self) -> PyResult<Vec<u64>> {
        check_fork()?;
        Ok(self.table.released())
    }
}

/// An importer's side.
#[pyclass(frozen, module = "device_ipc")]
pub(crate) struct _Claims {
    pub(crate) claims: Arc<front_end::Claims>,
}

#[pymethods]
impl _Claims {
    /// Takes the table that the peer of a channel has handed over. `timeout` is in seconds.
    #[new]
    fn new(py: Python<'_>, channel: &Channel, importer: u32, timeout: f64) -> PyResult<Self> {
        let limit = wait::limit(Some(timeout))?;
        let receiver = channel.receiver()?;
        let claims = wait::wait(py, limit, |slice| front_end::Claims::receive(receiver, importer, slice))?;
        Ok(Self { claims: Arc::new(claims) })
    }

    /// Claims a ticket until `release`. Returns whether the exporter offers it.
    fn claim(&self, ticket: u64) -> PyResult<bool> {
        check_fork()?;
        Ok(self.claims.claim(ticket))
    }

    /// Releases a ticket.
    fn release(&self, ticket: u64) -> PyResult<()> {
        check_fork()?;
        self.claims.release(ticket);
        Ok(())
    }
}
