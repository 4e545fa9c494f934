//! Mappings at reserved addresses: suspended, resumed, and replaced by other exports of equal layout.
//!
//! Each version of the memory has a lease of its own, and an import that is mapped in the reserved ranges or not. All or nothing:
//! the new version is imported and ready before the old one is unmapped, and the old one is mapped again if the new one cannot be
//! mapped.

use std::sync::Arc;
use std::time::Duration;

use super::builder::OpenBuilder;
use super::link::Link;
use super::mapping::Mapping;
use super::mapping_source::MappingSource;
use super::open::{MappingAddresses, OpenOptions, with_tensor_name};
use super::open_export::{LazyDeadline, OpenExport};
use super::open_part::OpenPart;
use super::place::Place;
use super::reserved_open::{KeeperAddress, ReservedOpen};
use super::same_layout::check_same_layout;
use super::table::{LeaseRef, ReservedTarget};
use crate::backend::stream::{AsStream, BorrowedStream};
use crate::model::error::{Error, Result};
use crate::model::one_or_many::OneOrMany;
use crate::os::kill::kill_point;
use crate::sharing::export::check_backend;
use crate::sharing::{Ipc, Runtime};
use crate::transport::check_may_wait;
use crate::wire::descriptor::Descriptor;

/// An export that takes the addresses of a mapping ([`Mapping::resume`], [`Mapping::replace`]): a [`Descriptor`], which is opened
/// with the timeout and the users of the open that reserved the addresses, or an [`OpenBuilder`] with its own, such as
/// `ipc.open(&descriptor).grant(&grant)?`, or that of a received export or of a keeper's answer.
#[derive(Debug)]
pub struct Replacement<'a>(VersionSource<'a>);

#[derive(Debug)]
enum VersionSource<'a> {
    Descriptor(&'a Descriptor),
    Opened(OpenOptions<'a>),
}

impl<'a> From<&'a Descriptor> for Replacement<'a> {
    fn from(descriptor: &'a Descriptor) -> Self {
        Self(VersionSource::Descriptor(descriptor))
    }
}

impl<'a> From<OpenBuilder<'a>> for Replacement<'a> {
    fn from(builder: OpenBuilder<'a>) -> Self {
        Self(VersionSource::Opened(builder.options))
    }
}

/// The search for the present export of the keeper of a mapping.
#[derive(Debug)]
pub(crate) struct KeeperSearch {
    pub(crate) ipc: Ipc,
    pub(crate) timeout: Duration,
    pub(crate) keeper: Arc<KeeperAddress>,
    /// The connection to the exporter, and its count of changes, read before the keeper is asked.
    seen: Option<(Arc<Link>, u64)>,
}

/// The import of a part of the next version.
struct ImportedPart {
    lease: LeaseRef,
    /// Whether the home device is the device of the part.
    at_home: bool,
}

/// The imports of the next version, one for each part, which are not mapped. Dropping them ends their leases.
struct NextVersion {
    runtime: &'static Runtime,
    descriptor: Descriptor,
    keeper: Option<Arc<KeeperAddress>>,
    leases: Vec<ImportedPart>,
}

impl Drop for NextVersion {
    fn drop(&mut self) {
        for part in self.leases.drain(..) {
            self.runtime.imports.release(part.lease);
        }
    }
}

/// Mappings of [`OpenBuilder::reserved`](crate::OpenBuilder::reserved), whose addresses stay while their memory is exchanged.
/// Other mappings return [`Error::Unsupported`].
///
/// The methods wait on the host, for device work of this process and for the exporter, and fail on the library's own threads
/// ([`Error::OnWorkerThread`]). They change nothing if they fail, unless their documentation says otherwise. They end a lease
/// before they return, so that its exporter can free the memory; callbacks ([`on_gone`](Self::on_gone),
/// [`on_dropped`](Self::on_dropped)) and the [`timeline`](Self::timeline) of that lease end with it.
impl Mapping {
    /// Returns whether the mapping has reserved addresses that hold no memory.
    pub fn is_suspended(&self) -> bool {
        self.first_part().suspended().is_some()
    }

