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

mod read;
mod registration;

use std::ffi::{CStr, CString, c_char, c_void};
use std::fmt::Write as _;
use std::ptr::{NonNull, null_mut};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::{process, slice};

use device_ipc_core::backend::{Unavailable, VendorError, environment};
use device_ipc_core::{Error, Result};

use crate::bindings::{
    AgentConfig, MEMORY_DEVICE, MEMORY_HOST, MemoryList, MemoryType, OPERATION_READ, RawAgent,
    RegistrationList, Request, Status, THREAD_SYNC_STRICT, TransferList,
};
use crate::exit::{self, Call};
use crate::library::NixlLibrary;
use crate::library::status::SUCCESS;
use crate::metadata::RegionMetadata;
use crate::peers::Peers;

pub(crate) use read::{Pieces, Read};
pub(crate) use registration::Registration;

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
        exit::watch();
        let _call = Call::begin();
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
                     libplugin_UCX.so, or install the wheel nixl-cu13"
                }
                _ => {
                    ". The plugin UCX cannot be started; check UCX_TLS (where there is an NVIDIA GPU, it has to contain cuda or \
                     cuda_copy) and UCX_NET_DEVICES"
                },
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
            let _call = Call::begin();
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

/// Returns the type of the memories of a list, which is one.
fn type_of(memories: &[NixlMemory]) -> MemoryType {
    memories.first().map_or(MEMORY_HOST, |memory| memory.memory_type)
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
