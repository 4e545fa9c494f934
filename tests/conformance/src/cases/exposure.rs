//! Exposure: importers can reach bytes beside the region. It is reported, refused, or avoided by a copy.

use std::sync::Arc;

use device_ipc_core::backend::HandleKindInfo;
use device_ipc_core::{Buffer, DeviceOwner, DeviceRange, ExposurePolicy, Exposure, Region, RecoverableError, counters};

use crate::agent::{Agent, Command, Place};
use crate::check::{equal, refused, same, that};
use crate::flows::{Memory, OLD, SOON, Witness, float_bytes, pattern};
use crate::gate::Gate;
use crate::{Context, Outcome, fail, skip, unchecked};

const NONE_ISOLATED: &str = "no kind of handle is isolated";

fn isolated(kind: &HandleKindInfo) -> bool {
    kind.isolated
}

/// The reason of a refused share, after the owner was returned unchanged.
#[track_caller]
fn owner_comes_back<O: DeviceOwner, T>(
    result: Result<T, RecoverableError<O>>,
    region: DeviceRange,
    kind: &str,
    phrases: &[&str],
) -> Outcome {
    let Err(failed) = result else {
        return fail(format!("a share that should be refused with {kind} succeeded"));
    };
    refused(Err::<(), _>(failed.error()), "the share", kind, phrases)?;
    equal(failed.into_inner().region().range, region, "the region of the owner that came back")
}

fn is_exact(exposure: Exposure, bytes: u64) -> Outcome {
    that(exposure.is_exact(), format!("the region should be all that importers reach: {exposure:?}"))?;
    equal(
        (exposure.region_bytes, exposure.reachable_bytes),
        (bytes, Some(bytes)),
        "bytes of the region, and in reach",
    )?;
    equal(exposure.to_string(), "importers can access the shared bytes only".to_owned(), "what an exact exposure says")
}

/// A whole allocation of an isolated kind is all that its importers reach, whatever the driver has rounded it up by.
pub fn whole_allocation_is_all_that_is_reached(context: &Context) -> Outcome {
    let kind = context.kind_that(isolated, NONE_ISOLATED)?;
    let mut importer = context.agent()?;
    for size in [1, 1000, 4096, (2 << 20) + 1] {
        let memory = Memory::of_kind(context, kind.kind, &pattern(size))?;
        let share = memory.ipc.share(Arc::clone(&memory.buffer)).exposure(ExposurePolicy::Refuse).start()?;
        is_exact(share.exposure(), size as u64)?;
        importer.open("m", share.descriptor(), Place::Home)?;
        equal(importer.checksum("m")?, crc32fast::hash(&pattern(size)), "the checksum of what is shared")?;
        importer.drop_mapping("m")?;
        // A part that is the whole is no part.
        is_exact(memory.share_part(0, size as u64)?.exposure(), size as u64)?;
    }
    Ok(())
}

/// A part of an allocation exposes the rest of it, for every kind of memory: handles are of whole allocations. The exposure is
/// reported, and refused by the policy; a refusal returns the owner and leaves no export.
pub fn part_of_an_allocation_exposes_the_rest(context: &Context) -> Outcome {
    for kind in context.usable_kinds()? {
        let memory = Memory::of_kind(context, kind.kind, &pattern(8192))?;
        for (offset, len) in [(100, 200), (0, 8191), (8191, 1)] {
            let share = memory.share_part(offset, len)?;
            let exposure = share.exposure();
            that(
                !exposure.is_exact(),
                format!("{len} of 8192 bytes are not all that importers reach: {exposure:?}"),
            )?;
            equal(exposure.region_bytes, len, "the bytes of the region")?;
            that(exposure.allocation_bytes >= 8192, format!("the allocation has 8192 bytes: {exposure:?}"))?;
            let reaches = exposure.reachable_bytes.is_none_or(|bytes| bytes >= exposure.allocation_bytes);
            that(reaches, format!("importers reach the whole allocation: {exposure:?}"))?;
            let said = exposure.to_string();
            that(
                said.contains(&format!("in addition to the {len} B")),
                format!("an exposure should say so: {said}"),
            )?;
            let before = counters().exports_total;
            let part = memory.buffer.slice(offset, len)?;
            let region = part.region().range;
            let refusal = memory.ipc.share(part).exposure(ExposurePolicy::Refuse).start();
            let phrases = [&*format!("in addition to the {len} B"), "a part of its allocation", "ExposurePolicy::Copy"];
            owner_comes_back(refusal, region, "Exposes", &phrases)?;
            equal(counters().exports_total, before, "the exports that were made, after the refusal")?;
        }
    }
    Ok(())
}