    /// Unmaps the memory and ends the lease; the addresses stay reserved. Does nothing if the mapping is suspended.
    ///
    /// The host waits first for all work of this process on the devices of the mapping. Until [`resume`](Self::resume), views
    /// return [`Error::Suspended`], and device work on the addresses, as by a captured graph, fails as on any address without
    /// memory: on CUDA this ends the use of the device by this process.
    ///
    /// # Errors
    ///
    /// [`Error::Forked`]; the vendor's error.
    pub fn suspend(&mut self) -> Result<()> {
        let timeout = self.reserved("suspend")?.timeout;
        check_may_wait("suspending a mapping", timeout)?;
        if self.is_suspended() {
            return Ok(());
        }
        let runtime = self.first_part().runtime()?;
        self.finish_work(None, timeout)?;
        self.unmap()?;
        self.release_all(runtime);
        Ok(())
    }

    /// Maps an export in the reserved addresses of a suspended mapping: the one that was mapped before, or another one of equal
    /// layout. Waits until the bytes are ready.
    ///
    /// The layouts are equal if the names, element types, shapes, strides and offsets of all tensors are the same in the same
    /// order, and the regions have the same sizes. The home devices may differ; the device and the access of the mapping stay.
    ///
    /// # Errors
    ///
    /// [`LayoutError::Differs`](crate::LayoutError::Differs) with the first difference; as for
    /// [`OpenBuilder::on_device`](crate::OpenBuilder::on_device). The mapping stays suspended.
    pub fn resume<'a>(&mut self, next: impl Into<Replacement<'a>>) -> Result<()> {
        let reserved = self.reserved("resume")?;
        if !self.is_suspended() {
            return Err(Error::Unsupported {
                backend: reserved.ipc.backend().info().name,
                what: "resume a mapping that is not suspended".into(),
                why: "its addresses hold memory; replace it instead".into(),
            });
        }
        let next = next.into().options(reserved);
        check_may_wait("resuming a mapping", next.timeout)?;
        let next = self.import(next)?;
        kill_point!("importer:replace-ready");
        self.map(next)
    }

    /// Exchanges the memory for that of another export of equal layout (see [`resume`](Self::resume)), at the same addresses.
    /// Captured graphs and addresses of tensors then use the new memory.
    ///
    /// Opens the export, waits until its bytes are ready and until all work of this process on the devices of the mapping is
    /// complete, and exchanges the memory. [`replace_on`](Self::replace_on) waits for one stream instead.
    ///
    /// # Errors
    ///
    /// As for [`resume`](Self::resume), and [`Error::Suspended`] for a suspended mapping. The mapping has the old memory; it is
    /// suspended only if the vendor maps neither the new memory nor the old one again.
    pub fn replace<'a>(&mut self, next: impl Into<Replacement<'a>>) -> Result<()> {
        self.replace_after(next.into(), None)
    }

    /// Exchanges the memory as [`replace`](Self::replace) does, after the work that was submitted to `stream` so far. The caller
    /// orders work of other streams before that, by events; of devices other than the stream's, all work is waited for.
    ///
    /// The host waits for the stream: drivers unmap at once, not in the order of a stream. Work that is submitted to any stream
    /// after this call uses the new memory.
    ///
    /// # Errors
    ///
    /// As for [`replace`](Self::replace); [`Error::WrongStream`], [`Error::WrongBackend`], [`Error::StreamCapturing`].
    pub fn replace_on<'a, M>(
        &mut self,
        next: impl Into<Replacement<'a>>,
        stream: &impl AsStream<M>,
    ) -> Result<()> {
        self.replace_after(next.into(), Some(stream.as_stream()))
    }

    pub(crate) fn replace_after(
        &mut self,
        next: Replacement<'_>,
        stream: Option<BorrowedStream<'_>>,
    ) -> Result<()> {
        let next = next.options(self.reserved("replace")?);
        if self.is_suspended() {
            return Err(Error::Suspended);
        }
        let timeout = next.timeout;
        check_may_wait("replacing the memory of a mapping", timeout)?;
        if let Some(stream) = stream {
            self.check_stream(stream)?;
        }
        let next = self.import(next)?;
        kill_point!("importer:replace-ready");
        self.finish_work(stream, timeout)?;
        self.unmap()?;
        kill_point!("importer:replace-unmapped");
        self.map(next)
    }

    /// Returns the search for the present export of the mapping's keeper; `None` if the mapping is known to have it.
    pub(crate) fn search_keeper(&self) -> Result<Option<KeeperSearch>> {
        let reserved = self.reserved("follow the keeper of")?;
        let Some(keeper) = &reserved.keeper else {
            return Err(Error::Unsupported {
                backend: reserved.ipc.backend().info().name,
                what: "follow a mapping that no keeper has answered with".into(),
                why: "it was opened by a descriptor; replace it by the next descriptor instead".into(),
            });
        };
        if self.is_suspended() {
            return Err(Error::Suspended);
        }
        let seen = self.exporter_seen();
        let count = seen.as_ref().map(|(_, count)| *count);
        if count.is_some() && count == reserved.current_at {
            return Ok(None);
        }
        let (ipc, timeout, keeper) = (reserved.ipc.clone(), reserved.timeout, Arc::clone(keeper));
        Ok(Some(KeeperSearch { ipc, timeout, keeper, seen }))
    }

    /// Notes that the mapping has the export that the keeper has answered a search with.
    pub(crate) fn note_current(&mut self, search: KeeperSearch) {
        let now = self.exporter_seen();
        let current_at = match (search.seen, now) {
            // Read before the keeper was asked, so that a later change is not missed.
            (Some((link, count)), Some((now, _))) if Arc::ptr_eq(&link, &now) => Some(count),
            _ => None,
        };
        if let Some(reserved) = &mut self.reserved {
            reserved.current_at = current_at;
        }
    }

    /// Returns the connection to an exporter that is known to live, and its count of changes.
    fn exporter_seen(&self) -> Option<(Arc<Link>, u64)> {
        let link = &self.leases().next()?.link;
        let count = link.epoch()?;
        // After the count: that of a terminated exporter must not be mistaken for the current one.
        link.is_known_alive().then(|| (Arc::clone(link), count))
    }

    /// Sets the parameters with which the next versions are opened.
    pub(super) fn reserved_by(mut self, options: &OpenOptions<'_>) -> Self {
        let (ipc, keeper) = (options.ipc.clone(), options.keeper.cloned());
        let timeout = options.timeout;
        self.reserved = Some(Box::new(ReservedOpen { ipc, timeout, keeper, current_at: None }));
        self
    }

    fn reserved(&self, what: &str) -> Result<&ReservedOpen> {
        self.first_part().check_process()?;
        self.reserved.as_deref().ok_or_else(|| Error::Unsupported {
            backend: self.first_part().backend().info().name,
            what: format!("{what} a mapping whose addresses are not reserved"),
            why: "its addresses end with its memory; open the export with reserved addresses".into(),
        })
    }

    fn leases(&self) -> impl Iterator<Item = &LeaseRef> {
        self.parts.iter().filter_map(OpenPart::lease)
    }

    /// Imports the next version for the addresses of this mapping, and waits until its bytes are ready.
    fn import(&self, mut options: OpenOptions<'_>) -> Result<NextVersion> {
        let backend = self.first_part().backend().info().name;
        check_backend("the next version", options.ipc.backend().info().name, backend)?;
        if let Some(wanted) = options.access.filter(|wanted| *wanted != self.access()) {
            return Err(Error::Unsupported {
                backend,
                what: format!("open the next version of a {} mapping {wanted}", self.access()),
                why: "the access of a mapping stays; open the export as another mapping".into(),
            });
        }
        options.check_no_place()?;
        (options.access, options.addresses) = (Some(self.access()), MappingAddresses::Reserved);
        options.check_kind()?;
        options.check_reserved()?;
        let contents = options.descriptor.contents();
        check_same_layout(self.descriptor.contents(), contents)?;
        let time_limit = LazyDeadline::new(options.timeout);
        let places: Vec<_> = self.parts.iter().map(places_of).collect();
        let opening = |(index, part): (usize, &OpenPart)| {
            let opening = options.opening(index, |_, _| Ok(part.device()), None, &time_limit);
            let mut opening = opening.map_err(|error| with_tensor_name(contents, index, None, error))?;
            opening.reserved = Some(ReservedTarget::Exchange(&places[index]));
            Ok(opening)
        };
        let openings: OneOrMany<_> = self.parts.iter().enumerate().map(opening).collect::<Result<_>>()?;
        let (descriptor, keeper) = (options.descriptor.clone(), options.keeper.cloned());
        let (runtime, leases) = (self.first_part().runtime()?, Vec::with_capacity(self.parts.len()));
        let mut next = NextVersion { runtime, descriptor, keeper, leases };
        options.deliver(&openings, None, || {
            for (index, opening) in openings.iter().enumerate() {
                next.leases.push(import_part(&options, index, opening)?);
            }
            Ok(())
        })?;
        kill_point!("importer:replace-imported");
        for ImportedPart { lease, .. } in &next.leases {
            if let Some(ready) = &lease.ready {
                ready.synchronize(time_limit.left())?;
            }
            // The event of an exporter that has terminated may report that it was reached.
            lease.check_ready()?;
            lease.note_ready();
        }
        Ok(next)
    }

    /// Waits until device work of this process no longer uses the addresses: that of the stream on its device, and all of other
    /// devices.
    fn finish_work(&self, stream: Option<BorrowedStream<'_>>, timeout: Duration) -> Result<()> {
        let mut finished = Vec::new();
        for part in self.parts.iter().filter(|part| part.is_used()) {
            let device = part.device();
            if finished.contains(&device) {
                continue;
            }
            finished.push(device);
            let Some(stream) = stream.filter(|stream| stream.device() == device) else {
                part.backend().synchronize_device(device)?;
                continue;
            };
            match part.released_event(stream)? {
                Some(event) => event.synchronize(timeout)?,
                None => part.backend().memory().synchronize(stream)?,
            }
        }
        Ok(())
    }

    /// Unmaps all parts, or none.
    fn unmap(&self) -> Result<()> {
        for (index, lease) in self.leases().enumerate() {
            if let Err(error) = lease.unmap_reserved() {
                for unmapped in self.leases().take(index) {
                    if let Err(error) = unmapped.map_again() {
                        tracing::warn!(target: crate::os::log::IMPORT, %error, "memory at reserved addresses could not be mapped again");
                    }
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// Maps the next version in the addresses, which hold nothing; the old one again if that fails.
    fn map(&mut self, mut next: NextVersion) -> Result<()> {
        let runtime = next.runtime;
        for (index, part) in next.leases.iter().enumerate() {
            let Err(error) = part.lease.map_reserved() else { continue };
            for mapped in &next.leases[..index] {
                if let Err(error) = mapped.lease.unmap_reserved() {
                    tracing::warn!(target: crate::os::log::IMPORT, %error, "memory at reserved addresses could not be unmapped again");
                }
            }
            let restored = self.leases().try_for_each(|lease| lease.map_again());
            if let Err(lost) = restored {
                tracing::warn!(target: crate::os::log::IMPORT, error = %lost, "memory at reserved addresses could not be mapped again; the mapping is suspended");
                self.release_all(runtime);
            }
            return Err(error);
        }
        kill_point!("importer:replace-mapped");
        for (part, ImportedPart { lease, at_home }) in self.parts.iter_mut().zip(next.leases.drain(..)) {
            part.exchange(MappingSource::Remote(lease), at_home).end(runtime);
        }
        self.descriptor = next.descriptor.clone();
        if let Some(reserved) = &mut self.reserved {
            reserved.keeper = next.keeper.take().or(reserved.keeper.take());
            reserved.current_at = None;
        }
        Ok(())
    }

    /// Ends the leases and keeps the addresses.
    fn release_all(&mut self, runtime: &'static Runtime) {
        for part in self.parts.iter_mut().filter(|part| part.suspended().is_none()) {
            part.suspend().end(runtime);
        }
    }
}

impl<'a> Replacement<'a> {
    fn options(self, reserved: &'a ReservedOpen) -> OpenOptions<'a> {
        match self.0 {
            VersionSource::Descriptor(descriptor) => {
                OpenOptions::new(&reserved.ipc, descriptor, reserved.timeout)
            }
            VersionSource::Opened(options) => options,
        }
    }
}

/// Returns the reserved addresses of a part.
fn places_of(part: &OpenPart) -> Vec<Arc<Place>> {
    match (part.suspended(), part.lease()) {
        (Some(suspended), _) => suspended.places.clone(),
        (None, lease) => lease.map(|lease| lease.places()).unwrap_or_default(),
    }
}

/// Imports a part of the next version.
fn import_part(options: &OpenOptions<'_>, index: usize, opening: &OpenExport<'_>) -> Result<ImportedPart> {
    let contents = opening.named.contents;
    let layout = || unreachable!("memory at reserved addresses is no copy");
    let source = options
        .acquire(opening, layout, &|region, error| with_tensor_name(contents, index, Some(region), error));
    match source.map_err(|error| with_tensor_name(contents, index, None, error))? {
        MappingSource::Remote(lease) => {
            Ok(ImportedPart { lease, at_home: opening.home == Some(opening.device) })
        }
        _ => unreachable!("a reserved part is an import of another process"),
    }
}
