//! An agent of NIXL with the plugin UCX: its registrations, its peers, and its requests.
//!
//! **Progress.** The agent has a progress thread, which answers peers while this process does something else. By default the
//! thread uses one processor fully also while nothing happens; with a delay it sleeps until UCX has an event.
//!
//! **Requests.** NIXL's `release_xfer_req` succeeds for a request that is in progress, but UCX continues to write to its
//! destinations. So a request is released only when it is over. It is over when NIXL reports a success, which means that UCX has
//! completed all of its reads, or an error: all reads of a request belong to one endpoint of UCX, whose failure closes the
//! connection and ends all of its operations. If the connection fails, NIXL reports `NOT_FOUND` for the other requests to the
//! same peer, which have ended for the same reason. This was observed by TCP only. A read of many bytes is several requests, so
//! that its progress can be reported; it is over when all of them are.
//!
//! For the metadata of peers see `peers`.

use std::collections::VecDeque;
use std::ffi::{CStr, CString, c_char, c_void};
use std::fmt::Write as _;
use std::ptr::{NonNull, null, null_mut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{mem, process, slice};

use device_ipc_core::backend::environment;
use device_ipc_core::{Error, Result, Unavailable, VendorError};

use crate::bindings::{
    AgentConfig, MEMORY_DEVICE, MEMORY_HOST, MemoryList, MemoryType, OPERATION_READ, RawAgent,
    RegistrationList, Request, Status, THREAD_SYNC_STRICT, TransferList,
};
use crate::library::NixlLibrary;
use crate::library::status::{IN_PROGRESS, INVALID_STATE, SUCCESS};
use crate::metadata::RegionMetadata;
use crate::peers::Peers;

/// The plugin that transfers the bytes.
const PLUGIN: &CStr = c"UCX";

/// A setting of UCX's TCP transport, unless [`TIMEOUT_VARIABLE`] is set: a connection on which the peer takes no bytes for this time
/// is closed. UCX reads the memory that a peer has requested as the peer takes the bytes, also after its deregistration. So the time has to be
/// shorter than the 10 s for which the library keeps the memory at least, after the last message of an importer that is suspended or cannot be reached.
const TIMEOUT: (&CStr, &CStr) = (c"engine_config", c"TCP_USER_TIMEOUT=5s");
const TIMEOUT_VARIABLE: &str = "UCX_TCP_USER_TIMEOUT";

/// The longest sleep of the progress thread in µs. UCX's events end a sleep early.
const PROGRESS_DELAY_US: u64 = 10_000;

/// An agent. All functions may be called by several threads at the same time.
#[derive(Debug)]
pub(crate) struct Agent {
    library: NixlLibrary,
    raw: NonNull<RawAgent>,
    /// The process that started the agent: the threads of NIXL do not exist in a forked child.
    process: u32,
    memory_types: Vec<MemoryType>,
    /// NIXL's metadata of this agent: its name and network addresses.
    connection: Vec<u8>,
    /// Locked while a request is started or ended, so that no peer is forgotten meanwhile.
    peers: Mutex<Peers>,
}

// SAFETY: the agent is created with strict synchronization, which lets any threads call its functions.
unsafe impl Send for Agent {}
// SAFETY: as above.
unsafe impl Sync for Agent {}

/// A range of memory as NIXL names it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NixlMemory {
    pub(crate) memory_type: MemoryType,
    /// The ordinal of the device; 0 for host memory.
    pub(crate) device: u64,
    pub(crate) address: u64,
    pub(crate) len: u64,
}

impl NixlMemory {
    /// Removes this number of bytes from the front, and returns them.
    const fn take_front(&mut self, len: u64) -> Self {
        let front = Self { len, ..*self };
        self.address += len;
        self.len -= len;
        front
    }
}

