//! Copies and fills ("Memory Management" in `cuda.h`).
//!
//! The driver checks the range of a copy against its block at submission. It reads unregistered host memory during
//! the call, and writes it before the call returns.

use std::ffi::{c_uchar, c_uint, c_ushort};

use device_ipc_mock_engine::{Access, Address};

use crate::context::{context, current};
use crate::entry::driver;
use crate::ffi::HostBytes;
use crate::memory::Kind;
use crate::simulator::simulator;
use crate::status::{Result, Status};
use crate::stream::{Target, target};

/// Checks that the bytes are in one known block to which the stream's device has access.
pub(crate) fn known(target: &Target, address: u64, len: u64, writes: bool) -> Result {
    if is_known(target, address, len, writes)? { Ok(()) } else { Err(Status::INVALID_VALUE) }
}

/// Returns whether the bytes are known memory; otherwise they are pageable host memory.
fn is_known(target: &Target, address: u64, len: u64, writes: bool) -> Result<bool> {
    let simulator = simulator()?;
    let (access_is_set, first) = {
        let objects = simulator.objects();
        match objects.memory.containing(address, len)? {
            Some(block) => {
                let pooled = matches!(block.kind, Kind::Pooled { .. } | Kind::PoolImported { .. });
                (pooled || matches!(block.kind, Kind::Virtual), true)
            }
            None => (false, false),
        }
    };
    if !first {
        // Reserved addresses without memory.
        let ours = simulator.machine.reservation_of(Address::new(address)).is_some();
        return if ours { Err(Status::INVALID_VALUE) } else { Ok(false) };
    }
    if access_is_set {
        let access = simulator.machine.access_of(Address::new(address), target.context.device)?;
        let enough = if writes { access == Some(Access::ReadWrite) } else { access.is_some() };
        if !enough {
            return Err(Status::INVALID_VALUE);
        }
    }
    Ok(true)
}

/// Submits a copy. `kinds` says for destination and source whether the caller declared device memory.
fn copy(target: &Target, to: u64, from: u64, len: usize, stated: [bool; 2]) -> Result {
    if len == 0 {
        return Ok(());
    }
    let bytes = len as u64;
    let to_known = is_known(target, to, bytes, true)?;
    let from_known = is_known(target, from, bytes, false)?;
    if (stated[0] && !to_known) || (stated[1] && !from_known) {
        return Err(Status::INVALID_VALUE);
    }
    let (there, here) = (Address::new(to), Address::new(from));
    match (to_known, from_known) {
        (true, true) => target.submit(|machine| machine.copy(there, here, bytes, target.engine)),
        (true, false) => {
            let taken = HostBytes::new(from, len)?.to_vec();
            target.submit(|machine| machine.write_from_host(there, &taken, target.engine))
        }
        (false, true) => {
            let room = HostBytes::new(to, len)?;
            crate::capture::refuse_on(target)?;
            target.order()?;
            let read = simulator()?.machine.read_to_host(here, bytes, target.engine);
            room.fill_from(&target.context.settle(read)?);
            Ok(())
        }
        (false, false) => {
            let (room, source) = (HostBytes::new(to, len)?, HostBytes::new(from, len)?);
            crate::capture::refuse_on(target)?;
            target.synchronize()?;
            room.fill_from(&source.to_vec());
            Ok(())
        }
    }
}

/// Copies on the default stream, and waits.
fn copy_and_wait(to: u64, from: u64, len: usize, stated: [bool; 2]) -> Result {
    crate::capture::reject_unsafe_call()?;
    let target = target(0)?;
    copy(&target, to, from, len, stated)?;
    target.synchronize()
}

/// Submits a fill with a pattern of 1, 2 or 4 bytes.
fn fill(target: &Target, address: u64, pattern: &[u8], count: usize) -> Result {
    let len = count.checked_mul(pattern.len()).ok_or(Status::INVALID_VALUE)?;
    if len == 0 {
        return Ok(());
    }
    if !address.is_multiple_of(pattern.len() as u64) {
        return Err(Status::INVALID_VALUE);
    }
    known(target, address, len as u64, true)?;
    let at = Address::new(address);
    if pattern.iter().all(|byte| *byte == pattern[0]) {
        return target.submit(|machine| machine.fill(at, len as u64, pattern[0], target.engine));
    }
    target.submit(|machine| machine.write_from_host(at, &pattern.repeat(count), target.engine))
}

