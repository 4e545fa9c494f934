//! The devices and the driver ("Initialization", "Version Management", "Device Management", "Error Handling" and
//! "Driver Entry Point Access" in `cuda.h`).

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};

use crate::config::Config;
use crate::context::device;
use crate::entry::{driver, plain_name};
use crate::ffi::{HostBytes, Out, Text, Uuid};
use crate::simulator::{initialise, simulator, simulator_if_any};
use crate::status::{Result, Status};

/// Returns the value of a `CUdevice_attribute`. Values about sharing are those of an H200.
fn attribute(number: c_int, device: usize) -> Result<c_int> {
    Ok(match number {
        // MAX_THREADS_PER_BLOCK, MAX_BLOCK_DIM_X, _Y, _Z, MAX_GRID_DIM_X, _Y, _Z
        1..=3 => 1024,
        4 => 64,
        5 => i32::MAX,
        6 | 7 => 65_535,
        // MAX_SHARED_MEMORY_PER_BLOCK, WARP_SIZE
        8 => 49_152,
        10 => 32,
        // MULTIPROCESSOR_COUNT, INTEGRATED
        16 => 132,
        18 => 0,
        // CAN_MAP_HOST_MEMORY, COMPUTE_MODE
        19 => 1,
        20 => 0,
        // PCI_BUS_ID, PCI_DEVICE_ID
        33 => device as c_int + 1,
        34 => 0,
        // UNIFIED_ADDRESSING, COMPUTE_CAPABILITY_MAJOR, _MINOR, MANAGED_MEMORY
        41 => 1,
        75 => 9,
        76 => 0,
        83 => 1,
        // CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, HOST_REGISTER_SUPPORTED, CAN_USE_64_BIT_STREAM_MEM_OPS,
        // CAN_USE_STREAM_WAIT_VALUE_NOR
        91 | 99 | 122 | 123 => 1,
        // CAN_USE_STREAM_MEM_OPS_V1 and CAN_FLUSH_REMOTE_WRITES
        92..=94 | 98 => 0,
        // VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        102 | 103 => 1,
        // MEMORY_POOLS_SUPPORTED, MEMPOOL_SUPPORTED_HANDLE_TYPES (file descriptor, fabric), IPC_EVENT_SUPPORTED
        115 => 1,
        119 => 9,
        125 => 1,
        // HANDLE_TYPE_FABRIC_SUPPORTED: also where the use is rejected, as seen on two H200.
        128 => 1,
        // MPS_ENABLED
        133 if simulator()?.config.version >= 12_010 => simulator()?.config.mps.into(),
        _ => return Err(Status::INVALID_VALUE),
    })
}

/// Returns the function of this name in this library, which may be a copy with hidden names.
fn own_symbol(name: &str) -> Option<usize> {
    let name = CString::new(name).ok()?;
    // SAFETY: the address is of this library, and the strings outlive the calls. The opened handle is one more
    // reference to a library that is never unloaded.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        if libc::dladdr(own_symbol as *const c_void, &raw mut info) == 0 {
            return None;
        }
        let own = libc::dlopen(info.dli_fname, libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        if own.is_null() {
            return None;
        }
        let found = libc::dlsym(own, name.as_ptr());
        (!found.is_null()).then_some(found as usize)
    }
}

/// Returns the newest version of a function that this library has and a program of that CUDA version knows.
fn newest(name: &str, version: c_int) -> Option<usize> {
    // Each with the version that introduced it, if newer than the oldest simulated driver.
    let since = |candidate: &str| if candidate == "cuCtxCreate_v4" { 12_050 } else { 0 };
    let candidates = ["_v4", "_v3", "_v2", ""].map(|suffix| format!("{name}{suffix}"));
    candidates
        .iter()
        .filter(|candidate| since(candidate) <= version)
        .find_map(|candidate| own_symbol(candidate))
}

