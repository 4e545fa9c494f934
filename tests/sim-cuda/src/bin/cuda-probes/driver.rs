//! The driver as a C program uses it: functions by name, statuses as text.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::Path;

use libloading::Library;

/// The result of a call, with the text of a status other than success.
pub(crate) type R<T = ()> = Result<T, String>;

/// `CUipcMemHandle` and `CUipcEventHandle`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Handle(pub(crate) [u8; 64]);

/// `CUmemLocation`: a device.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Location(pub(crate) c_int, pub(crate) c_int);

/// `CUmemAllocationProp`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct AllocationProp {
    pub(crate) kind: c_int,
    pub(crate) handle_types: c_int,
    pub(crate) location: Location,
    pub(crate) win32: usize,
    pub(crate) flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct AccessDesc(pub(crate) Location, pub(crate) c_int);

/// `CUmemPoolProps`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct PoolProps {
    pub(crate) kind: c_int,
    pub(crate) handle_types: c_int,
    pub(crate) location: Location,
    pub(crate) win32: usize,
    pub(crate) max_size: usize,
    pub(crate) usage: u16,
    pub(crate) reserved: [u8; 54],
}

/// The library.
pub(crate) struct Driver(Library);

macro_rules! functions {
    ($(fn $name:ident = $symbol:ident($($arg:ident: $type:ty),*);)*) => {
        impl Driver {
            $(
                /// Calls the function of this name.
                #[allow(clippy::too_many_arguments, reason = "the driver's")]
                pub(crate) fn $name(&self, $($arg: $type),*) -> R {
                    type Function = unsafe extern "C" fn($($type),*) -> c_int;
                    // SAFETY: the type is that of the function in cuda.h.
                    let found = unsafe { self.0.get::<Function>(stringify!($symbol)) };
                    let Ok(function) = found else { return Err(concat!("no ", stringify!($symbol)).to_owned()) };
                    // SAFETY: each probe passes pointers to live values of the declared types, or deliberately
                    // invalid ones that the driver must reject without dereferencing them.
                    let status = unsafe { function($($arg),*) };
                    self.check(status)
                }
            )*
        }
    };
}