fn fill_and_wait(address: u64, pattern: &[u8], count: usize) -> Result {
    crate::capture::reject_unsafe_call()?;
    let target = target(0)?;
    fill(&target, address, pattern, count)?;
    target.synchronize()
}

driver! {
    /// Copies between any two addresses.
    fn cuMemcpy(to: u64, from: u64, len: usize) {
        copy_and_wait(to, from, len, [false, false])
    }

    /// Copies between any two addresses, on a stream.
    fn cuMemcpyAsync(to: u64, from: u64, len: usize, stream: u64) {
        copy(&target(stream)?, to, from, len, [false, false])
    }

    /// Copies from host to device.
    fn cuMemcpyHtoD_v2(to: u64, from: u64, len: usize) {
        copy_and_wait(to, from, len, [true, false])
    }

    /// Copies from host to device, on a stream.
    fn cuMemcpyHtoDAsync_v2(to: u64, from: u64, len: usize, stream: u64) {
        copy(&target(stream)?, to, from, len, [true, false])
    }

    /// Copies from device to host.
    fn cuMemcpyDtoH_v2(to: u64, from: u64, len: usize) {
        copy_and_wait(to, from, len, [false, true])
    }

    /// Copies from device to host, on a stream.
    fn cuMemcpyDtoHAsync_v2(to: u64, from: u64, len: usize, stream: u64) {
        copy(&target(stream)?, to, from, len, [false, true])
    }

    /// Copies between device memory.
    fn cuMemcpyDtoD_v2(to: u64, from: u64, len: usize) {
        copy_and_wait(to, from, len, [true, true])
    }

    /// Copies between device memory, on a stream.
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, len: usize, stream: u64) {
        copy(&target(stream)?, to, from, len, [true, true])
    }

    /// Copies between the memory of two contexts, which need no peer access.
    fn cuMemcpyPeer(to: u64, to_context: u64, from: u64, from_context: u64, len: usize) {
        context(to_context)?.check_usable()?;
        context(from_context)?.check_usable()?;
        copy_and_wait(to, from, len, [true, true])
    }

    /// Copies between the memory of two contexts, on a stream.
    fn cuMemcpyPeerAsync(to: u64, to_context: u64, from: u64, from_context: u64, len: usize, stream: u64) {
        context(to_context)?.check_usable()?;
        context(from_context)?.check_usable()?;
        copy(&target(stream)?, to, from, len, [true, true])
    }

    /// Sets bytes.
    fn cuMemsetD8_v2(address: u64, value: c_uchar, count: usize) {
        current()?;
        fill_and_wait(address, &[value], count)
    }

    /// Sets bytes, on a stream.
    fn cuMemsetD8Async(address: u64, value: c_uchar, count: usize, stream: u64) {
        fill(&target(stream)?, address, &[value], count)
    }

    /// Sets values of 2 bytes.
    fn cuMemsetD16_v2(address: u64, value: c_ushort, count: usize) {
        fill_and_wait(address, &value.to_le_bytes(), count)
    }

    /// Sets values of 2 bytes, on a stream.
    fn cuMemsetD16Async(address: u64, value: c_ushort, count: usize, stream: u64) {
        fill(&target(stream)?, address, &value.to_le_bytes(), count)
    }

    /// Sets values of 4 bytes.
    fn cuMemsetD32_v2(address: u64, value: c_uint, count: usize) {
        fill_and_wait(address, &value.to_le_bytes(), count)
    }

    /// Sets values of 4 bytes, on a stream.
    fn cuMemsetD32Async(address: u64, value: c_uint, count: usize, stream: u64) {
        fill(&target(stream)?, address, &value.to_le_bytes(), count)
    }
}
