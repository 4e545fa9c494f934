//! Calls during the capture of a stream.

use super::{LARGE, Probe, SMALL, status};
use crate::driver::R;

const GLOBAL: i32 = 0;
const RELAXED: i32 = 2;

/// Returns a stream that is being captured in global mode.
fn capturing(probe: &Probe<'_>) -> R<u64> {
    probe.driver.start(0)?;
    let stream = probe.driver.stream()?;
    probe.driver.stream_begin_capture(stream, GLOBAL)?;
    Ok(stream)
}

fn end(probe: &Probe<'_>, stream: u64) -> String {
    let mut graph = 0;
    status(probe.driver.stream_end_capture(stream, &raw mut graph))
}

pub(super) fn synchronize_ends_it(probe: &Probe<'_>) -> R<String> {
    let stream = capturing(probe)?;
    let call = status(probe.driver.stream_synchronize(stream));
    Ok(format!("{call}, end: {}", end(probe, stream)))
}

pub(super) fn allocate_ends_it(probe: &Probe<'_>) -> R<String> {
    let stream = capturing(probe)?;
    let call = status(probe.driver.alloc(LARGE));
    Ok(format!("{call}, end: {}", end(probe, stream)))
}

pub(super) fn allocate_when_relaxed(probe: &Probe<'_>) -> R<String> {
    let stream = capturing(probe)?;
    let mut mode = RELAXED;
    probe.driver.thread_exchange_capture_mode(&raw mut mode)?;
    let call = status(probe.driver.alloc(LARGE));
    Ok(format!("the mode before: {mode}, {call}, end: {}", end(probe, stream)))
}

pub(super) fn nothing_wrong(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let (block, stream) = (probe.driver.alloc(SMALL)?, probe.driver.stream()?);
    probe.driver.fill(block, 1, SMALL)?;
    probe.driver.stream_begin_capture(stream, GLOBAL)?;
    let call = status(probe.driver.memset_d8_async(block, 2, SMALL, stream));
    let ended = end(probe, stream);
    Ok(format!("{call}, end: {ended}, the bytes are still {}", probe.driver.byte(block)?))
}

pub(super) fn states(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let stream = probe.driver.stream()?;
    let state = || {
        let mut state = -1;
        probe.driver.stream_is_capturing(stream, &raw mut state).map(|()| state.to_string())
    };
    let before = state()?;
    probe.driver.stream_begin_capture(stream, GLOBAL)?;
    let during = state()?;
    let _ = probe.driver.stream_synchronize(stream);
    let spoilt = state()?;
    let _ = end(probe, stream);
    Ok(format!("{before}, {during}, {spoilt}, {}", state()?))
}

pub(super) fn wait_for_an_outside_event(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let (event, outside) = (probe.driver.event(2)?, probe.driver.stream()?);
    probe.driver.event_record(event, outside)?;
    let stream = capturing(probe)?;
    let call = status(probe.driver.stream_wait_event(stream, event, 0));
    Ok(format!("{call}, end: {}", end(probe, stream)))
}

pub(super) fn record_a_shared_event(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let event = probe.driver.event(6)?;
    let stream = capturing(probe)?;
    let call = status(probe.driver.event_record(event, stream));
    Ok(format!("{call}, end: {}", end(probe, stream)))
}

pub(super) fn write_a_word(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let word = probe.driver.alloc(SMALL)?;
    let stream = capturing(probe)?;
    let call = status(probe.driver.stream_write_value(stream, word, 1, 0));
    Ok(format!("{call}, end: {}", end(probe, stream)))
}

pub(super) fn query_an_event(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let event = probe.driver.event(2)?;
    let stream = capturing(probe)?;
    let call = status(probe.driver.event_query(event));
    Ok(format!("{call}, end: {}", end(probe, stream)))
}

pub(super) fn open_memory(probe: &Probe<'_>) -> R<String> {
    let other = probe.other()?;
    let block = other.number(&format!("alloc {LARGE}"))?;
    let handle = other.handle(&format!("export {block}"))?;
    let stream = capturing(probe)?;
    let call = status(probe.driver.open(handle));
    Ok(format!("{call}, end: {}", end(probe, stream)))
}

pub(super) fn close_memory(probe: &Probe<'_>) -> R<String> {
    let other = probe.other()?;
    probe.driver.start(0)?;
    let block = other.number(&format!("alloc {LARGE}"))?;
    let opened = probe.driver.open(other.handle(&format!("export {block}"))?)?;
    let stream = capturing(probe)?;
    let call = status(probe.driver.ipc_close_mem_handle(opened));
    Ok(format!("{call}, end: {}", end(probe, stream)))
}

pub(super) fn open_an_event(probe: &Probe<'_>) -> R<String> {
    let other = probe.other()?;
    let event = other.number("event")?;
    let handle = other.handle(&format!("export-event {event}"))?;
    let stream = capturing(probe)?;
    let call = status(probe.driver.open_event(handle));
    Ok(format!("{call}, end: {}", end(probe, stream)))
}

pub(super) fn query_a_captured_event(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let event = probe.driver.event(2)?;
    let stream = capturing(probe)?;
    probe.driver.event_record(event, stream)?;
    let mut mode = RELAXED;
    probe.driver.thread_exchange_capture_mode(&raw mut mode)?;
    let call = status(probe.driver.event_query(event));
    Ok(format!("{call}, end: {}", end(probe, stream)))
}

pub(super) fn wait_for_one_never_recorded(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let event = probe.driver.event(2)?;
    let stream = capturing(probe)?;
    let call = status(probe.driver.stream_wait_event(stream, event, 0));
    Ok(format!("{call}, end: {}", end(probe, stream)))
}

pub(super) fn synchronize_the_context_when_relaxed(probe: &Probe<'_>) -> R<String> {
    let stream = capturing(probe)?;
    let mut mode = RELAXED;
    probe.driver.thread_exchange_capture_mode(&raw mut mode)?;
    let call = status(probe.driver.ctx_synchronize());
    Ok(format!("{call}, end: {}", end(probe, stream)))
}

pub(super) fn state_of_the_default_stream(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let mut said = Vec::new();
    for flags in [0, 1] {
        let (mut stream, mut state) = (0, -1);
        probe.driver.stream_create(&raw mut stream, flags)?;
        probe.driver.stream_begin_capture(stream, GLOBAL)?;
        let asked = status(probe.driver.stream_is_capturing(0, &raw mut state));
        said.push(format!("{asked}, end: {}", end(probe, stream)));
    }
    Ok(format!("blocking: {}, non-blocking: {}", said[0], said[1]))
}