/// Small blocks of a kind that is not isolated lie in pages with others, and expose them.
pub fn blocks_that_share_pages_expose_each_other(context: &Context) -> Outcome {
    let kind = context.kind_that(|kind| !kind.isolated, "every kind of handle is isolated")?;
    let memory = Memory::of_kind(context, kind.kind, &pattern(1000))?;
    let share = memory.share()?;
    let exposure = share.exposure();
    that(!exposure.is_exact(), format!("a small block of this kind is not alone: {exposure:?}"))?;
    equal(exposure.region_bytes, 1000, "the bytes of the region")?;
    let shared = memory.ipc.share(Arc::clone(&memory.buffer)).exposure(ExposurePolicy::Refuse).start();
    owner_comes_back(shared, memory.buffer.range(), "Exposes", &["1000 B", "ExposurePolicy::Copy", "isolated"])
}

/// A backend reports at least the allocation as reachable, and nothing else for an isolated kind.
pub fn reach_is_what_the_kind_says(context: &Context) -> Outcome {
    let backend = context.backend();
    for kind in context.usable_kinds()? {
        let memory = Memory::of_kind(context, kind.kind, &pattern(1000))?;
        for extent in backend.extents_of(memory.buffer.range(), None)? {
            let exported = backend.export(&extent, Some(kind.kind))?;
            let reach = backend.reach(&exported);
            backend.unexport(exported)?;
            let (allocation, name) = (extent.allocation, kind.name);
            match reach {
                Some(reach) if kind.isolated => {
                    equal(reach, allocation, format!("the reach of {name} handles"))?
                }
                Some(reach) => {
                    that(
                        reach.contains(&allocation),
                        format!("{name} handles of {allocation:?} reach {reach:?}"),
                    )?;
                }
                None => that(
                    !kind.isolated,
                    format!("{name} handles are isolated, and their reach is not known"),
                )?,
            }
        }
    }
    Ok(())
}

/// A part of an allocation whose neighbours must not be exposed is shared as a copy: importers reach the copy only, and later
/// writes of either side are not visible on the other. The owner of the original is dropped at once.
pub fn copy_is_shared_in_its_place(context: &Context) -> Outcome {
    context.kind_that(isolated, NONE_ISOLATED)?;
    let bytes = pattern(8192);
    let (offset, len) = (513_usize, 1001_usize);
    let memory = Memory::with_bytes(context, 0, &bytes)?;
    let mut importer = context.agent()?;
    let (witness, dropped) = Witness::of(&memory);
    let part = memory.buffer.slice(offset as u64, len as u64)?.region();
    let share = memory.ipc.share(unchecked::owned(witness, part)).exposure(ExposurePolicy::Copy).start()?;
    that(dropped.recv_timeout(SOON).is_ok(), "the owner of what was copied should be dropped")?;
    is_exact(share.exposure(), len as u64)?;
    let mapped = importer.open("m", share.descriptor(), Place::Home)?;
    equal(mapped.len, len as u64, "the length of the mapping")?;
    memory.buffer.view_mut::<u8, _>(&memory.stream)?.fill_bytes(0x11)?;
    memory.stream.synchronize()?;
    same(
        &importer.bytes("m")?,
        &bytes[offset..offset + len],
        "the bytes of the copy after the original was overwritten",
    )?;
    importer.must(&Command::Fill { name: "m".into(), byte: 0xee })?;
    importer.synchronize(0)?;
    same(&memory.bytes()?, &[0x11; 8192], "the original after the importer has filled the copy")?;
    importer.drop_mapping("m")?;
    Ok(share.close(SOON)?)
}

