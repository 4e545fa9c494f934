//! Allocations that have a legacy handle.

use super::{LARGE, PAGE, Probe, SMALL, status, yes};
use crate::driver::R;

pub(super) fn inside_gives_the_bytes_of_the_base(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let block = probe.driver.alloc(LARGE)?;
    let (base, inside) = (probe.driver.handle(block)?, probe.driver.handle(block + 1000)?);
    Ok(format!(
        "{}, the same again: {}",
        yes(base.0 == inside.0),
        yes(base.0 == probe.driver.handle(block)?.0)
    ))
}

pub(super) fn handle_of_the_next_block(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let block = probe.driver.alloc(LARGE)?;
    let first = probe.driver.handle(block)?;
    probe.driver.mem_free(block)?;
    let next = probe.driver.alloc(LARGE)?;
    Ok(format!("in the same place, another handle: {}", yes(first.0 != probe.driver.handle(next)?.0)))
}

pub(super) fn host_memory(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let memory = probe.driver.alloc_host(SMALL)?;
    Ok(status(probe.driver.handle(memory)))
}

pub(super) fn pool_memory(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let mut block = 0;
    probe.driver.alloc_async(&raw mut block, LARGE, 0)?;
    Ok(status(probe.driver.handle(block)))
}

pub(super) fn virtual_memory(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let address = probe.driver.map(probe.driver.create(PAGE, 1)?, PAGE, 3)?;
    Ok(status(probe.driver.handle(address)))
}

pub(super) fn freed_memory(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let block = probe.driver.alloc(LARGE)?;
    probe.driver.mem_free(block)?;
    Ok(status(probe.driver.handle(block)))
}

pub(super) fn opened_memory(probe: &Probe<'_>) -> R<String> {
    let other = probe.other()?;
    probe.driver.start(0)?;
    let block = other.number(&format!("alloc {LARGE}"))?;
    let opened = probe.driver.open(other.handle(&format!("export {block}"))?)?;
    Ok(status(probe.driver.handle(opened)))
}