functions! {
    fn init = cuInit(flags: c_uint);
    fn device_get = cuDeviceGet(out: *mut c_int, position: c_int);
    fn device_get_count = cuDeviceGetCount(out: *mut c_int);
    fn primary_ctx_retain = cuDevicePrimaryCtxRetain(out: *mut u64, device: c_int);
    fn primary_ctx_release = cuDevicePrimaryCtxRelease_v2(device: c_int);
    fn ctx_get_id = cuCtxGetId(context: u64, out: *mut u64);
    fn primary_ctx_reset = cuDevicePrimaryCtxReset_v2(device: c_int);
    fn primary_ctx_get_state = cuDevicePrimaryCtxGetState(device: c_int, flags: *mut c_uint, active: *mut c_int);
    fn ctx_create = cuCtxCreate_v2(out: *mut u64, flags: c_uint, device: c_int);
    fn ctx_destroy = cuCtxDestroy_v2(context: u64);
    fn ctx_push = cuCtxPushCurrent_v2(context: u64);
    fn ctx_pop = cuCtxPopCurrent_v2(out: *mut u64);
    fn ctx_get_current = cuCtxGetCurrent(out: *mut u64);
    fn ctx_synchronize = cuCtxSynchronize();
    fn ctx_enable_peer_access = cuCtxEnablePeerAccess(context: u64, flags: c_uint);
    fn get_error_name_of = cuGetErrorName(status: c_int, out: *mut *const c_char);
    fn get_proc_address = cuGetProcAddress_v2(name: *const c_char, out: *mut usize, version: c_int, flags: u64, found: *mut c_int);
    fn mem_alloc = cuMemAlloc_v2(out: *mut u64, size: usize);
    fn mem_free = cuMemFree_v2(address: u64);
    fn mem_get_address_range = cuMemGetAddressRange_v2(base: *mut u64, size: *mut usize, address: u64);
    fn mem_host_alloc = cuMemHostAlloc(out: *mut u64, size: usize, flags: c_uint);
    fn mem_free_host = cuMemFreeHost(address: u64);
    fn mem_host_register = cuMemHostRegister_v2(address: u64, size: usize, flags: c_uint);
    fn mem_host_unregister = cuMemHostUnregister(address: u64);
    fn mem_host_get_device_pointer = cuMemHostGetDevicePointer_v2(out: *mut u64, address: u64, flags: c_uint);
    fn memcpy_htod = cuMemcpyHtoD_v2(to: u64, from: *const c_void, len: usize);
    fn memcpy_dtoh = cuMemcpyDtoH_v2(to: *mut c_void, from: u64, len: usize);
    fn memcpy_dtod = cuMemcpyDtoD_v2(to: u64, from: u64, len: usize);
    fn memset_d8 = cuMemsetD8_v2(address: u64, value: u8, count: usize);
    fn memset_d32 = cuMemsetD32_v2(address: u64, value: c_uint, count: usize);
    fn memset_d8_async = cuMemsetD8Async(address: u64, value: u8, count: usize, stream: u64);
    fn pointer_get_attribute = cuPointerGetAttribute(out: *mut c_void, attribute: c_int, address: u64);
    fn pointer_get_attributes = cuPointerGetAttributes(count: c_uint, attributes: *const c_int, outs: *const *mut c_void, address: u64);
    fn ipc_get_mem_handle = cuIpcGetMemHandle(out: *mut Handle, address: u64);
    fn ipc_open_mem_handle = cuIpcOpenMemHandle_v2(out: *mut u64, handle: Handle, flags: c_uint);
    fn ipc_close_mem_handle = cuIpcCloseMemHandle(address: u64);
    fn ipc_get_event_handle = cuIpcGetEventHandle(out: *mut Handle, event: u64);
    fn ipc_open_event_handle = cuIpcOpenEventHandle(out: *mut u64, handle: Handle);
    fn event_create = cuEventCreate(out: *mut u64, flags: c_uint);
    fn event_destroy = cuEventDestroy_v2(event: u64);
    fn event_record = cuEventRecord(event: u64, stream: u64);
    fn event_query = cuEventQuery(event: u64);
    fn stream_create = cuStreamCreate(out: *mut u64, flags: c_uint);
    fn stream_destroy = cuStreamDestroy_v2(stream: u64);
    fn stream_synchronize = cuStreamSynchronize(stream: u64);
    fn stream_query = cuStreamQuery(stream: u64);
    fn stream_wait_event = cuStreamWaitEvent(stream: u64, event: u64, flags: c_uint);
    fn stream_get_ctx = cuStreamGetCtx(stream: u64, out: *mut u64);
    fn stream_write_value = cuStreamWriteValue64_v2(stream: u64, address: u64, value: u64, flags: c_uint);
    fn stream_wait_value = cuStreamWaitValue64_v2(stream: u64, address: u64, value: u64, flags: c_uint);
    fn stream_begin_capture = cuStreamBeginCapture_v2(stream: u64, mode: c_int);
    fn stream_end_capture = cuStreamEndCapture(stream: u64, graph: *mut u64);
    fn stream_is_capturing = cuStreamIsCapturing(stream: u64, out: *mut c_int);
    fn thread_exchange_capture_mode = cuThreadExchangeStreamCaptureMode(mode: *mut c_int);
    fn module_load_data = cuModuleLoadData(out: *mut u64, image: *const c_char);
    fn module_get_function = cuModuleGetFunction(out: *mut u64, module: u64, name: *const c_char);
    fn launch_kernel = cuLaunchKernel(function: u64, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint, shared: c_uint, stream: u64, parameters: *const *mut c_void, extra: *const c_void);
    fn granularity = cuMemGetAllocationGranularity(out: *mut usize, prop: *const AllocationProp, option: c_int);
    fn mem_create = cuMemCreate(out: *mut u64, size: usize, prop: *const AllocationProp, flags: u64);
    fn mem_release = cuMemRelease(handle: u64);
    fn mem_reserve = cuMemAddressReserve(out: *mut u64, size: usize, alignment: usize, wanted: u64, flags: u64);
    fn mem_address_free = cuMemAddressFree(address: u64, size: usize);
    fn mem_map = cuMemMap(address: u64, size: usize, offset: usize, handle: u64, flags: u64);
    fn mem_unmap = cuMemUnmap(address: u64, size: usize);
    fn mem_set_access = cuMemSetAccess(address: u64, size: usize, what: *const AccessDesc, count: usize);
    fn mem_get_access = cuMemGetAccess(flags: *mut u64, location: *const Location, address: u64);
    fn mem_export = cuMemExportToShareableHandle(out: *mut c_void, handle: u64, kind: c_int, flags: u64);
    fn mem_import = cuMemImportFromShareableHandle(out: *mut u64, os_handle: *mut c_void, kind: c_int);
    fn mem_retain = cuMemRetainAllocationHandle(out: *mut u64, address: *mut c_void);
    fn mem_properties = cuMemGetAllocationPropertiesFromHandle(out: *mut AllocationProp, handle: u64);
    fn default_pool = cuDeviceGetDefaultMemPool(out: *mut u64, device: c_int);
    fn set_pool = cuDeviceSetMemPool(device: c_int, pool: u64);
    fn pool_create = cuMemPoolCreate(out: *mut u64, props: *const PoolProps);
    fn pool_destroy = cuMemPoolDestroy(pool: u64);
    fn pool_set_access = cuMemPoolSetAccess(pool: u64, what: *const AccessDesc, count: usize);
    fn pool_export = cuMemPoolExportToShareableHandle(out: *mut c_void, pool: u64, kind: c_int, flags: u64);
    fn pool_import = cuMemPoolImportFromShareableHandle(out: *mut u64, os_handle: *mut c_void, kind: c_int, flags: u64);
    fn pool_export_pointer = cuMemPoolExportPointer(out: *mut Handle, address: u64);
    fn pool_import_pointer = cuMemPoolImportPointer(out: *mut u64, pool: u64, data: *mut Handle);
    fn alloc_async = cuMemAllocAsync(out: *mut u64, size: usize, stream: u64);
    fn alloc_from_pool = cuMemAllocFromPoolAsync(out: *mut u64, size: usize, pool: u64, stream: u64);
    fn free_async = cuMemFreeAsync(address: u64, stream: u64);
}

