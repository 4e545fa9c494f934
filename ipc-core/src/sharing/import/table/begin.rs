//! The begin of a lease: the request to the exporter, and the driver's open.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::ImportTable;
use super::ahead::LeasesAhead;
use super::keys::LeaseKey;
use super::lease::{KnownLease, Lease, LeaseRef, NO_EPOCH, Ready, notified};
use super::open_target::OpenTarget;
use super::regions::UnclaimedRegions;
use super::reusable::{self, ReusableLease};
use crate::backend::{DeviceEvent, HandleBytes, with_device_context};
use crate::model::error::{Error, Result};
use crate::model::lease::LeaseId;
use crate::os::kill::kill_point;
use crate::os::process::ProcessIdentity;
use crate::sharing::Runtime;
use crate::sharing::import::grant::UnusedGrant;
use crate::sharing::import::link::Link;
use crate::sharing::import::notices::{ExportNotices, NotifiedLease};
use crate::transport::Deadline;
use crate::wire::descriptor::NamedExport;
use crate::wire::{LeaseAhead, OpenedExport};

impl ImportTable {
    pub(super) fn begin(&'static self, wanted: &OpenTarget<'_>, opening: &LeaseRef) -> Result<Lease> {
        let (link, is_new) =
            self.link(wanted.runtime, wanted.descriptor.broker(), wanted.allow, wanted.deadline)?;
        match self.begin_over(&link, wanted, opening) {
            // Idle mappings are closed for this open; those that were dropped or released are waited for.
            Err(error) if matches!(error.innermost(), Error::OverlapsInUse { .. }) => {
                if !close_ended(wanted.runtime, &wanted.descriptor.contents.exporter, wanted.deadline) {
                    return Err(error);
                }
                self.begin_over(&link, wanted, opening)
            }
            // A busy exporter may have closed a connection that held no lease.
            Err(Error::ExporterGone { .. }) if !is_new => {
                let (link, _) =
                    self.link(wanted.runtime, wanted.descriptor.broker(), wanted.allow, wanted.deadline)?;
                self.begin_over(&link, wanted, opening)
            }
            begun => begun,
        }
    }

    fn begin_over(
        &'static self,
        link: &Arc<Link>,
        wanted: &OpenTarget<'_>,
        opening: &LeaseRef,
    ) -> Result<Lease> {
        let descriptor = &wanted.descriptor;
        let peer = wanted.backend.local_peer_id(wanted.device)?;
        // Before the lease begins, so that no notification about it is missed.
        let known = notified(opening);
        let notices = link.expect_notices(descriptor.part.export, &known);
        let epoch = link.epoch().unwrap_or(NO_EPOCH);
        let importer = (wanted.device, peer);
        let reusable = self.reusable_lease(wanted, link, opening.key().on);
        let like = reusable.as_ref().and_then(ReusableLease::lease);
        let tokens = (descriptor.part.token, wanted.grant.and_then(UnusedGrant::token));
        let mut ahead = LeasesAhead::new(self, link, epoch);
        let expect = |leases: &[LeaseAhead]| ahead.expect(leases, opening.key());
        let export = descriptor.part.export;
        let open = || link.open(export, tokens, wanted.access, importer, like, wanted.deadline, expect);
        let granted = check_token(&notices, opening, descriptor).and_then(|()| open());
        if let (Ok(_), Some(grant)) = (&granted, wanted.grant) {
            grant.used_up();
        }
        let begun = granted.and_then(|(grant, fds)| {
            kill_point!("importer:granted");
            if !grant.keep {
                notices.recall();
            }
            let id = grant.lease;
            let begun = self.open_granted(
                wanted,
                opening.key(),
                link,
                (notices, epoch),
                reusable.as_ref(),
                (grant, fds),
            );
            match &begun {
                Ok(lease) => {
                    self.remember_layout(wanted, opening);
                    ahead.keep(wanted, lease);
                }
                Err(_) => link.release(id),
            }
            begun
        });
        if begun.is_err() {
            link.forget_notices(descriptor.part.export, &known);
        }
        begun
    }

