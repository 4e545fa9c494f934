//! Holders of bundles, and the death of either side.

use std::sync::mpsc::channel;

use device_ipc_core::{HolderPolicy, counters};

use crate::agent::{Command, Place};
use crate::check::{equal, refused, that};
use crate::flows::{Memory, SOON, Witness, happens_soon, pattern};
use crate::{Context, Outcome, unchecked};
use super::{SHORT, bytes_of_shape, three_tensors, whole};

/// The error names the holders of a bundle, and the owners are kept until the last release.
pub fn holders_are_named_and_waited_for(context: &Context) -> Outcome {
    let memory = Memory::with_bytes(context, 0, &pattern(4096))?;
    let (witness, dropped) = Witness::of(&memory);
    let mut bundle = memory.ipc.tensors();
    let owner = unchecked::owned(witness, memory.buffer_region(context));
    bundle.owned("w", owner, Some(bytes_of_shape(&[64, 64])?))?;
    let export = memory.ipc.share_all(bundle).start()?;
    equal(export.holders().opened(), 0, "how often it has been opened")?;
    refused(export.wait_released(SHORT), "no open so far", "NotOpened", &["no process has opened the export"])?;
    let mut importer = context.agent()?;
    importer.open("b", export.descriptor(), Place::Stream(0))?;
    let id = importer.peer().id().to_string();
    refused(export.wait_released(SHORT), "it is open", "StillHeld", &[&id, "4096 bytes"])?;
    refused(export.close_with(SHORT, HolderPolicy::Keep), "closing what is held", "StillHeld", &[&id, "4096 bytes"])?;
    that(dropped.recv_timeout(SHORT).is_err(), "the owner is kept for the importer")?;
    importer.must(&Command::Release { name: "b".into(), device: Some(0) })?;
    that(dropped.recv_timeout(SOON).is_ok(), "the owner should go after the last importer")
}

/// The death of an importer ends its leases.
pub fn importer_killed(context: &Context) -> Outcome {
    let memory = Memory::with_bytes(context, 0, &pattern(4096))?;
    let export = whole(&memory.ipc, &memory)?;
    let mut importer = context.agent()?;
    importer.open("b", export.descriptor(), Place::Home)?;
    equal(export.holders().iter().len(), 1, "the number of holders")?;
    importer.kill()?;
    refused(export.wait_released(SOON), "waiting for an importer that was killed", "HolderDied", &["died"])?;
    Ok(export.close(SOON)?)
}

/// An importer is notified of the exporter's exit, once, and opens nothing of it any longer.
pub fn exporter_killed(context: &Context) -> Outcome {
    let (exporter, descriptor) = three_tensors(context)?;
    let ipc = context.ipc();
    let mapping = ipc.open(&descriptor).at_home()?;
    let (sender, gone) = channel();
    mapping.on_gone(move |error| drop(sender.send(error.to_string())));
    exporter.kill()?;
    let told = gone.recv_timeout(SOON);
    that(told.is_ok_and(|told| told.contains("has terminated")), "on_gone should be told that the exporter has terminated")?;
    refused(ipc.open(&descriptor).at_home(), "a dead exporter's bundle", "ExporterGone", &["has terminated"])?;
    drop(mapping);
    happens_soon("the close of what was open", || Ok(counters().mapped_bytes == 0))
}
