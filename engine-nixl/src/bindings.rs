//! The declarations of NIXL's C API that this crate uses, and their addresses in a loaded library.
//!
//! The C API is `src/bindings/rust/wrapper.h` in NIXL's repository. From 0.9 to 1.5 it has only grown.

use std::ffi::{c_char, c_int, c_uint, c_void};

use libloading::Library;

/// A status of NIXL. A number, because a newer library may return unknown ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Status(pub(crate) i32);

/// A type of memory (`nixl_capi_mem_type_t`).
pub(crate) type MemoryType = c_uint;

pub(crate) const MEMORY_HOST: MemoryType = 0;
pub(crate) const MEMORY_DEVICE: MemoryType = 1;

/// `NIXL_CAPI_XFER_OP_READ`.
pub(crate) const OPERATION_READ: c_uint = 0;

/// `NIXL_CAPI_THREAD_SYNC_STRICT`: the agent may be called by several threads, one of which is its progress thread.
pub(crate) const THREAD_SYNC_STRICT: c_uint = 1;

/// `nixl_capi_agent_config_t`.
#[repr(C)]
pub(crate) struct AgentConfig {
    pub(crate) enable_prog_thread: bool,
    pub(crate) enable_listen_thread: bool,
    pub(crate) listen_port: c_int,
    pub(crate) thread_sync: c_uint,
    pub(crate) num_workers: c_uint,
    pub(crate) pthr_delay_us: u64,
    pub(crate) lthr_delay_us: u64,
    pub(crate) capture_telemetry: bool,
}

/// Declares objects that only NIXL looks into.
macro_rules! opaque {
    ($($name:ident)+) => {
        $(
            #[repr(C)]
            pub(crate) struct $name {
                _private: [u8; 0],
            }
        )+
    };
}

opaque!(RawAgent Params MemoryList Backend OptionalArguments RegistrationList TransferList Request);

/// Declares the table of functions. Each has the prefix `nixl_capi_` in the library.
macro_rules! functions {
    ($($name:ident($($argument:ty),* $(,)?);)+) => {
        /// The functions of a loaded library.
        pub(crate) struct Api {
            $(pub(crate) $name: unsafe extern "C" fn($($argument),*) -> Status,)+
        }

        impl Api {
            /// Looks up the functions; fails with the name of the first that is missing. The library must stay loaded.
            pub(crate) fn of(library: &Library) -> Result<Self, &'static str> {
                Ok(Self {
                    $($name: {
                        const SYMBOL: &str = concat!("nixl_capi_", stringify!($name));
                        // SAFETY: the function has this type in all versions of the C API.
                        *unsafe { library.get::<unsafe extern "C" fn($($argument),*) -> Status>(SYMBOL) }
                            .map_err(|_| SYMBOL)?
                    },)+
                })
            }
        }
    };
}

functions! {
    create_configured_agent(*const c_char, *const AgentConfig, *mut *mut RawAgent);
    destroy_agent(*mut RawAgent);
    get_plugin_params(*mut RawAgent, *const c_char, *mut *mut MemoryList, *mut *mut Params);
    destroy_mem_list(*mut MemoryList);
    params_add(*mut Params, *const c_char, *const c_char);
    destroy_params(*mut Params);
    create_backend(*mut RawAgent, *const c_char, *mut Params, *mut *mut Backend);
    destroy_backend(*mut Backend);
    get_backend_params(*mut RawAgent, *mut Backend, *mut *mut MemoryList, *mut *mut Params);
    mem_list_size(*mut MemoryList, *mut usize);
    mem_list_get(*mut MemoryList, usize, *mut MemoryType);
    create_reg_dlist(MemoryType, *mut *mut RegistrationList);
    destroy_reg_dlist(*mut RegistrationList);
    reg_dlist_add_desc(*mut RegistrationList, usize, usize, u64, *const c_void, usize);
    register_mem(*mut RawAgent, *mut RegistrationList, *mut OptionalArguments);
    deregister_mem(*mut RawAgent, *mut RegistrationList, *mut OptionalArguments);
    get_local_partial_md(*mut RawAgent, *mut RegistrationList, *mut *mut c_void, *mut usize, *mut OptionalArguments);
    load_remote_md(*mut RawAgent, *const c_void, usize, *mut *mut c_char);
    invalidate_remote_md(*mut RawAgent, *const c_char);
    create_xfer_dlist(MemoryType, *mut *mut TransferList);
    destroy_xfer_dlist(*mut TransferList);
    xfer_dlist_add_desc(*mut TransferList, usize, usize, u64);
    create_xfer_req(*mut RawAgent, c_uint, *mut TransferList, *mut TransferList, *const c_char, *mut *mut Request, *mut OptionalArguments);
    post_xfer_req(*mut RawAgent, *mut Request, *mut OptionalArguments);
    get_xfer_status(*mut RawAgent, *mut Request);
    release_xfer_req(*mut RawAgent, *mut Request);
    destroy_xfer_req(*mut Request);
}
