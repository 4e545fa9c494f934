//! The open of one export on one device: by an existing lease, by a request to the exporter, or by a copy.
//!
//! The checks are in the order of their cost: arguments, what the descriptor says about the exporter (another boot, another host, a
//! process that has exited), and only then a message. Nothing is used up before they have passed, least of all a grant.
//!
//! Memory of this process is not opened by the driver, which would refuse it: the part takes a lease from this process's own table.
//! [`OpenExport::is_local`] explains why the identity of the exporter alone does not decide that.

use std::cell::OnceCell;
use std::fmt;
use std::time::Duration;

use rustix::io::Errno;

use super::copy_policy::ProgressReport;
use super::grant::UnusedGrant;
use super::mapping_source::{Copied, LocalLease, MappingSource};
use super::open_part::{OpenPart, PartSettings};
use super::place::operations;
use super::staged::{Incoming, copy_in};
use super::table::{LeaseRef, OpenTarget, ReservedTarget};
use crate::backend::Access;
use crate::backend::stream::BorrowedStream;
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Remedy, Result};
use crate::os::kill::kill_point;
use crate::sharing::export::{BorrowedMemory, LocalGrant, OpenRequest, check_backend};
use crate::sharing::remote::{IncomingPull, pull_in};
use crate::sharing::staging::{CopyLayout, copy_within};
use crate::sharing::timeline::Termination;
use crate::sharing::{Ipc, Runtime};
use crate::transport::{Deadline, check_may_wait, socket};
use crate::wire::descriptor::{Descriptor, NamedExport};
use crate::wire::{BrokerAddress, Refusal};

/// The replacement of a copy over the network: memory of this process in which the bytes of another host arrive repeatedly.
pub(crate) trait Replicate: fmt::Debug {
    /// Shares such memory on the device of `incoming`, and returns its descriptor.
    fn replicate(&self, ipc: &Ipc, incoming: &IncomingPull<'_>) -> Result<Descriptor>;
}

/// The open of a part: an export on one device.
pub(super) struct OpenExport<'a> {
    pub(super) runtime: &'static Runtime,
    pub(super) ipc: &'a Ipc,
    pub(super) named: NamedExport<'a>,
    pub(super) device: DeviceOrdinal,
    /// The ordinal of the home device, if it is visible.
    pub(super) home: Option<DeviceOrdinal>,
    pub(super) access: Access,
    pub(super) time_limit: &'a LazyDeadline,
    pub(super) grant: Option<&'a UnusedGrant>,
    pub(super) alone: bool,
    pub(super) reserved: Option<ReservedTarget<'a>>,
    pub(super) replicate: Option<&'a dyn Replicate>,
}

