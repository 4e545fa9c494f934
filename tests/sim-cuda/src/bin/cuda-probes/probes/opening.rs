//! Opening legacy handles.

use super::memory::attributes_of;
use super::{LARGE, Probe, SMALL, status, yes};
use crate::driver::{Handle, R};
use crate::other::Other;

/// Starts an exporter with a block of bytes 7. Returns its process, the block's address there, and the handle.
fn exporter(probe: &Probe<'_>, size: usize) -> R<(Other, u64, Handle)> {
    let other = probe.other()?;
    probe.driver.start(0)?;
    let block = other.number(&format!("alloc {size}"))?;
    other.ask(&format!("fill {block} 7 {size}"))?;
    let handle = other.handle(&format!("export {block}"))?;
    Ok((other, block, handle))
}

pub(super) fn reads_and_is_read(probe: &Probe<'_>) -> R<String> {
    let (other, block, handle) = exporter(probe, LARGE)?;
    let opened = probe.driver.open(handle)?;
    let read = probe.driver.byte(opened)?;
    probe.driver.fill(opened, 9, LARGE)?;
    Ok(format!("reads {read}, and 9 is {}", other.ask(&format!("byte {block}"))?))
}

pub(super) fn zeros(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    Ok(status(probe.driver.open(Handle([0; 64]))))
}

/// Corrupts the first byte, which the driver ignores.
pub(super) fn corrupt(probe: &Probe<'_>) -> R<String> {
    let (_other, _, mut handle) = exporter(probe, LARGE)?;
    handle.0[0] ^= 0xff;
    Ok(status(probe.driver.open(handle)))
}

pub(super) fn corrupt_wholly(probe: &Probe<'_>) -> R<String> {
    let (_other, _, mut handle) = exporter(probe, LARGE)?;
    handle.0.iter_mut().for_each(|byte| *byte ^= 0xff);
    Ok(status(probe.driver.open(handle)))
}

/// Returns the bytes that can be inverted, one at a time.
pub(super) fn bytes_that_are_ignored(probe: &Probe<'_>) -> R<String> {
    let (_other, _, handle) = exporter(probe, LARGE)?;
    let is_ignored = |at: &usize| {
        let mut changed = handle;
        changed.0[*at] ^= 0xff;
        probe.driver.open(changed).is_ok()
    };
    let ignored: Vec<_> = (0..64).filter(is_ignored).map(|at| at.to_string()).collect();
    Ok(ignored.join(" "))
}

pub(super) fn in_the_exporter(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let block = probe.driver.alloc(LARGE)?;
    Ok(status(probe.driver.open(probe.driver.handle(block)?)))
}

pub(super) fn freed(probe: &Probe<'_>) -> R<String> {
    let (other, block, handle) = exporter(probe, LARGE)?;
    other.ask(&format!("free {block}"))?;
    Ok(status(probe.driver.open(handle)))
}

/// Replaces the exported block by another one with the byte 8.
fn successor(other: &Other, block: u64) -> R {
    other.ask(&format!("free {block}"))?;
    if other.number(&format!("alloc {LARGE}"))? != block {
        return Err("skipped: the new block is in another place".to_owned());
    }
    other.ask(&format!("fill {block} 8 {LARGE}")).map(drop)
}

pub(super) fn stale_with_a_private_successor(probe: &Probe<'_>) -> R<String> {
    let (other, block, handle) = exporter(probe, LARGE)?;
    successor(&other, block)?;
    Ok(status(probe.driver.open(handle)))
}

pub(super) fn stale_with_an_exported_successor(probe: &Probe<'_>) -> R<String> {
    let (other, block, handle) = exporter(probe, LARGE)?;
    successor(&other, block)?;
    other.ask(&format!("export {block}"))?;
    let opened = probe.driver.open(handle)?;
    Ok(format!("reads {}", probe.driver.byte(opened)?))
}

pub(super) fn stale_while_the_old_block_is_open(probe: &Probe<'_>) -> R<String> {
    let (other, block, handle) = exporter(probe, LARGE)?;
    let opened = probe.driver.open(handle)?;
    successor(&other, block)?;
    other.ask(&format!("export {block}"))?;
    let again = probe.driver.open(handle)?;
    Ok(format!("the old mapping: {}, reads {}", yes(again == opened), probe.driver.byte(again)?))
}

