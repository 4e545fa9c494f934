//! The backend: implements [`DeviceIpc`].

use std::sync::Arc;

use device_ipc_core::backend::{
    BackendInfo, Capabilities, DeviceEvent, DeviceIpc, DeviceMemory, DeviceTimelines, Exported, Extent,
    HandleBytes, HandleKind, HandleKindInfo, Opened, Rank, ReceivedHandle, Registration, TestKernels,
    Unavailable, environment,
};
use device_ipc_core::{Access, DeviceIdentity, DeviceInfo, DeviceOrdinal, DeviceRange, Error, Result};

use crate::NAME;
use crate::diagnosis::AcmeDiagnosis;
use crate::memory::{AcmeMemory, capacity};

/// The variable that hides the device: its value is `0`, or it hides it.
pub(crate) const VISIBLE_VARIABLE: &str = "ACME_VISIBLE_DEVICES";

/// The only kind of handle: a memory file.
const FILE: HandleKind = HandleKind(1);

/// `kDLCPU` of `dlpack.h`: frameworks use the memory as memory of the host.
const DLPACK_HOST: i32 = 1;

/// The registration of this backend.
pub const REGISTRATION: Registration =
    Registration::new(NAME, Rank::THIRD_PARTY, || Ok(AcmeBackend::load()?))
        .with_dlpack_device_type(DLPACK_HOST)
        .with_diagnosis(&AcmeDiagnosis);

/// The backend for plain shared memory.
#[derive(Debug)]
pub struct AcmeBackend {
    info: BackendInfo,
    memory: AcmeMemory,
}

impl AcmeBackend {
    /// Creates the backend.
    ///
    /// # Errors
    ///
    /// [`Unavailable::NoDevice`] if the environment hides the device.
    pub fn load() -> Result<Arc<Self>, Unavailable> {
        if environment::variable(VISIBLE_VARIABLE).is_some_and(|value| value != "0") {
            let detail = format!("{VISIBLE_VARIABLE} hides the only device; set it to 0, or unset it");
            return Err(Unavailable::NoDevice { detail });
        }
        let info = BackendInfo::new(NAME, format!("shared memory {}", env!("CARGO_PKG_VERSION")), None);
        Ok(Arc::new(Self { info, memory: AcmeMemory::default() }))
    }
}

/// Checks that a device exists.
pub(crate) fn check_device(ordinal: DeviceOrdinal) -> Result<()> {
    if ordinal.get() == 0 { Ok(()) } else { Err(Error::NoSuchDevice { backend: NAME, ordinal, count: 1 }) }
}

pub(crate) fn unsupported(what: impl Into<String>, why: &str) -> Error {
    Error::Unsupported { backend: NAME, what: what.into(), why: why.into() }
}

/// Checks that a kind is the only one.
pub(crate) fn check_kind(kind: HandleKind) -> Result<()> {
    if kind == FILE {
        return Ok(());
    }
    Err(unsupported(format!("use handles of kind {}", kind.0), "its only kind is 1 (memory file)"))
}

impl DeviceIpc for AcmeBackend {
    fn info(&self) -> &BackendInfo {
        &self.info
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        let identity = DeviceIdentity::Uuid(*b"acme-shared-mem0");
        Ok(vec![DeviceInfo::new(0.into(), identity, "Acme shared memory", capacity().total_bytes)])
    }

