//! The exporter's guard.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use super::changes::ExportChanges;
use super::exposure::Exposure;
use super::shared::{Allocation, Handles};
use crate::model::address::DeviceRange;
use crate::model::error::{Error, Remedy, Result};
use crate::model::lease::Holders;
use crate::model::one_or_many::OneOrMany;
use crate::sharing::timeline::Timeline;
use crate::sharing::{RecoverableError, Runtime, RuntimeRef};
use crate::transport::Deadline;
use crate::transport::check_may_wait;
use crate::wire::Grant;
use crate::wire::descriptor::{Descriptor, ExportId};

/// An export, which importers can open as long as it lives. It keeps the memory allocated until the last importer has released
/// its lease.
///
/// Dropping it does not wait: further opens fail with [`Error::ExportDropped`], existing mappings remain valid, and the owner
/// is dropped after the last lease. [`close`](Self::close) waits for that; [`wait_released`](Self::wait_released) waits for the
/// importers and keeps the export open.
///
/// # Examples
///
/// ```
/// # fn main() -> device_ipc_core::Result<()> {
/// # let backend = device_ipc_mock::MockBackend::from_spec("devices=1").expect("a valid specification");
/// # let ipc = device_ipc_core::Ipc::with_backend(backend);
/// use std::time::Duration;
/// let export = ipc.share(ipc.allocate(0, 1024)?).start()?;
/// let text = export.descriptor().to_string(); // send it over any transport
/// let mapping = ipc.open(&text.parse()?).at_home()?;
/// assert_eq!(export.holders().opened(), 1);
/// mapping.release(&ipc.create_stream(0)?)?;
/// export.close(Duration::from_secs(10))?; // waits until no importer holds it
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "dropping the export ends it"]
pub struct Export {
    descriptor: Descriptor,
    reach: Reach,
    /// One for each home device.
    parts: OneOrMany<Published>,
    /// The descriptor for event loops, created on its first use.
    changes: OnceLock<ExportChanges>,
}

/// The memory that device work of importers can access.
#[derive(Debug)]
pub(super) enum Reach {
    Known(Exposure),
    /// Computed on request, because the vendor may have to be called for each allocation.
    Later(Box<LaterReach>),
}

#[derive(Debug)]
pub(super) struct LaterReach {
    bytes: u64,
    owned_whole: Vec<DeviceRange>,
    /// Of each part, as long as the export shares it: the handles end before the memory is freed.
    handles: Vec<Weak<[Arc<Allocation>]>>,
    known: OnceLock<Exposure>,
}

impl Reach {
    pub(super) fn later(bytes: u64, owned_whole: Vec<DeviceRange>, handles: &[Handles]) -> Self {
        let handles = handles.iter().map(Arc::downgrade).collect();
        Self::Later(Box::new(LaterReach { bytes, owned_whole, handles, known: OnceLock::new() }))
    }

    fn exposure(&self) -> Exposure {
        match self {
            Self::Known(exposure) => *exposure,
            Self::Later(later) => *later.known.get_or_init(|| {
                let handles: Vec<_> = later.handles.iter().filter_map(Weak::upgrade).collect();
                Exposure::of_tensors(later.bytes, &later.owned_whole, &handles)
            }),
        }
    }
}

impl Export {
    pub(super) fn new(descriptor: Descriptor, parts: OneOrMany<Published>, reach: Reach) -> Self {
        Self { descriptor, reach, parts, changes: OnceLock::new() }
    }

    /// Returns the memory that importers can access; see [`ShareBuilder::exposure`](crate::ShareBuilder::exposure).
    pub fn exposure(&self) -> Exposure {
        self.reach.exposure()
    }

    /// Returns the descriptor, which importers need. Send it over any transport.
    pub const fn descriptor(&self) -> &Descriptor {
        &self.descriptor
    }

