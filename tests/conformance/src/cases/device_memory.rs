//! Plain memory and streams, which all other cases stand on.


use device_ipc_core::{Buffer, DeviceOrdinal, Stream, View, ViewMut};

use crate::agent::Command;
use crate::check::{equal, refused, refused_as_one_of, same, that};
use crate::flows::{Memory, OLD, float_bytes, pattern};
use crate::gate::Gate;
use crate::unchecked::Bare;
use crate::{Context, Outcome, Stop, fail};

const FIRST: DeviceOrdinal = DeviceOrdinal::new(0);

fn bare(context: &Context, bytes: u64) -> Result<(Bare<'_>, Stream), Stop> {
    Ok((Bare::allocate(&**context.backend(), FIRST, bytes)?, context.ipc().create_stream(0)?))
}

/// Bytes that are written are read, on every device.
pub fn write_and_read(context: &Context) -> Outcome {
    for device in context.devices()? {
        let bytes = pattern(1_000_003);
        let memory = Memory::with_bytes(context, device.ordinal.get(), &bytes)?;
        same(&memory.bytes()?, &bytes, format!("the bytes on device {}", device.ordinal))?;
    }
    Ok(())
}

/// Filling, copying and adding touch their range and nothing else.
pub fn work_stays_in_its_range(context: &Context) -> Outcome {
    let (memory, stream) = bare(context, 64)?;
    let part = |offset, len| memory.range.slice(offset, len).ok_or_else(|| Stop::failed("a part lies inside"));
    memory.write(memory.range, &float_bytes(&[OLD; 16]), &stream)?;
    memory.add(part(8, 16)?, 1.0, &stream)?;
    memory.fill(part(33, 5)?, 0xaa, &stream)?;
    let mut expected = float_bytes(&[OLD; 16]);
    expected[8..24].copy_from_slice(&float_bytes(&[OLD + 1.0; 4]));
    expected[33..38].fill(0xaa);
    same(&memory.read(memory.range, &stream)?, &expected, "the bytes after a kernel and a fill of parts")?;
    let copy = Bare::allocate(&**context.backend(), FIRST, 64)?;
    copy.copy_from(&memory, &stream)?;
    same(&copy.read(copy.range, &stream)?, &expected, "the bytes of a copy")
}

/// Work that does not fit its range is refused.
pub fn work_that_does_not_fit(context: &Context) -> Outcome {
    let (memory, stream) = bare(context, 64)?;
    let kind = "InvalidRegion";
    refused(memory.write(memory.range, &[0; 63], &stream), "writing 63 bytes to 64", kind, &[])?;
    refused(memory.write(memory.range, &[0; 65], &stream), "writing 65 bytes to 64", kind, &[])?;
    let (shorter, _) = bare(context, 32)?;
    refused(memory.copy_from(&shorter, &stream), "copying 32 bytes to 64", kind, &[])?;
    let Some(odd) = memory.range.slice(1, 8) else { return fail("a part lies inside") };
    refused(memory.add(odd, 1.0, &stream), "adding to floats at an odd address", kind, &[])?;
    let Some(short) = memory.range.slice(0, 7) else { return fail("a part lies inside") };
    refused(memory.add(short, 1.0, &stream), "adding to seven bytes", kind, &[])
}

