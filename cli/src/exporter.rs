//! The process that a descriptor names, asked by its socket; nothing is opened.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use device_ipc::{AllowList, ListedExport, ListedProcess, ProcessIdentity, list_exports};

use crate::road::descriptor::AnyDescriptor;

/// How long it may take to answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// What has become of the exporting process.
pub(crate) enum Exporter {
    Answers(ListedProcess),
    /// It lives, and does not answer.
    Silent,
    /// It has ended; or it is another user's, or in other namespaces, where it cannot be seen from here.
    Unseen,
}

pub(crate) fn find(descriptor: &AnyDescriptor) -> Result<Exporter> {
    let view = descriptor.view()?;
    let exporter =
        if let AnyDescriptor::Ring(_) = descriptor { &view["memory"]["exporter"] } else { &view["exporter"] };
    // An abstract socket is found without a directory.
    let socket = exporter["socket"].as_str().filter(|socket| socket.starts_with('/'));
    let directory =
        socket.and_then(|socket| Path::new(socket).parent()).filter(|directory| directory.is_dir());
    let listed = list_exports(directory, &AllowList::own_user(), PATIENCE)?;
    let answers = listed.into_iter().flatten().find(|process| process.process == *descriptor.exporter());
    Ok(match answers {
        Some(process) => Exporter::Answers(process),
        None if is_alive(descriptor.exporter()) => Exporter::Silent,
        None => Exporter::Unseen,
    })
}

/// Is it a process of this pid namespace that has not ended? Its id may have been given to another one since.
fn is_alive(process: &ProcessIdentity) -> bool {
    let here = ProcessIdentity::current()
        .is_ok_and(|here| here.boot == process.boot && here.pid_namespace == process.pid_namespace);
    let stat = || std::fs::read_to_string(format!("/proc/{}/stat", process.pid)).ok();
    here && stat().and_then(|stat| start_time(&stat)) == Some(process.start_time)
}

/// Field 22 (proc_pid_stat(5)); the name in field 2 may hold blanks and parentheses.
fn start_time(stat: &str) -> Option<u64> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// Each export that the descriptor names, as its process lists it; `None` for one that is no longer there.
pub(crate) fn exports<'p>(
    process: &'p ListedProcess,
    descriptor: &AnyDescriptor,
) -> Vec<Option<&'p ListedExport>> {
    let named = match descriptor {
        AnyDescriptor::Export(descriptor) => vec![descriptor.export()],
        AnyDescriptor::Bundle(bundle) => bundle.exports().collect(),
        AnyDescriptor::Ring(ring) => vec![ring.export()],
    };
    let listed = |number| process.exports.iter().find(|export| export.export == number);
    named.into_iter().map(listed).collect()
}
