//! Streams, and words that they write and wait for.

use super::memory::{first_page, own_pages};
use super::{Probe, SMALL, status, yes};
use crate::driver::R;

/// Returns a word of value 0.
fn word(probe: &Probe<'_>) -> R<u64> {
    let word = probe.driver.alloc(SMALL)?;
    probe.driver.fill(word, 0, SMALL)?;
    Ok(word)
}

pub(super) fn word_is_written_and_awaited(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let (stream, word) = probe.busy_stream()?;
    let before = status(probe.driver.stream_query(stream));
    word.set(1);
    Ok(format!("before: {before}, after: {}", status(probe.driver.stream_synchronize(stream))))
}

pub(super) fn wait_is_cyclic(probe: &Probe<'_>) -> R<String> {
    let driver = probe.driver;
    driver.start(0)?;
    let (word, stream) = (word(probe)?, driver.stream()?);
    // 2^64 - 1 is one before 0, so 0 satisfies the wait.
    driver.stream_wait_value(stream, word, u64::MAX, 0)?;
    Ok(format!("0 for 2^64 - 1: {}", status(driver.stream_synchronize(stream))))
}

pub(super) fn word_misaligned(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let (word, stream) = (word(probe)?, probe.driver.stream()?);
    Ok(status(probe.driver.stream_write_value(stream, word + 4, 1, 0)))
}

pub(super) fn word_in_no_memory(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let stream = probe.driver.stream()?;
    Ok(status(probe.driver.stream_write_value(stream, 4096, 1, 0)))
}

pub(super) fn word_in_registered_memory(probe: &Probe<'_>) -> R<String> {
    let driver = probe.driver;
    driver.start(0)?;
    let pages = own_pages();
    let (at, stream) = (first_page(&pages), driver.stream()?);
    driver.mem_host_register(at, SMALL, 0)?;
    let write = status(driver.stream_write_value(stream, at, 5, 0));
    let wait = status(driver.stream_wait_value(stream, at, 5, 0));
    driver.stream_synchronize(stream)?;
    driver.mem_host_unregister(at)?;
    let index = (at - pages.as_ptr() as u64) as usize / 8;
    // SAFETY: within the pages, which the device does not use any more.
    let seen = unsafe { pages.as_ptr().add(index).read_volatile() };
    Ok(format!("write: {write}, wait: {wait}, the host sees {seen}"))
}

pub(super) fn large_value_frees_a_waiting_stream(probe: &Probe<'_>) -> R<String> {
    let driver = probe.driver;
    driver.start(0)?;
    let (word, stream, writer) = (word(probe)?, driver.stream()?, driver.stream()?);
    driver.stream_wait_value(stream, word, 1000, 0)?;
    driver.stream_write_value(writer, word, 1 << 62, 0)?;
    Ok(status(driver.stream_synchronize(stream)))
}

pub(super) fn word_of_another_process(probe: &Probe<'_>) -> R<String> {
    let (driver, other) = (probe.driver, probe.other()?);
    driver.start(0)?;
    let block = other.number(&format!("alloc {SMALL}"))?;
    other.ask(&format!("fill {block} 0 {SMALL}"))?;
    let opened = driver.open(other.handle(&format!("export {block}"))?)?;
    let (stream, theirs) = (driver.stream()?, other.number("stream")?);
    driver.stream_wait_value(stream, opened, 7, 0)?;
    let before = status(driver.stream_query(stream));
    other.ask(&format!("write-value {theirs} {block} 7"))?;
    Ok(format!("before: {before}, after: {}", status(driver.stream_synchronize(stream))))
}

pub(super) fn query_busy(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let (stream, _) = probe.busy_stream()?;
    Ok(status(probe.driver.stream_query(stream)))
}

pub(super) fn destroyed_with_work_left(probe: &Probe<'_>) -> R<String> {
    let driver = probe.driver;
    driver.start(0)?;
    let block = driver.alloc(SMALL)?;
    driver.fill(block, 0, SMALL)?;
    let (stream, word) = probe.busy_stream()?;
    driver.memset_d8_async(block, 5, SMALL, stream)?;
    let destroy = status(driver.stream_destroy(stream));
    word.set(1);
    driver.ctx_synchronize()?;
    Ok(format!("{destroy}, its work is done: {}", yes(driver.byte(block)? == 5)))
}

pub(super) fn context_of(probe: &Probe<'_>) -> R<String> {
    let context = probe.driver.start(0)?;
    let (stream, mut own, mut default) = (probe.driver.stream()?, 0, 0);
    probe.driver.stream_get_ctx(stream, &raw mut own)?;
    probe.driver.stream_get_ctx(0, &raw mut default)?;
    Ok(format!("{}, of the default stream: {}", yes(own == context), yes(default == context)))
}
