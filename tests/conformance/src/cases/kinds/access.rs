//! Read-only memory of each kind.

use std::sync::Arc;

use device_ipc_core::Access;

use crate::agent::{Command, Opening, Place};
use crate::check::{equal, refused, same, that};
use crate::flows::{Memory, OLD, SOON, float_bytes, for_each_kind, nobody_holds};
use crate::{Context, Outcome, Stop, fail};

/// Where a kind can be mapped read-only, it is: a share that is read-only, and an open that asks for less than it may.
/// Views for writing are refused, and what writes all the same changes nothing.
pub fn read_only_is_kept(context: &Context) -> Outcome {
    context.kind_that(|kind| kind.read_only, "no kind of handle can be mapped read-only")?;
    for_each_kind(context, |kind| {
        if !kind.read_only {
            return Ok(());
        }
        // One for each, as a device that was made to write may be of no use afterwards.
        for shared in [Access::ReadOnly, Access::ReadWrite] {
            let mut importer = context.agent()?;
            let memory = Memory::of_kind(context, kind.kind, &float_bytes(&[OLD; 16]))?;
            let share = memory.ipc.share(Arc::clone(&memory.buffer)).access(shared).start()?;
            let opening = Opening::new(share.descriptor(), Place::Home).access(Access::ReadOnly);
            let mapped = importer.try_open("m", opening)?.map_err(|refusal| Stop::failed(refusal.text))?;
            equal(
                mapped.access,
                Access::ReadOnly,
                format!("the access of a mapping of what is shared {shared}"),
            )?;
            same(&importer.floats("m")?, &[OLD; 16], "the floats of a read-only mapping")?;
            let add = importer.request(&Command::Add { name: "m".into(), value: 1.0 })?;
            refused(
                add.result,
                "a view for writing",
                "AccessDenied",
                &["read-only", "read-write access denied"],
            )?;
            let fill = importer.request(&Command::FillUnchecked { name: "m".into(), byte: 0xee })?;
            that(fill.result.is_err(), "a write to a read-only mapping should be an error of the device")?;
            same(&memory.floats()?, &[OLD; 16], "the floats after a write to a read-only mapping")?;
            // The exporter writes as before, and so do importers with write access.
            memory.add(1.0)?;
            if shared.is_writable() {
                let mut writer = context.agent()?;
                memory.stream.synchronize()?;
                writer.open("m", share.descriptor(), Place::Home)?;
                writer.add("m", 1.0)?;
                writer.synchronize(0)?;
                same(&memory.floats()?, &[OLD + 2.0; 16], "the floats that another importer may write")?;
            }
        }
        Ok(())
    })
}

/// The two accesses of one export are two mappings in one process: what is written through the one is read through the
/// other.
pub fn both_accesses_at_once(context: &Context) -> Outcome {
    context.kind_that(|kind| kind.read_only, "no kind of handle can be mapped read-only")?;
    let mut importer = context.agent()?;
    for_each_kind(context, |kind| {
        if !kind.read_only {
            return Ok(());
        }
        let memory = Memory::of_kind(context, kind.kind, &float_bytes(&[OLD; 256]))?;
        let share = memory.share()?;
        importer.open("writes", share.descriptor(), Place::Home)?;
        let reading = Opening::new(share.descriptor(), Place::Home).access(Access::ReadOnly);
        importer.try_open("reads", reading)?.map_err(|refusal| Stop::failed(refusal.text))?;
        importer.add("writes", 1.0)?;
        same(&importer.floats("reads")?, &[OLD + 1.0; 256], "the floats of the mapping that reads")?;
        importer.drop_mapping("writes")?;
        same(&importer.floats("reads")?, &[OLD + 1.0; 256], "the same once the other mapping has gone")?;
        importer.drop_mapping("reads")?;
        Ok(share.close(SOON)?)
    })
}

/// Where a kind cannot be mapped read-only, that is not pretended: the share is refused, and so is an open that asks for
/// less than it would get. Both name the kind and say what to do.
pub fn read_only_is_not_pretended(context: &Context) -> Outcome {
    context.kind_that(|kind| !kind.read_only, "every kind of handle can be mapped read-only")?;
    let mut importer = context.agent()?;
    for_each_kind(context, |kind| {
        if kind.read_only {
            return Ok(());
        }
        let memory = Memory::of_kind(context, kind.kind, &float_bytes(&[OLD; 16]))?;
        let shared = memory.ipc.share(Arc::clone(&memory.buffer)).access(Access::ReadOnly).start();
        let owner = match shared {
            Ok(_) => return fail("memory that cannot be mapped read-only was shared so"),
            Err(failed) => {
                let phrases = [kind.name, "read-write", "read_only_importers"];
                refused(Err::<(), _>(failed.error()), "sharing it read-only", "Unsupported", &phrases)?;
                failed.into_inner()
            }
        };
        equal(owner.range(), memory.buffer.range(), "the range of the owner that came back")?;
        let share = memory.share()?;
        let reading = Opening::new(share.descriptor(), Place::Home).access(Access::ReadOnly);
        refused(importer.try_open("m", reading)?, "opening it read-only", "Unsupported", &["read-only"])?;
        nobody_holds(&share, "the refusal")?;
        importer.open("m", share.descriptor(), Place::Home)?;
        same(&importer.floats("m")?, &[OLD; 16], "the floats of a mapping for writing, after the refusal")?;
        importer.drop_mapping("m")?;
        Ok(share.close(SOON)?)
    })
}
