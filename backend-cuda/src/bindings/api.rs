//! The functions of libcuda that this backend calls.
//!
//! Statuses are declared as `i32`, so that a number absent from all headers is not undefined behaviour. The
//! suffix `_v2` belongs to the symbol wherever `cuda.h` defines the plain name as a macro for it; the plain symbols of
//! those functions still exist, with 32-bit sizes or other arguments.

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};

use libloading::{Library, Symbol};

use crate::bindings::layout::{
    AccessDescription, AllocationProperties, BlockHandle, Location, PoolPointer, PoolProperties,
};

/// A required function that a library lacks.
pub(crate) struct Missing {
    /// The symbol.
    pub(crate) symbol: &'static str,
    /// The CUDA version that introduced it.
    pub(crate) since: &'static str,
}

macro_rules! opaque {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        $(
            $(#[$doc])*
            ///
            /// An opaque pointer of libcuda, stored as a number: it is never dereferenced here, and the driver's
            /// functions may be called from any thread.
            #[derive(Clone, Copy, Debug, PartialEq, Eq)]
            #[repr(transparent)]
            pub(crate) struct $name(pub(crate) usize);

            impl $name {
                pub(crate) const NULL: Self = Self(0);
            }
        )*
    };
}

opaque! {
    /// `CUcontext`.
    Context;
    /// `CUstream`.
    Stream;
    /// `CUevent`.
    Event;
    /// `CUmodule`.
    Module;
    /// `CUfunction`.
    Function;
    /// `CUmemoryPool`.
    Pool;
}

impl Stream {
    /// Returns whether it is a stream of the driver: the default stream, `CU_STREAM_LEGACY` or `CU_STREAM_PER_THREAD`.
    pub(crate) const fn is_default(self) -> bool {
        self.0 <= 2
    }
}

/// `CUdevice`.
pub(crate) type Device = c_int;
/// `CUdeviceptr`.
pub(crate) type DevicePointer = u64;
/// `CUhostFn`.
pub(crate) type HostFn = unsafe extern "C" fn(*mut c_void);

/// The length of `CUipcMemHandle` and of `CUipcEventHandle`: `CU_IPC_HANDLE_SIZE`.
pub(crate) const IPC_HANDLE_BYTES: usize = 64;

/// `CUipcMemHandle` and `CUipcEventHandle`, which are passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct IpcHandle {
    pub(crate) reserved: [u8; IPC_HANDLE_BYTES],
}

/// `CUuuid`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Uuid {
    pub(crate) bytes: [u8; 16],
}

const _: () =
    assert!(size_of::<usize>() == 8 && size_of::<IpcHandle>() == 64 && align_of::<IpcHandle>() == 1);

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
pub(crate) const IPC_MEM_LAZY_ENABLE_PEER_ACCESS: c_uint = 0x1;
/// `CU_EVENT_DISABLE_TIMING`.
pub(crate) const EVENT_DISABLE_TIMING: c_uint = 0x2;
/// `CU_EVENT_INTERPROCESS`.
pub(crate) const EVENT_INTERPROCESS: c_uint = 0x4;
/// `CU_EVENT_WAIT_DEFAULT`.
pub(crate) const EVENT_WAIT_DEFAULT: c_uint = 0x0;
/// `CU_STREAM_NON_BLOCKING`.
pub(crate) const STREAM_NON_BLOCKING: c_uint = 0x1;
/// `CU_MEMHOSTALLOC_PORTABLE`.
pub(crate) const MEMHOSTALLOC_PORTABLE: c_uint = 0x1;
/// `CU_MEMHOSTREGISTER_PORTABLE` and `CU_MEMHOSTREGISTER_DEVICEMAP`.
pub(crate) const MEMHOSTREGISTER_PORTABLE_DEVICEMAP: c_uint = 0x1 | 0x2;
/// `CU_STREAM_WRITE_VALUE_DEFAULT`: after a fence for all earlier writes of the stream.
pub(crate) const STREAM_WRITE_VALUE_DEFAULT: c_uint = 0x0;
/// `CU_STREAM_WAIT_VALUE_GEQ`.
pub(crate) const STREAM_WAIT_VALUE_GEQ: c_uint = 0x0;
/// `CU_STREAM_CAPTURE_STATUS_NONE`.
pub(crate) const STREAM_CAPTURE_STATUS_NONE: c_uint = 0;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
pub(crate) const STREAM_CAPTURE_MODE_RELAXED: c_uint = 2;
/// `CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS_V1`.
pub(crate) const DEVICE_ATTRIBUTE_FORMER_VALUE_OPERATIONS: c_int = 93;
/// `CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS`.
pub(crate) const DEVICE_ATTRIBUTE_VALUE_OPERATIONS: c_int = 122;
/// `CU_MEMORYTYPE_HOST`.
pub(crate) const MEMORYTYPE_HOST: u64 = 1;
/// `CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED`, supported by drivers of CUDA 12 and newer.
pub(crate) const DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED: c_int = 125;
/// `CU_DEVICE_ATTRIBUTE_MPS_ENABLED`, supported by drivers of CUDA 12.1 and newer: whether contexts that this process creates
/// on the device are shared through MPS. 0 without a running control daemon, also if the directory of its pipes is set or has a
/// socket of an earlier daemon (observed with driver 580.159.04).
pub(crate) const DEVICE_ATTRIBUTE_MPS_ENABLED: c_int = 133;

