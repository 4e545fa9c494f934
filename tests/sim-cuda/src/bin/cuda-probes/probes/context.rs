//! The start of the driver, and contexts.

use std::ffi::{CStr, c_int};

use super::{LARGE, Probe, SMALL, status, yes};
use crate::driver::{Driver, R};

pub(super) fn call_before_init(probe: &Probe<'_>) -> R<String> {
    Ok(status(probe.driver.alloc(SMALL)))
}

pub(super) fn init_with_flags(probe: &Probe<'_>) -> R<String> {
    Ok(status(probe.driver.init(1)))
}

pub(super) fn call_without_context(probe: &Probe<'_>) -> R<String> {
    probe.driver.init(0)?;
    Ok(status(probe.driver.alloc(SMALL)))
}

pub(super) fn ordinal_out_of_range(probe: &Probe<'_>) -> R<String> {
    probe.driver.init(0)?;
    let mut device = 0;
    Ok(status(probe.driver.device_get(&raw mut device, 999)))
}

pub(super) fn name_of_an_unknown_status(probe: &Probe<'_>) -> R<String> {
    let mut name = std::ptr::null();
    Ok(status(probe.driver.get_error_name_of(4242, &raw mut name)))
}

fn address_of(probe: &Probe<'_>, name: &CStr) -> R<String> {
    probe.driver.init(0)?;
    let (mut address, mut found): (usize, c_int) = (0, 0);
    let asked = probe.driver.get_proc_address(name.as_ptr(), &raw mut address, 12_000, 0, &raw mut found);
    Ok(format!("{}, an address: {}, found: {found}", status(asked), yes(address != 0)))
}

pub(super) fn address_of_a_function(probe: &Probe<'_>) -> R<String> {
    address_of(probe, c"cuMemAlloc")
}

pub(super) fn address_of_no_function(probe: &Probe<'_>) -> R<String> {
    address_of(probe, c"cuMemAllocMuch")
}

pub(super) fn primary_context_is_one(probe: &Probe<'_>) -> R<String> {
    let first = probe.driver.start(0)?;
    Ok(format!("the same again: {}", yes(probe.driver.start(0)? == first)))
}

pub(super) fn pop_without_one(probe: &Probe<'_>) -> R<String> {
    probe.driver.init(0)?;
    let mut context = 0;
    Ok(status(probe.driver.ctx_pop(&raw mut context)))
}

pub(super) fn destroy_a_primary_one(probe: &Probe<'_>) -> R<String> {
    let context = probe.driver.start(0)?;
    Ok(status(probe.driver.ctx_destroy(context)))
}

pub(super) fn state_after_reset(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let (mut flags, mut active) = (0, -1);
    let reset = status(probe.driver.primary_ctx_reset(0));
    probe.driver.primary_ctx_get_state(0, &raw mut flags, &raw mut active)?;
    Ok(format!("reset: {reset}, active: {active}"))
}

pub(super) fn memory_after_reset(probe: &Probe<'_>) -> R<String> {
    let driver = probe.driver;
    driver.start(0)?;
    let block = driver.alloc(LARGE)?;
    driver.primary_ctx_reset(0)?;
    // As code without knowledge of the reset does: the context is retained again.
    driver.start(0)?;
    Ok(format!(
        "fill: {}, free: {}",
        status(driver.memset_d8(block, 1, SMALL)),
        status(driver.mem_free(block))
    ))
}

pub(super) fn call_after_reset(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    probe.driver.primary_ctx_reset(0)?;
    Ok(status(probe.driver.alloc(SMALL)))
}

pub(super) fn opened_memory_after_reset(probe: &Probe<'_>) -> R<String> {
    let (driver, other) = (probe.driver, probe.other()?);
    driver.start(0)?;
    let block = other.number(&format!("alloc {LARGE}"))?;
    let opened = driver.open(other.handle(&format!("export {block}"))?)?;
    driver.primary_ctx_reset(0)?;
    driver.start(0)?;
    let fill = status(driver.memset_d8(opened, 1, SMALL));
    Ok(format!("fill: {fill}, close: {}", status(driver.ipc_close_mem_handle(opened))))
}

pub(super) fn memory_of_a_destroyed_one(probe: &Probe<'_>) -> R<String> {
    let driver = probe.driver;
    driver.start(0)?;
    let mut context = 0;
    driver.ctx_create(&raw mut context, 0, 0)?;
    let block = driver.alloc(LARGE)?;
    driver.ctx_destroy(context)?;
    let mut current = 0;
    driver.ctx_get_current(&raw mut current)?;
    let left = yes(current != 0 && current != context);
    Ok(format!("the one before is current: {left}, fill: {}", status(driver.memset_d8(block, 1, SMALL))))
}

