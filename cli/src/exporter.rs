//! The process that a descriptor names, asked by its socket; nothing is opened.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use device_ipc::{AllowList, Descriptor, ListedExport, ListedProcess, list_exports};
use serde_json::Value;

/// How long it may take to answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// The exporting process, if it lives and answers.
pub(crate) fn find(descriptor: &Descriptor) -> Result<Option<ListedProcess>> {
    let view = serde_json::to_value(descriptor.view())?;
    // An abstract socket is found without a directory.
    let socket = view["exporter"]["socket"].as_str().filter(|socket| socket.starts_with('/'));
    let directory =
        socket.and_then(|socket| Path::new(socket).parent()).filter(|directory| directory.is_dir());
    let listed = list_exports(directory, &AllowList::own_user(), PATIENCE)?;
    Ok(listed.into_iter().flatten().find(|process| process.process == *descriptor.exporter()))
}

/// The export that the descriptor names, as its process lists it.
pub(crate) fn export<'p>(
    process: &'p ListedProcess,
    descriptor: &Descriptor,
) -> Result<Option<&'p ListedExport>> {
    let view = serde_json::to_value(descriptor.view())?;
    let is_it = |export: &&ListedExport| {
        serde_json::to_value(export.export).is_ok_and(|number: Value| number == view["exporter"]["export"])
    };
    Ok(process.exports.iter().find(is_it))
}