    /// Returns the processes that hold a lease on the export now, or a message with it that they have not opened.
    ///
    /// That a process is listed does not say that it uses the memory: when its last mapping is released, its import cache
    /// keeps the lease, idle, so that opening the export again costs nothing. [`Holder::state`](crate::Holder::state) tells which: it is read from
    /// memory that the importer shares with this process, so it is that of this moment, also for an importer that is stopped.
    /// No time limit ends an idle lease. It ends
    ///
    /// - when this process takes it back, for which the importer is not needed: [`recall`](Self::recall),
    ///   [`wait_released`](Self::wait_released), [`close`](Self::close), or the drop of the export; from then on leases are
    ///   returned as soon as they are idle;
    /// - when the importer's cache passes its limits ([`set_cache_limits`](crate::limits::set_cache_limits); 1024 mappings unless
    ///   set), or the importer calls [`close_unused`](crate::close_unused) or [`shutdown`](crate::shutdown);
    /// - when the importer exits.
    ///
    /// A lease that is [draining](crate::LeaseState::Draining) is returned by the importer, when its device has finished; no process
    /// can see of another one's device work that it is over. An importer that is stopped returns none: the calls above wait for it
    /// until their timeout and name it. Release mappings on a stream ([`Mapping::release`](crate::Mapping::release)) to have them
    /// idle instead.
    ///
    /// An importer of named tensors counts once for each device that the memory lives on.
    pub fn holders(&self) -> Holders {
        self.clear_readiness();
        let mut holders = Holders::default();
        self.parts.iter().for_each(|part| holders.add(part.holders()));
        holders
    }

    /// Waits until `count` importers have requested a [timeline](crate::Mapping::timeline), and returns these timelines in the
    /// order in which the importers opened the export. The timeline of a released lease is not among them.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`], which says how many there are; [`Error::OnWorkerThread`] in a callback; [`Error::Forked`].
    pub fn timelines(&self, count: usize, timeout: Duration) -> Result<Vec<Timeline>> {
        let first = &self.parts[0];
        let runtime = first.runtime.check()?;
        check_may_wait("waiting for timelines", timeout)?;
        let found = runtime.exports.timelines(first.export, count, Deadline::after(timeout).at);
        found.map_err(|found| Error::Timeout {
            what: format!("a count of {count} timelines of the export"),
            after: timeout,
            detail: format!("; {found} importers have asked for theirs ({})", Remedy::RequestTimeline),
        })
    }

    /// Makes a right to open the export once, as bytes that travel beside the [descriptor](Self::descriptor).
    ///
    /// Until it ends it keeps the memory as a lease does, so the export may be dropped as soon as the bytes have been sent.
    /// [`wait_released`](Self::wait_released) and [`close`](Self::close) wait for it, and [`holders`](Self::holders) counts all such
    /// grants as one holder, in the state [`InMessage`](crate::LeaseState::InMessage). It ends when an open uses it
    /// ([`OpenBuilder::grant`](crate::OpenBuilder::grant)), when its receiver gives it back ([`Grant::give_back`]), or `limit` from
    /// now: no connection shows whether anybody still has the bytes.
    ///
    /// # Examples
    ///
    /// ```
    /// # fn main() -> device_ipc_core::Result<()> {
    /// # let backend = device_ipc_mock::MockBackend::from_spec("devices=1").expect("a valid specification");
    /// # let ipc = device_ipc_core::Ipc::with_backend(backend);
    /// use std::time::Duration;
    /// use device_ipc_core::Grant;
    /// let export = ipc.share(ipc.allocate(0, 1024)?).start()?;
    /// let descriptor = export.descriptor().clone();
    /// let bytes = export.grant(Duration::from_secs(60))?.to_bytes(); // send both over any transport
    /// drop(export);
    /// let mapping = ipc.open(&descriptor).grant(&Grant::from_bytes(&bytes)?)?.at_home()?;
    /// assert!(ipc.open(&descriptor).at_home().is_err(), "the export has been dropped");
    /// # drop(mapping);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Forked`]; [`Error::Io`] if the system has no random bytes.
    pub fn grant(&self, limit: Duration) -> Result<Grant> {
        let runtime = self.parts[0].runtime.check()?;
        let mut begun = OneOrMany::NONE;
        for part in self.parts.iter() {
            match runtime.exports.begin_timed_grant(part.export, limit, None) {
                Ok(token) => begun.push((part.export, token)),
                Err(error) => {
                    begun.for_each(|(export, token)| runtime.exports.end_grant(export, token));
                    return Err(error);
                }
            }
        }
        Ok(Grant::new(&runtime.identity, begun))
    }

