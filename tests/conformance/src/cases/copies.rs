//! Sharing a copy, for memory that cannot travel itself or should not: made in order, equal, and on its own afterwards.

use std::sync::Arc;

use device_ipc_core::{DeviceOwner, Dtype, Region, counters};

use crate::agent::{Command, Place, Sharing};
use crate::check::{equal, refused, same, that};
use crate::flows::{Memory, OLD, SOON, bytes_of, float_bytes, pattern};
use crate::gate::Gate;
use crate::{Context, Outcome, unchecked};

/// The importer reads what the original held when the copy was made; what either side writes later the other does not see.
pub fn equal_and_independent(context: &Context) -> Outcome {
    let bytes = pattern(100_003);
    let memory = Memory::with_bytes(context, 0, &bytes)?;
    let share = memory.ipc.share_copy(&memory.buffer, &memory.stream)?.start()?;
    let mut importer = context.agent()?;
    let mapped = importer.open("m", share.descriptor(), Place::Home)?;
    equal(mapped.len, bytes.len() as u64, "the length of the mapping")?;
    memory.buffer.view_mut::<u8, _>(&memory.stream)?.fill_bytes(0x11)?;
    memory.stream.synchronize()?;
    same(&importer.bytes("m")?, &bytes, "the bytes of the copy after the original was overwritten")?;
    importer.must(&Command::Fill { name: "m".into(), byte: 0xee })?;
    importer.synchronize(0)?;
    same(&memory.bytes()?, &vec![0x11; bytes.len()], "the original after the importer has filled the copy")
}

/// Of a region inside an allocation, at an odd place and of an odd length, that part alone is copied.
pub fn part_of_an_allocation(context: &Context) -> Outcome {
    let bytes = pattern(3 << 20);
    let (offset, len) = ((2 << 20) + 4099, 1001);
    let memory = Memory::with_bytes(context, 0, &bytes)?;
    let part = memory.buffer.slice(offset as u64, len as u64)?;
    let share = memory.ipc.share_copy(&part, &memory.stream)?.start()?;
    equal(share.exposure().region_bytes, len as u64, "the bytes of the region")?;
    that(share.exposure().allocation_bytes < 3 << 20, "the copy of a part should not be one of the whole")?;
    let mut importer = context.agent()?;
    importer.open("m", share.descriptor(), Place::Home)?;
    same(&importer.bytes("m")?, &bytes[offset..offset + len], "the bytes of the copy")
}

/// The copy has its original's element type, and takes a layout as any share does.
pub fn type_and_shape_are_kept(context: &Context) -> Outcome {
    let memory = Memory::with_floats(context, 20)?;
    let typed: Region = memory.buffer.region().with_dtype(Dtype::F32);
    let owner = unchecked::owned(Arc::clone(&memory.buffer), typed);
    let mut importer = context.agent()?;
    let shaped = memory.ipc.share_copy(&owner, &memory.stream)?.shape([4, 5]).start()?;
    let mapped = importer.open("shaped", shaped.descriptor(), Place::Home)?;
    equal(mapped.tensor, Some(("float32".to_owned(), vec![4, 5])), "type and shape of the copy")?;
    let plain = memory.ipc.share_copy(&owner, &memory.stream)?.start()?;
    let mapped = importer.open("plain", plain.descriptor(), Place::Home)?;
    equal(mapped.tensor, Some(("float32".to_owned(), vec![20])), "type and shape where no shape was stated")?;
    same(&importer.floats("shaped")?, &[OLD; 20], "the elements")?;
    let too_large = memory.ipc.share_copy(&owner, &memory.stream)?.shape([4, 6]).start();
    refused(too_large, "a shape that the copy is too small for", "Layout", &["needs 96 bytes", "80 bytes"])
}

