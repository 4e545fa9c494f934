//! The kinds of handle: what holds for one of them holds for memory of every other, where its description does not say
//! otherwise. Each case goes through all kinds that the first device can use.

mod access;

use std::time::Instant;

use device_ipc_core::backend::{HandleKind, HandleKindInfo, Lifetime};
use device_ipc_core::{Access, DeviceOrdinal, Error, MemoryUse};

use crate::agent::{Command, Place};
use crate::check::{equal, refused, refused_as_one_of, same, that};
use crate::flows::{Memory, OLD, SOON, bytes_of, float_bytes, for_each_kind, memory_stays_free, pattern};
use crate::{Context, Outcome, Stop, fail, skip};

pub use access::{both_accesses_at_once, read_only_is_kept, read_only_is_not_pretended};

const FIRST: DeviceOrdinal = DeviceOrdinal::new(0);

/// A kind that no backend knows.
const FOREIGN: HandleKind = HandleKind(u16::MAX);

/// Memory that was allocated for a kind is shared by that kind, and its bytes go both ways.
pub fn round_trip(context: &Context) -> Outcome {
    let bytes = pattern(100_003);
    let mut importer = context.agent()?;
    for_each_kind(context, |kind| {
        let memory = Memory::of_kind(context, kind.kind, &bytes)?;
        let share = memory.share()?;
        let mapped = importer.open("m", share.descriptor(), Place::Home)?;
        equal(
            (mapped.len, mapped.access),
            (bytes.len() as u64, Access::ReadWrite),
            "length and access of the mapping",
        )?;
        same(&importer.bytes("m")?, &bytes, "the bytes that the importer reads")?;
        importer.must(&Command::Fill { name: "m".into(), byte: 0xee })?;
        importer.synchronize(0)?;
        same(&memory.bytes()?, &vec![0xee; bytes.len()], "the bytes after the importer has filled them")?;
        memory.buffer.view_mut::<u8, _>(&memory.stream)?.copy_from(&bytes)?;
        memory.stream.synchronize()?;
        same(&importer.bytes("m")?, &bytes, "the bytes after the exporter has written them again")?;
        importer.drop_mapping("m")?;
        Ok(share.close(SOON)?)
    })
}

/// The handle of such memory is of the kind that it was allocated for, and carries file descriptors where its description
/// says so.
pub fn handles_are_of_their_kind(context: &Context) -> Outcome {
    let backend = context.backend();
    for_each_kind(context, |kind| {
        let memory = Memory::of_kind(context, kind.kind, &pattern(64))?;
        for wanted in [None, Some(kind.kind)] {
            let extents = backend.extents_of(memory.buffer.range(), None)?;
            let Some(extent) = extents.first() else { return fail("an allocation has no extents") };
            let exported = backend.export(extent, wanted)?;
            let found = (exported.kind, !exported.fds.is_empty());
            backend.unexport(exported)?;
            equal(
                found,
                (kind.kind, kind.carries_fds),
                "the kind of the handle, and whether it has descriptors",
            )?;
        }
        let extents = backend.extents_of(memory.buffer.range(), None)?;
        match extents.first().map(|extent| backend.export(extent, Some(FOREIGN))) {
            Some(Err(Error::Unsupported { .. } | Error::NotShareable { .. })) => Ok(()),
            Some(Err(error)) => {
                fail(format!("a handle of an unknown kind was refused with another error: {error}"))
            }
            _ => fail("a handle of an unknown kind was made"),
        }
    })
}

/// Floats of every kind are added to by a kernel of the importer, in place.
pub fn kernels_work_in_place(context: &Context) -> Outcome {
    let mut importer = context.agent()?;
    for_each_kind(context, |kind| {
        let memory = Memory::of_kind(context, kind.kind, &float_bytes(&[OLD; 1024]))?;
        let share = memory.share()?;
        importer.open("m", share.descriptor(), Place::Stream(0))?;
        importer.add("m", 2.5)?;
        importer.must(&Command::Release { name: "m".into(), device: None })?;
        share.wait_released(SOON)?;
        same(&memory.floats()?, &[OLD + 2.5; 1024], "the floats after the importer's kernel")
    })
}