/// Blocks are copied by their numbers to their places in every tensor, and nothing else is written: blocks of odd and of large sizes, blocks
/// side by side and apart, more blocks and more tensors than one kernel takes.
pub fn blocks_are_copied(context: &Context) -> Outcome {
    for (tensors, block, sources, destinations) in [
        (66, 3, vec![4, 0, 3], vec![1, 5, 2]),
        (2, 40_008, vec![3, 1], vec![0, 1]),
        (1, 24, (0..360).collect(), (1..361).rev().collect()),
        (3, 8, (0..700).collect(), (200..900).collect()),
        (2, 5, [0, 1, 2, 9, 10, 20, 3, 3].into(), [30, 31, 32, 33, 34, 0, 5, 6].into()),
    ] {
        let blocks = 1 + sources.iter().chain(&destinations).max().copied().unwrap_or(0) as usize;
        let bytes = pattern(tensors * blocks * block);
        let mut expected = vec![0xee; bytes.len()];
        let layers = bytes.chunks(blocks * block);
        let (mut targets, mut held) = (Vec::new(), Vec::new());
        for layer in layers {
            held.push(Memory::with_bytes(context, 0, layer)?);
            targets.push(Memory::with_bytes(context, 0, &vec![0xee; layer.len()])?);
        }
        let stream = context.ipc().create_stream(0)?;
        let mut views = Vec::new();
        for (target, source) in targets.iter().zip(&held) {
            target.stream.synchronize()?;
            source.stream.synchronize()?;
            views.push((target.buffer.view_mut::<u8, _>(&stream)?, source.buffer.view::<u8, _>(&stream)?));
        }
        ViewMut::copy_blocks(&mut views, block, &sources, &destinations)?;
        for tensor in 0..tensors {
            for (from, to) in sources.iter().zip(&destinations) {
                let at = |number: &u32| (tensor * blocks + *number as usize) * block;
                expected[at(to)..][..block].copy_from_slice(&bytes[at(from)..][..block]);
            }
        }
        let copied = |views: &[(ViewMut<'_, u8>, View<'_, u8>)]| {
            views.iter().map(|(to, _)| to.to_vec()).collect::<Result<Vec<_>, _>>().map(|bytes| bytes.concat())
        };
        same(&copied(&views)?, &expected, format!("{} blocks of {block} bytes in {tensors} tensors", sources.len()))?;
        let kind = "InvalidRegion";
        let mut copy = |sources: &[u32], destinations: &[u32]| {
            ViewMut::copy_blocks(&mut views, block, sources, destinations)
        };
        refused(copy(&[0, blocks as u32], &[0, 1]), "a source block behind the last", kind, &["source block", "tensor 0"])?;
        refused(copy(&[0], &[u32::MAX]), "a destination block behind the last", kind, &["destination block"])?;
        refused(copy(&[0, 1], &[1, 1]), "a destination named twice", kind, &["block 1", "twice"])?;
        refused(copy(&[0, 1], &[0]), "two sources for one destination", kind, &["2 source blocks"])?;
        copy(&[], &[])?;
        for (size, phrase) in [(0, "0 bytes"), (usize::MAX, "does not lie in")] {
            let copied = ViewMut::copy_blocks(&mut views, size, &[0], &[0]);
            refused(copied, "blocks of a senseless size", kind, &[phrase])?;
        }
        same(&copied(&views)?, &expected, "the bytes after refused copies and a copy of nothing")?;
    }
    Ok(())
}

/// No bytes is no allocation, and more than there is does not fit.
pub fn senseless_sizes(context: &Context) -> Outcome {
    let memory = context.backend().memory();
    refused(memory.allocate(FIRST, 0), "allocating no bytes", "InvalidRegion", &[])?;
    let total = memory.memory_info(FIRST)?.total_bytes;
    for bytes in [total.saturating_mul(4), u64::MAX] {
        let what = format!("allocating {bytes} bytes of {total}");
        refused_as_one_of(memory.allocate(FIRST, bytes), &what, &["OutOfMemory", "InvalidRegion"], &[])?;
    }
    // The device is none the worse for it.
    Memory::with_bytes(context, 0, &pattern(64)).map(drop)
}

/// The device has as much memory as its description says, and an allocation takes from what is free.
pub fn memory_is_accounted_for(context: &Context) -> Outcome {
    const BYTES: u64 = 64 << 20;
    for device in context.devices()? {
        let info = context.backend().memory().memory_info(device.ordinal)?;
        that(info.free_bytes <= info.total_bytes, format!("more free memory than there is: {info:?}"))?;
        that(info.total_bytes > 0, format!("device {} should have memory", device.ordinal))?;
    }
    let (small, _stream) = bare(context, 64)?;
    let before = context.backend().memory().memory_info(FIRST)?.free_bytes;
    if before < 2 * BYTES {
        return crate::skip("the device has too little free memory");
    }
    let large = Bare::allocate(&**context.backend(), FIRST, BYTES)?;
    let after = context.backend().memory().memory_info(FIRST)?.free_bytes;
    drop((small, large));
    that(after < before, format!("{before} bytes were free, and {after} after an allocation of {BYTES}"))
}

/// Work on no bytes is no error and does nothing.
pub fn empty_ranges_are_left_alone(context: &Context) -> Outcome {
    let (memory, stream) = bare(context, 64)?;
    memory.write(memory.range, &pattern(64), &stream)?;
    let Some(empty) = memory.range.slice(32, 0) else { return fail("a part lies inside") };
    let calls = [
        ("DeviceMemory::fill", memory.fill(empty, 0xaa, &stream)),
        ("DeviceMemory::write", memory.write(empty, &[], &stream)),
        ("TestKernels::add_f32", memory.add(empty, 1.0, &stream)),
        ("DeviceMemory::copy", memory.copy_part(empty, empty, &stream)),
        ("DeviceMemory::read", memory.read(empty, &stream).map(drop)),
    ];
    for (call, result) in calls {
        let refused = |error| Stop::failed(format_args!("{call} has to accept zero bytes: {error}"));
        result.map_err(refused)?;
    }
    same(&memory.read(memory.range, &stream)?, &pattern(64), "the bytes around an empty range")
}

