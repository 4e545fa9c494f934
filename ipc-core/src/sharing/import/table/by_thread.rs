//! The leases that a thread has opened last, which it finds without contending with other threads.
//!
//! The state of a lease determines whether it can be used. Remembering a lease keeps nothing open, only about 250 B until the
//! thread remembers another one in its place.

use std::cell::RefCell;

use super::keys::{LeaseKey, OnDevice};
use super::lease::{KnownLease, LeaseRef};
use crate::os::process::ProcessIdentity;
use crate::wire::descriptor::{ExportId, NamedExport};

/// Number of leases that a thread remembers.
const PLACES: usize = 256;

type Places = [Option<KnownLease>; PLACES];

thread_local! {
    static RECENT: RefCell<Places> = const { RefCell::new([const { None }; PLACES]) };
}

/// Returns the shared lease on this export, device and access, if this thread remembers it.
pub(super) fn find(named: &NamedExport<'_>, on: OnDevice) -> Option<LeaseRef> {
    // A thread that is about to end remembers nothing.
    let found = RECENT
        .try_with(|recent| {
            recent.borrow()[place(named.exporter(), named.part.export, on)].as_ref()?.upgrade()
        })
        .ok()??;
    found.key().is_shared(named, on).then_some(found)
}

/// Remembers a lease in this thread.
pub(super) fn remember(lease: &LeaseRef) {
    let LeaseKey { exporter, export, on, .. } = lease.key();
    let place = place(exporter, *export, *on);
    let _ = RECENT.try_with(|recent| recent.borrow_mut()[place] = Some(KnownLease::of(lease)));
}

/// Consecutive export numbers have different places.
fn place(exporter: &ProcessIdentity, export: ExportId, on: OnDevice) -> usize {
    let apart = 89 * exporter.pid as usize + 31 * on.device.index();
    (export.0 as usize).wrapping_add(apart) % PLACES
}