impl OpenExport<'_> {
    /// Returns a reference to an open lease that can be used without a message.
    pub(super) fn reuse_lease(&self) -> Option<LeaseRef> {
        if self.alone {
            return None;
        }
        let (backend, on, allow) = (self.ipc.backend(), (self.device, self.access), self.ipc.allow_list());
        let lease = self.runtime.imports.acquire_open(&self.named, backend, on, self.grant, allow)?;
        kill_point!("importer:mapped");
        Some(lease)
    }

    #[inline]
    pub(super) fn part(&self, source: MappingSource) -> OpenPart {
        let (device, access) = (self.device, self.access);
        // Zero is the limit of an open without a request, and not that of later requests of the mapping.
        let timeout = Some(self.time_limit.timeout).filter(|timeout| !timeout.is_zero());
        let timeout = timeout.unwrap_or_else(|| self.ipc.timeout());
        let at_home = self.home == Some(device) || matches!(source, MappingSource::Copy(_));
        OpenPart::new(self.runtime, source, PartSettings { device, access, at_home, timeout })
    }

    /// Returns whether the device reaches the home device, as far as this process sees that.
    pub(super) fn has_peer_access(&self) -> Result<bool> {
        self.home.map_or(Ok(true), |home| self.ipc.backend().peer_access(self.device, home))
    }

    /// Makes the stream wait until the bytes are ready; the host waits if there is no stream.
    #[inline]
    pub(super) fn wait_ready(&self, part: &OpenPart, stream: Option<BorrowedStream<'_>>) -> Result<()> {
        match stream {
            Some(stream) => part.wait_ready_on(stream),
            None => part.wait_ready(|| self.time_limit.left()),
        }
    }

    /// Opens a part that has no such lease.
    pub(super) fn open(&self, with_region_name: &dyn Fn(usize, Error) -> Error) -> Result<MappingSource> {
        let Self { runtime, ipc, named, device, home, access, time_limit, grant, alone, reserved, .. } =
            *self;
        let backend = ipc.backend();
        if access.is_writable() && !named.contents.access.is_writable() {
            return Err(Error::AccessDenied { wanted: access, granted: named.contents.access });
        }
        if time_limit.timeout.is_zero() && named.contents.exporter != runtime.identity {
            // The exporter would begin a lease for a request that is given up at once.
            return Err(time_limit.deadline().passed("the answer of the exporting process", ""));
        }
        self.check()?;
        if reserved.is_some() {
            operations(&**backend)?;
        }
        let source = if self.is_local()? {
            if reserved.is_some() {
                return Err(Error::Unsupported {
                    backend: backend.info().name,
                    what: "map memory of the same process at other addresses".into(),
                    why: Remedy::UseSharedAddress.to_string(),
                });
            }
            // Before the grant is used.
            self.check_at_home()?;
            self.local_source(self.granted_locally()?)
        } else {
            if named.contents.exporter == runtime.identity {
                self.check_at_home()?;
            }
            if !self.has_peer_access()? {
                return Err(Error::NoPeerAccess { from: device, to: named.part.home });
            }
            let allow = ipc.allow_list();
            let (descriptor, deadline) = (named, time_limit.deadline());
            let wanted = OpenTarget {
                runtime,
                backend,
                descriptor,
                device,
                home,
                access,
                allow,
                deadline,
                grant,
                alone,
                reserved,
                with_region_name,
            };
            let lease = runtime.imports.acquire(&wanted)?;
            if let Some(ReservedTarget::New | ReservedTarget::Places(_)) = reserved
                && let Err(error) = lease.map_reserved()
            {
                runtime.imports.release(lease);
                return Err(error);
            }
            MappingSource::Remote(lease)
        };
        kill_point!("importer:mapped");
        Ok(source)
    }

    /// Copies the memory to the device.
    pub(super) fn copy(&self, layout: CopyLayout, progress: ProgressReport<'_>) -> Result<MappingSource> {
        let Self { ipc, named, device, time_limit, grant, .. } = *self;
        let timeout = time_limit.timeout;
        let backend = ipc.backend();
        self.check()?;
        let buffer = if self.is_local()? {
            let reading = Self { access: Access::ReadOnly, ..*self };
            let granted = reading.granted_locally()?;
            let home = granted.shared.regions[0].device;
            // Its drop ends the lease, also after an error.
            let kept = Self { device: home, ..reading }.part(self.local_source(granted));
            kept.wait_ready(|| timeout)?;
            kept.note_use();
            let buffer = copy_within(backend, kept.regions(), &layout, device)?;
            progress.call(layout.bytes(), layout.bytes());
            buffer
        } else {
            let allow = ipc.allow_list();
            let report = &|copied| progress.call(copied, layout.bytes());
            copy_in(&Incoming {
                runtime: self.runtime,
                backend,
                named,
                layout: &layout,
                device,
                grant,
                allow,
                timeout,
                report,
            })?
        };
        kill_point!("importer:mapped");
        Ok(MappingSource::Copy(Box::new(Copied { buffer, layout })))
    }

    /// Copies the memory to the device over the network, or opens its replacement.
    pub(super) fn pull(&self, layout: CopyLayout, progress: ProgressReport<'_>) -> Result<MappingSource> {
        let report = &|copied| progress.call(copied, layout.bytes());
        let incoming = self.incoming("a copy from another host", report)?;
        if let Some(replicate) = self.replicate {
            let descriptor = replicate.replicate(self.ipc, &incoming)?;
            let local = OpenExport { named: descriptor.contents().named(0), grant: None, ..*self };
            return Ok(local.local_source(local.granted_locally()?));
        }
        let buffer = pull_in(&incoming, &layout)?;
        kill_point!("importer:mapped");
        Ok(MappingSource::Copy(Box::new(Copied { buffer, layout })))
    }

    /// Returns the export for a copy over the network by this call.
    pub(super) fn incoming<'b>(
        &'b self,
        call: &'static str,
        report: &'b dyn Fn(u64),
    ) -> Result<IncomingPull<'b>> {
        let Self { ipc, named, device, time_limit, .. } = *self;
        let (backend, timeout) = (ipc.backend(), time_limit.timeout);
        check_may_wait(call, timeout)?;
        self.check_arguments()?;
        let Some(remote) = ipc.remote() else {
            return Err(Error::Unsupported {
                backend: backend.info().name,
                what: "copy memory over the network".into(),
                why: format!("there is no transfer engine; {}", Remedy::SetTransferEngine),
            });
        };
        if named.contents.exporter == self.runtime.identity {
            let why = match self.replicate {
                None => Remedy::UseSharedAddress,
                Some(_) => Remedy::OpenRingInPlace,
            };
            return Err(Error::Unsupported {
                backend: backend.info().name,
                what: "copy memory of the same process over the network".into(),
                why: why.to_string(),
            });
        }
        Ok(IncomingPull { runtime: self.runtime, remote, backend, named, device, timeout, report })
    }

    fn local_source(&self, granted: LocalGrant) -> MappingSource {
        let LocalGrant { lease, shared, .. } = granted;
        let (backend, export) = (self.ipc.backend().clone(), self.named.part.export);
        MappingSource::Local(Box::new(LocalLease { backend, export, lease, shared }))
    }

    /// Checks the arguments and the exporter before any message.
    fn check(&self) -> Result<()> {
        self.check_arguments()?;
        check_reachable(&self.named, self.runtime)
    }

    fn check_arguments(&self) -> Result<()> {
        let name = self.ipc.backend().info().name;
        check_backend("the descriptor", self.named.contents.backend.as_str(), name)?;
        let count = self.ipc.devices()?.len();
        if self.device.index() >= count {
            return Err(Error::NoSuchDevice { backend: name, ordinal: self.device, count });
        }
        Ok(())
    }

    /// Returns whether this copy of the library is the exporter, so that there is nothing to open.
    fn is_local(&self) -> Result<bool> {
        let Self { runtime, named, .. } = self;
        if named.contents.exporter != runtime.identity {
            return Ok(false);
        }
        if runtime.poller.listens_at(&named.contents.broker) {
            return Ok(true);
        }
        if matches!(socket::connect_to(&named.contents.broker), Err(Errno::CONNREFUSED | Errno::NOENT)) {
            // The process has executed another program since, which has the same id and start time (execve(2)).
            return Err(Error::ExporterGone { pid: named.exporter().pid });
        }
        // Another copy of the library in this process, which grants leases by its own broker.
        Ok(false)
    }

    /// Checks that memory of this process is opened on its home device.
    fn check_at_home(&self) -> Result<()> {
        match self.home {
            Some(home) if home != self.device => Err(Error::Unsupported {
                backend: self.ipc.backend().info().name,
                what: format!("open memory of the same process on device {}", self.device),
                why: format!(
                    "within one process there is one address; open it at home (device {home}) and enable peer access, or {}",
                    Remedy::OpenStaged
                ),
            }),
            _ => Ok(()),
        }
    }

    /// Begins a lease on an export of this process.
    fn granted_locally(&self) -> Result<LocalGrant> {
        let Self { runtime, named, access, .. } = *self;
        let grant = self.grant.and_then(UnusedGrant::token);
        let request = OpenRequest { export: named.part.export, token: named.part.token, grant, access };
        match runtime.exports.grant_locally(request) {
            Ok(granted) => {
                if let Some(grant) = self.grant {
                    grant.used_up();
                }
                if let Some(Err(detail)) = granted.borrowed.as_ref().map(BorrowedMemory::check) {
                    runtime.exports.release(named.part.export, granted.lease, Termination::Released);
                    return Err(Error::StaleGeneration(detail));
                }
                Ok(granted)
            }
            Err(Refusal::Dropped) => Err(Error::ExportDropped { pid: named.exporter().pid }),
            Err(Refusal::Access { granted }) => Err(Error::AccessDenied { wanted: access, granted }),
            Err(_) => Err(Error::wrong_token(named.exporter().pid)),
        }
    }
}