/// An allocation is missing from the free memory that another process sees.
pub fn memory_info_is_of_the_whole_device(context: &Context) -> Outcome {
    const BYTES: u64 = 64 << 20;
    let backend = &**context.backend();
    let mut other = context.agent()?;
    other.prepare(0)?;
    let mut free = || other.get::<u64>(&Command::FreeMemory { device: 0 });
    if free()? < 2 * BYTES {
        return crate::skip("the device has too little free memory");
    }
    // A pool may have had the memory before. Other processes may free some meanwhile, but not every time.
    for kind in context.usable_kinds()? {
        for _ in 0..5 {
            let before = free()?;
            let memory = Bare::allocate_as(backend, FIRST, BYTES, kind.kind)?;
            let missing = before.saturating_sub(free()?);
            drop(memory);
            if missing >= BYTES / 2 {
                return Ok(());
            }
        }
    }
    fail(format_args!(
        "{BYTES} bytes that this process allocated are not missing from the free memory that another process sees: \
         DeviceMemory::memory_info has to tell the free memory of the device, not of the process"
    ))
}

/// The bytes of a write may be changed as soon as it returns, also while the stream has yet to come to it.
pub fn written_bytes_may_be_reused(context: &Context) -> Outcome {
    for len in [64, 1 << 20] {
        let (memory, stream) = bare(context, len as u64)?;
        let mut bytes = pattern(len);
        let gate = Gate::close(&stream)?;
        // It may wait for the stream.
        gate.open_soon();
        memory.write(memory.range, &bytes, &stream)?;
        bytes.fill(0xee);
        let read = memory.read(memory.range, &stream)?;
        that(
            read == pattern(len),
            format!(
                "the bytes that a write was given were changed after it had returned, and the device got the later ones: \
                 DeviceMemory::write has to copy the bytes before it returns, or to wait for the stream ({len} bytes)"
            ),
        )?;
    }
    Ok(())
}

/// Every call that takes a stream refuses one of another backend, by its name.
pub fn streams_of_another_backend_are_refused(context: &Context) -> Outcome {
    let (memory, _stream) = bare(context, 64)?;
    for (call, result) in crate::unchecked::use_stream_of_another_backend(context.backend(), &memory)? {
        let what = format!(
            "{call} with a stream of the backend \"another-backend\" (compare BorrowedStream::backend before the stream's \
             number is used)"
        );
        let optional = call.contains("host");
        let kinds: &[&str] = if optional { &["WrongBackend", "Unsupported"] } else { &["WrongBackend"] };
        refused_as_one_of(result, &what, kinds, &[])?;
    }
    Ok(())
}

/// Submitting work does not wait for it, and reading does.
pub fn work_is_done_later_and_in_order(context: &Context) -> Outcome {
    let memory = Memory::with_floats(context, 1024)?;
    let gate = Gate::close(&memory.stream)?;
    memory.add(1.0)?;
    memory.add(2.0)?;
    gate.open_soon();
    let floats = memory.floats()?;
    gate.was_passed("reading")?;
    gate.open("submitting work")?;
    same(&floats, &[OLD + 3.0; 1024], "the floats after the work")
}

/// Streams of one device do not wait for each other.
pub fn streams_are_independent(context: &Context) -> Outcome {
    let memory = Memory::with_floats(context, 1024)?;
    let busy = context.ipc().create_stream(0)?;
    let gate = Gate::close(&busy)?;
    memory.add(1.0)?;
    memory.stream.synchronize()?;
    gate.open_soon();
    busy.synchronize()?;
    gate.was_passed("waiting for a stream")?;
    gate.open("another stream")
}

/// Waiting for a device waits for all its streams.
pub fn waiting_for_the_device(context: &Context) -> Outcome {
    let streams = [context.ipc().create_stream(0)?, context.ipc().create_stream(0)?];
    for stream in &streams {
        let gate = Gate::close(stream)?;
        gate.open_soon();
        context.backend().synchronize_device(FIRST)?;
        gate.was_passed("waiting for a device")?;
    }
    Ok(())
}