    /// Returns whether a grant has neither been used nor given back, and its time limit has not passed.
    #[doc(hidden)]
    pub fn is_granted(&self) -> bool {
        let is_granted = |part: &Published| {
            part.runtime.here().is_none_or(|runtime| runtime.exports.is_granted(part.export))
        };
        self.parts.iter().any(is_granted)
    }

    /// Takes idle leases back, without waiting: those that only the import caches of other processes keep end now, whether the
    /// processes are running or stopped. Leases in use, and those of later opens, are returned as soon as no mapping uses them,
    /// so each further open by an importer costs a message and a driver call. The export stays open.
    ///
    /// An importer closes its mapping of the memory soon after; until then the driver may count the memory as in use.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # fn main() -> device_ipc_core::Result<()> {
    /// # let export: device_ipc_core::Export = unimplemented!();
    /// use device_ipc_core::LeaseState;
    ///
    /// export.recall();
    /// let in_use = export.holders().count(LeaseState::InUse);
    /// # Ok(())
    /// # }
    /// ```
    pub fn recall(&self) {
        for part in self.parts.iter() {
            if let Some(runtime) = part.runtime.here() {
                runtime.exports.recall(part.export);
            }
        }
    }

    /// Waits until the export has been opened and no process uses it any longer. The export stays open.
    ///
    /// `Ok` means that the device work of every importer on this memory has finished: of those that released their mappings, and of
    /// those that exited in order ([`exit(3)`], or a return from `main`), which finish it first.
    ///
    /// [`exit(3)`]: std::process::exit
    ///
    /// Idle leases are [recalled](Self::recall), so no process that has only an idle lease is waited for.
    ///
    /// # Errors
    ///
    /// When the time is over, [`Error::NotOpened`] if no process has opened the export yet, otherwise [`Error::StillHeld`] with
    /// the process, the program and the bytes of each holder. [`Error::HolderDied`] if the export is released, and importers died
    /// while they used it, once for each death; [`holders`](Self::holders) keeps listing them. [`Error::OnWorkerThread`] in a
    /// callback; [`Error::Forked`].
    pub fn wait_released(&self, timeout: Duration) -> Result<()> {
        check_may_wait("waiting for the release of an export", timeout)?;
        let deadline = Deadline::after(timeout);
        let mut held = None;
        for part in self.parts.iter() {
            if let Err(holders) = part.wait_released(deadline)? {
                held.get_or_insert_with(Holders::default).add(holders);
            }
        }
        match held {
            None => self.report_deaths(),
            Some(holders) if holders.opened() == 0 => {
                Err(Error::NotOpened { after: timeout, opened: 0, expected: 1 })
            }
            Some(holders) => Err(Error::StillHeld { after: timeout, holders }),
        }
    }

    /// Fails if importers died while they used the memory, once for each death.
    fn report_deaths(&self) -> Result<()> {
        let mut is_new = false;
        for part in self.parts.iter() {
            is_new |= part.runtime.check()?.exports.take_deaths(part.export);
        }
        if is_new { Err(Error::HolderDied { holders: self.holders() }) } else { Ok(()) }
    }

    /// Returns whether the export has been opened and no process holds it any longer. Does not wait. As
    /// [`wait_released`](Self::wait_released), it asks importers for their idle leases.
    ///
    /// The descriptor of the export ([`AsFd`]) becomes readable with every change of [`holders`](Self::holders): when a process has
    /// opened the export, released it, or terminated. It stays readable until the next call of this method or of `holders`.
    /// Call this method first, then wait for the descriptor, in a loop.
    ///
    /// # Errors
    ///
    /// [`Error::HolderDied`] as there; [`Error::Forked`].
    pub fn try_wait_released(&self) -> Result<bool> {
        self.clear_readiness();
        let mut is_released = true;
        for part in self.parts.iter() {
            is_released &= part.runtime.check()?.exports.try_wait_released(part.export);
        }
        if is_released {
            self.report_deaths()?;
        }
        Ok(is_released)
    }

