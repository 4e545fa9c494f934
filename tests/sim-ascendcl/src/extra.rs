//! Extensions: kernels in C, fault injection, and counters.
//!
//! Kernels of the vendor cannot run on the CPU, and where other calls are rejected only kernels can access memory
//! of other processes. A kernel is a host function that accesses device memory word by word, on a stream, with the
//! access of the stream's device.

use std::ffi::c_void;

use device_ipc_mock_engine::{Address, EngineError, KernelMemory, Operation};

use crate::abi::{ExceptionInfo, Handle, Pointer, Text};
use crate::call::{arm, calls, calls_of};
use crate::callback::report_exception;
use crate::simulator::Simulator;
use crate::status::{Status, refuse};

/// `int (*)(struct DeviceIpcSimMemory *, void *)`: returns 0, or traps.
type Kernel = unsafe extern "C" fn(*mut RunningKernel, *mut c_void) -> i32;

/// A running kernel, the argument of `deviceIpcSimLoad` and `deviceIpcSimStore`.
#[derive(Debug)]
pub struct RunningKernel {
    memory: *mut KernelMemory,
    failed: Option<EngineError>,
}

impl RunningKernel {
    fn access(&mut self, address: u64, len: u64, value: Option<u64>) -> Option<u64> {
        let result = self.try_access(address, len, value);
        result.map_err(|error| self.failed.get_or_insert(error).clone()).ok()
    }

    fn try_access(&mut self, address: u64, len: u64, value: Option<u64>) -> Result<u64, EngineError> {
        // SAFETY: set by `run` while the kernel runs, on this thread only.
        let memory = unsafe { &mut *self.memory };
        let device = memory.device();
        let illegal = EngineError::IllegalAddress { address: Address::new(address), device };
        let simulator = Simulator::get().map_err(|_| illegal.clone())?;
        let block = simulator.device_operand(address, len).map_err(|_| illegal.clone())?;
        simulator.require_access(device, &block).map_err(|_| illegal)?;
        match value {
            Some(value) => memory.store(Address::new(address), len, value).map(|()| value),
            None => memory.load(Address::new(address), len),
        }
    }
}

/// A pointer that is passed to the thread of a kernel's stream.
struct Argument(*mut c_void);

// SAFETY: the caller of `deviceIpcSimKernel` guarantees that it may be used on the stream's thread.
unsafe impl Send for Argument {}

impl Argument {
    fn run(&self, kernel: Kernel, memory: &mut KernelMemory, stream: u64) -> Result<(), EngineError> {
        let device = memory.device() as u32;
        let mut running = RunningKernel { memory, failed: None };
        // SAFETY: the caller of `deviceIpcSimKernel` guarantees the function and its argument; `running` lives
        // until it returns.
        let trapped = unsafe { kernel(&raw mut running, self.0) } != 0;
        let status = Status::RT_VECTOR_CORE_EXCEPTION.0;
        let trap = || EngineError::Injected { operation: Operation::Kernel, code: status };
        let result = running.failed.map_or(Ok(()), Err).and(if trapped { Err(trap()) } else { Ok(()) });
        if result.is_err() {
            let status = status.cast_unsigned();
            report_exception(ExceptionInfo { task: 0, stream: stream as u32, thread: 0, device, status });
        }
        result
    }
}

calls! {
    /// Submits a kernel.
    run fn deviceIpcSimKernel(sim, stream: Handle, kernel: Option<Kernel>, argument: *mut c_void) {
        let Some(kernel) = kernel else { return refuse(Status::INVALID_PARAM, "kernel is a null pointer") };
        let target = sim.target(stream)?;
        let (argument, stream) = (Argument(argument), target.stream.get());
        let work = move |memory: &mut KernelMemory| argument.run(kernel, memory, stream);
        Ok(sim.machine.run_kernel(work, target.stream)?)
    }

    /// Arms a fault: the `after`th call of a name from now on returns a status, once.
    run_always fn deviceIpcSimInject(_sim, name: Text, after: u64, status: i32) {
        let name = String::from_utf8_lossy(name.bytes("name")?);
        arm(&name, after, status);
        Ok(())
    }

    /// Returns the number of calls of a name.
    run_always fn deviceIpcSimCalls(_sim, name: Text, count: Pointer<u64>) {
        let name = String::from_utf8_lossy(name.bytes("name")?);
        count.put(calls_of(&name), "count")
    }
}

/// Loads 1, 2, 4 or 8 bytes in a kernel. Returns 0, or -1 without access, which fails the stream.
///
/// # Safety
///
/// `running` is the argument of the kernel; `value` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deviceIpcSimLoad(
    running: *mut RunningKernel,
    address: u64,
    len: u64,
    value: Pointer<u64>,
) -> i32 {
    // SAFETY: guaranteed by the caller.
    let loaded = unsafe { &mut *running }.access(address, len, None);
    loaded.and_then(|loaded| value.put(loaded, "value").ok()).map_or(-1, |()| 0)
}

/// Stores the lowest 1, 2, 4 or 8 bytes of a value in a kernel. Returns 0, or -1 without access, which fails the
/// stream.
///
/// # Safety
///
/// `running` is the argument of the kernel.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deviceIpcSimStore(
    running: *mut RunningKernel,
    address: u64,
    len: u64,
    value: u64,
) -> i32 {
    // SAFETY: guaranteed by the caller.
    unsafe { &mut *running }.access(address, len, Some(value)).map_or(-1, |_| 0)
}