/// Kernels that fill and copy bytes, and one that reads a word.
const PTX: &CStr = c"
.version 6.0
.target sm_50
.address_size 64
.visible .entry fill_u8(.param .u64 at, .param .u32 value)
{
    .reg .u32 %r<4>;
    .reg .u64 %rd<4>;
    ld.param.u64 %rd1, [at];
    ld.param.u32 %r1, [value];
    cvta.to.global.u64 %rd1, %rd1;
    mov.u32 %r2, %tid.x;
    cvt.u64.u32 %rd2, %r2;
    add.u64 %rd3, %rd1, %rd2;
    st.global.u8 [%rd3], %r1;
    ret;
}
.visible .entry copy_u8(.param .u64 to, .param .u64 from)
{
    .reg .u32 %r<4>;
    .reg .u64 %rd<6>;
    ld.param.u64 %rd1, [to];
    ld.param.u64 %rd2, [from];
    cvta.to.global.u64 %rd1, %rd1;
    cvta.to.global.u64 %rd2, %rd2;
    mov.u32 %r1, %tid.x;
    cvt.u64.u32 %rd3, %r1;
    add.u64 %rd4, %rd1, %rd3;
    add.u64 %rd5, %rd2, %rd3;
    ld.global.u8 %r2, [%rd5];
    st.global.u8 [%rd4], %r2;
    ret;
}
";

fn made<T: Default>(call: impl FnOnce(*mut T) -> R) -> R<T> {
    let mut value = T::default();
    call(&raw mut value)?;
    Ok(value)
}

/// Calls that most probes need, without pointers.
impl Driver {
    pub(crate) fn load(path: &Path) -> R<Self> {
        // SAFETY: the caller that names a library is responsible for its initializers.
        unsafe { Library::new(path) }.map(Self).map_err(|error| error.to_string())
    }

