//! Physical memory and reserved addresses.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use super::memory::attributes_of;
use super::{PAGE, Probe, SMALL, status, yes};
use crate::driver::{AllocationProp, Driver, Location, R};

pub(super) fn granularity(probe: &Probe<'_>) -> R<String> {
    probe.driver.init(0)?;
    let (prop, mut least) = (Driver::prop(1), 0);
    probe.driver.granularity(&raw mut least, &raw const prop, 0)?;
    Ok(format!("{least} bytes"))
}

pub(super) fn odd_size(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    Ok(format!(
        "create: {}, reserve: {}",
        status(probe.driver.create(4096, 1)),
        status(probe.driver.reserve(4096))
    ))
}

pub(super) fn reserve_at_an_address(probe: &Probe<'_>) -> R<String> {
    let driver = probe.driver;
    driver.start(0)?;
    let free = driver.reserve(4 * PAGE)?;
    driver.mem_address_free(free, 4 * PAGE)?;
    let ask_for = |size, alignment, hint| {
        let mut found = 0;
        match driver.mem_reserve(&raw mut found, size, alignment, hint, 0) {
            Ok(()) if found == hint => "there".to_owned(),
            Ok(()) => "elsewhere".to_owned(),
            failed => status(failed),
        }
    };
    let ask = |hint| ask_for(PAGE, 0, hint);
    let (at_free, again) = (ask(free), ask(free));
    let (page, byte) = (ask(free + PAGE as u64 + 4096), ask(free + PAGE as u64 + 1));
    // Far from the addresses that the driver chooses.
    let (far, large) = (16 << 40, 32 << 20);
    let (small, aligned, whole) = (ask(far), ask_for(PAGE, large, far), ask_for(large, 0, far + (1 << 40)));
    let between = far + (2 << 40) + PAGE as u64;
    let (moved, refused) = (ask_for(large, 0, between), ask_for(PAGE, large, between));
    Ok(format!(
        "free: {at_free}; in use: {again}; 4096 B behind a unit: {page}; 1 B behind one: {byte}; at 16 TiB: {small}, aligned to 32 MiB: \
         {aligned}; 32 MiB at 17 TiB: {whole}; at no multiple of 32 MiB: {moved}, aligned to it: {refused}"
    ))
}

/// Maps one block with an access.
fn mapped(probe: &Probe<'_>, flags: c_int) -> R<(u64, u64)> {
    probe.driver.start(0)?;
    let block = probe.driver.create(PAGE, 1)?;
    Ok((block, probe.driver.map(block, PAGE, flags)?))
}

pub(super) fn no_access(probe: &Probe<'_>) -> R<String> {
    let (_, address) = mapped(probe, 0)?;
    let fill = status(probe.driver.memset_d8(address, 1, SMALL));
    let (location, mut flags) = (Location(1, 0), 77);
    let asked = status(probe.driver.mem_get_access(&raw mut flags, &raw const location, address));
    Ok(format!("fill: {fill}, read: {}, access: {asked} {flags}", status(probe.driver.byte(address))))
}

pub(super) fn read_only_fill(probe: &Probe<'_>) -> R<String> {
    let (_, address) = mapped(probe, 1)?;
    Ok(format!(
        "of words: {}, of bytes: {}",
        status(probe.driver.memset_d32(address, 1, 4)),
        status(probe.driver.memset_d8(address, 1, 4))
    ))
}

pub(super) fn read_only_read(probe: &Probe<'_>) -> R<String> {
    let (_, address) = mapped(probe, 1)?;
    let own = probe.driver.alloc(SMALL)?;
    let copy = status(probe.driver.byte(address));
    Ok(format!("copy: {copy}, kernel: {}", status(probe.driver.kernel_copy(own, address, 8))))
}

pub(super) fn read_only_kernel(probe: &Probe<'_>) -> R<String> {
    let (_, address) = mapped(probe, 1)?;
    Ok(status(probe.driver.kernel_fill(address, 1, 1)))
}

