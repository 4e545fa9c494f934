//! Memory pools.

use std::os::fd::AsRawFd;

use super::memory::attributes_of;
use super::{LARGE, Probe, SMALL, status, yes};
use crate::driver::{AccessDesc, Handle, Location, R};
use crate::other::Other;

pub(super) fn export_the_default_pool(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let mut pool = 0;
    probe.driver.default_pool(&raw mut pool, 0)?;
    Ok(status(probe.driver.pool_fd(pool)))
}

pub(super) fn export_a_pointer_first(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let pool = probe.driver.pool(1)?;
    let block = probe.driver.allocate_from(pool, SMALL)?;
    let before = status(probe.driver.pool_pointer(block));
    probe.driver.pool_fd(pool)?;
    Ok(format!("before the pool: {before}, after: {}", status(probe.driver.pool_pointer(block))))
}

/// Imports a pool of another process with a block of bytes 7. Returns its address there, and the bytes that name
/// it.
fn foreign(probe: &Probe<'_>) -> R<(Other, u64, u64, Handle)> {
    let (other, _, block, pool, data) = foreign_of(probe)?;
    Ok((other, block, pool, data))
}

/// Imports a pool of another process, which is returned before the block.
fn foreign_of(probe: &Probe<'_>) -> R<(Other, u64, u64, u64, Handle)> {
    let other = probe.other()?;
    probe.driver.start(0)?;
    let theirs = other.number("pool")?;
    let fd = other.fd(&format!("pool-fd {theirs}"))?;
    let block = other.number(&format!("from-pool {theirs} {LARGE}"))?;
    other.ask(&format!("fill {block} 7 {LARGE}"))?;
    let data = other.handle(&format!("export-pointer {block}"))?;
    let pool = probe.driver.import_pool(fd.as_raw_fd())?;
    Ok((other, theirs, block, pool, data))
}

pub(super) fn import_and_read(probe: &Probe<'_>) -> R<String> {
    let (other, block, pool, data) = foreign(probe)?;
    let address = probe.driver.import_pointer(pool, data)?;
    let read = probe.driver.byte(address)?;
    probe.driver.fill(address, 9, LARGE)?;
    Ok(format!("reads {read}, and 9 is {}", other.ask(&format!("byte {block}"))?))
}

pub(super) fn read_only(probe: &Probe<'_>) -> R<String> {
    let (_other, _, pool, _) = foreign(probe)?;
    let what = AccessDesc(Location(1, 0), 1);
    Ok(status(probe.driver.pool_set_access(pool, &raw const what, 1)))
}

pub(super) fn attributes(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let pool = probe.driver.pool(1)?;
    let block = probe.driver.allocate_from(pool, SMALL)?;
    Ok(format!(
        "{}, the pool itself: {}",
        attributes_of(probe, block),
        yes(probe.driver.attribute(17, block)? == pool)
    ))
}

pub(super) fn attributes_of_an_imported_pointer(probe: &Probe<'_>) -> R<String> {
    let (_other, _, pool, data) = foreign(probe)?;
    let address = probe.driver.import_pointer(pool, data)?;
    let (base, size) = probe.driver.range(address + 5)?;
    let range = yes((base, size) == (address, LARGE));
    Ok(format!("{}, its range: {range}", attributes_of(probe, address)))
}

pub(super) fn free_an_imported_pointer(probe: &Probe<'_>) -> R<String> {
    let (_other, _, pool, data) = foreign(probe)?;
    let address = probe.driver.import_pointer(pool, data)?;
    let free = status(probe.driver.mem_free(address));
    let read = status(probe.driver.byte(address));
    Ok(format!("free: {free}, read: {read}, destroy the pool: {}", status(probe.driver.pool_destroy(pool))))
}

pub(super) fn import_a_pointer_twice(probe: &Probe<'_>) -> R<String> {
    let (_other, _, pool, data) = foreign(probe)?;
    probe.driver.import_pointer(pool, data)?;
    Ok(status(probe.driver.import_pointer(pool, data)))
}

pub(super) fn import_a_freed_pointer(probe: &Probe<'_>) -> R<String> {
    let (other, block, pool, data) = foreign(probe)?;
    other.ask(&format!("free {block}"))?;
    Ok(status(probe.driver.import_pointer(pool, data)))
}