pub(super) fn twice_in_one_context(probe: &Probe<'_>) -> R<String> {
    let (_other, _, handle) = exporter(probe, LARGE)?;
    let opened = probe.driver.open(handle)?;
    Ok(format!("the same address: {}", yes(probe.driver.open(handle)? == opened)))
}

pub(super) fn closes_are_counted(probe: &Probe<'_>) -> R<String> {
    let (_other, _, handle) = exporter(probe, LARGE)?;
    let opened = probe.driver.open(handle)?;
    probe.driver.open(handle)?;
    let mut said = Vec::new();
    for _ in 0..3 {
        let close = status(probe.driver.ipc_close_mem_handle(opened));
        said.push(format!("{close} then {}", status(probe.driver.byte(opened))));
    }
    Ok(said.join(", "))
}

/// Creates a second context of the device and makes it current.
fn second_context(probe: &Probe<'_>) -> R<u64> {
    let mut context = 0;
    probe.driver.ctx_create(&raw mut context, 0, 0)?;
    Ok(context)
}

/// Opens a handle in a second context of a device whose first context has it open.
pub(super) fn in_two_contexts(probe: &Probe<'_>) -> R<String> {
    let (_other, _, handle) = exporter(probe, LARGE)?;
    probe.driver.open(handle)?;
    second_context(probe)?;
    Ok(status(probe.driver.open(handle)))
}

pub(super) fn in_the_second_context_alone(probe: &Probe<'_>) -> R<String> {
    let (_other, _, handle) = exporter(probe, LARGE)?;
    second_context(probe)?;
    let opened = probe.driver.open(handle)?;
    Ok(format!(
        "reads {}, close: {}",
        probe.driver.byte(opened)?,
        status(probe.driver.ipc_close_mem_handle(opened))
    ))
}

pub(super) fn close_in_another_context(probe: &Probe<'_>) -> R<String> {
    let (_other, _, handle) = exporter(probe, LARGE)?;
    let opened = probe.driver.open(handle)?;
    second_context(probe)?;
    Ok(status(probe.driver.ipc_close_mem_handle(opened)))
}

pub(super) fn read_after_close_in_another_context(probe: &Probe<'_>) -> R<String> {
    let (_other, _, handle) = exporter(probe, LARGE)?;
    let (opened, mut second) = (probe.driver.open(handle)?, 0);
    second_context(probe)?;
    probe.driver.ipc_close_mem_handle(opened)?;
    probe.driver.ctx_pop(&raw mut second)?;
    let (read, close) = (probe.driver.byte(opened), probe.driver.ipc_close_mem_handle(opened));
    Ok(format!("read: {}, close: {}", status(read), status(close)))
}

pub(super) fn close_on_another_device(probe: &Probe<'_>) -> R<String> {
    probe.two_devices()?;
    let (_other, _, handle) = exporter(probe, LARGE)?;
    let opened = probe.driver.open(handle)?;
    probe.driver.start(1)?;
    Ok(status(probe.driver.ipc_close_mem_handle(opened)))
}

pub(super) fn close_inside(probe: &Probe<'_>) -> R<String> {
    let (_other, _, handle) = exporter(probe, LARGE)?;
    let opened = probe.driver.open(handle)?;
    Ok(status(probe.driver.ipc_close_mem_handle(opened + 4096)))
}

pub(super) fn close_own_memory(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let block = probe.driver.alloc(LARGE)?;
    Ok(status(probe.driver.ipc_close_mem_handle(block)))
}

fn with_flags(probe: &Probe<'_>, flags: u32) -> R<String> {
    let (_other, _, handle) = exporter(probe, LARGE)?;
    let mut opened = 0;
    Ok(status(probe.driver.ipc_open_mem_handle(&raw mut opened, handle, flags)))
}

pub(super) fn without_the_lazy_flag(probe: &Probe<'_>) -> R<String> {
    with_flags(probe, 0)
}

pub(super) fn with_an_unknown_flag(probe: &Probe<'_>) -> R<String> {
    with_flags(probe, 0x41)
}

