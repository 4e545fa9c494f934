//! Mappings at reserved addresses: suspended, resumed, and replaced by other exports of equal layout.
//!
//! Each version of the memory has a lease of its own, and an import that is mapped in the reserved ranges or not. All or nothing:
//! the new version is imported and ready before the old one is unmapped, and the old one is mapped again if the new one cannot be
//! mapped.

use std::sync::Arc;
use std::time::Duration;

use super::mapping::Mapping;
use super::open::{OpenBuilder, blame};
use super::open_export::Patience;
use super::open_part::{MappingSource, OpenPart};
use super::same_layout::check_same_layout;
use super::table::{LeaseRef, Reservation, ReservedTarget};
use crate::backend::stream::{AsStream, BorrowedStream};
use crate::model::error::{Error, Result};
use crate::os::kill::kill_point;
use crate::sharing::{Runtime, Session};
use crate::transport::check_may_wait;
use crate::wire::descriptor::Descriptor;

/// The parameters with which the next versions of a reserved mapping are opened.
#[derive(Debug)]
pub(super) struct ReservedOpen {
    session: Session,
    timeout: Duration,
}

/// The imports of the next version, one for each part, which are not mapped. Dropping them ends their leases.
struct NextVersion {
    runtime: &'static Runtime,
    /// Each with whether its home device is the device of the part.
    leases: Vec<(LeaseRef, bool)>,
}

impl Drop for NextVersion {
    fn drop(&mut self) {
        for (lease, _) in self.leases.drain(..) {
            self.runtime.imports.release(lease);
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
        let runtime = Runtime::get()?;
        self.finish_work(None, timeout)?;
        self.unmap()?;
        self.release_all(runtime);
        Ok(())
    }

    /// Maps an export in the reserved addresses of a suspended mapping: the one that was mapped before, or another one of equal
    /// layout. Waits until the bytes are ready.
    ///
    /// The layouts are equal if the names, element types, shapes, strides and offsets of all tensors are the same in the same
    /// order, and the regions have the same sizes. The home devices may differ.
    ///
    /// # Errors
    ///
    /// [`LayoutError::Differs`](crate::LayoutError::Differs) with the first difference; as for
    /// [`OpenBuilder::on_device`](crate::OpenBuilder::on_device), with the access and the timeout of the builder that opened the
    /// mapping. The mapping stays suspended.
    pub fn resume(&mut self, descriptor: &Descriptor) -> Result<()> {
        let reserved = self.reserved("resume")?;
        if !self.is_suspended() {
            return Err(Error::Unsupported {
                backend: reserved.session.backend().info().name,
                what: "resume a mapping that is not suspended".into(),
                why: "its addresses hold memory; replace it instead".into(),
            });
        }
        check_may_wait("resuming a mapping", reserved.timeout)?;
        let next = self.import(reserved, descriptor)?;
        kill_point!("importer:replace-ready");
        self.map(next, descriptor)
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
    pub fn replace(&mut self, descriptor: &Descriptor) -> Result<()> {
        self.replace_after(descriptor, None)
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
    pub fn replace_on<M>(&mut self, descriptor: &Descriptor, stream: &impl AsStream<M>) -> Result<()> {
        self.replace_after(descriptor, Some(stream.as_stream()))
    }

    fn replace_after(&mut self, descriptor: &Descriptor, stream: Option<BorrowedStream<'_>>) -> Result<()> {
        let reserved = self.reserved("replace")?;
        if self.is_suspended() {
            return Err(Error::Suspended);
        }
        check_may_wait("replacing the memory of a mapping", reserved.timeout)?;
        if let Some(stream) = stream {
            self.check_stream(stream)?;
        }
        let next = self.import(reserved, descriptor)?;
        kill_point!("importer:replace-ready");
        self.finish_work(stream, reserved.timeout)?;
        self.unmap()?;
        kill_point!("importer:replace-unmapped");
        self.map(next, descriptor)
    }

    /// Sets the parameters with which the next versions are opened.
    pub(super) fn reserved_by(mut self, session: &Session, timeout: Duration) -> Self {
        self.reserved = Some(Box::new(ReservedOpen { session: session.clone(), timeout }));
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
    fn import(&self, reserved: &ReservedOpen, descriptor: &Descriptor) -> Result<NextVersion> {
        let (contents, runtime) = (descriptor.contents(), Runtime::get()?);
        let patience = Patience::new(reserved.timeout);
        let builder = OpenBuilder::new(&reserved.session, descriptor, reserved.timeout)
            .access(self.access())
            .reserved();
        builder.check_kind()?;
        check_same_layout(self.descriptor.contents(), contents)?;
        let mut next = NextVersion { runtime, leases: Vec::with_capacity(self.parts.len()) };
        for (index, part) in self.parts.iter().enumerate() {
            let known: Vec<_> = match (part.suspended(), part.lease()) {
                (Some(suspended), _) => suspended.reservations.clone(),
                (None, lease) => lease.map(|lease| lease.reservations()).unwrap_or_default(),
            };
            next.leases.push(import_part(&builder, index, part, &known, &patience)?);
        }
        kill_point!("importer:replace-imported");
        for (lease, _) in &next.leases {
            if let Some(ready) = &lease.ready {
                ready.synchronize(patience.left())?;
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
    fn map(&mut self, mut next: NextVersion, descriptor: &Descriptor) -> Result<()> {
        let runtime = next.runtime;
        for (index, (lease, _)) in next.leases.iter().enumerate() {
            let Err(error) = lease.map_reserved() else { continue };
            for (mapped, _) in &next.leases[..index] {
                if let Err(error) = mapped.unmap_reserved() {
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
        for (part, (lease, at_home)) in self.parts.iter_mut().zip(next.leases.drain(..)) {
            part.exchange(MappingSource::Remote(lease), at_home).end(runtime);
        }
        self.descriptor = descriptor.clone();
        Ok(())
    }

    /// Ends the leases and keeps the addresses.
    fn release_all(&mut self, runtime: &'static Runtime) {
        for part in self.parts.iter_mut().filter(|part| part.suspended().is_none()) {
            part.suspend().end(runtime);
        }
    }
}

/// Imports a part of the next version. Returns its lease, and whether its home device is the device of the part.
fn import_part(
    builder: &OpenBuilder<'_>,
    index: usize,
    part: &OpenPart,
    reservations: &[Arc<Reservation>],
    patience: &Patience,
) -> Result<(LeaseRef, bool)> {
    let mut opening = builder.opening(index, |_, _| Ok(part.device()), None, patience)?;
    opening.reserved = Some(ReservedTarget::Existing(reservations));
    let contents = opening.named.contents;
    let source = opening.open(&|region, error| blame(contents, index, Some(region), error));
    let source = source.map_err(|error| blame(contents, index, None, error))?;
    match source {
        MappingSource::Remote(lease) => Ok((lease, opening.home == Some(opening.device))),
        _ => unreachable!("a reserved part is an import of another process"),
    }
}