impl Agent {
    /// Starts an agent. UCX listens on network ports from now on.
    pub(crate) fn start(library: NixlLibrary) -> Result<Self, Unavailable> {
        let name = random_name()?;
        let config = AgentConfig {
            enable_prog_thread: true,
            enable_listen_thread: false,
            listen_port: 0,
            thread_sync: THREAD_SYNC_STRICT,
            num_workers: 0,
            pthr_delay_us: PROGRESS_DELAY_US,
            lthr_delay_us: 0,
            capture_telemetry: false,
        };
        let mut raw = null_mut();
        // SAFETY: the arguments are valid for the call, which copies them.
        let status =
            unsafe { (library.api.create_configured_agent)(name.as_ptr(), &raw const config, &raw mut raw) };
        let failed = |library: &NixlLibrary, call, status, advice: &str| Unavailable::Failed {
            detail: format!("{}: {}{advice}", library.file, NixlLibrary::error(call, status)),
        };
        let Some(raw) = NonNull::new(raw).filter(|_| status == SUCCESS) else {
            return Err(failed(&library, "create_configured_agent", status, ""));
        };
        let (memory_types, connection) = Default::default();
        let process = process::id();
        // From here on, a drop destroys the agent.
        let mut agent = Self { library, raw, process, memory_types, connection, peers: Mutex::default() };
        agent.memory_types = agent.create_backend().map_err(|(call, status)| {
            let advice = match call {
                "get_plugin_params" => {
                    ". The plugin UCX was not found or cannot be loaded: set NIXL_PLUGIN_DIR to the folder with \
                     libplugin_UCX.so, or install the wheel nixl-cu12"
                }
                _ => ". The plugin UCX cannot be started; check UCX_TLS and UCX_NET_DEVICES",
            };
            failed(&agent.library, call, status, advice)
        })?;
        let none = agent.registration_list(MEMORY_HOST).and_then(|list| agent.metadata_of(&list));
        agent.connection = none.map_err(|error| Unavailable::Failed { detail: error.to_string() })?;
        Ok(agent)
    }

    /// Creates the backend UCX, and returns the types of memory that it supports.
    fn create_backend(&self) -> Result<Vec<MemoryType>, (&'static str, Status)> {
        let check = |call, status| if status == SUCCESS { Ok(()) } else { Err((call, status)) };
        let api = &self.library.api;
        let (mut memories, mut parameters, mut backend) = (null_mut(), null_mut(), null_mut());
        // SAFETY: the agent exists; each result is used after success only, and destroyed once.
        unsafe {
            let status = (api.get_plugin_params)(
                self.raw.as_ptr(),
                PLUGIN.as_ptr(),
                &raw mut memories,
                &raw mut parameters,
            );
            check("get_plugin_params", status)?;
            (api.destroy_mem_list)(memories);
            if environment::variable(TIMEOUT_VARIABLE).is_none() {
                let (name, value) = TIMEOUT;
                let status = (api.params_add)(parameters, name.as_ptr(), value.as_ptr());
                check("params_add", status).inspect_err(|_| {
                    (api.destroy_params)(parameters);
                })?;
            }
            let status =
                (api.create_backend)(self.raw.as_ptr(), PLUGIN.as_ptr(), parameters, &raw mut backend);
            (api.destroy_params)(parameters);
            check("create_backend", status)?;
            let status =
                (api.get_backend_params)(self.raw.as_ptr(), backend, &raw mut memories, &raw mut parameters);
            // Destroys the reference only; the backend exists as long as the agent.
            (api.destroy_backend)(backend);
            check("get_backend_params", status)?;
            (api.destroy_params)(parameters);
            let types = self.types_of(memories);
            (api.destroy_mem_list)(memories);
            types
        }
    }

    /// Returns the elements of a list of memory types.
    ///
    /// # Safety
    ///
    /// The list exists.
    unsafe fn types_of(&self, list: *mut MemoryList) -> Result<Vec<MemoryType>, (&'static str, Status)> {
        let api = &self.library.api;
        let mut count = 0;
        // SAFETY: the caller's promise.
        let status = unsafe { (api.mem_list_size)(list, &raw mut count) };
        if status != SUCCESS {
            return Err(("mem_list_size", status));
        }
        let mut types = Vec::new();
        for index in 0..count {
            let mut memory_type = 0;
            // SAFETY: the caller's promise.
            let status = unsafe { (api.mem_list_get)(list, index, &raw mut memory_type) };
            if status != SUCCESS {
                return Err(("mem_list_get", status));
            }
            types.push(memory_type);
        }
        Ok(types)
    }

    /// Returns whether UCX supports host memory, or else CUDA memory.
    pub(crate) fn supports(&self, is_host: bool) -> bool {
        self.memory_types.contains(&if is_host { MEMORY_HOST } else { MEMORY_DEVICE })
    }

    /// Returns the file of the library.
    pub(crate) fn file(&self) -> &str {
        &self.library.file
    }

