//! Processes in separate namespaces, as in containers. Skipped where `unshare` is not permitted.

use std::os::fd::AsFd;
use std::process::{Command, Stdio};

use super::events::is_opened_by;
use super::{LARGE, PAGE, Probe, status};
use crate::driver::R;
use crate::other::{Other, hex};

/// Starts a process with a separate `/dev/shm`.
const OWN_SHM: [&str; 5] =
    ["unshare", "--mount", "sh", "-c", "mount -t tmpfs none /dev/shm && exec \"$0\" \"$@\""];
/// Starts a process in a pid namespace with its `/proc`, as process 1.
const OWN_PIDS: [&str; 5] = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"];

/// Starts another process through other programs.
fn other(probe: &Probe<'_>, through: &[&str]) -> R<Other> {
    let mut test: Vec<&str> = through.to_vec();
    test.push("true");
    let made = Command::new(test[0]).args(&test[1..]).stdin(Stdio::null()).stderr(Stdio::null()).status();
    if !made.is_ok_and(|status| status.success()) {
        return Err("skipped: unshare is not permitted".to_owned());
    }
    Other::start_through(probe.library, through)
}

fn memory(probe: &Probe<'_>, other: &Other) -> R<String> {
    let block = probe.driver.alloc(LARGE)?;
    probe.driver.fill(block, 7, LARGE)?;
    let opened = other.ask(&format!("open {}", hex(probe.driver.handle(block)?)));
    Ok(match opened {
        Ok(address) => format!("reads {}", other.ask(&format!("byte {address}"))?),
        Err(status) => status,
    })
}

pub(super) fn memory_with_its_own_shm(probe: &Probe<'_>) -> R<String> {
    let other = other(probe, &OWN_SHM)?;
    probe.driver.start(0)?;
    memory(probe, &other)
}

pub(super) fn event_with_its_own_shm(probe: &Probe<'_>) -> R<String> {
    let other = other(probe, &OWN_SHM)?;
    probe.driver.start(0)?;
    is_opened_by(probe, &other)
}

pub(super) fn no_proc(probe: &Probe<'_>) -> R<String> {
    Ok(status(other(probe, &["unshare", "--pid", "--fork", "--kill-child"])))
}

pub(super) fn memory_with_another_pid(probe: &Probe<'_>) -> R<String> {
    let other = other(probe, &OWN_PIDS)?;
    probe.driver.start(0)?;
    memory(probe, &other)
}

pub(super) fn event_with_another_pid(probe: &Probe<'_>) -> R<String> {
    let other = other(probe, &OWN_PIDS)?;
    probe.driver.start(0)?;
    is_opened_by(probe, &other)
}

/// Starts two processes with the same pid in separate pid namespaces.
fn twins(probe: &Probe<'_>) -> R<(Other, Other)> {
    let pair = (other(probe, &OWN_PIDS)?, other(probe, &OWN_PIDS)?);
    if pair.0.ask("pid")? == pair.1.ask("pid")? { Ok(pair) } else { Err("skipped: other numbers".to_owned()) }
}

pub(super) fn memory_with_the_same_pid(probe: &Probe<'_>) -> R<String> {
    let (first, second) = twins(probe)?;
    let block = first.number(&format!("alloc {LARGE}"))?;
    let handle = first.ask(&format!("export {block}"))?;
    Ok(status(second.ask(&format!("open {handle}"))))
}

pub(super) fn event_with_the_same_pid(probe: &Probe<'_>) -> R<String> {
    let (first, second) = twins(probe)?;
    let event = first.number("event")?;
    let handle = first.ask(&format!("export-event {event}"))?;
    Ok(status(second.ask(&format!("open-event {handle}"))))
}

pub(super) fn virtual_memory_with_the_same_pid(probe: &Probe<'_>) -> R<String> {
    let (first, second) = twins(probe)?;
    let block = first.number(&format!("create {PAGE}"))?;
    let address = first.number(&format!("map {block} {PAGE}"))?;
    first.ask(&format!("fill {address} 7 {PAGE}"))?;
    let fd = first.fd(&format!("export-fd {block}"))?;
    let imported = second.ask_with("import-fd", Some(fd.as_fd()))?.0;
    let address = second.ask(&format!("map {imported} {PAGE}"))?;
    Ok(format!("reads {}", second.ask(&format!("byte {address}"))?))
}