/// One byte, odd sizes, and sizes just below, at and above what drivers round to; the mapping has the bytes that were
/// asked for, and neighbours do not get into each other's way.
pub fn sizes(context: &Context) -> Outcome {
    const GRANULE: usize = 2 << 20;
    let mut importer = context.agent()?;
    for_each_kind(context, |kind| {
        for size in [1, 3, 511, 4097, GRANULE - 1, GRANULE + 1] {
            let bytes = pattern(size);
            let beside = [0x5a; 7];
            let neighbours = [
                Memory::of_kind(context, kind.kind, &beside)?,
                Memory::of_kind(context, kind.kind, &beside)?,
            ];
            let memory = Memory::of_kind(context, kind.kind, &bytes)?;
            equal(memory.buffer.range().len, size as u64, "the length of the memory that was allocated")?;
            let aligned = memory.buffer.range().ptr.get().is_multiple_of(256);
            that(aligned, format!("an allocation should be aligned to 256 bytes: {:?}", memory.buffer.range()))?;
            let share = memory.share()?;
            let mapped = importer.open("m", share.descriptor(), Place::Home)?;
            equal(mapped.len, size as u64, "the length of the mapping")?;
            let read = importer.checksum("m")?;
            equal(read, crc32fast::hash(&bytes), format!("the checksum of a mapping of {size} bytes"))?;
            importer.must(&Command::Fill { name: "m".into(), byte: 0xee })?;
            importer.synchronize(0)?;
            same(&memory.bytes()?, &vec![0xee; size], format!("{size} bytes that the importer has filled"))?;
            for neighbour in neighbours {
                same(&neighbour.bytes()?, &beside, format!("the bytes of a neighbour of {size} bytes"))?;
            }
            importer.drop_mapping("m")?;
            share.close(SOON)?;
        }
        Ok(())
    })
}

/// A region deep in an allocation, at an odd offset, arrives at its first byte, and what is beside it is not touched. Vendors open
/// whole allocations, and forgetting the offset is a frequent bug.
pub fn region_inside_an_allocation(context: &Context) -> Outcome {
    let bytes = pattern(3 << 20);
    // Across the place where many drivers' pages meet, and behind it.
    let regions = [((1 << 20) + 4099, (1 << 20) + 5001), ((2 << 20) + 4099, 1001)];
    let mut importer = context.agent()?;
    for_each_kind(context, |kind| {
        for (offset, len) in regions {
            let memory = Memory::of_kind(context, kind.kind, &bytes)?;
            let share = memory.share_part(offset as u64, len as u64)?;
            let mapped = importer.open("m", share.descriptor(), Place::Home)?;
            equal(mapped.len, len as u64, "the length of the mapping in bytes")?;
            let expected = crc32fast::hash(&bytes[offset..offset + len]);
            equal(importer.checksum("m")?, expected, "the checksum of the region")?;
            importer.must(&Command::Fill { name: "m".into(), byte: 0xee })?;
            importer.synchronize(0)?;
            let mut expected = bytes.clone();
            expected[offset..offset + len].fill(0xee);
            same(&memory.bytes()?, &expected, "the allocation after the importer has filled the region")?;
            importer.drop_mapping("m")?;
            share.close(SOON)?;
        }
        Ok(())
    })
}

/// One importer has memory of all kinds open at a time, several of each, and releases them in another order.
pub fn side_by_side(context: &Context) -> Outcome {
    let mut importer = context.agent()?;
    let mut open = Vec::new();
    for kind in context.usable_kinds()? {
        for part in 0..3_u8 {
            let name = format!("{} {part}", kind.name);
            let bytes = pattern(10_000 + 100 * open.len());
            let memory = Memory::of_kind(context, kind.kind, &bytes)?;
            let share = memory.share()?;
            importer.open(&name, share.descriptor(), Place::Home)?;
            open.push((name, bytes, memory, share));
        }
    }
    // First the even ones, then those that are left.
    let (mut even, mut odd) = (Vec::new(), Vec::new());
    for (index, one) in open.into_iter().enumerate() {
        if index % 2 == 0 { even.push(one) } else { odd.push(one) }
    }
    for (name, bytes, _memory, share) in even.into_iter().chain(odd) {
        same(&importer.bytes(&name)?, &bytes, format!("the bytes of {name}"))?;
        importer.drop_mapping(&name)?;
        share.close(SOON)?;
    }
    Ok(())
}