    /// Refuses a call in a forked child.
    fn check_process(&self) -> Result<()> {
        if process::id() == self.process { Ok(()) } else { Err(Error::Forked) }
    }

    fn registration_list(&self, memory_type: MemoryType) -> Result<List<'_, RegistrationList>, VendorError> {
        let mut list = null_mut();
        // SAFETY: writes one pointer.
        let status = unsafe { (self.library.api.create_reg_dlist)(memory_type, &raw mut list) };
        NixlLibrary::check("create_reg_dlist", status)?;
        Ok(List { raw: list, destroy: self.library.api.destroy_reg_dlist, _agent: self })
    }

    /// Returns a list of memories, all of the first one's type.
    fn transfer_list(&self, memories: &[NixlMemory]) -> Result<List<'_, TransferList>, VendorError> {
        let api = &self.library.api;
        let mut raw = null_mut();
        // SAFETY: writes one pointer.
        let status = unsafe { (api.create_xfer_dlist)(type_of(memories), &raw mut raw) };
        NixlLibrary::check("create_xfer_dlist", status)?;
        let list = List { raw, destroy: api.destroy_xfer_dlist, _agent: self };
        for NixlMemory { device, address, len, .. } in memories {
            // SAFETY: the list exists; the address is not accessed.
            let status =
                unsafe { (api.xfer_dlist_add_desc)(list.raw, *address as usize, *len as usize, *device) };
            NixlLibrary::check("xfer_dlist_add_desc", status)?;
        }
        Ok(list)
    }

    /// Returns NIXL's metadata of registered regions, or of the agent if the list is empty.
    fn metadata_of(&self, list: &List<'_, RegistrationList>) -> Result<Vec<u8>, VendorError> {
        let (mut data, mut len) = (null_mut::<c_void>(), 0);
        // SAFETY: agent and list exist; null stands for no options.
        let status = unsafe {
            (self.library.api.get_local_partial_md)(
                self.raw.as_ptr(),
                list.raw,
                &raw mut data,
                &raw mut len,
                null_mut(),
            )
        };
        NixlLibrary::check("get_local_partial_md", status)?;
        // SAFETY: after success, `data` has `len` bytes of malloc, which the caller has to free.
        unsafe {
            let bytes = slice::from_raw_parts(data.cast::<u8>(), len).to_vec();
            libc::free(data);
            Ok(bytes)
        }
    }

    /// Loads metadata of another agent, and returns that agent's name.
    fn load(&self, metadata: &[u8]) -> Result<CString, VendorError> {
        let mut name = null_mut::<c_char>();
        // SAFETY: the bytes are valid for the call, which copies them.
        let status = unsafe {
            (self.library.api.load_remote_md)(
                self.raw.as_ptr(),
                metadata.as_ptr().cast(),
                metadata.len(),
                &raw mut name,
            )
        };
        NixlLibrary::check("load_remote_md", status)?;
        // SAFETY: after success, `name` is a text of malloc, which the caller has to free.
        unsafe {
            let owned = CStr::from_ptr(name).to_owned();
            libc::free(name.cast());
            Ok(owned)
        }
    }

    fn peers(&self) -> MutexGuard<'_, Peers> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets a peer: closes the connection, and drops the metadata of its regions.
    fn forget(&self, peer: &CStr) {
        // SAFETY: the agent exists. After a lost connection NIXL has forgotten the peer already, and reports that.
        unsafe { (self.library.api.invalidate_remote_md)(self.raw.as_ptr(), peer.as_ptr()) };
    }

    /// Records the end of a request to a peer.
    fn end_request(&self, peers: &mut Peers, peer: &CStr, failed: bool) {
        if peers.end(peer, failed) {
            self.forget(peer);
        }
    }

    /// Loads the metadata of regions and of their agent, as far as they are not loaded. Returns the agent's name.
    fn load_regions(&self, peers: &mut Peers, regions: &[RegionMetadata]) -> Result<CString> {
        let Some(first) = regions.first() else {
            return Err(Error::InvalidRegion("a transfer needs at least one region".into()));
        };
        let peer = self.load(&first.connection)?;
        if regions.iter().all(|region| peers.knows(&peer, region)) {
            return Ok(peer);
        }
        let outdated = peers.outdated_by(&peer, regions);
        for name in &outdated {
            self.forget(name);
        }
        if outdated.contains(&peer) {
            self.load(&first.connection)?;
        }
        for region in regions {
            if peers.knows(&peer, region) {
                continue;
            }
            let name = self.load(&region.region)?;
            if name != peer {
                return Err(Error::Protocol("the NIXL metadata is that of two agents".into()));
            }
            peers.add(&peer, region);
        }
        Ok(peer)
    }

    /// Creates and starts a request that reads each source of a loaded peer into the destination beside it.
    fn start_request(&self, peer: &CStr, pieces: &Pieces) -> Result<(*mut Request, Status), VendorError> {
        let api = &self.library.api;
        let (local, remote) =
            (self.transfer_list(&pieces.destinations)?, self.transfer_list(&pieces.sources)?);
        let mut request = null_mut();
        // SAFETY: all objects exist; NIXL copies the lists.
        let status = unsafe {
            (api.create_xfer_req)(
                self.raw.as_ptr(),
                OPERATION_READ,
                local.raw,
                remote.raw,
                peer.as_ptr(),
                &raw mut request,
                null_mut(),
            )
        };
        NixlLibrary::check("create_xfer_req", status)?;
        // SAFETY: the caller has registered the destination, and keeps it until the request is over.
        let status = unsafe { (api.post_xfer_req)(self.raw.as_ptr(), request, null_mut()) };
        Ok((request, status))
    }

    /// Starts requests for waiting pieces, as long as none has failed. Adds the bytes of those that are over at once.
    fn start_waiting(&self, running: &mut Running, arrived: &mut u64) {
        while running.failed.is_none()
            && running.requests.len() < IN_FLIGHT
            && let Some(batch) = running.waiting.pop_front()
        {
            let bytes = batch.bytes();
            let started = self.start_request(&running.peer, &batch);
            match started {
                Ok((request, IN_PROGRESS)) => running.requests.push_back(Posted { request, bytes }),
                Ok((request, status)) => {
                    self.release(request);
                    match NixlLibrary::check("post_xfer_req", status) {
                        Ok(()) => *arrived += bytes,
                        Err(error) => running.failed = Some(error),
                    }
                }
                Err(error) => running.failed = Some(error),
            }
        }
    }

    /// Releases a request that is over.
    fn release(&self, request: *mut Request) {
        let api = &self.library.api;
        // SAFETY: the request exists, is over, and is not used again.
        let status = unsafe {
            let status = (api.release_xfer_req)(self.raw.as_ptr(), request);
            (api.destroy_xfer_req)(request);
            status
        };
        if status != SUCCESS {
            let error = NixlLibrary::error("release_xfer_req", status);
            tracing::warn!(target: crate::LOG, %error, "NIXL did not release a request");
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // In a forked child, NIXL would wait for threads that do not exist.
        if self.check_process().is_ok() {
            // SAFETY: each registration and each request has a reference to the agent, so there are none.
            unsafe { (self.library.api.destroy_agent)(self.raw.as_ptr()) };
        }
    }
}