pub(super) fn survives_the_exporters_free(probe: &Probe<'_>) -> R<String> {
    let (other, block, handle) = exporter(probe, LARGE)?;
    let opened = probe.driver.open(handle)?;
    let free = status(other.ask(&format!("free {block}")));
    Ok(format!("free: {free}, reads {}", probe.driver.byte(opened)?))
}

pub(super) fn survives_the_exporters_death(probe: &Probe<'_>) -> R<String> {
    let (mut other, _, handle) = exporter(probe, LARGE)?;
    let opened = probe.driver.open(handle)?;
    other.kill();
    let read = probe.driver.byte(opened)?;
    probe.driver.fill(opened, 3, LARGE)?;
    Ok(format!("reads {read}, writes {}", probe.driver.byte(opened)?))
}

pub(super) fn after_the_exporters_death(probe: &Probe<'_>) -> R<String> {
    let (mut other, _, handle) = exporter(probe, LARGE)?;
    other.kill();
    Ok(status(probe.driver.open(handle)))
}

pub(super) fn range_is_the_block(probe: &Probe<'_>) -> R<String> {
    let (_other, _, handle) = exporter(probe, SMALL)?;
    let opened = probe.driver.open(handle)?;
    let (base, size) = probe.driver.range(opened + 100)?;
    Ok(format!("the address: {}, {size} bytes", yes(base == opened)))
}

pub(super) fn attributes(probe: &Probe<'_>) -> R<String> {
    let (_other, _, handle) = exporter(probe, LARGE)?;
    let opened = probe.driver.open(handle)?;
    Ok(attributes_of(probe, opened))
}

pub(super) fn retain_its_handle(probe: &Probe<'_>) -> R<String> {
    let (_other, _, handle) = exporter(probe, LARGE)?;
    let (opened, mut block) = (probe.driver.open(handle)?, 0);
    Ok(status(probe.driver.mem_retain(&raw mut block, opened as usize as *mut _)))
}

pub(super) fn free_it(probe: &Probe<'_>) -> R<String> {
    let (_other, _, handle) = exporter(probe, LARGE)?;
    let opened = probe.driver.open(handle)?;
    Ok(status(probe.driver.mem_free(opened)))
}

pub(super) fn copy_past_its_end(probe: &Probe<'_>) -> R<String> {
    let (other, _, handle) = exporter(probe, SMALL)?;
    other.ask(&format!("alloc {SMALL}"))?;
    let (opened, own) = (probe.driver.open(handle)?, probe.driver.alloc(LARGE)?);
    Ok(status(probe.driver.memcpy_dtod(own, opened, SMALL + 1)))
}

pub(super) fn kernel_reads_the_neighbour(probe: &Probe<'_>) -> R<String> {
    let (other, block, handle) = exporter(probe, SMALL)?;
    let neighbour = other.number(&format!("alloc {SMALL}"))?;
    if neighbour != block + SMALL as u64 {
        return Ok("skipped: no neighbours".to_owned());
    }
    other.ask(&format!("fill {neighbour} 8 {SMALL}"))?;
    let (opened, own) = (probe.driver.open(handle)?, probe.driver.alloc(SMALL)?);
    probe.driver.kernel_copy(own, opened + SMALL as u64, 8)?;
    Ok(format!("reads {}", probe.driver.byte(own)?))
}

pub(super) fn close_while_a_stream_waits(probe: &Probe<'_>) -> R<String> {
    let (_other, _, handle) = exporter(probe, LARGE)?;
    let mut context = 0;
    probe.driver.ctx_get_current(&raw mut context)?;
    let opened = probe.driver.open(handle)?;
    let (_, word) = probe.busy_stream()?;
    probe.waits(context, word, |driver| driver.ipc_close_mem_handle(opened))
}

pub(super) fn on_another_device(probe: &Probe<'_>) -> R<String> {
    probe.two_devices()?;
    let (_other, _, handle) = exporter(probe, LARGE)?;
    let at_home = probe.driver.open(handle)?;
    probe.driver.start(1)?;
    let there = probe.driver.open(handle)?;
    let device = probe.driver.attribute(9, there)?;
    let read = probe.driver.byte(there)?;
    probe.driver.kernel_fill(there, 6, 1)?;
    Ok(format!(
        "another address: {}, device {device}, reads {read}, a kernel writes {}",
        yes(there != at_home),
        probe.driver.byte(at_home)?
    ))
}