pub(super) fn call_after_such_a_kernel(probe: &Probe<'_>) -> R<String> {
    let (_, address) = mapped(probe, 1)?;
    let own = probe.driver.alloc(SMALL)?;
    let _ = probe.driver.kernel_fill(address, 1, 1);
    Ok(status(probe.driver.memset_d8(own, 1, 1)))
}

pub(super) fn map_where_something_is(probe: &Probe<'_>) -> R<String> {
    let (block, address) = mapped(probe, 3)?;
    Ok(status(probe.driver.mem_map(address, PAGE, 0, block, 0)))
}

pub(super) fn unmap_a_part(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let block = probe.driver.create(2 * PAGE, 1)?;
    let address = probe.driver.map(block, 2 * PAGE, 3)?;
    Ok(status(probe.driver.mem_unmap(address, PAGE)))
}

pub(super) fn free_addresses_in_use(probe: &Probe<'_>) -> R<String> {
    let (_, address) = mapped(probe, 3)?;
    Ok(status(probe.driver.mem_address_free(address, PAGE)))
}

pub(super) fn release_keeps_the_mapping(probe: &Probe<'_>) -> R<String> {
    let (block, address) = mapped(probe, 3)?;
    probe.driver.fill(address, 4, PAGE)?;
    probe.driver.mem_release(block)?;
    Ok(format!("reads {}", probe.driver.byte(address)?))
}

pub(super) fn attributes(probe: &Probe<'_>) -> R<String> {
    let (_, address) = mapped(probe, 3)?;
    Ok(attributes_of(probe, address))
}

pub(super) fn range_of_two_mappings(probe: &Probe<'_>) -> R<String> {
    let driver = probe.driver;
    driver.start(0)?;
    let space = driver.reserve(4 * PAGE)?;
    for at in [0, PAGE] {
        driver.mem_map(space + at as u64, PAGE, 0, driver.create(PAGE, 1)?, 0)?;
    }
    driver.access(space, 2 * PAGE, 3)?;
    let (base, size) = driver.range(space + PAGE as u64 + 5)?;
    Ok(format!("from {} pages on, {} pages", (base - space) / PAGE as u64, size / PAGE))
}

pub(super) fn retain_is_the_same_handle(probe: &Probe<'_>) -> R<String> {
    let (block, address) = mapped(probe, 3)?;
    let mut again = 0;
    probe.driver.mem_retain(&raw mut again, (address + 100) as usize as *mut _)?;
    let releases = (status(probe.driver.mem_release(block)), status(probe.driver.mem_release(block)));
    Ok(format!("{}, release: {}, again: {}", yes(again == block), releases.0, releases.1))
}

pub(super) fn export_without_being_asked_for(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let block = probe.driver.create(PAGE, 0)?;
    Ok(status(probe.driver.export_fd(block)))
}

/// Returns a block of another process with the byte 7, as a descriptor.
fn foreign(probe: &Probe<'_>) -> R<(crate::other::Other, OwnedFd)> {
    let other = probe.other()?;
    probe.driver.start(0)?;
    let block = other.number(&format!("create {PAGE}"))?;
    let address = other.number(&format!("map {block} {PAGE}"))?;
    other.ask(&format!("fill {address} 7 {PAGE}"))?;
    let fd = other.fd(&format!("export-fd {block}"))?;
    Ok((other, fd))
}

pub(super) fn import_by_value(probe: &Probe<'_>) -> R<String> {
    let (_other, fd) = foreign(probe)?;
    let block = probe.driver.import_fd(fd.as_raw_fd())?;
    drop(fd);
    let address = probe.driver.map(block, PAGE, 3)?;
    let mut prop = AllocationProp { handle_types: 77, ..Driver::prop(0) };
    probe.driver.mem_properties(&raw mut prop, block)?;
    Ok(format!("reads {}, handle types {}", probe.driver.byte(address)?, prop.handle_types))
}