/// A list of NIXL, which is destroyed on drop.
struct List<'a, T> {
    raw: *mut T,
    destroy: unsafe extern "C" fn(*mut T) -> Status,
    /// The library is loaded as long as the agent exists.
    _agent: &'a Agent,
}

impl<T> Drop for List<'_, T> {
    fn drop(&mut self) {
        // SAFETY: the list exists, and is not used again.
        unsafe { (self.destroy)(self.raw) };
    }
}

/// Maximum number of bytes of one request: the engine reports progress by requests that are over.
const REQUEST_BYTES: u64 = 64 << 20;

/// Number of requests of one read that run at the same time: one is transferred while the end of the other is noticed.
const IN_FLIGHT: usize = 2;

/// The bytes that one request reads: as many sources as destinations, in pairs of equal length.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    pub(crate) sources: Vec<NixlMemory>,
    pub(crate) destinations: Vec<NixlMemory>,
}

impl Pieces {
    fn bytes(&self) -> u64 {
        self.sources.iter().map(|memory| memory.len).sum()
    }

    /// Divides the pieces into those of requests of at most [`REQUEST_BYTES`].
    fn into_batches(self) -> VecDeque<Self> {
        let mut batches = VecDeque::from([Self::default()]);
        let mut room = REQUEST_BYTES;
        for (mut source, mut destination) in self.sources.into_iter().zip(self.destinations) {
            while source.len > 0 {
                if room == 0 {
                    batches.push_back(Self::default());
                    room = REQUEST_BYTES;
                }
                let last = batches.back_mut().expect("there is one");
                let len = source.len.min(room);
                last.sources.push(source.take_front(len));
                last.destinations.push(destination.take_front(len));
                room -= len;
            }
        }
        batches
    }
}

