//! Shared events.

use std::time::{Duration, Instant};

use super::{BLOCKED, Probe, SMALL, status, yes};
use crate::driver::{Handle, R};
use crate::other::{Other, hex};

/// `CU_EVENT_DISABLE_TIMING`, and with it `CU_EVENT_INTERPROCESS`.
const ORDINARY: u32 = 2;
const SHARED: u32 = 6;

pub(super) fn with_timing(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    Ok(status(probe.driver.event(4)))
}

pub(super) fn export_of_an_ordinary_one(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let event = probe.driver.event(ORDINARY)?;
    Ok(status(probe.driver.event_handle(event)))
}

pub(super) fn open_own(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let event = probe.driver.event(SHARED)?;
    Ok(status(probe.driver.open_event(probe.driver.event_handle(event)?)))
}

pub(super) fn open_zeros(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    Ok(status(probe.driver.open_event(Handle([0; 64]))))
}

pub(super) fn open_destroyed(probe: &Probe<'_>) -> R<String> {
    let other = probe.other()?;
    probe.driver.start(0)?;
    let event = other.number("event")?;
    let handle = other.handle(&format!("export-event {event}"))?;
    other.ask(&format!("destroy-event {event}"))?;
    Ok(status(probe.driver.open_event(handle)))
}

pub(super) fn open_after_the_exporters_death(probe: &Probe<'_>) -> R<String> {
    let mut other = probe.other()?;
    probe.driver.start(0)?;
    let event = other.number("event")?;
    let handle = other.handle(&format!("export-event {event}"))?;
    other.kill();
    Ok(status(probe.driver.open_event(handle)))
}

pub(super) fn query_of_a_destroyed_one(probe: &Probe<'_>) -> R<String> {
    let other = probe.other()?;
    probe.driver.start(0)?;
    let event = other.number("event")?;
    let handle = other.handle(&format!("export-event {event}"))?;
    other.ask(&format!("destroy-event {event}"))?;
    queried(probe, handle)
}

pub(super) fn query_after_the_exporters_death(probe: &Probe<'_>) -> R<String> {
    let mut other = probe.other()?;
    probe.driver.start(0)?;
    let event = other.number("event")?;
    let handle = other.handle(&format!("export-event {event}"))?;
    other.kill();
    queried(probe, handle)
}

/// Records the other process's event behind a stream that waits. Returns the handle, and the command that releases
/// the stream.
fn pending(other: &Other, event: u64) -> R<(Handle, String)> {
    let handle = other.handle(&format!("export-event {event}"))?;
    let (word, stream) = (other.number(&format!("alloc {SMALL}"))?, other.number("stream")?);
    other.ask(&format!("fill {word} 0 {SMALL}"))?;
    other.ask(&format!("wait-value {stream} {word} 1"))?;
    other.ask(&format!("record {event} {stream}"))?;
    let writer = other.number("stream")?;
    Ok((handle, format!("write-value {writer} {word} 1")))
}

/// Returns the status of a query of the event that this handle opens.
fn queried(probe: &Probe<'_>, handle: Handle) -> R<String> {
    let opened = probe.driver.open_event(handle)?;
    let (query, stream) = (status(probe.driver.event_query(opened)), probe.driver.stream()?);
    let wait = status(probe.driver.stream_wait_event(stream, opened, 0));
    let end = Instant::now() + BLOCKED;
    let done = loop {
        match probe.driver.stream_query(stream) {
            Err(_) if Instant::now() < end => std::thread::sleep(Duration::from_millis(2)),
            done => break status(done),
        }
    };
    Ok(format!("{query}, a stream waits for it: {wait}, and then: {done}"))
}

pub(super) fn destroyed_while_pending(probe: &Probe<'_>) -> R<String> {
    let other = probe.other()?;
    probe.driver.start(0)?;
    let event = other.number("event")?;
    let (handle, go_on) = pending(&other, event)?;
    other.ask(&format!("destroy-event {event}"))?;
    let before = queried(probe, handle)?;
    other.ask(&go_on)?;
    Ok(before)
}

pub(super) fn dead_while_pending(probe: &Probe<'_>) -> R<String> {
    let mut other = probe.other()?;
    probe.driver.start(0)?;
    let event = other.number("event")?;
    let (handle, _) = pending(&other, event)?;
    other.kill();
    queried(probe, handle)
}