/// `CUpointer_attribute`.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct PointerAttribute(c_uint);

impl PointerAttribute {
    pub(crate) const MEMORY_TYPE: Self = Self(2);
    pub(crate) const BUFFER_ID: Self = Self(7);
    pub(crate) const IS_MANAGED: Self = Self(8);
    pub(crate) const DEVICE_ORDINAL: Self = Self(9);
    pub(crate) const IS_LEGACY_CUDA_IPC_CAPABLE: Self = Self(10);
    pub(crate) const ALLOWED_HANDLE_TYPES: Self = Self(14);
    pub(crate) const MEMPOOL_HANDLE: Self = Self(17);
}

/// Returns the function with this name, or `None` if the library lacks it.
///
/// # Safety
///
/// `F` is the type of the function.
unsafe fn symbol<F: Copy>(library: &Library, name: &str) -> Option<F> {
    // SAFETY: as the caller promised.
    let found: Result<Symbol<'_, F>, _> = unsafe { library.get(name) };
    found.ok().map(|symbol| *symbol)
}

macro_rules! api {
    (
        required { $($required:ident = $required_symbol:literal, $since:literal, ($($required_arg:ty),*);)* }
        optional { $($optional:ident = $optional_symbol:literal, ($($optional_arg:ty),*);)* }
        groups {
            $(
                $(#[$doc:meta])*
                $group:ident: $Group:ident { $($member:ident = $member_symbol:literal, ($($member_arg:ty),*);)* }
            )*
        }
    ) => {
        $(
            $(#[$doc])*
            pub(crate) struct $Group {
                $(pub(crate) $member: unsafe extern "C" fn($($member_arg),*) -> i32,)*
            }
        )*

        /// The functions of libcuda, named without their prefix.
        pub(crate) struct Api {
            $(pub(crate) $required: unsafe extern "C" fn($($required_arg),*) -> i32,)*
            $(pub(crate) $optional: Option<unsafe extern "C" fn($($optional_arg),*) -> i32>,)*
            $(pub(crate) $group: Option<$Group>,)*
        }

        impl Api {
            /// Looks the functions up.
            ///
            /// # Safety
            ///
            /// `library` is libcuda, or has its functions with the signatures of `cuda.h`. The table is not used after
            /// the library has been unloaded.
            pub(crate) unsafe fn load(library: &Library) -> Result<Self, Missing> {
                Ok(Self {
                    $($required: {
                        type Required = unsafe extern "C" fn($($required_arg),*) -> i32;
                        // SAFETY: the type is that of the function in cuda.h, as the caller promised.
                        let found = unsafe { symbol::<Required>(library, concat!($required_symbol, "\0")) };
                        found.ok_or(Missing { symbol: $required_symbol, since: $since })?
                    },)*
                    $($optional: {
                        type Optional = unsafe extern "C" fn($($optional_arg),*) -> i32;
                        // SAFETY: as above.
                        unsafe { symbol::<Optional>(library, concat!($optional_symbol, "\0")) }
                    },)*
                    $($group: (|| Some($Group {
                        $($member: {
                            type Member = unsafe extern "C" fn($($member_arg),*) -> i32;
                            // SAFETY: as above.
                            unsafe { symbol::<Member>(library, concat!($member_symbol, "\0")) }?
                        },)*
                    }))(),)*
                })
            }
        }
    };
}

api! {
    required {
        init = "cuInit", "2.0", (c_uint);
        driver_get_version = "cuDriverGetVersion", "2.2", (*mut c_int);

        device_get = "cuDeviceGet", "2.0", (*mut Device, c_int);
        device_get_count = "cuDeviceGetCount", "2.0", (*mut c_int);
        device_get_name = "cuDeviceGetName", "2.0", (*mut c_char, c_int, Device);
        device_get_attribute = "cuDeviceGetAttribute", "2.0", (*mut c_int, c_int, Device);
        device_get_uuid = "cuDeviceGetUuid", "9.2", (*mut Uuid, Device);
        device_total_mem = "cuDeviceTotalMem_v2", "3.2", (*mut usize, Device);
        device_can_access_peer = "cuDeviceCanAccessPeer", "4.0", (*mut c_int, Device, Device);
        device_primary_ctx_retain = "cuDevicePrimaryCtxRetain", "7.0", (*mut Context, Device);
        device_primary_ctx_get_state = "cuDevicePrimaryCtxGetState", "7.0", (Device, *mut c_uint, *mut c_int);
        device_primary_ctx_release = "cuDevicePrimaryCtxRelease_v2", "11.0", (Device);

        ctx_get_current = "cuCtxGetCurrent", "4.0", (*mut Context);
        ctx_set_current = "cuCtxSetCurrent", "4.0", (Context);
        ctx_push_current = "cuCtxPushCurrent_v2", "4.0", (Context);
        ctx_pop_current = "cuCtxPopCurrent_v2", "4.0", (*mut Context);
        ctx_synchronize = "cuCtxSynchronize", "2.0", ();

        pointer_get_attribute = "cuPointerGetAttribute", "4.0", (*mut c_void, PointerAttribute, DevicePointer);
        mem_get_address_range = "cuMemGetAddressRange_v2", "3.2", (*mut DevicePointer, *mut usize, DevicePointer);
        mem_get_info = "cuMemGetInfo_v2", "3.2", (*mut usize, *mut usize);
        mem_alloc = "cuMemAlloc_v2", "3.2", (*mut DevicePointer, usize);
        mem_free = "cuMemFree_v2", "3.2", (DevicePointer);
        mem_host_alloc = "cuMemHostAlloc", "2.2", (*mut *mut c_void, usize, c_uint);
        mem_free_host = "cuMemFreeHost", "2.0", (*mut c_void);
        memcpy_async = "cuMemcpyAsync", "4.0", (DevicePointer, DevicePointer, usize, Stream);
        memcpy_htod_async = "cuMemcpyHtoDAsync_v2", "3.2", (DevicePointer, *const c_void, usize, Stream);
        memcpy_dtoh_async = "cuMemcpyDtoHAsync_v2", "3.2", (*mut c_void, DevicePointer, usize, Stream);
        memset_d8_async = "cuMemsetD8Async", "3.2", (DevicePointer, c_uchar, usize, Stream);

        ipc_get_mem_handle = "cuIpcGetMemHandle", "4.1", (*mut IpcHandle, DevicePointer);
        ipc_open_mem_handle = "cuIpcOpenMemHandle_v2", "11.0", (*mut DevicePointer, IpcHandle, c_uint);
        ipc_close_mem_handle = "cuIpcCloseMemHandle", "4.1", (DevicePointer);
        ipc_get_event_handle = "cuIpcGetEventHandle", "4.1", (*mut IpcHandle, Event);
        ipc_open_event_handle = "cuIpcOpenEventHandle", "4.1", (*mut Event, IpcHandle);

        event_create = "cuEventCreate", "2.0", (*mut Event, c_uint);
        event_destroy = "cuEventDestroy_v2", "4.0", (Event);
        event_record = "cuEventRecord", "2.0", (Event, Stream);
        event_query = "cuEventQuery", "2.0", (Event);

        stream_create = "cuStreamCreate", "2.0", (*mut Stream, c_uint);
        stream_destroy = "cuStreamDestroy_v2", "4.0", (Stream);
        stream_get_ctx = "cuStreamGetCtx", "9.2", (Stream, *mut Context);
        stream_synchronize = "cuStreamSynchronize", "2.0", (Stream);
        stream_query = "cuStreamQuery", "2.0", (Stream);
        stream_wait_event = "cuStreamWaitEvent", "3.2", (Stream, Event, c_uint);
        launch_host_func = "cuLaunchHostFunc", "10.0", (Stream, HostFn, *mut c_void);

        module_load_data = "cuModuleLoadData", "2.0", (*mut Module, *const c_void);
        module_unload = "cuModuleUnload", "2.0", (Module);
        module_get_function = "cuModuleGetFunction", "2.0", (*mut Function, Module, *const c_char);
        launch_kernel = "cuLaunchKernel", "4.0", (
            Function, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Stream, *mut *mut c_void,
            *mut *mut c_void
        );
    }
    optional {
        device_get_uuid_v2 = "cuDeviceGetUuid_v2", (*mut Uuid, Device);
        ctx_get_id = "cuCtxGetId", (Context, *mut c_ulonglong);
        get_error_name = "cuGetErrorName", (i32, *mut *const c_char);
        get_error_string = "cuGetErrorString", (i32, *mut *const c_char);
        pointer_get_attributes = "cuPointerGetAttributes", (
            c_uint, *const PointerAttribute, *const *mut c_void, DevicePointer
        );
    }
    groups {
        /// The functions of stream capture; `None` if the driver lacks one of them.
        capture: CaptureApi {
            is_capturing = "cuStreamIsCapturing", (Stream, *mut c_uint);
            exchange_mode = "cuThreadExchangeStreamCaptureMode", (*mut c_uint);
        }
        /// The functions that register host memory of other owners for devices.
        host_pages: HostPagesApi {
            register = "cuMemHostRegister_v2", (*mut c_void, usize, c_uint);
            unregister = "cuMemHostUnregister", (*mut c_void);
            device_pointer = "cuMemHostGetDevicePointer_v2", (*mut DevicePointer, *mut c_void, c_uint);
        }
        /// Stream memory operations since CUDA 11.7, available on every device that supports them.
        value_operations: ValueApi {
            write = "cuStreamWriteValue64_v2", (Stream, DevicePointer, u64, c_uint);
            wait = "cuStreamWaitValue64_v2", (Stream, DevicePointer, u64, c_uint);
        }
        /// Stream memory operations before CUDA 11.7, which a parameter of the kernel driver must permit.
        former_value_operations: FormerValueApi {
            write = "cuStreamWriteValue64", (Stream, DevicePointer, u64, c_uint);
            wait = "cuStreamWaitValue64", (Stream, DevicePointer, u64, c_uint);
        }
        /// The functions of virtual memory; `None` if the driver lacks one of them.
        virtual_memory: VirtualMemoryApi {
            create = "cuMemCreate", (*mut BlockHandle, usize, *const AllocationProperties, c_ulonglong);
            release = "cuMemRelease", (BlockHandle);
            retain = "cuMemRetainAllocationHandle", (*mut BlockHandle, DevicePointer);
            properties = "cuMemGetAllocationPropertiesFromHandle", (*mut AllocationProperties, BlockHandle);
            granularity = "cuMemGetAllocationGranularity", (*mut usize, *const AllocationProperties, c_uint);
            export = "cuMemExportToShareableHandle", (*mut c_void, BlockHandle, c_uint, c_ulonglong);
            import = "cuMemImportFromShareableHandle", (*mut BlockHandle, *mut c_void, c_uint);
            reserve = "cuMemAddressReserve", (*mut DevicePointer, usize, usize, DevicePointer, c_ulonglong);
            unreserve = "cuMemAddressFree", (DevicePointer, usize);
            map = "cuMemMap", (DevicePointer, usize, usize, BlockHandle, c_ulonglong);
            unmap = "cuMemUnmap", (DevicePointer, usize);
            set_access = "cuMemSetAccess", (DevicePointer, usize, *const AccessDescription, usize);
        }
        /// The functions of memory pools; `None` if the driver lacks one of them.
        pools: PoolApi {
            create = "cuMemPoolCreate", (*mut Pool, *const PoolProperties);
            destroy = "cuMemPoolDestroy", (Pool);
            trim_to = "cuMemPoolTrimTo", (Pool, usize);
            get_attribute = "cuMemPoolGetAttribute", (Pool, c_uint, *mut c_void);
            set_attribute = "cuMemPoolSetAttribute", (Pool, c_uint, *mut c_void);
            get_access = "cuMemPoolGetAccess", (*mut c_uint, Pool, *mut Location);
            set_access = "cuMemPoolSetAccess", (Pool, *const AccessDescription, usize);
            export = "cuMemPoolExportToShareableHandle", (*mut c_void, Pool, c_uint, c_ulonglong);
            import = "cuMemPoolImportFromShareableHandle", (*mut Pool, *mut c_void, c_uint, c_ulonglong);
            export_pointer = "cuMemPoolExportPointer", (*mut PoolPointer, DevicePointer);
            import_pointer = "cuMemPoolImportPointer", (*mut DevicePointer, Pool, *mut PoolPointer);
            allocate = "cuMemAllocFromPoolAsync", (*mut DevicePointer, usize, Pool, Stream);
            current = "cuDeviceGetMemPool", (*mut Pool, Device);
            set_current = "cuDeviceSetMemPool", (Device, Pool);
        }
    }
}
