//! Copies and fills.
//!
//! Memory that another device's process exported is accessible only to kernels and to asynchronous copies between
//! devices (`docs/zh/api_ref/11-07_IPC_memory_sharing.md` of hicann/runtime). A program that copies to the host
//! from such memory works on one card and fails on two.

use std::sync::Mutex;

use device_ipc_mock_engine::{Address, StreamId};

use crate::abi::Handle;
use crate::block::Operand;
use crate::call::calls;
use crate::simulator::{Simulator, lock};
use crate::status::{Outcome, Status, refuse};
use crate::stream::Target;

const HOST_TO_DEVICE: i32 = 1;
const DEVICE_TO_HOST: i32 = 2;
const DEVICE_TO_DEVICE: i32 = 3;
const DEFAULT: i32 = 4;
const HOST_TO_BUFFER_TO_DEVICE: i32 = 5;
const WITHIN_A_DEVICE: i32 = 6;
const BETWEEN_DEVICES: i32 = 7;

/// Serializes synchronous copies, which share a stream and its failures.
static SYNCHRONOUS: Mutex<()> = Mutex::new(());

/// A host address to which a stream writes later, as the program requested.
struct HostDestination(*mut u8);

// SAFETY: the caller of an asynchronous copy guarantees the bytes until the stream has written them.
unsafe impl Send for HostDestination {}

