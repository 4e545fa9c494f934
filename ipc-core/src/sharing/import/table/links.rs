//! The links to exporters.

use std::collections::HashMap;
use std::sync::{Arc, MutexGuard, PoisonError};

use super::ImportTable;
use crate::model::error::Result;
use crate::os::process::ProcessIdentity;
use crate::sharing::Runtime;
use crate::transport::{AllowList, Deadline, Gate, Link};
use crate::wire::BrokerAddress;

/// Held while the link is being made, so that an exporter that does not answer delays no other one's opens.
pub(super) type LinkSlot = Gate<Option<Arc<Link>>>;

impl ImportTable {
    /// The link to an exporter, connected unless there is one already; and whether it was connected now.
    pub(crate) fn link(
        &self,
        (exporter, broker): (&ProcessIdentity, &BrokerAddress),
        allow: &AllowList,
        deadline: Deadline,
    ) -> Result<(Arc<Link>, bool)> {
        let slot = self.link_slot(exporter);
        let connecting = || deadline.passed("connecting to the exporting process", "");
        let mut slot = slot.enter(deadline).ok_or_else(connecting)?;
        if let Some(link) = slot.as_ref().filter(|link| !link.is_gone()) {
            link.check_permitted(allow)?;
            return Ok((Arc::clone(link), false));
        }
        let connected = Link::connect(exporter, broker, allow, deadline);
        // An exporter that cannot be reached leaves nothing behind.
        let link = Arc::new(connected.inspect_err(|_| self.forget_link(exporter))?);
        Runtime::get()?.poller.watch(&link)?;
        *slot = Some(Arc::clone(&link));
        Ok((link, true))
    }

    /// The link to an exporter, where there is one that nobody is making just now.
    pub(in crate::sharing::import) fn known_link(&self, exporter: &ProcessIdentity) -> Option<Arc<Link>> {
        let slot = Arc::clone(self.lock_links().get(exporter)?);
        slot.try_enter()?.as_ref().filter(|link| !link.is_gone()).cloned()
    }

    /// Is there a link that tells, without asking the kernel, that the exporter has not ended?
    pub(in crate::sharing::import) fn knows_to_live(&self, exporter: &ProcessIdentity) -> bool {
        self.known_link(exporter).is_some_and(|link| link.is_known_to_live())
    }

    /// The exporter has gone, and its socket with it.
    pub(crate) fn forget_link(&self, exporter: &ProcessIdentity) {
        self.lock_links().remove(exporter);
        self.forget_ended(exporter);
    }

    fn link_slot(&self, exporter: &ProcessIdentity) -> Arc<LinkSlot> {
        let mut links = self.lock_links();
        if let Some(slot) = links.get(exporter) {
            return Arc::clone(slot);
        }
        let slot = links.entry(Arc::new(*exporter)).or_insert_with(|| Arc::new(Gate::new(None)));
        Arc::clone(slot)
    }

    /// The identity of an exporter as the keys of what is open of it have it: most of them share one.
    pub(super) fn shared_identity(&self, exporter: &ProcessIdentity) -> Arc<ProcessIdentity> {
        let links = self.lock_links();
        links.get_key_value(exporter).map_or_else(|| Arc::new(*exporter), |(shared, _)| Arc::clone(shared))
    }

    fn lock_links(&self) -> MutexGuard<'_, HashMap<Arc<ProcessIdentity>, Arc<LinkSlot>>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
