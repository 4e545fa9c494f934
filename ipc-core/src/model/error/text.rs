//! Texts of errors that depend on more than one field.

use std::time::Duration;

use crate::model::availability::BackendStatus;
use crate::model::device::DeviceIdentity;
use crate::model::error::Remedy;
use crate::model::lease::Holders;

pub(super) fn not_opened(after: Duration, opened: u64, expected: u64) -> String {
    let after = after.as_millis();
    let failed = match opened {
        0 => format!("no process has opened the export within {after} ms"),
        _ => format!("the export was opened {opened} of {expected} times within {after} ms"),
    };
    format!("{failed}; check that the importers received the descriptor and open it, or drop the export")
}

pub(super) fn not_released(after: Duration, holders: &Holders) -> String {
    let after = after.as_millis();
    if holders.iter().len() == 0 {
        let times = holders.opened();
        return format!(
            "the export was not released within {after} ms, though no process holds it now (opened {times} times); wait again"
        );
    }
    format!("after {after} ms the export is still held: {holders}")
}

pub(super) fn holders_died(holders: &Holders) -> String {
    let died: Vec<_> =
        holders.died().map(|holder| format!("process {} ({})", holder.pid, holder.program)).collect();
    format!(
        "the export is released, but {} died while using it: device work that was to write the memory may be incomplete; \
         write it again, or discard it",
        died.join(", ")
    )
}

pub(super) fn no_entry(home: &DeviceIdentity, peer: Option<&str>) -> String {
    let remedy = Remedy::InsertIntoDeviceMap;
    match peer {
        None => format!("the device map has no entry for device {home}; {remedy}"),
        Some(peer) => format!(
            "the device map of the channel with {peer} has no entry for device {home}; {remedy} to \
             the map that is given to device_map where the channel is made"
        ),
    }
}

pub(super) fn list(statuses: &[BackendStatus]) -> String {
    if statuses.is_empty() {
        return format!(" none is compiled in; {}", Remedy::EnableAnyBackend);
    }
    statuses.iter().map(|status| format!("\n  {status}")).collect()
}
/// Returns the remedy for a descriptor of another host.
pub(super) fn other_host_remedy(listens: bool) -> String {
    if listens {
        format!("; {}", Remedy::CopyOverNetwork)
    } else {
        format!(". A copy over the network needs the address of the exporter: {}", Remedy::ListenForRemote)
    }
}

/// Returns the remedy for a system call that failed by the limit on open files, or an empty text.
pub(super) fn open_files_remedy(cause: &std::io::Error) -> &'static str {
    let numbers = [rustix::io::Errno::MFILE, rustix::io::Errno::NFILE].map(rustix::io::Errno::raw_os_error);
    match cause.raw_os_error() {
        Some(number) if numbers.contains(&number) => "; raise the limit on open files (ulimit -n)",
        _ => "",
    }
}