    /// Returns the descriptor of [`AsFd`], which the first call creates, or an error if there is none left.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the process cannot create a descriptor (its limit of open files is reached); a later call tries again.
    /// [`Error::Forked`].
    pub fn try_as_fd(&self) -> Result<BorrowedFd<'_>> {
        let changes = match self.changes.get() {
            Some(known) => known,
            None => {
                let exports = self.parts.iter().map(|part| part.export);
                let created = ExportChanges::try_of(exports, self.parts[0].runtime)?;
                self.changes.get_or_init(|| created)
            }
        };
        Ok(changes.as_fd())
    }

    /// Returns the state of the process that the export belongs to.
    pub(crate) fn runtime(&self) -> RuntimeRef {
        self.parts[0].runtime
    }

    /// Makes the descriptor unreadable until the next change. Called before the state is read, so that no change is lost.
    fn clear_readiness(&self) {
        if let Some(changes) = self.changes.get() {
            changes.clear();
        }
    }

    /// Returns a descriptor for changes of [`holders`](Self::holders) that only its own [`clear`](ExportChanges::clear) makes
    /// unreadable, for a program in which several event loops or threads wait for this export.
    pub fn changes(&self) -> ExportChanges {
        ExportChanges::of(self.parts.iter().map(|part| part.export), self.parts[0].runtime)
    }

    /// Waits until the export has been opened `count` times since its creation. An importer that opens it while it has it open
    /// already counts once.
    ///
    /// # Errors
    ///
    /// [`Error::NotOpened`] with the number of times that it was opened; [`Error::OnWorkerThread`] in a callback; [`Error::Forked`].
    pub fn wait_opened(&self, count: u64, timeout: Duration) -> Result<()> {
        check_may_wait("waiting for importers of an export", timeout)?;
        let deadline = Deadline::after(timeout);
        let wait = |part: &Published| -> Result<Result<(), Holders>> {
            Ok(part.runtime.check()?.exports.wait_opened(part.export, count, deadline.at))
        };
        let waited = self.parts.iter().map(wait).find(|waited| !matches!(waited, Ok(Ok(()))));
        waited.unwrap_or(Ok(Ok(())))?.map_err(|holders| Error::NotOpened {
            after: timeout,
            opened: holders.opened(),
            expected: count,
        })
    }

    /// Runs `callback` after a change of [`holders`](Self::holders): when an importer has opened the export, has released its
    /// last mapping, has used a cached lease again, or has died, also after the export was dropped. An open of an
    /// export of this process by a callback causes no further call. While a callback is registered, such changes cost the importer a message. One call reports all changes that come before it begins. It runs on a thread
    /// of the library, which does nothing else meanwhile, so it notifies another thread and returns: calls that wait are
    /// refused there ([`Error::OnWorkerThread`]). The context of the memory's device is current. A second callback replaces
    /// the first.
    pub fn on_change(&self, callback: impl Fn() + Send + Sync + 'static) {
        let callback = Arc::new(callback);
        for part in self.parts.iter() {
            if let Some(runtime) = part.runtime.here() {
                let callback = Arc::clone(&callback);
                runtime.exports.watch(part.export, move || callback());
            }
        }
    }

    /// Ends the export and waits until no process uses it and its owner has been dropped.
    ///
    /// Idle leases are taken back, whether the processes that have them are running or stopped. A running importer closes its
    /// mapping before the owner is dropped; one that has not done so within 250 ms is no longer waited for.
    ///
    /// # Errors
    ///
    /// [`RecoverableError`], which gives the export back: [`Error::StillHeld`] after the timeout, with the holders, or
    /// [`Error::Timeout`] where no process holds it and only its owner's drop takes longer. The export can no longer be
    /// opened then. Look at its [`holders`](Self::holders), call `close` again to wait longer, or drop it: its owner is dropped after
    /// the last holder. [`Error::OnWorkerThread`] in a callback, where nothing has changed.
    pub fn close(self, timeout: Duration) -> Result<(), RecoverableError<Self>> {
        self.close_with(timeout, HolderPolicy::Keep)
    }

    /// Closes the export as [`close`](Self::close) does, with a policy for memory that importers still hold after the timeout.
    ///
    /// # Errors
    ///
    /// As [`close`](Self::close), also where the memory was freed under its holders: they are named.
    /// [`Error::Unsupported`], at once, for [`HolderPolicy::FreeAnyway`] with handles whose importers pin the memory.
    pub fn close_with(self, timeout: Duration, policy: HolderPolicy) -> Result<(), RecoverableError<Self>> {
        close_all(&self.parts, timeout, policy).map_err(|error| RecoverableError::new(error, self))
    }
}