/// A stream that is dropped still does what was submitted to it.
pub fn dropped_stream_finishes_its_work(context: &Context) -> Outcome {
    let memory = Memory::with_floats(context, 1024)?;
    let stream = context.ipc().create_stream(0)?;
    let gate = Gate::close(&stream)?;
    memory.buffer.view_mut::<f32, _>(&stream)?.add(1.0)?;
    // It may wait for the work.
    gate.open_soon();
    drop(stream);
    context.backend().synchronize_device(FIRST)?;
    same(&memory.floats()?, &[OLD + 1.0; 1024], "the floats after the work of a dropped stream")
}

/// Memory may be freed while submitted work still uses it: the backend waits for the work, or frees later. Neither an
/// unmapped address nor the bytes of the next allocation come into the work, on a stream of any device.
pub fn free_waits_for_submitted_work(context: &Context) -> Outcome {
    let (ipc, bytes) = (context.ipc(), pattern(1 << 20));
    let len = bytes.len() as u64;
    let writer = ipc.create_stream(0)?;
    for kind in context.usable_kinds()? {
        for device in context.devices()? {
            if !context.backend().peer_access(device.ordinal, FIRST)? {
                continue;
            }
            let target = ipc.allocate(device.ordinal, len)?;
            if !can_copy_from(&ipc.allocate_for(0, len, kind.kind)?, &target, &ipc.create_stream(device.ordinal)?) {
                // Memory of this kind is not reached from there, whatever the peer access (CANN before 8.5).
                continue;
            }
            let reader = ipc.create_stream(device.ordinal)?;
            {
                let source = ipc.allocate_for(0, len, kind.kind)?;
                source.view_mut::<u8, _>(&writer)?.copy_from(&bytes)?;
                writer.synchronize()?;
                target.view_mut::<u8, _>(&reader)?.fill_bytes(0)?;
                reader.synchronize()?;
                let gate = Gate::close(&reader)?;
                target.view_mut::<u8, _>(&reader)?.copy_from_device(&source.view(&reader)?)?;
                // The memory is freed before the copy begins, unless the free waits for it.
                gate.open_soon();
                drop(source);
                let next = ipc.allocate_for(0, len, kind.kind)?;
                next.view_mut::<u8, _>(&writer)?.fill_bytes(0xee)?;
                writer.synchronize()?;
                let read = target.view::<u8, _>(&reader)?.to_vec();
                freed_under_work(read.map_err(|error| error.to_string()), &bytes).map_err(|what| {
                    Stop::failed(format_args!(
                        "memory for {} handles on device 0 was freed while a stream of device {} had a copy from it \
                         pending, and {what}: DeviceMemory::free has to wait for the work that was submitted before \
                         the call, on every stream of this process that can reach the memory, or to free later",
                        kind.name, device.ordinal
                    ))
                })?;
                gate.open("submitting a copy")?;
            }
        }
    }
    Ok(())
}

/// Returns whether a stream can copy between two buffers of the same length.
fn can_copy_from(source: &Buffer, target: &Buffer, stream: &Stream) -> bool {
    let copy = || target.view_mut::<u8, _>(stream)?.copy_from_device(&source.view::<u8, _>(stream)?);
    copy().and_then(|()| stream.synchronize()).is_ok()
}

fn freed_under_work(read: Result<Vec<u8>, String>, expected: &[u8]) -> Result<(), String> {
    let read = read.map_err(|error| format!("the stream failed ({error})"))?;
    match read.iter().zip(expected).position(|(found, expected)| found != expected) {
        None => Ok(()),
        Some(at) => Err(format!("the copy read {:#04x} at byte {at}, not {:#04x}", read[at], expected[at])),
    }
}

/// Memory of two devices that can reach each other is copied between them.
pub fn copies_between_devices(context: &Context) -> Outcome {
    let [_, second] = context.two_peers()?;
    let backend = &**context.backend();
    let bytes = pattern(100_003);
    let (source, stream) = bare(context, bytes.len() as u64)?;
    source.write(source.range, &bytes, &stream)?;
    context.backend().synchronize_device(FIRST)?;
    let target = Bare::allocate(backend, second.ordinal, bytes.len() as u64)?;
    let there = context.ipc().create_stream(second.ordinal)?;
    equal(there.device(), second.ordinal, "the device of a stream")?;
    target.copy_from(&source, &there)?;
    same(&target.read(target.range, &there)?, &bytes, "the bytes copied from device 0 to device 1")
}
