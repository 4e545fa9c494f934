//! The mock with the restrictions of vendors' handles.
//!
//! The mock's handles map read-only, expose only their allocation, and open on any number of devices in any
//! process. CUDA's legacy handles do not have the first two properties, Ascend's keys not the others. This kind of
//! handle has none of them, so that core's code for such kinds runs without a vendor's library.

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use device_ipc_core::backend::{
    BackendInfo, Capabilities, DeviceEvent, DeviceIpc, DeviceMemory, DeviceTimelines, Exported, Extent,
    HandleBytes, HandleKind, HandleKindInfo, Opened, ReceivedHandle, TestKernels,
};
use device_ipc_core::{Access, DeviceInfo, DeviceOrdinal, DevicePtr, DeviceRange, Error, Result};

/// Size of the pages that an importer maps, in bytes.
const PAGE: u64 = 2 << 20;

/// Size of the suffix of a handle that locates the list of permitted processes.
const PERMITS_BYTES: usize = 8;

/// The mock with restricted handles.
pub(crate) struct Restricted {
    mock: Arc<dyn DeviceIpc>,
    /// The permitted processes of each export, by the descriptor number of the file with their ids.
    permits: Mutex<HashMap<i32, File>>,
    /// The handles that are open in this process, by the cookie of the mapping.
    open: Mutex<HashMap<u64, Vec<HandleBytes>>>,
}

impl Restricted {
    /// Restricts the handles of `mock`.
    pub(crate) fn new(mock: Arc<dyn DeviceIpc>) -> Arc<Self> {
        Arc::new(Self { mock, permits: Mutex::default(), open: Mutex::default() })
    }

    fn refusal(&self, what: &str, why: &str) -> Error {
        Error::Unsupported { backend: self.mock.info().name, what: what.into(), why: why.into() }
    }

    /// Returns the bytes of the mock's handle, after checking that this process may open it.
    fn check_permit(&self, bytes: &[u8]) -> Result<HandleBytes> {
        let (handle, permits) = bytes
            .split_last_chunk::<PERMITS_BYTES>()
            .ok_or_else(|| self.refusal("open a handle", "it is too short"))?;
        let number = |part: &[u8]| u32::from_ne_bytes([part[0], part[1], part[2], part[3]]);
        let path = format!("/proc/{}/fd/{}", number(&permits[..4]), number(&permits[4..]));
        let mut permitted = Vec::new();
        let read = File::open(path).and_then(|mut file| file.read_to_end(&mut permitted));
        read.map_err(|error| Error::io("reading the list of permitted processes", error))?;
        if permitted.chunks_exact(4).any(|id| number(id) == std::process::id()) {
            return Ok(HandleBytes::new(handle));
        }
        Err(self.refusal("open a handle", "its exporter has not permitted this process"))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn permits_of(exported: &Exported) -> i32 {
    let number = exported.bytes.as_slice().last_chunk::<4>().copied().unwrap_or_default();
    i32::from_ne_bytes(number)
}

fn without_permits(exported: Exported) -> Exported {
    let bytes = exported.bytes.as_slice();
    let bytes = HandleBytes::new(&bytes[..bytes.len().saturating_sub(PERMITS_BYTES)]);
    Exported { bytes, ..exported }
}

impl DeviceIpc for Restricted {
    delegate!(info devices visible_devices_variable peer_access capabilities extents_of create_event open_event);
    delegate!(synchronize_device memory timelines test_kernels);

    fn handle_kinds(&self) -> Vec<HandleKindInfo> {
        let restricted = |mut kind: HandleKindInfo| {
            kind.name = "restricted bytes";
            kind.read_only = false;
            kind.one_open_per_process = true;
            kind.whitelist = true;
            kind.isolated = false;
            // It passes on no reservations of the mock.
            kind.remappable = false;
            kind.across_pid_namespaces = false;
            kind
        };
        self.mock.handle_kinds().into_iter().map(restricted).collect()
    }

    fn export(&self, extent: &Extent, kind: Option<HandleKind>) -> Result<Exported> {
        let exported = self.mock.export(extent, kind)?;
        let path =
            std::env::temp_dir().join(format!("permits-{}-{:p}", std::process::id(), &raw const exported));
        let made = File::options().read(true).write(true).create_new(true).open(&path).and_then(|file| {
            std::fs::remove_file(&path)?;
            Ok(file)
        });
        let file = made.map_err(|error| Error::io("creating the list of permitted processes", error))?;
        let number = file.as_raw_fd();
        let mut bytes = exported.bytes.as_slice().to_vec();
        bytes.extend(std::process::id().to_ne_bytes());
        bytes.extend(number.to_ne_bytes());
        lock(&self.permits).insert(number, file);
        Ok(Exported { bytes: HandleBytes::new(bytes), ..exported })
    }

    fn unexport(&self, exported: Exported) -> Result<()> {
        lock(&self.permits).remove(&permits_of(&exported));
        self.mock.unexport(without_permits(exported))
    }

    fn reach(&self, exported: &Exported) -> Option<DeviceRange> {
        let allocation = exported.extent.allocation;
        let (first, end) = (allocation.ptr.get(), allocation.ptr.get() + allocation.len);
        let base = first - first % PAGE;
        let reach =
            DeviceRange::new(allocation.device, DevicePtr::new(base), end.next_multiple_of(PAGE) - base);
        Some(reach)
    }

    fn authorize(&self, exported: &Exported, peer: &[u8]) -> Result<()> {
        let mut permits = lock(&self.permits);
        let file = permits
            .get_mut(&permits_of(exported))
            .ok_or_else(|| self.refusal("permit a process to open a handle", "the handle does not exist"))?;
        let written = file.seek(SeekFrom::End(0)).and_then(|_| file.write_all(peer));
        written.map_err(|error| Error::io("adding a permitted process", error))
    }

    fn local_peer_id(&self, _on: DeviceOrdinal) -> Result<Vec<u8>> {
        Ok(std::process::id().to_ne_bytes().to_vec())
    }

    fn open(&self, handles: Vec<ReceivedHandle>, on: DeviceOrdinal, access: Access) -> Result<Opened> {
        // Rejects an invalid ordinal.
        self.mock.capabilities(on)?;
        if !access.is_writable() {
            return Err(self.refusal("map memory read-only", "its handles have no such access"));
        }
        let known = self.mock.handle_kinds();
        if handles.iter().any(|handle| known.iter().all(|kind| kind.kind != handle.kind)) {
            return Err(self.refusal("open a handle", "its kind is unknown"));
        }
        let bytes: Vec<_> = handles.iter().map(|handle| handle.bytes.clone()).collect();
        let mut open = lock(&self.open);
        if open.values().flatten().any(|known| bytes.contains(known)) {
            return Err(self.refusal("open a handle again", "this process has it open already"));
        }
        let plain = handles.into_iter().map(|handle| {
            Ok(ReceivedHandle { bytes: self.check_permit(handle.bytes.as_slice())?, ..handle })
        });
        let opened = self.mock.open(plain.collect::<Result<_>>()?, on, access)?;
        open.insert(opened.cookie, bytes);
        Ok(opened)
    }

    fn close(&self, opened: Opened) -> Result<()> {
        // Locked until the close returns: another open may get the same address, which is the cookie.
        let mut open = lock(&self.open);
        open.remove(&opened.cookie);
        self.mock.close(opened)
    }
}

impl fmt::Debug for Restricted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Restricted").field("mock", &self.mock).finish_non_exhaustive()
    }
}
