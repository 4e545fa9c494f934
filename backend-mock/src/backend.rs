//! The backend: implements [`DeviceIpc`] on the engine.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use device_ipc_core::backend::engine::MemorySpace;
use device_ipc_core::backend::{
    BackendInfo, Capabilities, DeviceEvent, DeviceIpc, DeviceMemory, DeviceReservations, DeviceTimelines,
    Exported, Extent, Generation, HandleBytes, HandleKind, HandleKindInfo, Opened, Rank, ReceivedHandle,
    Registration, TestKernels, Unavailable, environment,
};
use device_ipc_core::{
    Access, DeviceIdentity, DeviceInfo, DeviceOrdinal, DevicePtr, DeviceRange, Error, Result,
};
use device_ipc_mock_engine::{
    self as engine_crate, Address, EngineError, Machine, MachineConfig, NODE_VARIABLE,
};

use crate::errors::{engine, unknown_kind, unsupported};
use crate::event::MockEvent;
use crate::host_pages::HostPages;
use crate::kinds::NAME;
use crate::memory::MockMemory;
use crate::profile::{Form, Kinds, MemoryKind, Reach};
use crate::received::{engine_access, open_error};
use crate::reservations::MockReservations;
use crate::spec::{self, HandleForm, MACHINE_VARIABLE};
use crate::timelines::MockTimelines;

/// `kDLCPU` of `dlpack.h`: to frameworks the memory is that of the host.
const DLPACK_HOST: i32 = 1;

/// The registration for [`Backends::with`](device_ipc_core::backend::Backends::with). `DEVICE_IPC_MOCK` describes the machine.
pub const REGISTRATION: Registration = Registration::new(NAME, Rank::SIMULATED, || {
    let spec = environment::variable(MACHINE_VARIABLE).unwrap_or_default();
    Ok(MockBackend::from_spec(&spec.to_string_lossy())?)
})
.with_dlpack_device_type(DLPACK_HOST);

/// A backend whose devices are simulated in shared memory.
pub struct MockBackend {
    machine: Arc<Machine>,
    memory: MockMemory,
    /// `None` with `timelines=off`.
    timelines: Option<MockTimelines>,
    reservations: MockReservations,
    kinds: Arc<Kinds>,
    /// The numbers of the separate exports, by the bytes of their handles.
    separate: Mutex<HashMap<Vec<u8>, u32>>,
    info: BackendInfo,
}

/// Without the table of open handles, whose bytes are not for logs.
impl fmt::Debug for MockBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MockBackend").field("info", &self.info).finish_non_exhaustive()
    }
}

impl MockBackend {
    /// Creates the backend on the machine that `spec` describes.
    ///
    /// # Errors
    ///
    /// [`Unavailable::Failed`] with the key, the value and the accepted values.
    pub fn from_spec(spec: &str) -> Result<Arc<Self>, Unavailable> {
        Ok(Self::with(spec::parse(spec)?))
    }

    /// Creates the backend on a machine of this configuration.
    pub fn new(config: MachineConfig, form: HandleForm) -> Arc<Self> {
        let kinds = Kinds::own(form, config.lifetime == engine_crate::Lifetime::Revoking, false);
        Self::with(spec::Parsed { config, kinds, timelines: true, pinned: true })
    }

    fn with(parsed: spec::Parsed) -> Arc<Self> {
        let spec::Parsed { config, kinds, timelines, pinned } = parsed;
        let kinds = Arc::new(kinds);
        let node = environment::variable(NODE_VARIABLE).and_then(|node| node.into_string().ok());
        let machine = Machine::in_node(config, node);
        let info = BackendInfo::new(NAME, concat!("engine ", env!("CARGO_PKG_VERSION")), None);
        let pages = Arc::new(HostPages::new(Arc::clone(&machine)));
        let timelines = timelines.then(|| MockTimelines::new(Arc::clone(&machine), Arc::clone(&pages)));
        Arc::new(Self {
            memory: MockMemory {
                machine: Arc::clone(&machine),
                kinds: Arc::clone(&kinds),
                pinned: pinned.then_some(pages),
            },
            reservations: MockReservations::new(Arc::clone(&machine), Arc::clone(&kinds)),
            machine,
            timelines,
            kinds,
            separate: Mutex::default(),
            info,
        })
    }

    /// Returns the engine's machine, for fault injection and call counters.
    pub fn machine(&self) -> &Arc<Machine> {
        &self.machine
    }

    fn kind(&self, kind: HandleKind) -> Result<&MemoryKind> {
        self.kinds.get(kind).ok_or_else(|| unknown_kind(kind, &self.kinds))
    }