/// The copy is made behind what was submitted to the stream before, which is waited for.
pub fn waits_for_the_stream(context: &Context) -> Outcome {
    let memory = Memory::with_floats(context, 4096)?;
    let gate = Gate::close(&memory.stream)?;
    memory.add(1.0)?;
    gate.open_soon();
    let builder = memory.ipc.share_copy(&memory.buffer, &memory.stream)?;
    gate.was_passed("the copy")?;
    let share = builder.start()?;
    let mut importer = context.agent()?;
    importer.open("m", share.descriptor(), Place::Home)?;
    same(&importer.floats("m")?, &[OLD + 1.0; 4096], "the floats of the copy")
}

/// The original may be freed at once; the copy is freed after the last release.
pub fn original_may_go(context: &Context) -> Outcome {
    let bytes = pattern(5000);
    let Memory { ipc, buffer, stream } = Memory::with_bytes(context, 0, &bytes)?;
    let share = ipc.share_copy(&buffer, &stream)?.start()?;
    drop(buffer);
    // Whatever takes the original's place.
    let _others =
        [Memory::with_bytes(context, 0, &[0xee; 5000])?, Memory::with_bytes(context, 0, &[0xee; 5000])?];
    let mut importer = context.agent()?;
    importer.open("m", share.descriptor(), Place::Home)?;
    same(&importer.bytes("m")?, &bytes, "the bytes of the copy when the original has gone")?;
    importer.drop_mapping("m")?;
    share.close(SOON)?;
    equal(counters().exports, 0, "the number of exports")
}

/// The copy lives on the device of its original.
pub fn on_every_device(context: &Context) -> Outcome {
    let mut importer = context.agent()?;
    for device in context.devices()? {
        let bytes = pattern(4099);
        let memory = Memory::with_bytes(context, device.ordinal.get(), &bytes)?;
        let share = memory.ipc.share_copy(&memory.buffer, &memory.stream)?.start()?;
        let mapped = importer.open("m", share.descriptor(), Place::Home)?;
        equal(mapped.home, device.identity, "where the copy lives")?;
        same(&importer.bytes("m")?, &bytes, format!("the bytes of a copy on device {}", device.ordinal))?;
        importer.drop_mapping("m")?;
    }
    Ok(())
}

/// Memory that was itself opened from another process cannot be exported again; a copy of it can.
pub fn memory_of_another_process(context: &Context) -> Outcome {
    let bytes = pattern(4096);
    let (mut exporter, mut last) = (context.agent()?, context.agent()?);
    exporter.allocate("e", 0, &bytes)?;
    let descriptor = exporter.share("e", Sharing { offset: 96, len: Some(1000), ..Default::default() })?;
    let ipc = context.ipc();
    let stream = ipc.create_stream(0)?;
    let mapping = ipc.open(&descriptor).on(&stream)?;
    let region = Region::new(context.backend().info().name, mapping.range());
    let owner = unchecked::owned(mapping, region);
    let copy = ipc.share_copy(&owner, &stream)?.start()?;
    refused(ipc.share(owner).start(), "sharing the mapping itself", "SharedOn", &["forward the descriptor"])?;
    exporter.must(&Command::Fill { name: "e".into(), byte: 0xee })?;
    exporter.synchronize(0)?;
    exporter.exit()?;
    last.open("m", copy.descriptor(), Place::Home)?;
    same(&last.bytes("m")?, &bytes[96..1096], "the bytes of a copy of another process's memory")?;
    // In this process too.
    let own = ipc.open(copy.descriptor()).on(&stream)?;
    same(&bytes_of(&own, &stream)?, &bytes[96..1096], "the same in the process that made the copy")
}

/// Memory and streams of another backend are refused by name.
pub fn another_backend(context: &Context) -> Outcome {
    let memory = Memory::with_bytes(context, 0, &float_bytes(&[OLD; 16]))?;
    let phrases = ["another-backend"];
    let foreign = unchecked::not_owned(Region::new("another-backend", memory.buffer.range()));
    refused(
        memory.ipc.share_copy(&foreign, &memory.stream),
        "another backend's memory",
        "WrongBackend",
        &phrases,
    )?;
    let stream = unchecked::stream_of_another_backend();
    refused(
        memory.ipc.share_copy(&memory.buffer, &stream),
        "another backend's stream",
        "WrongBackend",
        &phrases,
    )
}
