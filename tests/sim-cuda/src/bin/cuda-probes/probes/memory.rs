//! Plain memory, and attributes of addresses.

use std::ffi::c_void;

use super::{LARGE, Probe, SMALL, status, yes};
use crate::driver::R;

pub(super) fn allocate_nothing(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    Ok(status(probe.driver.alloc(0)))
}

pub(super) fn free_null(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    Ok(status(probe.driver.mem_free(0)))
}

pub(super) fn free_inside(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let block = probe.driver.alloc(LARGE)?;
    Ok(status(probe.driver.mem_free(block + 512)))
}

pub(super) fn free_twice(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let block = probe.driver.alloc(LARGE)?;
    probe.driver.mem_free(block)?;
    Ok(status(probe.driver.mem_free(block)))
}

pub(super) fn new_block_takes_the_freed_place(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let block = probe.driver.alloc(LARGE)?;
    probe.driver.mem_free(block)?;
    Ok(yes(probe.driver.alloc(LARGE)? == block))
}

pub(super) fn buffer_id_is_new(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let block = probe.driver.alloc(LARGE)?;
    let id = probe.driver.attribute(7, block)?;
    probe.driver.mem_free(block)?;
    let next = probe.driver.alloc(LARGE)?;
    Ok(yes(probe.driver.attribute(7, next)? != id))
}

pub(super) fn small_blocks_are_neighbours(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let (first, second) = (probe.driver.alloc(SMALL)?, probe.driver.alloc(SMALL)?);
    Ok(format!("{} bytes apart", first.abs_diff(second)))
}

pub(super) fn range_of_an_interior_address(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let block = probe.driver.alloc(10_000)?;
    let (base, size) = probe.driver.range(block + 5000)?;
    Ok(format!("the base: {}, {size} bytes", yes(base == block)))
}

pub(super) fn range_of_no_memory(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let block = probe.driver.alloc(LARGE)?;
    probe.driver.mem_free(block)?;
    Ok(status(probe.driver.range(block)))
}

/// Returns memory type, managed, device, legacy IPC capability, mapped, whether it has a pool, and handle types.
pub(super) fn attributes_of(probe: &Probe<'_>, address: u64) -> String {
    let one = |number| match probe.driver.attribute(number, address) {
        Ok(value) if number == 17 => yes(value != 0),
        Ok(value) => value.to_string(),
        Err(status) => status,
    };
    let names = [
        (2, "type"),
        (8, "managed"),
        (9, "device"),
        (10, "legacy"),
        (13, "mapped"),
        (17, "pool"),
        (14, "handle types"),
    ];
    names.map(|(number, name)| format!("{name} {}", one(number))).join(", ")
}

pub(super) fn attributes_of_plain_memory(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let block = probe.driver.alloc(10_000)?;
    let range = (probe.driver.attribute(11, block + 1)?, probe.driver.attribute(12, block + 1)?);
    Ok(format!("{}, its range: {}", attributes_of(probe, block), yes(range == (block, 10_000))))
}

pub(super) fn attributes_of_host_memory(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let memory = probe.driver.alloc_host(SMALL)?;
    let same = probe.driver.attribute(4, memory)? == memory && probe.driver.attribute(3, memory)? == memory;
    Ok(format!("{}, one address for both: {}", attributes_of(probe, memory), yes(same)))
}

pub(super) fn attributes_of_no_memory(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    Ok(status(probe.driver.attribute(2, 4096)))
}

pub(super) fn attributes_in_one_call_of_no_memory(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let (mut kind, mut range, mut device) = (77_u32, 77_u64, 77_i32);
    let outs: [*mut c_void; 3] = [(&raw mut kind).cast(), (&raw mut range).cast(), (&raw mut device).cast()];
    let numbers = [2, 11, 9];
    let asked = probe.driver.pointer_get_attributes(3, numbers.as_ptr(), outs.as_ptr(), 4096);
    Ok(format!("{}, type {kind}, range {range}, device {device}", status(asked)))
}

/// Returns the attributes that a query of each one leaves unwritten.
pub(super) fn attributes_that_no_memory_leaves_alone(probe: &Probe<'_>) -> R<String> {
    const BEFORE: u64 = 0x7777_7777_7777_7777;
    probe.driver.start(0)?;
    let mut alone = Vec::new();
    for number in 1..=20 {
        // Number 5 are tokens for another driver, which are wider and exist for known memory only.
        if number == 5 {
            continue;
        }
        let mut value = BEFORE;
        let outs: [*mut c_void; 1] = [(&raw mut value).cast()];
        let asked = probe.driver.pointer_get_attributes(1, &raw const number, outs.as_ptr(), 4096);
        match asked {
            Ok(()) if value == BEFORE => alone.push(number.to_string()),
            Ok(()) => {}
            Err(status) => alone.push(format!("{number} is {status}")),
        }
    }
    Ok(alone.join(", "))
}

pub(super) fn copy_past_the_end(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let (block, source) = (probe.driver.alloc(SMALL)?, vec![1_u8; SMALL + 1]);
    Ok(status(probe.driver.memcpy_htod(block, source.as_ptr().cast(), SMALL + 1)))
}