    fn separate(&self) -> MutexGuard<'_, HashMap<Vec<u8>, u32>> {
        self.separate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the allocation at an address of a device.
    fn extent_at(&self, ptr: DevicePtr, device: DeviceOrdinal) -> Result<Extent> {
        let found = self.machine.range_of(Address::new(ptr.get())).map_err(|error| match error {
            EngineError::UnknownAddress { .. } => Error::NotDeviceMemory {
                ptr,
                why: "the mock has no allocation at this address (host memory?)".into(),
            },
            other => engine("range_of")(other),
        })?;
        if found.imported {
            return Err(Error::SharedOn { ptr });
        }
        let home = DeviceOrdinal::new(found.device as u32);
        if home != device {
            return Err(Error::InvalidRegion(format!(
                "{ptr} is memory of device {home}, not of device {device}"
            )));
        }
        let allocation = DeviceRange::new(home, DevicePtr::new(found.base.get()), found.size);
        Ok(Extent { allocation, generation: found.generation.map(Generation) })
    }

    fn check_device(&self, device: DeviceOrdinal) -> Result<()> {
        self.machine.peer_access(device.index(), device.index()).map(drop).map_err(engine("peer_access"))
    }
}

impl DeviceIpc for MockBackend {
    fn info(&self) -> &BackendInfo {
        &self.info
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        let devices = self.machine.devices().into_iter();
        Ok(devices
            .map(|device| {
                let ordinal = DeviceOrdinal::new(device.ordinal as u32);
                DeviceInfo::new(ordinal, DeviceIdentity::Uuid(device.uuid), device.name, device.memory_bytes)
            })
            .collect())
    }

