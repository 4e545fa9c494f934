//! Initialization and finalization, versions, and the last error.

use std::ffi::{OsStr, c_char};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::abi::{ErrorInfo, Pointer, Text};
use crate::call::{calls, last_status, take_message, value_of};
use crate::status::{Status, refuse};

/// Size of the buffer for a version in bytes, as the vendor's manual requires.
const VERSION_BYTES: usize = 128;

calls! {
    /// Initializes the library. A repeated call returns 100002 whatever its configuration, and counts nevertheless.
    /// The first configuration is that of the process: another one is rejected later.
    run_always fn aclInit(sim, config: Text) {
        let mut state = sim.state();
        if state.init.count > 0 {
            state.init.count += 1;
            return refuse(Status::REPEAT_INITIALIZE, "aclInit was called before");
        }
        let content = if config.is_null() || config.bytes("configPath")?.is_empty() {
            Vec::new()
        } else {
            let path = Path::new(OsStr::from_bytes(config.bytes("configPath")?));
            match std::fs::read(path) {
                Ok(content) => content,
                Err(error) => return refuse(Status::INVALID_FILE, format!("{}: {error}", path.display())),
            }
        };
        if state.init.configuration.get_or_insert_with(|| content.clone()) != &content {
            return refuse(
                Status::INVALID_PARAM,
                "the content differs from that of the first configuration file of the process",
            );
        }
        state.init.count = 1;
        state.init.finalised = false;
        Ok(())
    }

    /// Finalizes the library, whatever the number of `aclInit` calls.
    run_always fn aclFinalize(sim) {
        let mut state = sim.state();
        if state.init.finalised {
            return refuse(Status::REPEAT_FINALIZE, "aclFinalize was called before");
        }
        state.init.count = 0;
        state.init.finalised = true;
        Ok(())
    }

    /// Releases one `aclInit`; the last release finalizes the library.
    run_always fn aclFinalizeReference(sim, count: Pointer<u64>) {
        let left = {
            let mut state = sim.state();
            if state.init.count == 0 {
                return refuse(Status::REPEAT_FINALIZE, "aclFinalize was called for every aclInit");
            }
            state.init.count -= 1;
            state.init.finalised = state.init.count == 0;
            state.init.count
        };
        if count.is_null() { Ok(()) } else { count.put(left, "refCount") }
    }

    /// Returns the version of the interface.
    run_always fn aclrtGetVersion(sim, major: Pointer<i32>, minor: Pointer<i32>, patch: Pointer<i32>) {
        major.put(1, "majorVersion")?;
        minor.put(sim.config.cann.interface(), "minorVersion")?;
        patch.put(0, "patchVersion")
    }

    /// Returns the version of a package as text, in a buffer of 128 bytes.
    run_always fn aclsysGetVersionStr(sim, package: Text, version: Pointer<u8>) {
        package.bytes("pkgName")?;
        let mut text = [0; VERSION_BYTES];
        let name = sim.config.cann.name().as_bytes();
        text[..name.len()].copy_from_slice(name);
        version.put_list(&text, "versionStr")
    }

    /// Returns the version of a package as a number.
    run_always fn aclsysGetVersionNum(sim, package: Text, version: Pointer<i32>) {
        package.bytes("pkgName")?;
        version.put(sim.config.cann.number(), "versionNum")
    }

    /// Returns details of an error. There are none.
    run fn aclrtGetErrorVerbose(sim, device: i32, info: Pointer<ErrorInfo>) {
        sim.device(device)?;
        info.put(ErrorInfo { try_repair: 0, has_detail: 0, reserved: [0; 2], kind: 0 }, "errorInfo")
    }
}

/// Returns the last error of this thread, and resets it.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtGetLastError(_level: i32) -> i32 {
    value_of("aclrtGetLastError", |_| last_status(true).0).unwrap_or(Status::COMPILING_STUB_MODE.0)
}

/// Returns the last error of this thread.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtPeekAtLastError(_level: i32) -> i32 {
    value_of("aclrtPeekAtLastError", |_| last_status(false).0).unwrap_or(Status::COMPILING_STUB_MODE.0)
}

/// Returns the message of the last error of this thread, once; null if there was none. Valid until the next call.
#[unsafe(no_mangle)]
pub extern "C" fn aclGetRecentErrMsg() -> *const c_char {
    value_of("aclGetRecentErrMsg", |_| take_message()).unwrap_or(std::ptr::null())
}

/// Returns the name of the chip; null in the stub.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtGetSocName() -> *const c_char {
    let name = value_of("aclrtGetSocName", |sim| {
        let there = !sim.machine.devices().is_empty() && !sim.config.no_driver;
        if there { sim.config.soc.vendor_name().as_ptr() } else { std::ptr::null() }
    });
    name.unwrap_or(std::ptr::null())
}