    fn check(&self, status: c_int) -> R {
        if status == 0 { Ok(()) } else { Err(self.name(status)) }
    }

    fn name(&self, status: c_int) -> String {
        type Function = unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int;
        let mut text = std::ptr::null();
        // SAFETY: the type is that of cuda.h; the call writes a pointer to a string that lives as long as the
        // library.
        let named = unsafe {
            self.0.get::<Function>("cuGetErrorName").is_ok_and(|name| name(status, &raw mut text) == 0)
        };
        if !named || text.is_null() {
            return format!("status {status}");
        }
        // SAFETY: as above.
        let name = unsafe { CStr::from_ptr(text) }.to_string_lossy();
        format!("{} ({status})", name.trim_start_matches("CUDA_ERROR_"))
    }

    /// Initializes the driver, and makes the primary context of a device current.
    pub(crate) fn start(&self, device: c_int) -> R<u64> {
        self.init(0)?;
        let context = made(|out| self.primary_ctx_retain(out, device))?;
        self.ctx_push(context)?;
        Ok(context)
    }

    pub(crate) fn devices(&self) -> R<c_int> {
        self.init(0)?;
        made(|out| self.device_get_count(out))
    }

    pub(crate) fn alloc(&self, size: usize) -> R<u64> {
        made(|out| self.mem_alloc(out, size))
    }

    pub(crate) fn alloc_host(&self, size: usize) -> R<u64> {
        made(|out| self.mem_host_alloc(out, size, 0))
    }

    pub(crate) fn stream(&self) -> R<u64> {
        made(|out| self.stream_create(out, 1))
    }

    pub(crate) fn event(&self, flags: c_uint) -> R<u64> {
        made(|out| self.event_create(out, flags))
    }

    pub(crate) fn handle(&self, address: u64) -> R<Handle> {
        let mut handle = Handle([0; 64]);
        self.ipc_get_mem_handle(&raw mut handle, address)?;
        Ok(handle)
    }

    pub(crate) fn event_handle(&self, event: u64) -> R<Handle> {
        let mut handle = Handle([0; 64]);
        self.ipc_get_event_handle(&raw mut handle, event)?;
        Ok(handle)
    }

    pub(crate) fn open(&self, handle: Handle) -> R<u64> {
        made(|out| self.ipc_open_mem_handle(out, handle, 1))
    }

    pub(crate) fn open_event(&self, handle: Handle) -> R<u64> {
        made(|out| self.ipc_open_event_handle(out, handle))
    }

    pub(crate) fn fill(&self, address: u64, byte: u8, len: usize) -> R {
        self.memset_d8(address, byte, len)?;
        self.ctx_synchronize()
    }

    /// Reads the byte at an address.
    pub(crate) fn byte(&self, address: u64) -> R<u8> {
        made(|out: *mut u8| self.memcpy_dtoh(out.cast(), address, 1))
    }

    /// Returns an attribute as a number.
    pub(crate) fn attribute(&self, number: c_int, address: u64) -> R<u64> {
        made(|out: *mut u64| self.pointer_get_attribute(out.cast(), number, address))
    }

    pub(crate) fn range(&self, address: u64) -> R<(u64, usize)> {
        let (mut base, mut size) = (0, 0);
        self.mem_get_address_range(&raw mut base, &raw mut size, address)?;
        Ok((base, size))
    }

    fn kernel(&self, name: &CStr) -> R<u64> {
        let module = made(|out| self.module_load_data(out, PTX.as_ptr()))?;
        made(|out| self.module_get_function(out, module, name.as_ptr()))
    }

    /// Sets bytes by a kernel, one thread each.
    pub(crate) fn kernel_fill(&self, address: u64, byte: u8, count: c_uint) -> R {
        let (mut at, mut value) = (address, c_uint::from(byte));
        let parameters: [*mut c_void; 2] = [(&raw mut at).cast(), (&raw mut value).cast()];
        let kernel = self.kernel(c"fill_u8")?;
        self.launch_kernel(kernel, 1, 1, 1, count, 1, 1, 0, 0, parameters.as_ptr(), std::ptr::null())?;
        self.ctx_synchronize()
    }