/// A timeout that begins with the first wait: using an open lease does not read the clock.
#[derive(Debug)]
pub(super) struct LazyDeadline {
    timeout: Duration,
    deadline: OnceCell<Deadline>,
}

impl LazyDeadline {
    pub(super) const fn new(timeout: Duration) -> Self {
        Self { timeout, deadline: OnceCell::new() }
    }

    pub(super) fn deadline(&self) -> Deadline {
        *self.deadline.get_or_init(|| Deadline::after(self.timeout))
    }

    pub(super) fn left(&self) -> Duration {
        self.deadline().left()
    }
}

/// Returns whether the device cannot reach the memory, or the vendor cannot open it there.
pub(super) const fn is_out_of_reach(error: &Error) -> bool {
    matches!(
        error,
        Error::NoPeerAccess { .. }
            | Error::HomeNotVisible { .. }
            | Error::OverlapsInUse { .. }
            | Error::Unsupported { .. }
            | Error::Vendor(_)
    )
}

/// Returns whether a copy over the network may succeed where the memory cannot be opened or copied on this host.
pub(super) const fn is_elsewhere(error: &Error) -> bool {
    is_out_of_reach(error) || matches!(error, Error::OtherHost { .. } | Error::OtherNetworkNamespace)
}

/// Checks the facts about the exporter that need no message.
fn check_reachable(descriptor: &NamedExport<'_>, runtime: &Runtime) -> Result<()> {
    let (exporter, local) = (descriptor.exporter(), &runtime.identity);
    if exporter.boot != local.boot {
        return Err(if exporter.host == local.host {
            Error::Rebooted
        } else {
            Error::OtherHost {
                exporter: exporter.host.to_string(),
                local: local.host.to_string(),
                listens: !descriptor.contents.network.is_empty(),
            }
        });
    }
    if !runtime.imports.has_live_link(exporter) && exporter.has_exited(local) {
        return Err(Error::ExporterGone { pid: exporter.pid });
    }
    let is_abstract = matches!(descriptor.contents.broker, BrokerAddress::Abstract(_));
    if is_abstract && exporter.net_namespace != local.net_namespace {
        return Err(Error::OtherNetworkNamespace);
    }
    Ok(())
}
