//! Direct calls of the library, like those of another owner in the process.

use std::ffi::{CString, c_int, c_void};

use libloading::{Library, Symbol};

/// The library of this process, loaded again: the dynamic linker returns the same one.
pub(crate) struct Raw(Library);

impl Raw {
    pub(crate) fn open() -> Self {
        let path = std::env::var_os(device_ipc_ascend::LIBRARY_VARIABLE).expect("a scene names the library");
        // SAFETY: the simulator's library, whose initialisers are harmless.
        Self(unsafe { Library::new(path) }.expect("the backend has loaded it too"))
    }

    /// Calls a function without arguments.
    pub(crate) fn call(&self, name: &str) -> i32 {
        type Function = unsafe extern "C" fn() -> c_int;
        // SAFETY: callers name functions without arguments.
        unsafe { self.symbol::<Function>(name)() }
    }

    /// Calls `aclInit` with a configuration file.
    pub(crate) fn init(&self, file: &std::path::Path) -> i32 {
        type Function = unsafe extern "C" fn(*const std::ffi::c_char) -> c_int;
        let path = CString::new(file.as_os_str().as_encoded_bytes()).expect("a path");
        // SAFETY: a text that ends with a NUL.
        unsafe { self.symbol::<Function>("aclInit")(path.as_ptr()) }
    }

    /// Sets a device on the calling thread, like another owner of the runtime.
    pub(crate) fn own_device(&self, device: i32) {
        assert_eq!(self.call_with_null("aclInit"), 0, "aclInit");
        assert_eq!(self.call_with("aclrtSetDevice", device), 0, "aclrtSetDevice");
    }

    /// Calls a function that takes an int.
    pub(crate) fn call_with(&self, name: &str, argument: i32) -> i32 {
        type Function = unsafe extern "C" fn(c_int) -> c_int;
        // SAFETY: callers name functions that take an int.
        unsafe { self.symbol::<Function>(name)(argument) }
    }

    /// Calls a function that takes a null pointer.
    pub(crate) fn call_with_null(&self, name: &str) -> i32 {
        type Function = unsafe extern "C" fn(*const c_void) -> c_int;
        // SAFETY: callers name functions that allow a null pointer.
        unsafe { self.symbol::<Function>(name)(std::ptr::null()) }
    }

    /// Calls a function that writes an int. Returns its status, and the int.
    pub(crate) fn get_int(&self, name: &str) -> (i32, i32) {
        type Function = unsafe extern "C" fn(*mut c_int) -> c_int;
        let mut value = -1;
        // SAFETY: callers name functions that write an int.
        let status = unsafe { self.symbol::<Function>(name)(&raw mut value) };
        (status, value)
    }

    /// Returns the calling thread's context.
    pub(crate) fn context(&self) -> usize {
        type Function = unsafe extern "C" fn(*mut usize) -> c_int;
        let mut context = 0;
        // SAFETY: writes a pointer.
        let status = unsafe { self.symbol::<Function>("aclrtGetCurrentContext")(&raw mut context) };
        if status == 0 { context } else { 0 }
    }

    /// Creates a further context on a device.
    pub(crate) fn create_context(&self, device: i32) -> usize {
        type Function = unsafe extern "C" fn(*mut usize, c_int) -> c_int;
        let mut context = 0;
        // SAFETY: writes a pointer.
        let status = unsafe { self.symbol::<Function>("aclrtCreateContext")(&raw mut context, device) };
        assert_eq!(status, 0, "aclrtCreateContext");
        context
    }

    /// Creates a stream in the thread's context.
    pub(crate) fn create_stream(&self) -> u64 {
        type Function = unsafe extern "C" fn(*mut u64) -> c_int;
        let mut stream = 0;
        // SAFETY: writes a pointer.
        let status = unsafe { self.symbol::<Function>("aclrtCreateStream")(&raw mut stream) };
        assert_eq!(status, 0, "aclrtCreateStream");
        stream
    }

    /// Allocates memory of `aclrtMalloc` on the thread's device.
    pub(crate) fn malloc(&self, bytes: usize, policy: u32) -> u64 {
        type Function = unsafe extern "C" fn(*mut u64, usize, u32) -> c_int;
        let mut address = 0;
        // SAFETY: writes a pointer.
        let status = unsafe { self.symbol::<Function>("aclrtMalloc")(&raw mut address, bytes, policy) };
        assert_eq!(status, 0, "aclrtMalloc");
        address
    }

    /// Reserves addresses without memory.
    pub(crate) fn reserve(&self, bytes: usize) -> u64 {
        type Function = unsafe extern "C" fn(*mut u64, usize, usize, *mut c_void, u64) -> c_int;
        let mut address = 0;
        let reserve: Symbol<'_, Function> = self.symbol("aclrtReserveMemAddress");
        // SAFETY: writes a pointer.
        assert_eq!(unsafe { reserve(&raw mut address, bytes, 0, std::ptr::null_mut(), 0) }, 0, "reserve");
        address
    }

    /// Maps new physical memory of a device at an address.
    pub(crate) fn map_new(&self, address: u64, bytes: usize, device: u32) {
        type Allocate = unsafe extern "C" fn(*mut usize, usize, *const [u32; 8], u64) -> c_int;
        type Map = unsafe extern "C" fn(u64, usize, usize, usize, u64) -> c_int;
        // No type of handle, pinned, huge pages of high-bandwidth memory, the device, reserved.
        let properties = [0, 0, 4, device, 1, 0, 0, 0];
        let mut handle = 0;
        let allocate: Symbol<'_, Allocate> = self.symbol("aclrtMallocPhysical");
        // SAFETY: writes a pointer; the properties have the layout of `aclrtPhysicalMemProp`.
        let status = unsafe { allocate(&raw mut handle, bytes, &raw const properties, 0) };
        assert_eq!(status, 0, "aclrtMallocPhysical");
        // SAFETY: the address was reserved.
        let status = unsafe { self.symbol::<Map>("aclrtMapMem")(address, bytes, 0, handle, 0) };
        assert_eq!(status, 0, "aclrtMapMem");
    }

    /// Returns the number of calls of a function in this process.
    pub(crate) fn calls(&self, name: &str) -> u64 {
        type Function = unsafe extern "C" fn(*const std::ffi::c_char, *mut u64) -> c_int;
        let name = CString::new(name).expect("a name");
        let mut count = 0;
        // SAFETY: a text that ends with a NUL, and a number to write.
        let status = unsafe { self.symbol::<Function>("deviceIpcSimCalls")(name.as_ptr(), &raw mut count) };
        assert_eq!(status, 0, "deviceIpcSimCalls");
        count
    }

    /// Makes the next call of a function return this status.
    pub(crate) fn fail_next(&self, name: &str, status: i32) {
        type Function = unsafe extern "C" fn(*const std::ffi::c_char, u64, i32) -> c_int;
        let name = CString::new(name).expect("a name");
        // SAFETY: a text that ends with a NUL.
        let armed = unsafe { self.symbol::<Function>("deviceIpcSimInject")(name.as_ptr(), 1, status) };
        assert_eq!(armed, 0, "deviceIpcSimInject");
    }

    fn symbol<F>(&self, name: &str) -> Symbol<'_, F> {
        // SAFETY: the types above are those of the functions.
        unsafe { self.0.get(name.as_bytes()) }.expect("the library has it")
    }
}
