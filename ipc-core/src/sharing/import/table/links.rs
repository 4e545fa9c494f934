//! The links to exporters.

use std::collections::HashMap;
use std::sync::{Arc, MutexGuard, PoisonError};

use super::ImportTable;
use crate::model::error::Result;
use crate::os::process::ProcessIdentity;
use crate::sharing::Runtime;
use crate::sharing::import::link::Link;
use crate::transport::{AllowList, Deadline, TimedMutex};
use crate::wire::{BrokerAddress, GrantExporter};

/// Locked while the link is created, so that an exporter that does not answer delays no opens of other exporters.
pub(super) type LinkSlot = TimedMutex<Option<Arc<Link>>>;

impl ImportTable {
    /// Returns the link to an exporter, and whether this call created it.
    pub(crate) fn link(
        &self,
        (exporter, broker): (&ProcessIdentity, &BrokerAddress),
        allow: &AllowList,
        deadline: Deadline,
    ) -> Result<(Arc<Link>, bool)> {
        let runtime = Runtime::get()?;
        let slot = self.link_slot(exporter);
        let connecting = || deadline.passed("connecting to the exporting process", "");
        let mut slot = slot.lock(deadline).ok_or_else(connecting)?;
        if let Some(link) = slot.as_ref().filter(|link| !link.is_gone()) {
            link.check_permitted(allow)?;
            return Ok((Arc::clone(link), false));
        }
        let connected = Link::connect_to(exporter, broker, allow, deadline, runtime);
        // An exporter that cannot be reached has no entry.
        let link = Arc::new(connected.inspect_err(|_| self.forget_link(exporter))?);
        runtime.poller.watch(&link)?;
        *slot = Some(Arc::clone(&link));
        Ok((link, true))
    }

    /// Returns the link to an exporter, if it exists and no thread is creating it.
    pub(in crate::sharing::import) fn known_link(&self, exporter: &ProcessIdentity) -> Option<Arc<Link>> {
        let slot = Arc::clone(self.lock_links().get(exporter)?);
        slot.try_lock()?.as_ref().filter(|link| !link.is_gone()).cloned()
    }

    /// Returns the full identity of an exporter that this process is connected to.
    pub(in crate::sharing::import) fn exporter_of(
        &self,
        exporter: GrantExporter,
    ) -> Option<Arc<ProcessIdentity>> {
        self.lock_links().keys().find(|known| exporter == (&***known).into()).cloned()
    }

    /// Reports to all exporters that this process exits in order. Waits for no lock and no exporter.
    pub(crate) fn announce_exit(&self) {
        let Ok(links) = self.links.try_lock() else { return };
        for slot in links.values() {
            if let Some(link) =
                slot.try_lock().as_ref().and_then(|slot| slot.as_ref()).filter(|link| !link.is_gone())
            {
                link.announce_exit();
            }
        }
    }

    /// Returns whether the exporter is known to be alive, without asking the kernel.
    pub(in crate::sharing::import) fn knows_to_live(&self, exporter: &ProcessIdentity) -> bool {
        self.known_link(exporter).is_some_and(|link| link.is_known_to_live())
    }

    /// Removes the link to an exporter that has terminated.
    pub(crate) fn forget_link(&self, exporter: &ProcessIdentity) {
        self.lock_links().remove(exporter);
        self.forget_ended(exporter);
    }

    fn link_slot(&self, exporter: &ProcessIdentity) -> Arc<LinkSlot> {
        let mut links = self.lock_links();
        if let Some(slot) = links.get(exporter) {
            return Arc::clone(slot);
        }
        let slot = links.entry(Arc::new(*exporter)).or_insert_with(|| Arc::new(TimedMutex::new(None)));
        Arc::clone(slot)
    }

    /// Returns the identity of an exporter for the keys of its leases, which share it.
    pub(super) fn shared_identity(&self, exporter: &ProcessIdentity) -> Arc<ProcessIdentity> {
        let links = self.lock_links();
        links.get_key_value(exporter).map_or_else(|| Arc::new(*exporter), |(shared, _)| Arc::clone(shared))
    }

    fn lock_links(&self) -> MutexGuard<'_, HashMap<Arc<ProcessIdentity>, Arc<LinkSlot>>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