    fn visible_devices_variable(&self) -> &'static str {
        VISIBLE_VARIABLE
    }

    fn peer_access(&self, from: DeviceOrdinal, to: DeviceOrdinal) -> Result<bool> {
        check_device(from)?;
        check_device(to)?;
        Ok(true)
    }

    /// A process has a mapping of its own, which faults of other processes do not reach.
    fn capabilities(&self, device: DeviceOrdinal) -> Result<Capabilities> {
        check_device(device)?;
        Ok(Capabilities::NONE.with_timelines(true).with_fault_isolation(true))
    }

    fn handle_kinds(&self) -> Vec<HandleKindInfo> {
        let mut file = HandleKindInfo::new(FILE, "memory file");
        file.carries_fds = true;
        file.isolated = true;
        file.across_pid_namespaces = true;
        vec![file]
    }

    fn extents_of(&self, range: DeviceRange, stated_base: Option<DeviceRange>) -> Result<Vec<Extent>> {
        check_device(range.device)?;
        let allocation = self.memory.allocation_at(range.ptr)?;
        if let Some(stated) = stated_base
            && (stated.ptr != allocation.ptr || stated.len > allocation.len)
        {
            return Err(Error::InvalidRegion(format!(
                "the allocation was stated as {} bytes at {}, but it is {} bytes at {}",
                stated.len, stated.ptr, allocation.len, allocation.ptr
            )));
        }
        if !allocation.contains(&range) {
            return Err(Error::InvalidRegion(format!(
                "{} bytes at {} exceed their allocation of {} bytes at {}",
                range.len, range.ptr, allocation.len, allocation.ptr
            )));
        }
        Ok(vec![Extent { allocation, generation: None }])
    }

    fn export(&self, extent: &Extent, kind: Option<HandleKind>) -> Result<Exported> {
        kind.map_or(Ok(()), check_kind)?;
        let file = self.memory.file_of(extent.allocation.ptr)?;
        // The bytes of a handle state the length, for an error that names both lengths.
        let bytes = HandleBytes::new(extent.allocation.len.to_le_bytes());
        Ok(Exported { extent: *extent, kind: FILE, bytes, fds: vec![file] })
    }

    /// The handle consists of its file descriptor.
    fn unexport(&self, exported: Exported) -> Result<()> {
        drop(exported);
        Ok(())
    }

    fn open(&self, handles: Vec<ReceivedHandle>, on: DeviceOrdinal, access: Access) -> Result<Opened> {
        check_device(on)?;
        if access == Access::ReadOnly {
            return Err(unsupported(
                "open memory read-only",
                "work of its streams would end the process at a write",
            ));
        }
        let [handle]: [_; 1] = handles.try_into().map_err(|handles: Vec<_>| {
            unsupported(format!("open {} handles as one range", handles.len()), "a range has one handle")
        })?;
        check_kind(handle.kind)?;
        let found = handle.fds.len();
        let [file]: [_; 1] = handle
            .fds
            .try_into()
            .map_err(|_| Error::Protocol(format!("a handle has {found} file descriptors instead of 1")))?;
        let stated = <[u8; 8]>::try_from(handle.bytes.as_slice())
            .map_err(|_| Error::Protocol("the bytes of a handle are not a length".into()))?;
        let range = self.memory.open(file, u64::from_le_bytes(stated))?;
        Ok(Opened { range, cookie: range.ptr.get() })
    }

    fn close(&self, opened: Opened) -> Result<()> {
        self.memory.close(opened.range)
    }

    fn create_event(&self, device: DeviceOrdinal) -> Result<Box<dyn DeviceEvent>> {
        check_device(device)?;
        Err(no_events())
    }

    fn open_event(&self, _handle: &[u8], on: DeviceOrdinal) -> Result<Box<dyn DeviceEvent>> {
        check_device(on)?;
        Err(no_events())
    }

    fn synchronize_device(&self, device: DeviceOrdinal) -> Result<()> {
        check_device(device)?;
        self.memory.streams.synchronize_all();
        Ok(())
    }

    fn memory(&self) -> &dyn DeviceMemory {
        &self.memory
    }

    fn timelines(&self) -> Option<&dyn DeviceTimelines> {
        Some(&self.memory)
    }

    fn test_kernels(&self) -> Option<&dyn TestKernels> {
        Some(&self.memory)
    }
}

fn no_events() -> Error {
    unsupported("share events", "processes are ordered by timelines")
}