pub(super) fn copy_across_neighbours(probe: &Probe<'_>) -> R<String> {
    let driver = probe.driver;
    driver.start(0)?;
    let (first, second, large) = (driver.alloc(SMALL)?, driver.alloc(SMALL)?, driver.alloc(LARGE)?);
    if second != first + SMALL as u64 {
        return Ok("skipped: no neighbours".to_owned());
    }
    Ok(status(driver.memcpy_dtod(large, first, 2 * SMALL)))
}

pub(super) fn fill_misaligned(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let block = probe.driver.alloc(SMALL)?;
    Ok(status(probe.driver.memset_d32(block + 2, 1, 4)))
}

pub(super) fn kernel_across_neighbours(probe: &Probe<'_>) -> R<String> {
    let driver = probe.driver;
    driver.start(0)?;
    let (first, second, own) = (driver.alloc(SMALL)?, driver.alloc(SMALL)?, driver.alloc(SMALL)?);
    driver.fill(second, 5, SMALL)?;
    driver.kernel_copy(own, first + SMALL as u64, 8)?;
    Ok(format!("reads {}", driver.byte(own)?))
}

pub(super) fn kernel_on_no_memory(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    Ok(status(probe.driver.kernel_fill(4096, 1, 1)))
}

pub(super) fn call_after_such_a_kernel(probe: &Probe<'_>) -> R<String> {
    let driver = probe.driver;
    driver.start(0)?;
    let block = driver.alloc(SMALL)?;
    let _ = driver.kernel_fill(4096, 1, 1);
    Ok(format!("fill: {}, allocate: {}", status(driver.memset_d8(block, 1, 1)), status(driver.alloc(SMALL))))
}

pub(super) fn free_while_a_stream_waits(probe: &Probe<'_>) -> R<String> {
    let context = probe.driver.start(0)?;
    let block = probe.driver.alloc(LARGE)?;
    let (_, word) = probe.busy_stream()?;
    probe.waits(context, word, |driver| driver.mem_free(block))
}

pub(super) fn allocate_while_a_stream_waits(probe: &Probe<'_>) -> R<String> {
    let context = probe.driver.start(0)?;
    let (_, word) = probe.busy_stream()?;
    probe.waits(context, word, |driver| driver.alloc(LARGE).map(drop))
}

pub(super) fn free_host_memory_while_a_stream_waits(probe: &Probe<'_>) -> R<String> {
    let context = probe.driver.start(0)?;
    let memory = probe.driver.alloc_host(SMALL)?;
    let (_, word) = probe.busy_stream()?;
    probe.waits(context, word, |driver| driver.mem_free_host(memory))
}

/// Allocates whole pages of this process.
pub(super) fn own_pages() -> Vec<u64> {
    vec![0; 2 * SMALL]
}

/// Returns the first address of the pages.
pub(super) fn first_page(pages: &[u64]) -> u64 {
    (pages.as_ptr() as u64).next_multiple_of(SMALL as u64)
}

pub(super) fn register_twice(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let pages = own_pages();
    let at = first_page(&pages);
    let first = status(probe.driver.mem_host_register(at, SMALL, 0));
    let second = status(probe.driver.mem_host_register(at, SMALL, 0));
    Ok(format!("{first}, {second}, unregister: {}", status(probe.driver.mem_host_unregister(at))))
}

pub(super) fn unregister_nothing(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let pages = own_pages();
    Ok(status(probe.driver.mem_host_unregister(first_page(&pages))))
}

pub(super) fn device_address_of_registered_memory(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let pages = own_pages();
    let (at, mut address) = (first_page(&pages), 0);
    probe.driver.mem_host_register(at, SMALL, 0)?;
    probe.driver.mem_host_get_device_pointer(&raw mut address, at, 0)?;
    probe.driver.mem_host_unregister(at)?;
    Ok(format!("the same: {}", yes(address == at)))
}

pub(super) fn module_of_nonsense(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let mut module = 0;
    let wrong = c".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry k() { jump.about 3; }";
    Ok(status(probe.driver.module_load_data(&raw mut module, wrong.as_ptr())))
}

pub(super) fn unregister_while_a_stream_waits(probe: &Probe<'_>) -> R<String> {
    let context = probe.driver.start(0)?;
    let pages = own_pages();
    let at = first_page(&pages);
    probe.driver.mem_host_register(at, SMALL, 0)?;
    let (_, word) = probe.busy_stream()?;
    probe.waits(context, word, |driver| driver.mem_host_unregister(at))
}

fn holds_up(probe: &Probe<'_>, call: fn(&crate::driver::Driver, u64) -> R) -> R<String> {
    let context = probe.driver.start(0)?;
    let block = probe.driver.alloc(LARGE)?;
    let (_, word) = probe.busy_stream()?;
    let other: fn(&crate::driver::Driver) -> R = |driver| driver.event(2).map(drop);
    probe.waits_and_holds_up(context, word, move |driver| call(driver, block), Some(other))
}

pub(super) fn free_holds_up_others(probe: &Probe<'_>) -> R<String> {
    holds_up(probe, |driver, block| driver.mem_free(block))
}

pub(super) fn synchronize_holds_up_nobody(probe: &Probe<'_>) -> R<String> {
    holds_up(probe, |driver, _| driver.ctx_synchronize())
}