/// Memory is allocated by its use: it is of the first kind that fits, and it can be used so. If none fits, the error names
/// the requirement for each kind.
pub fn memory_for_a_use(context: &Context) -> Outcome {
    type Fits = fn(&HandleKindInfo) -> bool;
    let ipc = context.ipc();
    let usable = context.usable_kinds()?;
    let uses: [(&str, MemoryUse, Fits); 6] = [
        ("read-only", MemoryUse::new().read_only_importers(), |kind| kind.read_only),
        ("isolated", MemoryUse::new().isolated(), |kind| kind.isolated),
        ("pid namespaces", MemoryUse::new().across_pid_namespaces(), |kind| kind.across_pid_namespaces),
        ("addresses that they keep", MemoryUse::new().remappable(), |kind| kind.remappable),
        ("outlive", MemoryUse::new().outlives_exporter(), |kind| kind.lifetime == Lifetime::Pins),
        ("read-only", MemoryUse::new().isolated().read_only_importers(), |kind| kind.read_only && kind.isolated),
    ];
    for (what, wanted, fits) in uses {
        let allocated = ipc.allocate_for(0, 4096, wanted);
        let Some(expected) = usable.iter().find(|kind| fits(kind)) else {
            refused(allocated, what, "Unsupported", &["no kind of memory fits", what, usable[0].name])?;
            continue;
        };
        let buffer = allocated?;
        let extent = context.backend().extents_of(buffer.range(), None)?[0];
        let exported = context.backend().export(&extent, None)?;
        equal(exported.kind, expected.kind, format!("{what}: the kind of the memory"))?;
        context.backend().unexport(exported)?;
        if wanted == MemoryUse::new().read_only_importers() {
            let export = ipc.share(buffer).access(Access::ReadOnly).start()?;
            context.agent()?.open("m", export.descriptor(), Place::Home)?;
        }
    }
    equal(ipc.allocate_for(0, 0, MemoryUse::new().isolated())?.range().len, 0, "the bytes of an empty buffer")
}

/// A kind that the backend does not know is refused by name, and so are senseless sizes and devices of every kind.
pub fn senseless_allocations(context: &Context) -> Outcome {
    let ipc = context.ipc();
    let phrases = [context.backend().info().name, "65535"];
    refused(ipc.allocate_for(0, 64, FOREIGN), "memory of an unknown kind", "Unsupported", &phrases)?;
    let beyond = context.devices()?.len() as u32;
    let total = context.backend().memory().memory_info(FIRST)?.total_bytes;
    for_each_kind(context, |kind| {
        let nothing = context.backend().memory().allocate_as(FIRST, 0, kind.kind);
        refused(nothing, "no bytes of the bare backend", "InvalidRegion", &[])?;
        refused(ipc.allocate_for(beyond, 64, kind.kind), "memory of no device", "NoSuchDevice", &[])?;
        for bytes in [total.saturating_mul(4), u64::MAX, u64::MAX - 1000] {
            let what = format!("{bytes} bytes of {total}");
            refused_as_one_of(
                ipc.allocate_for(0, bytes, kind.kind),
                &what,
                &["OutOfMemory", "InvalidRegion"],
                &[],
            )?;
        }
        // The device is none the worse for it.
        Memory::of_kind(context, kind.kind, &pattern(64)).map(drop)
    })
}

/// One process has the memory open on two of its devices at once, also where a handle can be opened on one device only:
/// it then gets a further one. What is written through one mapping is read through the other.
pub fn on_two_devices_of_one_process(context: &Context) -> Outcome {
    context.two_peers()?;
    let mut importer = context.agent()?;
    for_each_kind(context, |kind| {
        let memory = Memory::of_kind(context, kind.kind, &float_bytes(&[OLD; 1024]))?;
        let share = memory.share()?;
        importer.open("home", share.descriptor(), Place::Device(0))?;
        importer.open("away", share.descriptor(), Place::Device(1))?;
        importer.add("away", 1.0)?;
        importer.synchronize(1)?;
        same(
            &importer.floats("home")?,
            &[OLD + 1.0; 1024],
            "the floats on device 0 after a kernel of device 1",
        )?;
        importer.drop_mapping("home")?;
        same(
            &importer.floats("away")?,
            &[OLD + 1.0; 1024],
            "the floats on device 1 when the other mapping has gone",
        )?;
        importer.open("home", share.descriptor(), Place::Device(0))?;
        importer.add("home", 1.0)?;
        importer.synchronize(0)?;
        same(
            &importer.floats("away")?,
            &[OLD + 2.0; 1024],
            "the floats on device 1 after a kernel of device 0",
        )?;
        importer.drop_mapping("away")?;
        importer.drop_mapping("home")?;
        Ok(share.close(SOON)?)
    })
}

/// An importer that is killed with the memory open takes nothing with it, and the next one can open the memory.
pub fn importer_killed(context: &Context) -> Outcome {
    let bytes = pattern(5000);
    for_each_kind(context, |kind| {
        let memory = Memory::of_kind(context, kind.kind, &bytes)?;
        let share = memory.share()?;
        let mut importer = context.agent()?;
        importer.open("m", share.descriptor(), Place::Home)?;
        importer.kill()?;
        refused(share.wait_released(SOON), "waiting for an importer that was killed", "HolderDied", &["died"])?;
        let mut next = context.agent()?;
        next.open("m", share.descriptor(), Place::Home)?;
        same(&next.bytes("m")?, &bytes, "the bytes that the next importer reads")?;
        same(&memory.bytes()?, &bytes, "the bytes that the exporter reads")?;
        next.drop_mapping("m")?;
        Ok(share.close(SOON)?)
    })
}