/// Returns the type of the memories of a list, which is one.
fn type_of(memories: &[NixlMemory]) -> MemoryType {
    memories.first().map_or(MEMORY_HOST, |memory| memory.memory_type)
}

/// Memories of one type that are registered with an agent until this is dropped.
#[derive(Debug)]
pub(crate) struct Registration {
    agent: Arc<Agent>,
    memories: Vec<NixlMemory>,
}

impl Registration {
    /// Registers memories of one type.
    ///
    /// # Safety
    ///
    /// The memories stay allocated until the result is dropped.
    pub(crate) unsafe fn new(agent: &Arc<Agent>, memories: Vec<NixlMemory>) -> Result<Self> {
        agent.check_process()?;
        let list = list_of(agent, &memories)?;
        // SAFETY: agent and list exist; the memory as the caller promised.
        let status = unsafe { (agent.library.api.register_mem)(agent.raw.as_ptr(), list.raw, null_mut()) };
        NixlLibrary::check("register_mem", status)?;
        Ok(Self { agent: Arc::clone(agent), memories })
    }

    /// Returns the metadata by which another process can pull from this memory, which is one range.
    pub(crate) fn metadata(&self) -> Result<RegionMetadata> {
        let NixlMemory { memory_type, device, address, len } = self.memories[0];
        let mut metadata = RegionMetadata::new(memory_type, device, address, len);
        metadata.connection = self.agent.connection.clone();
        metadata.region = self.agent.metadata_of(&list_of(&self.agent, &self.memories)?)?;
        Ok(metadata)
    }
}

fn list_of<'a>(agent: &'a Agent, memories: &[NixlMemory]) -> Result<List<'a, RegistrationList>, VendorError> {
    let list = agent.registration_list(type_of(memories))?;
    for NixlMemory { device, address, len, .. } in memories {
        let (address, len) = (*address as usize, *len as usize);
        // SAFETY: the list exists; the address is not accessed.
        let status =
            unsafe { (agent.library.api.reg_dlist_add_desc)(list.raw, address, len, *device, null(), 0) };
        NixlLibrary::check("reg_dlist_add_desc", status)?;
    }
    Ok(list)
}

impl Drop for Registration {
    fn drop(&mut self) {
        if self.agent.check_process().is_err() {
            return;
        }
        let deregistered = list_of(&self.agent, &self.memories).and_then(|list| {
            let agent = self.agent.raw.as_ptr();
            // SAFETY: agent and list exist, and the memory is registered.
            let status = unsafe { (self.agent.library.api.deregister_mem)(agent, list.raw, null_mut()) };
            NixlLibrary::check("deregister_mem", status)
        });
        if let Err(error) = deregistered {
            tracing::warn!(target: crate::LOG, %error, "memory was not deregistered");
        }
    }
}

/// A read from another process's memory.
#[derive(Debug)]
pub(crate) struct Read {
    agent: Arc<Agent>,
    state: Mutex<State>,
    /// The number of bytes of the requests that are over.
    arrived: AtomicU64,
}

#[derive(Debug)]
enum State {
    Running(Running),
    Over(Result<(), VendorError>),
}

#[derive(Debug)]
struct Running {
    /// The requests that may still run, in the order of their start.
    requests: VecDeque<Posted>,
    /// The pieces of the requests that are not started yet.
    waiting: VecDeque<Pieces>,
    /// The first error of a request that is over, or was not started.
    failed: Option<VendorError>,
    /// Deregistered at the end.
    destination: Registration,
    peer: CString,
}

#[derive(Clone, Copy, Debug)]
struct Posted {
    request: *mut Request,
    bytes: u64,
}

// SAFETY: a request may be used on any thread; the lock of the state admits one at a time.
unsafe impl Send for Posted {}