/// Returns whether the handle of a destroyed event names the event that was created after it.
pub(super) fn destroyed_with_a_successor(probe: &Probe<'_>) -> R<String> {
    let other = probe.other()?;
    probe.driver.start(0)?;
    let event = other.number("event")?;
    let handle = other.handle(&format!("export-event {event}"))?;
    other.ask(&format!("destroy-event {event}"))?;
    let next = other.number("event")?;
    let (_, go_on) = pending(&other, next)?;
    let before = queried(probe, handle)?;
    other.ask(&go_on)?;
    Ok(before)
}

pub(super) fn export_an_opened_one(probe: &Probe<'_>) -> R<String> {
    let other = probe.other()?;
    probe.driver.start(0)?;
    let event = other.number("event")?;
    let opened = probe.driver.open_event(other.handle(&format!("export-event {event}"))?)?;
    Ok(status(probe.driver.event_handle(opened)))
}

pub(super) fn never_recorded(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let event = probe.driver.event(SHARED)?;
    Ok(status(probe.driver.event_query(event)))
}

pub(super) fn record_on_another_context(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let event = probe.driver.event(ORDINARY)?;
    let mut context = 0;
    probe.driver.ctx_create(&raw mut context, 0, 0)?;
    let stream = probe.driver.stream()?;
    Ok(status(probe.driver.event_record(event, stream)))
}

pub(super) fn waits_for_the_exporter(probe: &Probe<'_>) -> R<String> {
    let (driver, other) = (probe.driver, probe.other()?);
    driver.start(0)?;
    let event = other.number("event")?;
    let opened = driver.open_event(other.handle(&format!("export-event {event}"))?)?;
    let (word, stream) = (other.number(&format!("alloc {SMALL}"))?, other.number("stream")?);
    other.ask(&format!("fill {word} 0 {SMALL}"))?;
    other.ask(&format!("wait-value {stream} {word} 1"))?;
    other.ask(&format!("record {event} {stream}"))?;
    let waiter = driver.stream()?;
    driver.stream_wait_event(waiter, opened, 0)?;
    let before =
        format!("{} and {}", status(driver.event_query(opened)), status(driver.stream_query(waiter)));
    let writer = other.number("stream")?;
    other.ask(&format!("write-value {writer} {word} 1"))?;
    Ok(format!("before: {before}, after: {}", status(driver.stream_synchronize(waiter))))
}

pub(super) fn record_is_seen_by_the_exporter(probe: &Probe<'_>) -> R<String> {
    let (driver, other) = (probe.driver, probe.other()?);
    driver.start(0)?;
    let event = other.number("event")?;
    let opened = driver.open_event(other.handle(&format!("export-event {event}"))?)?;
    let (stream, word) = probe.busy_stream()?;
    driver.event_record(opened, stream)?;
    let before = status(other.ask(&format!("query-event {event}")));
    word.set(1);
    driver.stream_synchronize(stream)?;
    Ok(format!("before: {before}, after: {}", status(other.ask(&format!("query-event {event}")))))
}

fn on_another_device(probe: &Probe<'_>, flags: u32) -> R<String> {
    probe.two_devices()?;
    probe.driver.start(0)?;
    let (event, stream) = (probe.driver.event(flags)?, probe.driver.stream()?);
    probe.driver.event_record(event, stream)?;
    probe.driver.start(1)?;
    let waiter = probe.driver.stream()?;
    let wait = status(probe.driver.stream_wait_event(waiter, event, 0));
    Ok(format!("{wait}, {}", status(probe.driver.stream_synchronize(waiter))))
}

pub(super) fn ordinary_one_on_another_device(probe: &Probe<'_>) -> R<String> {
    on_another_device(probe, ORDINARY)
}

pub(super) fn shared_one_on_another_device(probe: &Probe<'_>) -> R<String> {
    on_another_device(probe, SHARED)
}

/// Returns whether another process opens an event of this one.
pub(super) fn is_opened_by(probe: &Probe<'_>, other: &Other) -> R<String> {
    let event = probe.driver.event(SHARED)?;
    let handle = probe.driver.event_handle(event)?;
    let opened = other.ask(&format!("open-event {}", hex(handle)));
    Ok(format!("open: {}", status(opened.map(|text| yes(!text.is_empty())))))
}

pub(super) fn shared_one_in_another_context(probe: &Probe<'_>) -> R<String> {
    probe.driver.start(0)?;
    let event = probe.driver.event(SHARED)?;
    let mut context = 0;
    probe.driver.ctx_create(&raw mut context, 0, 0)?;
    let waiter = probe.driver.stream()?;
    Ok(status(probe.driver.stream_wait_event(waiter, event, 0)))
}
