//! The links to exporters.
//!
//! A process may have several exporters: a program and an extension module that it loads have a copy of this library each,
//! with exports, grants and a broker of its own. A link belongs to a broker. Numbers of exports are unique for each broker
//! only; tokens and numbers of allocations are unique for all.

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

/// The links to the brokers of each process, usually one.
pub(super) type Links = HashMap<Arc<ProcessIdentity>, Vec<(BrokerAddress, Arc<LinkSlot>)>>;

impl ImportTable {
    /// Returns the link to an exporter, and whether this call created it.
    pub(crate) fn link(
        &self,
        runtime: &'static Runtime,
        (exporter, broker): (&ProcessIdentity, &BrokerAddress),
        allow: &AllowList,
        deadline: Deadline,
    ) -> Result<(Arc<Link>, bool)> {
        let slot = self.link_slot(exporter, broker);
        let connecting = || deadline.passed("connecting to the exporting process", "");
        let mut slot = slot.lock(deadline).ok_or_else(connecting)?;
        if let Some(link) = slot.as_ref().filter(|link| !link.is_gone()) {
            link.check_permitted(allow)?;
            return Ok((Arc::clone(link), false));
        }
        let connected = Link::connect_to(exporter, broker, allow, deadline, runtime);
        // An exporter that cannot be reached has no entry.
        let link = Arc::new(connected.inspect_err(|_| self.forget_link(exporter, broker))?);
        runtime.poller.watch(&link)?;
        *slot = Some(Arc::clone(&link));
        Ok((link, true))
    }

    /// Returns the links to a process that exist and that no thread is creating.
    pub(in crate::sharing::import) fn known_links(&self, exporter: &ProcessIdentity) -> Vec<Arc<Link>> {
        self.lock_links().get(exporter).into_iter().flatten().filter_map(known_link).collect()
    }

    /// Returns the full identity of an exporter that this process is connected to.
    pub(in crate::sharing::import) fn exporter_of(
        &self,
        exporter: GrantExporter,
    ) -> Option<Arc<ProcessIdentity>> {
        self.lock_links().keys().find(|known| exporter == (&***known).into()).cloned()
    }

    /// Reports to all exporters that this process exits in order, and that its device work with their memory has finished.
    pub(crate) fn announce_exit(&self, deadline: Deadline) {
        let slots: Vec<_> = self.lock_links().values().flatten().map(|(_, slot)| Arc::clone(slot)).collect();
        let known = slots.iter().filter_map(|slot| slot.lock(deadline)?.as_ref().cloned());
        known.filter(|link| !link.is_gone()).for_each(|link| link.announce_exit(deadline));
    }

    /// Returns whether the exporter is known to be alive, without asking the kernel.
    pub(in crate::sharing::import) fn has_live_link(&self, exporter: &ProcessIdentity) -> bool {
        let links = self.lock_links();
        let mut known = links.get(exporter).into_iter().flatten().filter_map(known_link);
        known.any(|link| link.is_known_alive())
    }

    /// Removes the link to an exporter that has terminated.
    pub(crate) fn forget_link(&self, exporter: &ProcessIdentity, broker: &BrokerAddress) {
        let mut links = self.lock_links();
        let Some(slots) = links.get_mut(exporter) else { return };
        slots.retain(|(other, _)| other != broker);
        if slots.is_empty() {
            links.remove(exporter);
            drop(links);
            self.ended.forget(exporter);
        }
    }

    fn link_slot(&self, exporter: &ProcessIdentity, broker: &BrokerAddress) -> Arc<LinkSlot> {
        let mut links = self.lock_links();
        let known = links.get(exporter).and_then(|slots| slots.iter().find(|(other, _)| other == broker));
        if let Some(known) = known {
            return slot_of(known);
        }
        let slots = match links.get_mut(exporter) {
            Some(slots) => slots,
            None => links.entry(Arc::new(*exporter)).or_default(),
        };
        let slot = Arc::new(TimedMutex::new(None));
        slots.push((broker.clone(), Arc::clone(&slot)));
        slot
    }

    /// Returns the identity of an exporter for the keys of its leases, which share it.
    pub(super) fn shared_identity(&self, exporter: &ProcessIdentity) -> Arc<ProcessIdentity> {
        let links = self.lock_links();
        links.get_key_value(exporter).map_or_else(|| Arc::new(*exporter), |(shared, _)| Arc::clone(shared))
    }

    fn lock_links(&self) -> MutexGuard<'_, Links> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the link in a slot, unless a thread is creating it. Does not wait.
fn known_link((_, slot): &(BrokerAddress, Arc<LinkSlot>)) -> Option<Arc<Link>> {
    slot.try_lock()?.as_ref().filter(|link| !link.is_gone()).cloned()
}

fn slot_of((_, slot): &(BrokerAddress, Arc<LinkSlot>)) -> Arc<LinkSlot> {
    Arc::clone(slot)
}

#[cfg(test)]
mod tests;