pub(super) fn peer_access_to_oneself(probe: &Probe<'_>) -> R<String> {
    let context = probe.driver.start(0)?;
    Ok(status(probe.driver.ctx_enable_peer_access(context, 0)))
}

fn peer_memory(probe: &Probe<'_>, with_access: bool) -> R<String> {
    probe.two_devices()?;
    let driver = probe.driver;
    let peer = driver.start(1)?;
    let block = driver.alloc(LARGE)?;
    driver.start(0)?;
    let mut said = String::new();
    if with_access {
        let first = status(driver.ctx_enable_peer_access(peer, 0));
        let again = status(driver.ctx_enable_peer_access(peer, 0));
        said = format!("enable: {first}, again: {again}, ");
    }
    let own = driver.alloc(LARGE)?;
    let copy = status(driver.memcpy_dtod(block, own, SMALL));
    Ok(format!("{said}copy: {copy}, kernel: {}", status(driver.kernel_fill(block, 1, 1))))
}

pub(super) fn peer_memory_without_access(probe: &Probe<'_>) -> R<String> {
    peer_memory(probe, false)
}

pub(super) fn peer_memory_with_access(probe: &Probe<'_>) -> R<String> {
    peer_memory(probe, true)
}

pub(super) fn release_too_often(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let first = status(probe.driver.primary_ctx_release(0));
    Ok(format!("{first}, again: {}", status(probe.driver.primary_ctx_release(0))))
}

pub(super) fn identity_after_reset(probe: &Probe<'_>) -> R<String> {
    let driver = probe.driver;
    let context = driver.start(0)?;
    let (mut before, mut after) = (0, 0);
    driver.ctx_get_id(context, &raw mut before)?;
    driver.primary_ctx_reset(0)?;
    let gone = status(driver.ctx_get_id(context, &raw mut after));
    driver.start(0)?;
    driver.ctx_get_id(context, &raw mut after)?;
    Ok(format!("{gone}, retained again another: {}", yes(before != after)))
}

/// Uses an event of a reset context up to the crash of the driver: a destroy, which is rejected, and a query.
fn event_after_reset(probe: &Probe<'_>, flags: u32) -> R<String> {
    let driver = probe.driver;
    driver.start(0)?;
    let event = driver.event(flags)?;
    driver.primary_ctx_reset(0)?;
    let gone = status(driver.event_query(event));
    driver.start(0)?;
    let destroy = status(driver.event_destroy(event));
    Ok(format!("query: {gone}, destroy: {destroy}, then query: {}", status(driver.event_query(event))))
}

pub(super) fn ordinary_event_after_reset(probe: &Probe<'_>) -> R<String> {
    event_after_reset(probe, 2)
}

pub(super) fn shared_event_after_reset(probe: &Probe<'_>) -> R<String> {
    event_after_reset(probe, 6)
}

/// Returns the status of one call on an event after the reset of its context, and after the context was retained
/// again.
fn refused_after_reset(probe: &Probe<'_>, flags: u32, call: fn(&Driver, u64) -> R) -> R<String> {
    let driver = probe.driver;
    driver.start(0)?;
    let (first, second) = (driver.event(flags)?, driver.event(flags)?);
    driver.primary_ctx_reset(0)?;
    let gone = status(call(driver, first));
    driver.start(0)?;
    Ok(format!("{gone}, retained again: {}", status(call(driver, second))))
}

pub(super) fn query_ordinary_event_after_reset(probe: &Probe<'_>) -> R<String> {
    refused_after_reset(probe, 2, |driver, event| driver.event_query(event))
}

pub(super) fn query_shared_event_after_reset(probe: &Probe<'_>) -> R<String> {
    refused_after_reset(probe, 6, |driver, event| driver.event_query(event))
}

pub(super) fn destroy_ordinary_event_after_reset(probe: &Probe<'_>) -> R<String> {
    refused_after_reset(probe, 2, |driver, event| driver.event_destroy(event))
}

pub(super) fn destroy_shared_event_after_reset(probe: &Probe<'_>) -> R<String> {
    refused_after_reset(probe, 6, |driver, event| driver.event_destroy(event))
}

pub(super) fn attribute_after_reset(probe: &Probe<'_>) -> R<String> {
    let driver = probe.driver;
    driver.start(0)?;
    let block = driver.alloc(LARGE)?;
    driver.primary_ctx_reset(0)?;
    Ok(format!("attribute: {}, range: {}", status(driver.attribute(7, block)), status(driver.range(block))))
}