/// Memory without neighbours is shared itself, also if the policy is to copy.
pub fn copy_of_what_is_exposed_alone(context: &Context) -> Outcome {
    let kind = context.kind_that(isolated, NONE_ISOLATED)?;
    let memory = Memory::of_kind(context, kind.kind, &float_bytes(&[OLD; 256]))?;
    let share = memory.ipc.share(Arc::clone(&memory.buffer)).exposure(ExposurePolicy::Copy).start()?;
    is_exact(share.exposure(), 1024)?;
    let mut importer = context.agent()?;
    importer.open("m", share.descriptor(), Place::Home)?;
    importer.add("m", 1.0)?;
    importer.synchronize(0)?;
    same(&memory.floats()?, &[OLD + 1.0; 256], "the original after the importer has added to what was shared")
}

/// The copy is made behind the work that writes the bytes, and keeps the tensor's type and shape.
pub fn copy_waits_for_what_writes_the_bytes(context: &Context) -> Outcome {
    context.kind_that(isolated, NONE_ISOLATED)?;
    let memory = Memory::with_floats(context, 1024)?;
    let part: Region = memory.buffer.slice(64, 80)?.region().with_dtype(device_ipc_core::Dtype::F32);
    let owner = unchecked::owned(Arc::clone(&memory.buffer), part);
    let gate = Gate::close(&memory.stream)?;
    memory.add(1.0)?;
    gate.open_soon();
    let share =
        memory.ipc.share(owner).shape([4, 5]).exposure(ExposurePolicy::Copy).ready_on(&memory.stream).start()?;
    let mut importer: Agent = context.agent()?;
    let mapped = importer.open("m", share.descriptor(), Place::Stream(0))?;
    equal(mapped.tensor, Some(("float32".to_owned(), vec![4, 5])), "type and shape of the tensor")?;
    same(&importer.floats("m")?, &[OLD + 1.0; 20], "the floats of the copy")
}

/// Drivers round allocations up: behind a copy's bytes there is nothing of what the device's memory held before.
pub fn nothing_is_left_behind_a_copy(context: &Context) -> Outcome {
    const BYTES: u64 = 4 << 20;
    let kind = context.kind_that(isolated, NONE_ISOLATED)?;
    let backend = &**context.backend();
    let memory = Memory::with_bytes(context, 0, &[0x77; 8192])?;
    // A secret would stay in the device's memory.
    for _ in 0..4 {
        let secret: Buffer = memory.ipc.allocate_for(0, BYTES, kind.kind)?;
        secret.view_mut::<u8, _>(&memory.stream)?.fill_bytes(0xee)?;
        memory.stream.synchronize()?;
    }
    let part = memory.buffer.slice(0, 1001)?;
    let share = memory.ipc.share(part).exposure(ExposurePolicy::Copy).start()?;
    // In this very process the mapping is the copy itself.
    let copy = memory.ipc.open(share.descriptor()).on(&memory.stream)?;
    same(&unchecked::read(backend, copy.range(), &memory.stream)?, &[0x77; 1001], "the bytes of the copy")?;
    let extents = backend.extents_of(copy.range(), None)?;
    let Some(last) = extents.last().map(|extent| extent.allocation) else {
        return fail("a copy has no extents");
    };
    let whole = DeviceRange { len: last.len, ..last };
    let Some(behind) = copy.range().end().and_then(|end| end.offset_from(whole.ptr)) else {
        return fail("a copy should lie in its allocation");
    };
    let Some(rest) = whole.slice(behind, whole.len - behind).filter(|rest| rest.len > 0) else {
        // Not rounded up at all.
        return Ok(());
    };
    let left = unchecked::read(backend, rest, &memory.stream)?;
    that(left.iter().all(|byte| *byte == 0), "the bytes behind a copy should be zero")
}

/// Where no kind of memory is isolated a copy would expose as much; the share is refused and gives the owner back.
pub fn copy_needs_an_isolated_kind(context: &Context) -> Outcome {
    if context.usable_kinds()?.iter().any(isolated) {
        return skip("a kind of handle is isolated");
    }
    let memory = Memory::with_bytes(context, 0, &pattern(8192))?;
    let part = memory.buffer.slice(0, 100)?;
    let region = part.region().range;
    let shared = memory.ipc.share(part).exposure(ExposurePolicy::Copy).start();
    owner_comes_back(shared, region, "Unsupported", &["isolated", "neighbouring"])
}