impl Read {
    /// Starts a read of pieces of these regions. `destinations` contain the pieces' destinations.
    ///
    /// # Safety
    ///
    /// The destinations stay allocated, and no other code accesses them, until [`is_finished`](Self::is_finished) has returned
    /// true or an error. If the result is dropped before, they stay allocated for ever.
    pub(crate) unsafe fn start(
        agent: &Arc<Agent>,
        regions: &[RegionMetadata],
        destinations: Vec<NixlMemory>,
        pieces: Pieces,
    ) -> Result<Self> {
        // SAFETY: as the caller promised.
        let registered = unsafe { Registration::new(agent, destinations)? };
        let mut peers = agent.peers();
        let peer = agent.load_regions(&mut peers, regions)?;
        peers.begin(&peer);
        let mut running = Running {
            requests: VecDeque::new(),
            waiting: pieces.into_batches(),
            failed: None,
            destination: registered,
            peer,
        };
        let mut arrived = 0;
        agent.start_waiting(&mut running, &mut arrived);
        if running.requests.is_empty()
            && let Some(error) = running.failed
        {
            agent.end_request(&mut peers, &running.peer, true);
            return Err(error.into());
        }
        drop(peers);
        let (agent, state) = (Arc::clone(agent), Mutex::new(State::Running(running)));
        Ok(Self { agent, state, arrived: AtomicU64::new(arrived) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of bytes of the requests that are over.
    pub(crate) fn arrived_bytes(&self) -> u64 {
        self.arrived.load(Ordering::Relaxed)
    }

    /// Returns whether all bytes have arrived; after an error all requests are over, too.
    pub(crate) fn is_finished(&self) -> Result<bool> {
        self.agent.check_process()?;
        let mut state = self.state();
        if let State::Running(running) = &mut *state {
            self.update(running);
            if running.requests.is_empty() {
                let over = State::Over(running.failed.take().map_or(Ok(()), Err));
                let ended = mem::replace(&mut *state, over);
                if let (State::Running(Running { destination, peer, .. }), State::Over(result)) =
                    (ended, &*state)
                {
                    drop(destination);
                    self.agent.end_request(&mut self.agent.peers(), &peer, result.is_err());
                }
            }
        }
        match &*state {
            State::Running(_) => Ok(false),
            State::Over(result) => result.clone().map(|()| true).map_err(Into::into),
        }
    }

    /// Starts no further requests. The read fails if there are any.
    pub(crate) fn cancel_rest(&self) {
        if let State::Running(running) = &mut *self.state()
            && !running.waiting.is_empty()
        {
            running.waiting.clear();
            running.failed.get_or_insert_with(|| NixlLibrary::error("post_xfer_req", INVALID_STATE));
        }
    }

    /// Releases the requests that are over, as far as no earlier one runs, and starts others.
    fn update(&self, running: &mut Running) {
        let api = &self.agent.library.api;
        let mut arrived = 0;
        while let Some(Posted { request, bytes }) = running.requests.front().copied() {
            // SAFETY: the request exists until it is over.
            let status = unsafe { (api.get_xfer_status)(self.agent.raw.as_ptr(), request) };
            if status == IN_PROGRESS {
                break;
            }
            running.requests.pop_front();
            self.agent.release(request);
            match NixlLibrary::check("get_xfer_status", status) {
                Ok(()) => arrived += bytes,
                Err(error) => {
                    running.failed.get_or_insert(error);
                }
            }
            self.agent.start_waiting(running, &mut arrived);
        }
        self.arrived.fetch_add(arrived, Ordering::Relaxed);
    }
}

impl Drop for Read {
    fn drop(&mut self) {
        let over = State::Over(Ok(()));
        if let State::Running(running) = mem::replace(&mut *self.state(), over) {
            // UCX may write to the destination as long as the agent exists, so both stay.
            mem::forget(running);
            mem::forget(Arc::clone(&self.agent));
            if self.agent.check_process().is_ok() {
                tracing::warn!(target: crate::LOG,
                    "a transfer was dropped before its end; the agent of NIXL stays until the process exits"
                );
            }
        }
    }
}

/// Returns a name that no other agent on any host has: NIXL identifies agents by it.
fn random_name() -> Result<CString, Unavailable> {
    let mut random = [0; 16];
    getrandom::fill(&mut random)
        .map_err(|error| Unavailable::Failed { detail: format!("no random bytes: {error}") })?;
    let mut name = "device-ipc-".to_owned();
    for byte in random {
        let _ = write!(name, "{byte:02x}");
    }
    Ok(CString::new(name).expect("hexadecimal digits"))
}