    fn visible_devices_variable(&self) -> &'static str {
        MACHINE_VARIABLE
    }

    fn peer_access(&self, from: DeviceOrdinal, to: DeviceOrdinal) -> Result<bool> {
        self.machine.peer_access(from.index(), to.index()).map_err(engine("peer_access"))
    }

    fn capabilities(&self, device: DeviceOrdinal) -> Result<Capabilities> {
        self.check_device(device)?;
        let config = self.machine.config();
        Ok(Capabilities::NONE
            .with_ipc_events(config.events)
            .with_timelines(self.timelines.is_some())
            .with_generations(config.generations)
            // A machine with whitelists resembles Ascend, which states nothing of it.
            .with_fault_isolation(!self.kinds.all().iter().any(|kind| kind.info.whitelist)))
    }

    fn handle_kinds(&self) -> Vec<HandleKindInfo> {
        self.kinds.all().iter().map(|kind| kind.info.clone()).collect()
    }

    fn extents_of(&self, range: DeviceRange, stated_base: Option<DeviceRange>) -> Result<Vec<Extent>> {
        self.check_device(range.device)?;
        let first = self.extent_at(range.ptr, range.device)?;
        let known = first.allocation;
        if let Some(stated) = stated_base.filter(|stated| stated.ptr != known.ptr || stated.len > known.len) {
            return Err(Error::InvalidRegion(format!(
                "the allocation of {} is {} bytes at {}, but {} bytes at {} were stated",
                range.ptr, known.len, known.ptr, stated.len, stated.ptr
            )));
        }
        let mut extents = vec![first];
        while let Some(last) = extents.last().map(|extent| extent.allocation)
            && last.end() < range.end()
        {
            let kind = self.kinds.of_allocation(last.ptr.get());
            let next = last.end().filter(|_| kind.neighbours);
            let next = next.and_then(|ptr| self.extent_at(ptr, range.device).ok());
            let of_the_kind = |next: &Extent| {
                self.kinds.of_allocation(next.allocation.ptr.get()).info.kind == kind.info.kind
            };
            let next = next.filter(of_the_kind);
            extents.push(next.ok_or_else(|| {
                Error::InvalidRegion(format!(
                    "{} bytes at {} exceed their allocation of {} bytes at {}",
                    range.len, range.ptr, last.len, last.ptr
                ))
            })?);
        }
        Ok(extents)
    }

    fn export(&self, extent: &Extent, kind: Option<HandleKind>) -> Result<Exported> {
        let memory = self.kinds.of_allocation(extent.allocation.ptr.get());
        if let Some(kind) = kind
            && self.kind(kind)?.info.kind != memory.info.kind
        {
            return Err(Error::NotShareable {
                ptr: extent.allocation.ptr,
                kind: format!("memory of the kind {}", memory.info.name),
                remedy: format!(
                    "a handle of kind {} was requested; allocate the memory of that kind",
                    kind.0
                ),
            });
        }
        let base = Address::new(extent.allocation.ptr.get());
        let (bytes, fds) = match memory.form {
            Form::Bytes => (self.machine.export_bytes(base).map_err(engine("export_bytes"))?, Vec::new()),
            Form::SeparateBytes => {
                let exported = self.machine.export_separately(base);
                let (bytes, number) = exported.map_err(engine("export_separately"))?;
                self.separate().insert(bytes.to_vec(), number);
                (bytes, Vec::new())
            }
            Form::Fds => {
                let (fd, bytes) = self.machine.export_fd(base).map_err(engine("export_fd"))?;
                (bytes, vec![fd])
            }
        };
        Ok(Exported { extent: *extent, kind: memory.info.kind, bytes: HandleBytes::new(bytes), fds })
    }

    fn unexport(&self, exported: Exported) -> Result<()> {
        let base = Address::new(exported.extent.allocation.ptr.get());
        let number = self.separate().remove(exported.bytes.as_slice());
        match number {
            Some(number) => self.machine.unexport_separate(base, number),
            None => self.machine.unexport(base),
        }
        .map_err(engine("unexport"))
    }

    fn reach(&self, exported: &Exported) -> Option<DeviceRange> {
        let allocation = exported.extent.allocation;
        match self.kinds.get(exported.kind)?.reach {
            Reach::Allocation => Some(allocation),
            Reach::Pages(page) => {
                let first = allocation.ptr.get() / page * page;
                let end = allocation.end()?.get().checked_next_multiple_of(page)?;
                Some(DeviceRange::new(allocation.device, DevicePtr::new(first), end - first))
            }
            Reach::Unknown => None,
        }
    }

    fn authorize(&self, exported: &Exported, peer: &[u8]) -> Result<()> {
        let listed = self.kind(exported.kind)?.info.whitelist;
        if listed && peer.len() != size_of::<u32>() {
            return Err(Error::Protocol(format!("{} bytes do not identify a peer of the mock", peer.len())));
        }
        Ok(())
    }

    fn local_peer_id(&self, on: DeviceOrdinal) -> Result<Vec<u8>> {
        self.check_device(on)?;
        let listed = self.kinds.all().iter().any(|kind| kind.info.whitelist);
        Ok(if listed { std::process::id().to_le_bytes().to_vec() } else { Vec::new() })
    }

    fn open(&self, handles: Vec<ReceivedHandle>, on: DeviceOrdinal, access: Access) -> Result<Opened> {
        self.check_device(on)?;
        let mut handles = handles;
        let elsewhere = self.kinds.other_home(&handles, on);
        let parts = self.kinds.parts(&mut handles, on, access)?;
        let opened = self.machine.open_contiguous(parts, on.index(), engine_access(access));
        let base = opened.map_err(|error| open_error("open", error, on, elsewhere))?;
        let mut len = 0;
        for _ in &handles {
            // The parts are contiguous, each rounded up to whole pages except for the last.
            let part = self.machine.range_of(base.add(len)).map_err(engine("range_of"))?;
            len = part.base.get() - base.get() + part.size;
        }
        let range = DeviceRange::new(on, DevicePtr::new(base.get()), len);
        Ok(Opened { range, cookie: base.get() })
    }

    fn close(&self, opened: Opened) -> Result<()> {
        self.machine.close(Address::new(opened.cookie)).map_err(engine("close"))
    }

    fn create_event(&self, device: DeviceOrdinal) -> Result<Box<dyn DeviceEvent>> {
        if !self.capabilities(device)?.ipc_events {
            return Err(no_events());
        }
        let event = self.machine.create_event(device.index(), true).map_err(engine("create_event"))?;
        Ok(Box::new(MockEvent { machine: Arc::clone(&self.machine), event, device, is_exportable: true }))
    }

    fn create_local_event(&self, device: DeviceOrdinal) -> Result<Box<dyn DeviceEvent>> {
        let event = self.machine.create_event(device.index(), false).map_err(engine("create_event"))?;
        Ok(Box::new(MockEvent { machine: Arc::clone(&self.machine), event, device, is_exportable: false }))
    }

    fn open_event(&self, handle: &[u8], on: DeviceOrdinal) -> Result<Box<dyn DeviceEvent>> {
        if !self.capabilities(on)?.ipc_events {
            return Err(no_events());
        }
        let event = self.machine.open_event(handle, on.index()).map_err(engine("open_event"))?;
        Ok(Box::new(MockEvent {
            machine: Arc::clone(&self.machine),
            event,
            device: on,
            is_exportable: false,
        }))
    }

    fn synchronize_device(&self, device: DeviceOrdinal) -> Result<()> {
        self.machine.synchronize_device(device.index()).map_err(engine("synchronize_device"))
    }

    /// The processor can access all memory of the mock.
    fn transfer_space(&self, _device: DeviceOrdinal) -> MemorySpace {
        MemorySpace::Host
    }

    fn memory(&self) -> &dyn DeviceMemory {
        &self.memory
    }

    fn reservations(&self) -> Option<&dyn DeviceReservations> {
        Some(&self.reservations)
    }

    fn timelines(&self) -> Option<&dyn DeviceTimelines> {
        self.timelines.as_ref().map(|timelines| timelines as &dyn DeviceTimelines)
    }

    fn test_kernels(&self) -> Option<&dyn TestKernels> {
        Some(&self.memory)
    }
}

fn no_events() -> Error {
    unsupported("share events", "the machine is configured with events=off")
}
