//! Texts of errors that depend on more than one field.

use std::time::Duration;

use crate::model::availability::BackendStatus;
use crate::model::device::DeviceIdentity;
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
    match peer {
        None => format!("the device map has no entry for device {home}; add one with DeviceMap::insert"),
        Some(peer) => format!(
            "the device map of the channel with {peer} has no entry for device {home}; add one with DeviceMap::insert to \
             the map that is given to device_map where the channel is made"
        ),
    }
}

pub(super) fn list(statuses: &[BackendStatus]) -> String {
    if statuses.is_empty() {
        return " none is compiled in; enable a feature (cuda, ascend, mock) or register one".into();
    }
    statuses.iter().map(|status| format!("\n  {status}")).collect()
}
/// Returns the remedy for a descriptor of another host.
pub(super) const fn other_host_remedy(listens: bool) -> &'static str {
    if listens {
        "; copy it over the network (OpenBuilder::or_pulled, on an Ipc with IpcBuilder::remote)"
    } else {
        ". A copy over the network needs the address of the exporter, whose Ipc does not listen (IpcBuilder::remote, Remote::listen)"
    }
}
