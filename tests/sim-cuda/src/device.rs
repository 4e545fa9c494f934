//! The devices, and the driver itself ("Initialization", "Version Management", "Device Management", "Error Handling" and
//! "Driver Entry Point Access" in `cuda.h`).

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};

use crate::config::Config;
use crate::context::device;
use crate::entry::{driver, plain_name};
use crate::ffi::{HostBytes, Out, Text, Uuid};
use crate::simulator::{initialise, simulator, simulator_if_any};
use crate::status::{Result, Status};

/// `CUdevice_attribute`: those that are known, with their values on an H200 where these are about sharing.
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
        // The first version of stream memory operations, and CAN_FLUSH_REMOTE_WRITES
        92..=94 | 98 => 0,
        // VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        102 | 103 => 1,
        // MEMORY_POOLS_SUPPORTED, MEMPOOL_SUPPORTED_HANDLE_TYPES (file descriptor, fabric), IPC_EVENT_SUPPORTED
        115 => 1,
        119 => 9,
        125 => 1,
        // HANDLE_TYPE_FABRIC_SUPPORTED: also where using one is refused, as seen on two H200.
        128 => 1,
        _ => return Err(Status::INVALID_VALUE),
    })
}

/// The function of this name in this very library, which may have been copied with some of its names hidden.
fn own_symbol(name: &str) -> Option<usize> {
    let name = CString::new(name).ok()?;
    // SAFETY: the address is of this library, and the calls take texts that outlive them. The handle that is opened is one
    // more reference to a library that is never unloaded.
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

/// The newest version of a function that this library has and a program of that CUDA version knows.
fn newest(name: &str, version: c_int) -> Option<usize> {
    // Each with the version that brought it, where that is newer than the oldest driver that is played.
    let since = |candidate: &str| if candidate == "cuCtxCreate_v4" { 12_050 } else { 0 };
    let candidates = ["_v4", "_v3", "_v2", ""].map(|suffix| format!("{name}{suffix}"));
    candidates
        .iter()
        .filter(|candidate| since(candidate) <= version)
        .find_map(|candidate| own_symbol(candidate))
}

driver! {
    /// Starts the driver.
    fn cuInit(flags: c_uint) {
        if flags != 0 {
            return Err(Status::INVALID_VALUE);
        }
        initialise()
    }

    /// The CUDA version: 1000 times the major one, and 10 times the minor. Also before `cuInit`.
    fn cuDriverGetVersion(out: Out<c_int>) {
        let version = match simulator_if_any() {
            Some(simulator) => simulator.config.version,
            None => Config::from_environment().map_err(|_| Status::UNKNOWN)?.version,
        };
        out.put(version)
    }

    /// How many devices this process sees.
    fn cuDeviceGetCount(out: Out<c_int>) {
        out.put(simulator()?.devices as c_int)
    }

    /// The device at a position.
    fn cuDeviceGet(out: Out<c_int>, position: c_int) {
        out.put(device(position)? as c_int)
    }

    /// Its name.
    fn cuDeviceGetName(out: *mut c_char, room: c_int, number: c_int) {
        let name = simulator()?.machine.devices()[device(number)?].name.clone();
        let room = usize::try_from(room).ok().filter(|room| *room > 0).ok_or(Status::INVALID_VALUE)?;
        let mut bytes = name.into_bytes();
        bytes.truncate(room - 1);
        bytes.push(0);
        HostBytes::new(out as u64, bytes.len())?.fill_from(&bytes);
        Ok(())
    }

    /// What it can do.
    fn cuDeviceGetAttribute(out: Out<c_int>, number: c_int, of: c_int) {
        out.put(attribute(number, device(of)?)?)
    }

    /// Its UUID.
    fn cuDeviceGetUuid(out: Out<Uuid>, number: c_int) {
        out.put(simulator()?.machine.devices()[device(number)?].uuid)
    }

    /// Its UUID: also that of an instance, of which there are none here.
    fn cuDeviceGetUuid_v2(out: Out<Uuid>, number: c_int) {
        out.put(simulator()?.machine.devices()[device(number)?].uuid)
    }

    /// The size of its memory.
    fn cuDeviceTotalMem_v2(out: Out<usize>, number: c_int) {
        out.put(simulator()?.machine.devices()[device(number)?].memory_bytes as usize)
    }

    /// Whether it reaches the memory of another one.
    fn cuDeviceCanAccessPeer(out: Out<c_int>, from: c_int, to: c_int) {
        let (from, to) = (device(from)?, device(to)?);
        let reaches = from != to && simulator()?.machine.peer_access(from, to)?;
        out.put(c_int::from(reaches))
    }

    /// The name of a status.
    fn cuGetErrorName(status: c_int, out: Out<*const c_char>) {
        describe(out, Status(status).name())
    }

    /// What a status says to people.
    fn cuGetErrorString(status: c_int, out: Out<*const c_char>) {
        describe(out, Status(status).text())
    }

    /// A function of the driver, by its name without a suffix.
    fn cuGetProcAddress_v2(name: Text, out: Out<usize>, version: c_int, _flags: u64, result: Out<c_int>) {
        const FOUND: c_int = 0;
        const SYMBOL_NOT_FOUND: c_int = 1;
        const VERSION_NOT_SUFFICIENT: c_int = 2;
        let name = plain_name(name.get()?);
        match (newest(name, version), newest(name, c_int::MAX)) {
            (Some(found), _) => {
                result.put_if_wanted(FOUND);
                out.put(found)
            }
            (None, later) => {
                result.put_if_wanted(if later.is_some() { VERSION_NOT_SUFFICIENT } else { SYMBOL_NOT_FOUND });
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