    fn open_granted(
        &self,
        wanted: &OpenTarget<'_>,
        lease_key: &LeaseKey,
        link: &Arc<Link>,
        (notices, epoch): (Arc<ExportNotices>, u64),
        reusable: Option<&ReusableLease>,
        (grant, fds): (OpenedExport, Vec<OwnedFd>),
    ) -> Result<Lease> {
        let like = if grant.like { Some(reusable::regions_of(reusable, &grant, fds.len())?) } else { None };
        let OpenedExport { lease: id, handles, ready: event, confirm, slot, .. } = grant;
        // Released again if a later step fails.
        let regions = match like {
            Some(regions) => regions,
            None => {
                let open = || self.open_ranges(wanted, lease_key, link, id, (handles, fds));
                // A single region is usually open already, which takes no call of the driver.
                let several = wanted.descriptor.regions().len() > 1;
                let opened = if several {
                    with_device_context(&**wanted.backend, wanted.device, open)
                } else {
                    open()
                };
                UnclaimedRegions::new(self, opened?)
            }
        };
        kill_point!("importer:opened");
        if confirm {
            // Another allocation may have had the addresses when the driver opened it.
            link.confirm(id, wanted.deadline)?;
        }
        let ready = event.map(|handle| ready(wanted, link, id, &handle)).transpose()?;
        Ok(Lease {
            id,
            alone: lease_key.alone != 0,
            seen_ready: AtomicBool::new(false),
            link: Arc::clone(link),
            notices,
            word: slot.and_then(|slot| link.lease_word(slot)),
            epoch: AtomicU64::new(epoch),
            borrowed: confirm,
            regions: regions.take(),
            ready: ready.map(Box::new),
            timeline: Mutex::default(),
            unmapped: AtomicBool::new(false),
            revoked: AtomicBool::new(false),
            unfinished: AtomicBool::new(false),
            releasing: AtomicUsize::new(0),
        })
    }
}

/// Closes the leases on the exporter's memory that no mapping uses. Returns false after the deadline.
fn close_ended(runtime: &'static Runtime, exporter: &ProcessIdentity, deadline: Deadline) -> bool {
    let exporter = *exporter;
    // On the worker, behind the ends of mappings that were dropped; device work may have to be waited for.
    let close_idle = || runtime.worker.run(move || runtime.imports.close_idle_of(&exporter), deadline.left());
    if !close_idle() {
        return false;
    }
    let open = runtime.imports.leases.open().into_iter();
    let of_exporter = open.filter(|lease| *lease.key().exporter == exporter);
    let releasing: Vec<_> =
        of_exporter.map(|lease| KnownLease::of(&lease)).filter(KnownLease::is_releasing).collect();
    if releasing.is_empty() {
        return true;
    }
    let closed = move || !releasing.iter().any(KnownLease::is_releasing);
    runtime.worker.wait_until(closed, deadline.left()) && close_idle()
}

/// Compares the descriptor's token with those of existing leases on the export before the exporter is asked: it counts wrong
/// tokens as guesses, and ends all leases of a process that sends several.
fn check_token(notices: &ExportNotices, opening: &LeaseRef, descriptor: &NamedExport<'_>) -> Result<()> {
    let token = opening.key().token;
    let has_another = |known: Arc<dyn NotifiedLease>| known.open_token().is_some_and(|known| known != token);
    if notices.any_lease(has_another) { Err(Error::wrong_token(descriptor.exporter().pid)) } else { Ok(()) }
}

/// Returns the signal for the readiness of the bytes. If the vendor's event shows that they are ready, it is the event.
/// Otherwise it is a word that the exporter's stream writes: the event of a process that dies early is never reached (CUDA),
/// while this process can store the word itself; and not every event can be opened (CUDA keeps them in `/dev/shm`, which
/// containers do not share). Without such words, or if the exporter is too busy, it is the event.
fn ready(wanted: &OpenTarget<'_>, link: &Link, lease: LeaseId, handle: &HandleBytes) -> Result<Ready> {
    let event = wanted.backend.open_event(handle.as_slice(), wanted.device);
    // The event of a process that has just died may open, and report that it was reached.
    link.check_alive()?;
    let reached = |event: &dyn DeviceEvent| event.query().unwrap_or(false);
    let has_words =
        || wanted.backend.capabilities(wanted.device).is_ok_and(|capabilities| capabilities.timelines);
    match event {
        Ok(event) if reached(&*event) => Ok(Ready::Event(event, AtomicBool::new(true))),
        Ok(event) if !has_words() => Ok(Ready::Event(event, AtomicBool::new(false))),
        Ok(event) => match link.timeline(lease, wanted.backend, true, wanted.deadline.at_most(WORD_DEADLINE))
        {
            Ok(word) => Ok(Ready::Word(word)),
            Err(gone @ Error::ExporterGone { .. }) => Err(gone),
            Err(error) => {
                tracing::debug!(target: crate::os::log::IMPORT, %error, "there is no word for the bytes; their event is waited for");
                Ok(Ready::Event(event, AtomicBool::new(false)))
            }
        },
        Err(error) if !has_words() => Err(error),
        // If there is no word either, the first error states what to change.
        Err(error) => match link.timeline(lease, wanted.backend, true, wanted.deadline) {
            Ok(word) => Ok(Ready::Word(word)),
            Err(refused @ Error::Refused { .. }) => {
                tracing::warn!(target: crate::os::log::IMPORT, %refused, "the exporter cannot write a word when the bytes are ready either");
                Err(error)
            }
            Err(other) => Err(other),
        },
    }
}

/// Timeout for a word if there is an event as well.
const WORD_DEADLINE: Duration = Duration::from_secs(1);
