//! The importer's side of a copy through host memory.

#![allow(unsafe_code, reason = "copies pages that the copy holds to a buffer of its own")]

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use super::grant::UnusedGrant;
use super::link::Link;
use crate::backend::{Buffer, DeviceEvent, DeviceIpc, DeviceStream, MemoryUse};
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Result};
use crate::model::lease::LeaseId;
use crate::os::kill::kill_point;
use crate::sharing::host_pages::{HostPages, Use};
use crate::sharing::staging::{Chunks, CopyLayout, Segments};
use crate::sharing::{Runtime, allocate};
use crate::transport::{AllowList, Deadline};
use crate::wire::descriptor::NamedExport;
use crate::wire::{Reply, Request};

/// The export to copy, and the target of the copy.
pub(crate) struct Incoming<'a> {
    pub(crate) runtime: &'static Runtime,
    pub(crate) backend: &'a Arc<dyn DeviceIpc>,
    pub(crate) named: NamedExport<'a>,
    /// The bytes to copy.
    pub(crate) layout: &'a CopyLayout,
    pub(crate) device: DeviceOrdinal,
    /// The right to open the export once more, whatever has become of it.
    pub(crate) grant: Option<&'a UnusedGrant>,
    pub(crate) allow: &'a AllowList,
    /// The timeout for each answer of the exporter.
    pub(crate) timeout: Duration,
    /// Called with the number of bytes that have been copied.
    pub(crate) report: &'a dyn Fn(u64),
}

/// Copies an export to a new buffer, as the layout states, and waits until the copy is complete.
pub(crate) fn copy_in(incoming: &Incoming<'_>) -> Result<Buffer> {
    let staging = match Staging::begin(incoming) {
        // A busy exporter may have closed a connection that held no lease.
        Err((Error::ExporterGone { .. }, false)) => Staging::begin(incoming),
        begun => begun,
    };
    let staging = staging.map_err(|(error, _)| error)?;
    kill_point!("importer:staging-begun");
    let target = Target::new(incoming)?;
    for chunk in 0..staging.chunks.count() {
        staging.ask_for(chunk, incoming.timeout)?;
        target.put(chunk, &staging, incoming.timeout)?;
        (incoming.report)(staging.chunks.start(chunk) + staging.chunks.len(chunk));
        kill_point!("importer:staging-chunk");
    }
    drop(staging);
    kill_point!("importer:staging-done");
    Ok(target.into_buffer())
}

/// A lease for copying. Dropping it releases it.
struct Staging {
    link: Arc<Link>,
    lease: LeaseId,
    chunks: Chunks,
    pages: HostPages,
    /// Whether the device copies from the pages itself.
    pinned: bool,
}

impl Staging {
    /// The error comes with whether the connection is new.
    fn begin(incoming: &Incoming<'_>) -> Result<Self, (Error, bool)> {
        let deadline = Deadline::after(incoming.timeout);
        let runtime = incoming.runtime;
        let linked = runtime.imports.link(runtime, incoming.named.broker(), incoming.allow, deadline);
        let (link, is_new) = linked.map_err(|error| (error, true))?;
        Self::begin_over(link, incoming, deadline).map_err(|error| (error, is_new))
    }

    fn begin_over(link: Arc<Link>, incoming: &Incoming<'_>, deadline: Deadline) -> Result<Self> {
        let (export, token) = (incoming.named.part.export, incoming.named.part.token);
        let grant = incoming.grant.and_then(UnusedGrant::token);
        let spans = incoming.layout.requested().to_vec();
        let pending =
            link.request(|request| Request::Stage { request, export, token, grant, spans }, deadline)?;
        kill_point!("importer:staging-asked");
        let (Reply::Staging { lease, chunk_bytes, bytes, .. }, files) = pending.wait(deadline)? else {
            return Err(
                link.check_gone(Error::Protocol("it sent another reply to a request for a copy".into()))
            );
        };
        if let Some(grant) = incoming.grant {
            grant.used_up();
        }
        let begun = Self::over_pages(&link, incoming, (chunk_bytes, bytes), files.take_first());
        let (chunks, pages, pinned) = begun.inspect_err(|_| link.release(lease))?;
        Ok(Self { link, lease, chunks, pages, pinned })
    }