    /// Copies bytes by a kernel, one thread each.
    pub(crate) fn kernel_copy(&self, to: u64, from: u64, count: c_uint) -> R {
        let (mut to, mut from) = (to, from);
        let parameters: [*mut c_void; 2] = [(&raw mut to).cast(), (&raw mut from).cast()];
        let kernel = self.kernel(c"copy_u8")?;
        self.launch_kernel(kernel, 1, 1, 1, count, 1, 1, 0, 0, parameters.as_ptr(), std::ptr::null())?;
        self.ctx_synchronize()
    }

    /// Returns the properties of virtual memory on device 0.
    pub(crate) fn prop(handle_types: c_int) -> AllocationProp {
        AllocationProp { kind: 1, handle_types, location: Location(1, 0), win32: 0, flags: [0; 8] }
    }

    pub(crate) fn create(&self, size: usize, handle_types: c_int) -> R<u64> {
        let prop = Self::prop(handle_types);
        made(|out| self.mem_create(out, size, &raw const prop, 0))
    }

    pub(crate) fn reserve(&self, size: usize) -> R<u64> {
        made(|out| self.mem_reserve(out, size, 0, 0, 0))
    }

    pub(crate) fn access(&self, address: u64, size: usize, flags: c_int) -> R {
        let what = AccessDesc(Location(1, 0), flags);
        self.mem_set_access(address, size, &raw const what, 1)
    }

    /// Reserves addresses, and maps a whole block there.
    pub(crate) fn map(&self, block: u64, size: usize, flags: c_int) -> R<u64> {
        let address = self.reserve(size)?;
        self.mem_map(address, size, 0, block, 0)?;
        if flags != 0 {
            self.access(address, size, flags)?;
        }
        Ok(address)
    }

    pub(crate) fn export_fd(&self, block: u64) -> R<c_int> {
        made(|out: *mut c_int| self.mem_export(out.cast(), block, 1, 0))
    }

    pub(crate) fn import_fd(&self, fd: c_int) -> R<u64> {
        made(|out| self.mem_import(out, fd as usize as *mut c_void, 1))
    }

    pub(crate) fn export_fabric(&self, block: u64) -> R<Handle> {
        let mut handle = Handle([0; 64]);
        self.mem_export((&raw mut handle).cast(), block, 8, 0)?;
        Ok(handle)
    }

    pub(crate) fn import_fabric(&self, mut handle: Handle) -> R<u64> {
        made(|out| self.mem_import(out, (&raw mut handle).cast(), 8))
    }

    pub(crate) fn pool(&self, handle_types: c_int) -> R<u64> {
        let props = PoolProps {
            kind: 1,
            handle_types,
            location: Location(1, 0),
            win32: 0,
            max_size: 0,
            usage: 0,
            reserved: [0; 54],
        };
        made(|out| self.pool_create(out, &raw const props))
    }

    pub(crate) fn pool_fd(&self, pool: u64) -> R<c_int> {
        made(|out: *mut c_int| self.pool_export(out.cast(), pool, 1, 0))
    }

    pub(crate) fn import_pool(&self, fd: c_int) -> R<u64> {
        made(|out| self.pool_import(out, fd as usize as *mut c_void, 1, 0))
    }

    pub(crate) fn allocate_from(&self, pool: u64, size: usize) -> R<u64> {
        let address = made(|out| self.alloc_from_pool(out, size, pool, 0))?;
        self.ctx_synchronize()?;
        Ok(address)
    }

    pub(crate) fn pool_pointer(&self, address: u64) -> R<Handle> {
        let mut data = Handle([0; 64]);
        self.pool_export_pointer(&raw mut data, address)?;
        Ok(data)
    }

    pub(crate) fn import_pointer(&self, pool: u64, mut data: Handle) -> R<u64> {
        made(|out| self.pool_import_pointer(out, pool, &raw mut data))
    }
}