/// If importers pin the memory, it stays after the exporter was killed, until their release.
pub fn exporter_killed_under_those_who_pin(context: &Context) -> Outcome {
    let pins = |kind: &HandleKindInfo| kind.lifetime == Lifetime::Pins;
    context.kind_that(pins, "every kind of handle is revoked when its exporter ends")?;
    let bytes = pattern(5000);
    let ipc = context.ipc();
    let stream = ipc.create_stream(0)?;
    for_each_kind(context, |kind| {
        if !pins(kind) {
            return Ok(());
        }
        let mut exporter = context.agent()?;
        let descriptor = exporter.export_as(kind.kind, "e", &bytes)?;
        let mapping = ipc.open(&descriptor).on(&stream)?;
        exporter.kill()?;
        let until = Instant::now() + SOON;
        while ipc.open(&descriptor).at_home().is_ok() {
            that(
                Instant::now() < until,
                "opening again should be refused when the exporter has been killed",
            )?;
            std::thread::yield_now();
        }
        same(&bytes_of(&mapping, &stream)?, &bytes, "the bytes of a killed exporter")
    })
}

/// Memory of every kind that was shared, opened, released and dropped is free again.
pub fn memory_is_free_again(context: &Context) -> Outcome {
    const BYTES: usize = 8 << 20;
    let mut importer = context.agent()?;
    importer.prepare(0)?;
    let free = || Ok::<_, Stop>(context.backend().memory().memory_info(FIRST)?.free_bytes);
    let contents = vec![7; BYTES];
    for_each_kind(context, |kind| {
        let round = || {
            let memory = Memory::of_kind(context, kind.kind, &contents)?;
            let share = memory.share()?;
            importer.open("m", share.descriptor(), Place::Home)?;
            importer.must(&Command::Release { name: "m".into(), device: None })?;
            share.wait_released(SOON)?;
            drop(memory);
            Ok::<_, Stop>(share.close(SOON)?)
        };
        memory_stays_free(BYTES, free, round)
    })
}

/// A device that cannot use a kind says so: what can be allocated can be shared, on every device.
pub fn on_every_device(context: &Context) -> Outcome {
    let bytes = pattern(4099);
    let ipc = context.ipc();
    let mut importer = context.agent()?;
    for device in context.devices()? {
        let stream = ipc.create_stream(device.ordinal)?;
        for kind in context.backend().handle_kinds() {
            let what = format!("{} handles of device {}", kind.name, device.ordinal);
            let buffer = match ipc.allocate_for(device.ordinal, bytes.len() as u64, kind.kind) {
                Ok(buffer) => buffer,
                Err(Error::Unsupported { why, .. }) => {
                    that(!why.is_empty(), format!("{what}: the refusal should say why"))?;
                    continue;
                }
                Err(error) => return fail(format!("{what}: {error}")),
            };
            buffer.view_mut::<u8, _>(&stream)?.copy_from(&bytes)?;
            stream.synchronize()?;
            let share = ipc.share(buffer).start()?;
            let mapped = importer.open("m", share.descriptor(), Place::Home)?;
            equal(mapped.home, device.identity, format!("{what}: where the bytes live"))?;
            same(&importer.bytes("m")?, &bytes, format!("{what}: the bytes"))?;
            importer.drop_mapping("m")?;
            share.close(SOON)?;
        }
    }
    Ok(())
}

/// The default kind of an allocation is the first of the list.
pub fn the_first_is_the_preferred(context: &Context) -> Outcome {
    let Some(first) = context.backend().handle_kinds().into_iter().next() else {
        return fail("the backend has no kind of handle");
    };
    if !context.usable_kinds()?.iter().any(|kind| kind.kind == first.kind) {
        return skip("the device cannot use the preferred kind");
    }
    let memory = Memory::with_bytes(context, 0, &pattern(64))?;
    let extents = context.backend().extents_of(memory.buffer.range(), None)?;
    let Some(extent) = extents.first() else { return fail("an allocation has no extents") };
    let exported = context.backend().export(extent, None)?;
    let kind = exported.kind;
    context.backend().unexport(exported)?;
    equal(kind, first.kind, "the kind of the handle of memory that was allocated for none in particular")
}