impl HostDestination {
    fn write(&self, bytes: &[u8]) {
        // SAFETY: as above; `bytes` is private memory and does not overlap.
        unsafe { self.0.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }
}

/// Reads the bytes at a host address.
fn host_bytes(address: u64, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    // SAFETY: the caller of an exported function guarantees `len` bytes; the destination is new.
    unsafe { (address as *const u8).copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
    bytes
}

/// The operands of a copy, and its length.
struct Copy {
    destination: Operand,
    source: Operand,
    len: u64,
}

impl Simulator {
    fn copy_of(&self, destination: Handle, room: usize, source: Handle, len: usize) -> Outcome<Copy> {
        let (to, from) = (destination.required("dst")?, source.required("src")?);
        if len > room {
            return refuse(
                Status::RT_PARAM_INVALID,
                format!("{len} bytes exceed the capacity of {room} bytes"),
            );
        }
        let len = len as u64;
        Ok(Copy { destination: self.operand(to, len)?, source: self.operand(from, len)?, len })
    }

    /// Returns the stream on which synchronous calls of a device run.
    fn copies(&self, device: usize) -> Outcome<StreamId> {
        if let Some(stream) = self.state().devices[device].copies {
            return Ok(stream);
        }
        let stream = self.machine.create_stream(device)?;
        self.state().devices[device].copies = Some(stream);
        Ok(stream)
    }

    /// Submits work to that stream, and waits.
    fn run_synchronously(&self, work: impl FnOnce(Target) -> Outcome) -> Outcome {
        let current = self.current()?;
        let _turn = lock(&SYNCHRONOUS);
        let stream = self.copies(current.device)?;
        work(Target { stream, device: current.device })?;
        Ok(self.machine.synchronize(stream)?)
    }

    fn has_remote_operand(&self, copy: &Copy) -> bool {
        let is_remote = |operand: &Operand| operand.device_memory().iter().any(|block| self.is_remote(block));
        is_remote(&copy.destination) || is_remote(&copy.source)
    }

    /// Submits a copy.
    fn queue(&self, copy: &Copy, target: Target) -> Outcome {
        for operand in [&copy.destination, &copy.source] {
            operand.device_memory().iter().try_for_each(|block| self.require_access(target.device, block))?;
        }
        let (to, from) = (copy.destination.address(), copy.source.address());
        match (copy.destination.is_known(), copy.source.is_known()) {
            (true, true) => {
                self.machine.copy(Address::new(to), Address::new(from), copy.len, target.stream)?;
            }
            (true, false) => {
                self.machine.write_from_host(Address::new(to), &host_bytes(from, copy.len), target.stream)?;
            }
            (false, true) => {
                let place = HostDestination(to as *mut u8);
                let then = move |bytes: Vec<u8>| place.write(&bytes);
                self.machine.read_then(Address::new(from), copy.len, target.stream, then)?;
            }
            (false, false) => {
                let (place, bytes) = (HostDestination(to as *mut u8), host_bytes(from, copy.len));
                self.machine.host_fn(Box::new(move || place.write(&bytes)), target.stream)?;
            }
        }
        Ok(())
    }

    fn copy_synchronously(&self, copy: &Copy) -> Outcome {
        if self.has_remote_operand(copy) {
            let text =
                "memory imported from another device supports only asynchronous copies between devices";
            return refuse(Status::RT_DRV_INTERNAL_ERROR, text);
        }
        self.run_synchronously(|target| self.queue(copy, target))
    }

    fn copy_on_stream(&self, copy: &Copy, kind: i32, stream: Handle) -> Outcome {
        let target = self.target(stream)?;
        let is_device = |operand: &Operand| !operand.device_memory().is_empty();
        let fits = match (kind, is_device(&copy.destination), is_device(&copy.source)) {
            (0, to, from) => !to && !from,
            (HOST_TO_DEVICE | HOST_TO_BUFFER_TO_DEVICE, to, from) => to && !from,
            (DEVICE_TO_HOST, to, from) => !to && from,
            (DEVICE_TO_DEVICE | WITHIN_A_DEVICE | BETWEEN_DEVICES, to, from) => to && from,
            _ => true,
        };
        if !fits {
            return refuse(Status::RT_PARAM_INVALID, format!("kind {kind} does not match the two addresses"));
        }
        if self.has_remote_operand(copy) && !matches!(kind, DEVICE_TO_DEVICE | BETWEEN_DEVICES) {
            let text = "memory imported from another device supports only copies of kind 3";
            return refuse(Status::RT_DRV_INTERNAL_ERROR, text);
        }
        self.queue(copy, target)
    }

    /// Submits a copy of `len` bytes to a destination with room for `room`, after checking the arguments.
    fn submit_copy(
        &self,
        (destination, room): (Handle, usize),
        (source, len): (Handle, usize),
        kind: i32,
        stream: Handle,
    ) -> Outcome {
        if len == 0 {
            return Ok(());
        }
        check_kind(kind)?;
        let copy = self.copy_of(destination, room, source, len)?;
        self.copy_on_stream(&copy, kind, stream)
    }

    fn fill(
        &self,
        pointer: Handle,
        room: usize,
        value: i32,
        count: usize,
        target: Option<Target>,
    ) -> Outcome {
        let address = pointer.required("devPtr")?;
        if count > room {
            return refuse(
                Status::RT_PARAM_INVALID,
                format!("{count} bytes exceed the capacity of {room} bytes"),
            );
        }
        let byte = value as u8;
        let operand = self.operand(address, count as u64)?;
        for block in operand.device_memory() {
            if self.is_remote(block) {
                let text =
                    "memory imported from another device supports only asynchronous copies between devices";
                return refuse(Status::RT_DRV_INTERNAL_ERROR, text);
            }
            self.require_access(target.map_or(self.current()?.device, |target| target.device), block)?;
        }
        let queue = |target: Target| match operand {
            Operand::Known(..) => {
                Ok(self.machine.fill(Address::new(address), count as u64, byte, target.stream)?)
            }
            Operand::Unknown(_) => {
                let place = HostDestination(address as *mut u8);
                let write = move || place.write(&vec![byte; count]);
                Ok(self.machine.host_fn(Box::new(write), target.stream)?)
            }
        };
        match target {
            Some(target) => queue(target),
            None => self.run_synchronously(queue),
        }
    }
}

fn check_kind(kind: i32) -> Outcome {
    if (0..=BETWEEN_DEVICES).contains(&kind) {
        return Ok(());
    }
    refuse(Status::INVALID_PARAM, format!("invalid kind of copy {kind}"))
}

calls! {
    /// Copies synchronously, in no order with any stream. The kind is ignored; the locations of the operands are
    /// determined by their addresses.
    run fn aclrtMemcpy(sim, destination: Handle, room: usize, source: Handle, len: usize, kind: i32) {
        if len == 0 {
            return Ok(());
        }
        check_kind(kind)?;
        let copy = sim.copy_of(destination, room, source, len)?;
        sim.copy_synchronously(&copy)
    }

    /// Copies on a stream; the kind must match the operands. Memory of `aclrtMallocHost` is read and written when
    /// the stream reaches the copy; other host memory is read during the call.
    run fn aclrtMemcpyAsync(
        sim,
        destination: Handle,
        room: usize,
        source: Handle,
        len: usize,
        kind: i32,
        stream: Handle,
    ) {
        sim.submit_copy((destination, room), (source, len), kind, stream)
    }

    /// Copies on a stream, as `aclrtMemcpyAsync` does.
    run fn aclrtMemcpyAsyncWithCondition(
        sim,
        destination: Handle,
        room: usize,
        source: Handle,
        len: usize,
        kind: i32,
        stream: Handle,
    ) {
        sim.submit_copy((destination, room), (source, len), kind, stream)
    }

    /// Copies rows synchronously.
    run fn aclrtMemcpy2d(
        sim,
        destination: Handle,
        destination_pitch: usize,
        source: Handle,
        source_pitch: usize,
        width: usize,
        height: usize,
        kind: i32,
    ) {
        let rows = rows(destination, destination_pitch, source, source_pitch, width, height, kind)?;
        rows.iter().try_for_each(|&(to, from)| sim.copy_synchronously(&sim.copy_of(to, width, from, width)?))
    }

    /// Copies rows on a stream.
    run fn aclrtMemcpy2dAsync(
        sim,
        destination: Handle,
        destination_pitch: usize,
        source: Handle,
        source_pitch: usize,
        width: usize,
        height: usize,
        kind: i32,
        stream: Handle,
    ) {
        let rows = rows(destination, destination_pitch, source, source_pitch, width, height, kind)?;
        rows.iter().try_for_each(|&(to, from)| {
            sim.copy_on_stream(&sim.copy_of(to, width, from, width)?, kind, stream)
        })
    }

    /// Sets bytes of device or host memory synchronously.
    run fn aclrtMemset(sim, pointer: Handle, room: usize, value: i32, count: usize) {
        sim.current()?;
        sim.fill(pointer, room, value, count, None)
    }

    /// Sets bytes on a stream.
    run fn aclrtMemsetAsync(sim, pointer: Handle, room: usize, value: i32, count: usize, stream: Handle) {
        let target = sim.target(stream)?;
        sim.fill(pointer, room, value, count, Some(target))
    }
}

/// Returns the addresses of the rows of two matrices.
fn rows(
    destination: Handle,
    destination_pitch: usize,
    source: Handle,
    source_pitch: usize,
    width: usize,
    height: usize,
    kind: i32,
) -> Outcome<Vec<(Handle, Handle)>> {
    if width == 0 || height == 0 || width > destination_pitch || width > source_pitch {
        return refuse(Status::INVALID_PARAM, "a row must have at least 1 byte and not exceed a pitch");
    }
    if !matches!(kind, HOST_TO_DEVICE | DEVICE_TO_HOST | DEVICE_TO_DEVICE | DEFAULT) {
        return refuse(Status::INVALID_PARAM, format!("invalid kind {kind} for copies of rows"));
    }
    let (to, from) = (destination.required("dst")?, source.required("src")?);
    let row = |index: usize| {
        let offset = |pitch: usize| (index * pitch) as u64;
        (Handle::new(to + offset(destination_pitch)), Handle::new(from + offset(source_pitch)))
    };
    Ok((0..height).map(row).collect())
}