impl AsFd for Export {
    /// Returns a descriptor that is readable after a change of [`holders`](Self::holders); see
    /// [`try_wait_released`](Self::try_wait_released).
    ///
    /// # Panics
    ///
    /// If the process cannot create the descriptor (its limit of open files is reached); [`try_as_fd`](Self::try_as_fd) returns
    /// the error.
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self.try_as_fd() {
            Ok(descriptor) => descriptor,
            Err(Error::Forked) => self.parts[0].runtime.always_ready(),
            Err(error) => panic!("{error}; Export::try_as_fd returns this error"),
        }
    }
}

impl AsRawFd for Export {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

/// An entry of the table, removed on drop; an [`Export`] has one for each home device.
#[derive(Debug)]
pub(crate) struct Published {
    export: ExportId,
    runtime: RuntimeRef,
}

impl Published {
    pub(crate) const fn new(export: ExportId, runtime: &'static Runtime) -> Self {
        Self { export, runtime: runtime.for_guard() }
    }

    fn holders(&self) -> Holders {
        self.runtime.here().map(|runtime| runtime.exports.holders(self.export)).unwrap_or_default()
    }

    /// Waits until the export has been opened and has no holder; the error lists the holders.
    fn wait_released(&self, deadline: Deadline) -> Result<Result<(), Holders>> {
        Ok(self.runtime.check()?.exports.wait_released(self.export, deadline.at))
    }
}

impl Drop for Published {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.here() {
            runtime.exports.drop_export(self.export);
        }
    }
}

/// Ends exports together, and waits until they have no holder and their owners have been dropped.
fn close_all(published: &OneOrMany<Published>, timeout: Duration, policy: HolderPolicy) -> Result<()> {
    let deadline = Deadline::after(timeout);
    check_may_wait("closing an export", timeout)?;
    let runtime = published[0].runtime.check()?;
    for one in published.iter() {
        if policy == HolderPolicy::FreeAnyway {
            runtime.exports.check_revokes(one.export)?;
        }
    }
    published.iter().for_each(|one| runtime.exports.drop_export(one.export));
    let mut held = None;
    for export in published.iter().map(|one| one.export) {
        if let Err(holders) = runtime.exports.wait_retired(export, deadline.at) {
            if policy == HolderPolicy::FreeAnyway {
                runtime.exports.end_leases(export);
            }
            held.get_or_insert_with(Holders::default).add(holders);
        }
    }
    held.map_or(Ok(()), |holders| Err(still_held(timeout, holders)))
}

/// Returns the error of an export that has not ended in time: processes hold it, or none does and the drop of its owner
/// takes longer.
pub(crate) fn still_held(after: Duration, holders: Holders) -> Error {
    if holders.iter().len() > 0 {
        return Error::StillHeld { after, holders };
    }
    Error::Timeout {
        what: "the drop of the memory's owner".into(),
        after,
        detail: "; no process holds the export, but the drop of its owner, or of an owner before it, has not returned: it \
                 may wait for a stream, or for an importer that is closing its mapping"
            .into(),
    }
}

/// The policy for memory that importers still hold after the timeout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HolderPolicy {
    /// Keeps the memory until the last lease has ended.
    Keep,
    /// Frees the memory. Only for kinds of handle that revoke the mappings of importers
    /// ([`Lifetime::Revokes`](crate::backend::Lifetime::Revokes)); their work that still uses it fails. Memory that importers of
    /// other hosts are copying is kept until they have finished, since a transfer engine would read freed memory.
    FreeAnyway,
}
