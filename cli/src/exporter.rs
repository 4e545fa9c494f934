//! Queries to the exporter that a descriptor names, over its socket; nothing is opened.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use device_ipc::front_end::{ListedExport, ListedProcess, list_exports};
use device_ipc::{AllowList, ProcessIdentity};

use crate::transport::descriptor::AnyDescriptor;

/// Timeout of a query.
const TIMEOUT: Duration = Duration::from_secs(2);

/// State of an exporter.
pub(crate) enum ExporterState {
    Answered(ListedProcess),
    /// The process is alive and does not answer.
    Unresponsive,
    /// The process has exited, belongs to another user, or is in namespaces that are not visible here.
    NotFound,
}

/// Returns the state of the exporter that the descriptor names.
pub(crate) fn find(descriptor: &AnyDescriptor, allow: &AllowList) -> Result<ExporterState> {
    let view = descriptor.view()?;
    // An abstract socket needs no directory.
    let socket = view["exporter"]["socket"].as_str().filter(|socket| socket.starts_with('/'));
    let directory =
        socket.and_then(|socket| Path::new(socket).parent()).filter(|directory| directory.is_dir());
    let listed = list_exports(directory, allow, TIMEOUT)?;
    let answered = listed.into_iter().flatten().find(|process| process.process == *descriptor.exporter());
    Ok(match answered {
        Some(process) => ExporterState::Answered(process),
        None if is_alive(descriptor.exporter()) => ExporterState::Unresponsive,
        None => ExporterState::NotFound,
    })
}

/// Returns whether the process is in this pid namespace and alive. The start time detects a reused process id.
fn is_alive(process: &ProcessIdentity) -> bool {
    let here = ProcessIdentity::current()
        .is_ok_and(|here| here.boot == process.boot && here.pid_namespace == process.pid_namespace);
    let stat = || std::fs::read_to_string(format!("/proc/{}/stat", process.pid)).ok();
    here && stat().and_then(|stat| start_time(&stat)) == Some(process.start_time)
}

/// Parses field 22 of proc_pid_stat(5); the name in field 2 may contain blanks and parentheses.
fn start_time(stat: &str) -> Option<u64> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// Returns each export that the descriptor names, as its process lists it; `None` for an export that no longer exists.
pub(crate) fn exports<'p>(
    process: &'p ListedProcess,
    descriptor: &AnyDescriptor,
) -> Vec<Option<&'p ListedExport>> {
    let listed = |id| process.exports.iter().find(|export| export.export == id);
    descriptor.descriptor().exports().map(listed).collect()
}