driver! {
    /// Initializes the driver.
    fn cuInit(flags: c_uint) {
        if flags != 0 {
            return Err(Status::INVALID_VALUE);
        }
        initialise()
    }

    /// Returns the CUDA version, 1000 times the major plus 10 times the minor version. Works before `cuInit`.
    fn cuDriverGetVersion(out: Out<c_int>) {
        let version = match simulator_if_any() {
            Some(simulator) => simulator.config.version,
            None => Config::from_environment().map_err(|_| Status::UNKNOWN)?.version,
        };
        out.put(version)
    }

    /// Returns the number of visible devices.
    fn cuDeviceGetCount(out: Out<c_int>) {
        out.put(simulator()?.devices as c_int)
    }

    /// Returns the device with an ordinal.
    fn cuDeviceGet(out: Out<c_int>, position: c_int) {
        out.put(device(position)? as c_int)
    }

    /// Returns the name of a device.
    fn cuDeviceGetName(out: *mut c_char, room: c_int, number: c_int) {
        let name = simulator()?.machine.devices()[device(number)?].name.clone();
        let room = usize::try_from(room).ok().filter(|room| *room > 0).ok_or(Status::INVALID_VALUE)?;
        let mut bytes = name.into_bytes();
        bytes.truncate(room - 1);
        bytes.push(0);
        HostBytes::new(out as u64, bytes.len())?.fill_from(&bytes);
        Ok(())
    }

    /// Returns an attribute of a device.
    fn cuDeviceGetAttribute(out: Out<c_int>, number: c_int, of: c_int) {
        out.put(attribute(number, device(of)?)?)
    }

    /// Returns the UUID of a device.
    fn cuDeviceGetUuid(out: Out<Uuid>, number: c_int) {
        out.put(simulator()?.machine.devices()[device(number)?].uuid)
    }

    /// Returns the UUID of a device. MIG instances are not supported.
    fn cuDeviceGetUuid_v2(out: Out<Uuid>, number: c_int) {
        out.put(simulator()?.machine.devices()[device(number)?].uuid)
    }

    /// Returns the memory size of a device.
    fn cuDeviceTotalMem_v2(out: Out<usize>, number: c_int) {
        out.put(simulator()?.machine.devices()[device(number)?].memory_bytes as usize)
    }

    /// Returns whether a device has access to the memory of another.
    fn cuDeviceCanAccessPeer(out: Out<c_int>, from: c_int, to: c_int) {
        let (from, to) = (device(from)?, device(to)?);
        let reaches = from != to && simulator()?.machine.peer_access(from, to)?;
        out.put(c_int::from(reaches))
    }

    /// Returns the name of a status.
    fn cuGetErrorName(status: c_int, out: Out<*const c_char>) {
        describe(out, Status(status).name())
    }

    /// Returns the description of a status.
    fn cuGetErrorString(status: c_int, out: Out<*const c_char>) {
        describe(out, Status(status).text())
    }

    /// Returns a function of the driver by its name without a suffix.
    fn cuGetProcAddress_v2(name: Text, out: Out<usize>, version: c_int, _flags: u64, result: Out<c_int>) {
        const FOUND: c_int = 0;
        const SYMBOL_NOT_FOUND: c_int = 1;
        const VERSION_NOT_SUFFICIENT: c_int = 2;
        let name = plain_name(name.get()?);
        match (newest(name, version), newest(name, c_int::MAX)) {
            (Some(found), _) => {
                result.put_if_not_null(FOUND);
                out.put(found)
            }
            (None, later) => {
                result.put_if_not_null(if later.is_some() { VERSION_NOT_SUFFICIENT } else { SYMBOL_NOT_FOUND });
                out.put(0)?;
                if result.is_null() { Err(Status::NOT_FOUND) } else { Ok(()) }
            }
        }
    }
}

fn describe(out: Out<*const c_char>, text: Option<&'static str>) -> Result {
    let text = text.and_then(|text| CStr::from_bytes_with_nul(text.as_bytes()).ok());
    out.put(text.map_or(std::ptr::null(), CStr::as_ptr))?;
    text.map(drop).ok_or(Status::INVALID_VALUE)
}