pub(super) fn import_by_pointer(probe: &Probe<'_>) -> R<String> {
    let (_other, fd) = foreign(probe)?;
    let (mut number, mut block) = (fd.as_raw_fd(), 0);
    Ok(status(probe.driver.mem_import(&raw mut block, (&raw mut number).cast(), 1)))
}

pub(super) fn import_of_something_else(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let file = std::fs::File::open("/proc/self/stat").map_err(|error| error.to_string())?;
    Ok(status(probe.driver.import_fd(file.as_raw_fd())))
}

pub(super) fn import_own(probe: &Probe<'_>) -> R<String> {
    let (block, address) = mapped(probe, 3)?;
    probe.driver.fill(address, 4, PAGE)?;
    // SAFETY: the driver has just opened it for this process.
    let fd = unsafe { OwnedFd::from_raw_fd(probe.driver.export_fd(block)?) };
    let again = probe.driver.import_fd(fd.as_raw_fd())?;
    let second = probe.driver.map(again, PAGE, 3)?;
    Ok(format!("reads {}", probe.driver.byte(second)?))
}

pub(super) fn survives_the_exporters_death(probe: &Probe<'_>) -> R<String> {
    let (mut other, fd) = foreign(probe)?;
    other.kill();
    let address = probe.driver.map(probe.driver.import_fd(fd.as_raw_fd())?, PAGE, 3)?;
    Ok(format!("reads {}", probe.driver.byte(address)?))
}

pub(super) fn export_an_imported_one(probe: &Probe<'_>) -> R<String> {
    let (_other, fd) = foreign(probe)?;
    let block = probe.driver.import_fd(fd.as_raw_fd())?;
    Ok(status(probe.driver.export_fd(block)))
}

pub(super) fn fabric(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    Ok(status(probe.driver.create(PAGE, 8)))
}

pub(super) fn range_without_access(probe: &Probe<'_>) -> R<String> {
    let (_, address) = mapped(probe, 0)?;
    Ok(status(probe.driver.range(address)))
}

pub(super) fn map_a_part_of_a_block(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let (block, space) = (probe.driver.create(2 * PAGE, 1)?, probe.driver.reserve(2 * PAGE)?);
    let from_the_start = status(probe.driver.mem_map(space, PAGE, 0, block, 0));
    Ok(format!(
        "{from_the_start}, with an offset: {}",
        status(probe.driver.mem_map(space, PAGE, PAGE, block, 0))
    ))
}

pub(super) fn import_a_pool(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let fd = probe.driver.pool_fd(probe.driver.pool(1)?)?;
    Ok(status(probe.driver.import_fd(fd)))
}

pub(super) fn unmap_while_a_stream_waits(probe: &Probe<'_>) -> R<String> {
    let (_, address) = mapped(probe, 3)?;
    let (mut context, (_, word)) = (0, probe.busy_stream()?);
    probe.driver.ctx_get_current(&raw mut context)?;
    probe.waits(context, word, |driver| driver.mem_unmap(address, PAGE))
}

pub(super) fn fabric_of_another_process(probe: &Probe<'_>) -> R<String> {
    let other = probe.other()?;
    probe.driver.start(0)?;
    let block = other.number(&format!("create-fabric {PAGE}"))?;
    let address = other.number(&format!("map {block} {PAGE}"))?;
    other.ask(&format!("fill {address} 7 {PAGE}"))?;
    let imported = probe.driver.import_fabric(other.handle(&format!("export-fabric {block}"))?)?;
    Ok(format!("reads {}", probe.driver.byte(probe.driver.map(imported, PAGE, 3)?)?))
}

pub(super) fn fabric_of_nonsense(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    Ok(status(probe.driver.import_fabric(crate::driver::Handle([7; 64]))))
}
