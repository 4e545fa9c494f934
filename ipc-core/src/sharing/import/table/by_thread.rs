//! The leases that a thread has opened last, so that it finds them again without meeting other threads.
//!
//! Whether one may still be used its own state says. Remembering one keeps nothing open: what it had open goes when it
//! ends, and only some 250 bytes stay until the thread remembers another one in its place.

use std::cell::RefCell;

use super::keys::{LeaseKey, OnDevice};
use super::lease::{KnownLease, LeaseRef};
use crate::os::process::ProcessIdentity;
use crate::wire::descriptor::{ExportId, NamedExport};

/// How many leases a thread remembers.
const PLACES: usize = 256;

type Places = [Option<KnownLease>; PLACES];

thread_local! {
    static RECENT: RefCell<Places> = const { RefCell::new([const { None }; PLACES]) };
}

/// The lease that mappings of this export share there, where this thread remembers it.
pub(super) fn find(named: &NamedExport<'_>, on: OnDevice) -> Option<LeaseRef> {
    // A thread that is about to end remembers nothing.
    let found = RECENT
        .try_with(|recent| recent.borrow()[place(named.exporter, named.export, on)].as_ref()?.upgrade())
        .ok()??;
    found.key().is_shared(named, on).then_some(found)
}

/// Has this thread find it again, unless it opens others in between.
pub(super) fn remember(lease: &LeaseRef) {
    let LeaseKey { exporter, export, on, .. } = lease.key();
    let place = place(exporter, *export, *on);
    let _ = RECENT.try_with(|recent| recent.borrow_mut()[place] = Some(KnownLease::of(lease)));
}

/// Neighbours in a process's count of exports have different places, and so mostly have the first exports of several.
fn place(exporter: &ProcessIdentity, export: ExportId, on: OnDevice) -> usize {
    let apart = 89 * exporter.pid as usize + 31 * on.device.index();
    (export.0 as usize).wrapping_add(apart) % PLACES
}