    fn over_pages(
        link: &Link,
        incoming: &Incoming<'_>,
        (chunk_bytes, bytes): (u64, u64),
        file: Option<std::os::fd::OwnedFd>,
    ) -> Result<(Chunks, HostPages, bool)> {
        incoming.layout.check_shared(bytes)?;
        let file = file.ok_or_else(|| {
            let what = "receiving the host memory of a copy (this process may have no file descriptors left; raise its \
                        limit, ulimit -n)";
            Error::io(what, rustix::io::Errno::MFILE)
        })?;
        let chunks = Chunks::of_exporter(bytes, chunk_bytes).map_err(|error| link.check_gone(error))?;
        let pages = HostPages::open(file, chunks.buffer_bytes(), "its host memory of a copy");
        let pages = pages.map_err(|error| link.check_gone(error))?;
        let pinned = match pages.known_to(incoming.backend, incoming.device, Use::Copies) {
            Ok(_) => true,
            Err(error) => {
                tracing::debug!(target: crate::os::log::IMPORT, %error, "a copy goes through memory that is not page-locked");
                false
            }
        };
        Ok((chunks, pages, pinned))
    }

    /// Waits until the chunk is in its half of the pages.
    fn ask_for(&self, chunk: u64, timeout: Duration) -> Result<()> {
        let deadline = Deadline::after(timeout);
        let lease = self.lease;
        let next = |request| Request::StageNext { request, lease, chunk };
        match self.link.request(next, deadline)?.wait(deadline)?.0 {
            Reply::Staged { chunk: copied, bytes, .. }
                if copied == chunk && bytes == self.chunks.len(chunk) =>
            {
                Ok(())
            }
            _ => Err(self.link.check_gone(Error::Protocol("it copied another chunk than requested".into()))),
        }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        self.link.release(self.lease);
    }
}

/// The new buffer, and a private stream that fills it: a stream of the caller may be busy, or captured into a graph.
struct Target<'a> {
    runtime: &'static Runtime,
    backend: &'a Arc<dyn DeviceIpc>,
    stream: Box<dyn DeviceStream>,
    /// `None` if the device has no events.
    copied: Option<Box<dyn DeviceEvent>>,
    /// Taken when the copy is complete.
    buffer: Option<Buffer>,
    segments: Segments,
}

impl<'a> Target<'a> {
    fn new(incoming: &Incoming<'a>) -> Result<Self> {
        let (backend, device) = (incoming.backend, incoming.device);
        let bytes = incoming.layout.buffer_bytes();
        let buffer = allocate(backend, device, bytes, MemoryUse::new())?;
        // The buffer is freed by drop from here on.
        let (segments, buffer) = (incoming.layout.segments(buffer.range())?, Some(buffer));
        let stream = backend.memory().create_stream(device)?;
        let events = backend.capabilities(device)?.ipc_events;
        let copied = if events { Some(backend.create_event(device)?) } else { None };
        Ok(Self { runtime: incoming.runtime, backend, stream, copied, buffer, segments })
    }

    /// Copies a chunk from its half of the pages, and waits until the copy is complete.
    fn put(&self, chunk: u64, from: &Staging, timeout: Duration) -> Result<()> {
        let (place, len) = (from.chunks.place(chunk), from.chunks.len(chunk));
        assert!(place + len as usize <= from.pages.len(), "chunks lie in the pages");
        let (memory, stream) = (self.backend.memory(), self.stream.as_borrowed());
        // SAFETY: inside the pages, by the check above.
        let bytes: NonNull<u8> = unsafe { from.pages.base().add(place) };
        let mut parts = self.segments.within(from.chunks.start(chunk), len);
        if !from.pinned {
            let mut own = vec![0_u8; len as usize];
            // SAFETY: the pages are mapped, and only ever touched by raw addresses.
            unsafe { own.as_mut_ptr().copy_from_nonoverlapping(bytes.as_ptr(), own.len()) };
            for (offset, part) in parts {
                // SAFETY: the part is the new buffer's; a write takes the bytes during the call.
                unsafe { memory.write(part, &own[offset as usize..][..part.len as usize], stream)? };
            }
            return memory.synchronize(stream);
        }
        let submitted = parts.try_for_each(|(offset, part)| {
            // SAFETY: inside the chunk. The pages stay pinned until the device has been waited for, and the part is the new
            // buffer's, which exists as long.
            unsafe { memory.copy_from_host(part, bytes.add(offset as usize), stream) }
        });
        if let Err(error) = submitted {
            // Parts before the failed one may still be read from the pages.
            memory.synchronize(stream)?;
            return Err(error);
        }
        match &self.copied {
            Some(copied) => copied.record(stream).and_then(|()| copied.wait(timeout)),
            None => memory.synchronize(stream),
        }
    }

    fn into_buffer(mut self) -> Buffer {
        self.buffer.take().expect("taken here alone")
    }
}

impl Drop for Target<'_> {
    /// A driver's free waits for streams; the caller must not.
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.runtime.worker.submit(move || drop(buffer));
        }
    }
}