pub(super) fn read_a_freed_pointer(probe: &Probe<'_>) -> R<String> {
    let (other, block, pool, data) = foreign(probe)?;
    other.ask(&format!("free {block}"))?;
    let address = probe.driver.import_pointer(pool, data)?;
    let read = probe.driver.byte(address).map_or_else(|status| status, |byte| byte.to_string());
    Ok(format!("reads {read}, free: {}", status(probe.driver.mem_free(address))))
}

pub(super) fn freed_pointer_with_a_successor(probe: &Probe<'_>) -> R<String> {
    let (other, theirs, block, pool, data) = foreign_of(probe)?;
    other.ask(&format!("free {block}"))?;
    if other.number(&format!("from-pool {theirs} {LARGE}"))? != block {
        return Err("skipped: the new block is in another place".to_owned());
    }
    other.ask(&format!("fill {block} 8 {LARGE}"))?;
    let address = probe.driver.import_pointer(pool, data)?;
    Ok(format!("reads {}", probe.driver.byte(address)?))
}

pub(super) fn allocate_from_an_imported_pool(probe: &Probe<'_>) -> R<String> {
    let (_other, _, pool, _) = foreign(probe)?;
    Ok(status(probe.driver.allocate_from(pool, SMALL)))
}

pub(super) fn current_pool_is_used(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let (pool, mut block) = (probe.driver.pool(1)?, 0);
    probe.driver.set_pool(0, pool)?;
    probe.driver.alloc_async(&raw mut block, SMALL, 0)?;
    Ok(yes(probe.driver.attribute(17, block)? == pool))
}

pub(super) fn take_access_from_its_own_device(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let pool = probe.driver.pool(1)?;
    let what = AccessDesc(Location(1, 0), 0);
    Ok(status(probe.driver.pool_set_access(pool, &raw const what, 1)))
}

pub(super) fn free_async_of_plain_memory(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let block = probe.driver.alloc(LARGE)?;
    let free = status(probe.driver.free_async(block, 0));
    probe.driver.ctx_synchronize()?;
    Ok(format!("{free}, then fill: {}", status(probe.driver.memset_d8(block, 1, SMALL))))
}

pub(super) fn export_an_interior_pointer(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let pool = probe.driver.pool(1)?;
    let block = probe.driver.allocate_from(pool, SMALL)?;
    probe.driver.pool_fd(pool)?;
    Ok(status(probe.driver.pool_pointer(block + 8)))
}

pub(super) fn import_the_pool_twice(probe: &Probe<'_>) -> R<String> {
    let other = probe.other()?;
    probe.driver.start(0)?;
    let theirs = other.number("pool")?;
    let fd = other.fd(&format!("pool-fd {theirs}"))?;
    let (first, second) =
        (probe.driver.import_pool(fd.as_raw_fd())?, probe.driver.import_pool(fd.as_raw_fd())?);
    Ok(format!("the same pool: {}", yes(first == second)))
}

pub(super) fn import_physical_memory(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let fd = probe.driver.export_fd(probe.driver.create(super::PAGE, 1)?)?;
    Ok(status(probe.driver.import_pool(fd)))
}

pub(super) fn destroy_an_imported_pool(probe: &Probe<'_>) -> R<String> {
    let (_other, _, pool, data) = foreign(probe)?;
    let address = probe.driver.import_pointer(pool, data)?;
    let early = status(probe.driver.pool_destroy(pool));
    probe.driver.mem_free(address)?;
    let late = status(probe.driver.pool_destroy(pool));
    Ok(format!(
        "with a pointer: {early}, without: {late}, again: {}",
        status(probe.driver.pool_destroy(pool))
    ))
}

pub(super) fn free_while_a_stream_waits(probe: &Probe<'_>) -> R<String> {
    let context = probe.driver.start(0)?;
    let block = probe.driver.allocate_from(probe.driver.pool(1)?, SMALL)?;
    let (_, word) = probe.busy_stream()?;
    probe.waits(context, word, |driver| driver.mem_free(block))
}

pub(super) fn blocks_are_neighbours(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let pool = probe.driver.pool(1)?;
    let (first, second) = (probe.driver.allocate_from(pool, 1000)?, probe.driver.allocate_from(pool, 1000)?);
    Ok(format!(
        "{} bytes apart, the range has {} bytes",
        first.abs_diff(second),
        probe.driver.range(first)?.1
    ))
}
