//! Copies through host memory: what a receiver gets where its device cannot reach the memory, if it asks for that.

mod tensors;

pub use tensors::*;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use device_ipc_core::limits::{StagingLimits, set_staging_limits};
use device_ipc_core::{Access, CopyPolicy, Descriptor, Dtype};

use crate::agent::{Agent, Answer, Command, Copying, Mapped, Opening, Place, Sharing};
use crate::check::{equal, refused, same, that};
use crate::flows::{Memory, OLD, SOON, bytes_of, float_bytes, nobody_holds, pattern};
use crate::wire;
use crate::gate::Gate;
use crate::{Context, Outcome, Stop, skip};

/// The shortest chunk.
const CHUNK: u64 = 64 << 10;

fn always(descriptor: &Descriptor, place: Place) -> Opening {
    Opening::new(descriptor, place).copying(Copying::Always)
}

fn if_needed(descriptor: &Descriptor, place: Place) -> Opening {
    Opening::new(descriptor, place).copying(Copying::IfNeeded)
}

/// Has the agent open, which must succeed.
fn copied(receiver: &mut Agent, name: &str, opening: Opening) -> Result<Mapped, Stop> {
    match receiver.try_open(name, opening)? {
        Ok(mapped) => Ok(mapped),
        Err(refusal) => crate::fail(format!("the copy was refused: {}: {}", refusal.kind, refusal.text)),
    }
}

/// Short chunks for what this process shares, so that a region has several.
fn short_chunks() -> Outcome {
    Ok(set_staging_limits(StagingLimits::default().with_chunk_bytes(CHUNK))?)
}

/// A copy on another card has the bytes, says what it is and whose, and the export is free again when the open returns.
pub fn to_another_device(context: &Context) -> Outcome {
    let [first, _] = context.two_devices()?;
    short_chunks()?;
    let bytes = pattern(5 * CHUNK as usize + 3);
    let memory = Memory::with_bytes(context, 0, &bytes)?;
    let share = memory.share()?;
    let mut receiver = context.agent()?;
    for (name, place) in [("device", Place::Device(1)), ("stream", Place::Stream(1))] {
        let mapped = copied(&mut receiver, name, always(share.descriptor(), place))?;
        equal((mapped.device, mapped.is_copy, mapped.len), (1, true, bytes.len() as u64), "device, copy, length")?;
        equal(mapped.home, first.identity, "the device where the original lives")?;
        nobody_holds(&share, "the copy")?;
        same(&receiver.bytes(name)?, &bytes, "the bytes of the copy")?;
    }
    Ok(share.wait_released(SOON)?)
}

/// Memory that can be opened is opened: `StagedIfNeeded` copies only if needed.
pub fn reachable_memory_is_opened(context: &Context) -> Outcome {
    let memory = Memory::with_bytes(context, 0, &pattern(4096))?;
    let share = memory.share()?;
    let mut receiver = context.agent()?;
    let mapped = copied(&mut receiver, "home", if_needed(share.descriptor(), Place::Home))?;
    equal((mapped.is_copy, mapped.at_home), (false, true), "whether it is a copy, and at home")?;
    context.two_peers()?;
    let mapped = copied(&mut receiver, "away", if_needed(share.descriptor(), Place::Device(1)))?;
    equal((mapped.is_copy, mapped.at_home), (false, false), "whether it is a copy, and at home, on device 1")?;
    same(&receiver.bytes("away")?, &pattern(4096), "the bytes")
}

/// A tensor without elements is copied too, whether its owner has memory or none.
pub fn tensor_without_elements(context: &Context) -> Outcome {
    let memory = Memory::with_floats(context, 20)?;
    let shares = [
        memory.ipc.share(memory.buffer.slice(80, 0)?).dtype(Dtype::F32).shape([0, 5]).start()?,
        memory.ipc.share(memory.ipc.allocate(0, 0)?).dtype(Dtype::F32).shape([0, 5]).start()?,
    ];
    let last = context.devices()?.len() as u32 - 1;
    let mut receiver = context.agent()?;
    for share in shares {
        for place in [Place::Home, Place::Stream(last)] {
            let mapped = copied(&mut receiver, "m", always(share.descriptor(), place))?;
            equal(mapped.tensor, Some(("float32".to_owned(), vec![0, 5])), "type and shape of the tensor")?;
            same(&receiver.floats("m")?, &[], "its elements")?;
            receiver.drop_mapping("m")?;
        }
        let own = memory.ipc.open(share.descriptor()).copy(CopyPolicy::Staged).at_home()?;
        equal(own.to_host::<f32, _>(&memory.stream)?, Vec::new(), "its elements in the own process")?;
        drop(own);
        share.close(SOON)?;
    }
    Ok(())
}

/// Without peer access the bytes are copied, if that was allowed.
pub fn unreachable_memory_is_copied(context: &Context) -> Outcome {
    without_peer_access(context)?;
    let memory = Memory::with_bytes(context, 0, &pattern(4096))?;
    let share = memory.share()?;
    let mut receiver = context.agent()?;
    let mapped = copied(&mut receiver, "m", if_needed(share.descriptor(), Place::Device(1)))?;
    equal((mapped.device, mapped.is_copy), (1, true), "the device, and whether it is a copy")?;
    same(&receiver.bytes("m")?, &pattern(4096), "the bytes of the copy")
}

/// Never silently: without the call there is the error, which names it.
pub fn unreachable_memory_is_refused_unless_asked_for(context: &Context) -> Outcome {
    without_peer_access(context)?;
    let memory = Memory::with_bytes(context, 0, &pattern(4096))?;
    let share = memory.share()?;
    let mut receiver = context.agent()?;
    let refusal = receiver.try_open("m", Opening::new(share.descriptor(), Place::Device(1)))?;
    refused(refusal, "opening without peer access", "NoPeerAccess", &["StagedIfNeeded"])
}

fn without_peer_access(context: &Context) -> Outcome {
    let [first, second] = context.two_devices()?;
    if context.backend().peer_access(second.ordinal, first.ordinal)? {
        return skip("device 1 has peer access to device 0");
    }
    Ok(())
}

/// A receiver that does not see the memory's card gets a copy on its own. At home there can be none.
pub fn hidden_home(context: &Context) -> Outcome {
    let [first, _] = context.two_devices()?;
    let memory = Memory::with_bytes(context, 0, &pattern(70_000))?;
    let share = memory.share()?;
    let mut receiver = context.agent_seeing(&[1])?;
    let refusal = receiver.try_open("m", always(share.descriptor(), Place::Home))?;
    refused(refusal, "a copy at a home that is hidden", "HomeNotVisible", &["StagedIfNeeded", "on_device"])?;
    for (name, opening) in [
        ("needed", if_needed(share.descriptor(), Place::Device(0))),
        ("always", always(share.descriptor(), Place::Device(0))),
    ] {
        let mapped = copied(&mut receiver, name, opening)?;
        that(mapped.is_copy || name == "needed", "it was to be a copy in any case")?;
        equal((mapped.device, mapped.home), (0, first.identity), "its device, and the original's home")?;
        same(&receiver.bytes(name)?, &pattern(70_000), "the bytes of a hidden card's memory")?;
        receiver.drop_mapping(name)?;
    }
    Ok(share.wait_released(SOON)?)
}

/// One byte, a byte more and less than a chunk, several chunks, and a rest.
pub fn lengths(context: &Context) -> Outcome {
    short_chunks()?;
    let mut receiver = context.agent()?;
    for len in [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 7 * CHUNK + 5] {
        let bytes = pattern(len as usize);
        let memory = Memory::with_bytes(context, 0, &bytes)?;
        let share = memory.share()?;
        let mapped = copied(&mut receiver, "m", always(share.descriptor(), Place::Device(0)))?;
        equal((mapped.len, mapped.is_copy), (len, true), "length, and whether it is a copy")?;
        same(&receiver.bytes("m")?, &bytes, format!("{len} bytes"))?;
        receiver.drop_mapping("m")?;
        share.close(SOON)?;
    }
    Ok(())
}

/// The copy is of the region, not of its allocation.
pub fn part_of_an_allocation(context: &Context) -> Outcome {
    short_chunks()?;
    let bytes = pattern(4 * CHUNK as usize);
    let memory = Memory::with_bytes(context, 0, &bytes)?;
    let (offset, len) = (4097, 2 * CHUNK as usize + 1);
    let share = memory.share_part(offset as u64, len as u64)?;
    let mut receiver = context.agent()?;
    copied(&mut receiver, "m", always(share.descriptor(), Place::Device(0)))?;
    same(&receiver.bytes("m")?, &bytes[offset..offset + len], "the bytes of the part")
}

/// A copy is its own memory: what one side writes, the other does not see.
pub fn neither_side_sees_the_others_writes(context: &Context) -> Outcome {
    let memory = Memory::with_floats(context, 1024)?;
    let share = memory.share()?;
    let mut receiver = context.agent()?;
    let mapped = copied(&mut receiver, "m", always(share.descriptor(), Place::Device(0)))?;
    equal(mapped.access, Access::ReadWrite, "what the receiver may do")?;
    receiver.add("m", 2.0)?;
    receiver.synchronize(0)?;
    memory.add(5.0)?;
    same(&memory.floats()?, &[OLD + 5.0; 1024], "the exporter's floats")?;
    same(&receiver.floats("m")?, &[OLD + 2.0; 1024], "the receiver's floats")
}

/// A copy has the bytes that the exporter's stream has yet to write, wherever the receiver wants them.
pub fn waits_for_ready(context: &Context) -> Outcome {
    let mut receiver = context.agent()?;
    receiver.prepare(0)?;
    // Both until the end: while a driver frees memory, it may hold up other calls until the stream is idle.
    let memories = [Memory::with_floats(context, 4096)?, Memory::with_floats(context, 4096)?];
    for (memory, place) in memories.iter().zip([Place::Device(0), Place::Stream(0)]) {
        let gate = Gate::close(&memory.stream)?;
        memory.add(1.0)?;
        gate.open_soon();
        let share = memory.ipc.share(Arc::clone(&memory.buffer)).ready_on(&memory.stream).start()?;
        copied(&mut receiver, "m", always(share.descriptor(), place))?;
        gate.was_passed("a copy")?;
        same(&receiver.floats("m")?, &[OLD + 1.0; 4096], "the floats of the copy")?;
        receiver.drop_mapping("m")?;
    }
    Ok(())
}

/// An exporter that does not reply within the timeout ends the open, and leaves nothing.
pub fn silence_times_out(context: &Context) -> Outcome {
    context.needs_events()?;
    let memory = Memory::with_floats(context, 4096)?;
    let mut receiver = context.agent()?;
    receiver.prepare(0)?;
    let gate = Gate::close(&memory.stream)?;
    memory.add(1.0)?;
    let share = memory.ipc.share(Arc::clone(&memory.buffer)).ready_on(&memory.stream).start()?;
    let opening = always(share.descriptor(), Place::Device(0)).timeout(Duration::from_millis(200));
    let refusal = receiver.try_open("m", opening)?;
    refused(refusal, "a copy of bytes that are not ready", "Timeout", &["200 ms"])?;
    gate.open("an open with a timeout")?;
    nobody_holds(&share, "the copy was given up")?;
    copied(&mut receiver, "m", always(share.descriptor(), Place::Device(0)))?;
    same(&receiver.floats("m")?, &[OLD + 1.0; 4096], "the floats of a copy with more patience")
}

/// A read-only export can be copied; the copy is read-only unless the receiver wants to write to what is its own.
pub fn read_only(context: &Context) -> Outcome {
    let kind = context.kind_that(|kind| kind.read_only, "no kind of handle can be mapped read-only")?;
    let floats = float_bytes(&[OLD; 1024]);
    let memory = Memory::of_kind(context, kind.kind, &floats)?;
    let share = memory.ipc.share(Arc::clone(&memory.buffer)).access(Access::ReadOnly).start()?;
    let mut receiver = context.agent()?;
    let mapped = copied(&mut receiver, "read", always(share.descriptor(), Place::Device(0)))?;
    equal(mapped.access, Access::ReadOnly, "what the receiver may do")?;
    let written = receiver.request(&Command::Fill { name: "read".into(), byte: 7 })?;
    refused(written.result, "writing to a read-only copy", "AccessDenied", &["read-only"])?;
    let own = always(share.descriptor(), Place::Device(0)).access(Access::ReadWrite);
    equal(copied(&mut receiver, "own", own)?.access, Access::ReadWrite, "what it may do with its own")?;
    receiver.must(&Command::Fill { name: "own".into(), byte: 7 })?;
    same(&receiver.bytes("own")?, &vec![7; floats.len()], "the bytes that the receiver wrote")?;
    same(&memory.bytes()?, &floats, "the exporter's bytes")?;
    let wanted = if_needed(share.descriptor(), Place::Device(0)).access(Access::ReadWrite);
    refused(receiver.try_open("w", wanted)?, "writing to what is shared for reading", "AccessDenied", &[])
}

/// Neither the drop of the export nor the exit of its process affects a copy.
pub fn outlives_the_export_and_its_process(context: &Context) -> Outcome {
    let mut exporter = context.agent()?;
    let descriptor = exporter.export("e", &pattern(100_000))?;
    let mut receiver = context.agent()?;
    copied(&mut receiver, "m", always(&descriptor, Place::Device(0)))?;
    exporter.must(&Command::Drop { names: vec!["e".into()] })?;
    same(&receiver.bytes("m")?, &pattern(100_000), "the bytes after the export was dropped")?;
    exporter.kill()?;
    same(&receiver.bytes("m")?, &pattern(100_000), "the bytes after the exporter's death")?;
    let refusal = receiver.try_open("n", always(&descriptor, Place::Device(0)))?;
    refused(refusal, "a copy from a dead process", "ExporterGone", &[])
}

/// A dropped export is no more copied than opened.
pub fn dropped_export(context: &Context) -> Outcome {
    let mut exporter = context.agent()?;
    let descriptor = exporter.export("e", &pattern(4096))?;
    exporter.must(&Command::Drop { names: vec!["e".into()] })?;
    let mut receiver = context.agent()?;
    for opening in [always(&descriptor, Place::Device(0)), if_needed(&descriptor, Place::Device(0))] {
        refused(receiver.try_open("m", opening)?, "a copy of a dropped export", "ExportDropped", &[])?;
    }
    Ok(())
}

/// A descriptor that names another length than the export has copies nothing.
pub fn altered_length(context: &Context) -> Outcome {
    let memory = Memory::with_bytes(context, 0, &pattern(8192))?;
    let share = memory.share_part(0, 4096)?;
    let len = wire::places(share.descriptor()).len;
    let longer = wire::altered(share.descriptor(), |bytes| {
        bytes[len].copy_from_slice(&8192_u64.to_le_bytes());
    })?;
    let mut receiver = context.agent()?;
    let refusal = receiver.try_open("m", always(&longer, Place::Device(0)))?;
    refused(refusal, "a copy of another length", "InvalidRegion", &["8192", "4096"])?;
    nobody_holds(&share, "the refused copy")?;
    copied(&mut receiver, "m", always(share.descriptor(), Place::Device(0)))?;
    same(&receiver.bytes("m")?, &pattern(8192)[..4096], "the bytes of the right length")
}

/// Two receivers, and several threads of one process, copy from one exporter at a time.
pub fn several_at_once(context: &Context) -> Outcome {
    let mut exporter = context.agent()?;
    exporter.must(&Command::StagingLimits { chunk_bytes: CHUNK, total_bytes: 256 << 20 })?;
    all_at_once(context, &mut exporter)
}

/// The same where the exporter has host memory for one of them: the others wait, and none fails.
pub fn many_with_little_room(context: &Context) -> Outcome {
    let mut exporter = context.agent()?;
    exporter.must(&Command::StagingLimits { chunk_bytes: CHUNK, total_bytes: 1 })?;
    all_at_once(context, &mut exporter)
}

fn all_at_once(context: &Context, exporter: &mut Agent) -> Outcome {
    let lengths = [1, 5 * CHUNK as usize, 3 * CHUNK as usize + 7, CHUNK as usize];
    let mut descriptors = Vec::new();
    for (number, len) in lengths.iter().enumerate() {
        descriptors.push(exporter.export(&format!("e{number}"), &pattern(*len))?);
    }
    let mut receiver = context.agent()?;
    let opening = Opening { name: "m".into(), ..always(&descriptors[1], Place::Device(0)) };
    receiver.send(&Command::Open(Box::new(opening)))?;
    let ipc = context.ipc();
    let stream = ipc.create_stream(0)?;
    let copy = |descriptor| bytes_of(&ipc.open(descriptor).copy(CopyPolicy::Staged).on_device(0)?, &stream);
    let copy = &copy;
    let copies: Vec<_> = thread::scope(|scope| {
        let threads = descriptors.iter().cycle().take(8);
        let started: Vec<_> = threads.map(|descriptor| scope.spawn(move || copy(descriptor))).collect();
        started.into_iter().map(|thread| thread.join().expect("it does not panic")).collect()
    });
    for (bytes, len) in copies.into_iter().zip(lengths.iter().cycle()) {
        same(&bytes?, &pattern(*len), format!("the {len} bytes of a thread"))?;
    }
    match receiver.receive_reply()?.result {
        Ok(Answer::Mapping(mapped)) => that(mapped.is_copy, "the other process has a copy")?,
        other => return crate::fail(format!("the other process got {other:?}")),
    }
    same(&receiver.bytes("m")?, &pattern(lengths[1]), "the bytes of the other process")
}

/// Within the exporting process a copy is made without ceremony, also on another card.
pub fn own_process(context: &Context) -> Outcome {
    let bytes = pattern(100_001);
    let memory = Memory::with_bytes(context, 0, &bytes)?;
    let share = memory.share()?;
    let mapping = memory.ipc.open(share.descriptor()).copy(CopyPolicy::Staged).at_home()?;
    that(mapping.is_copy() && mapping.range() != memory.buffer.range(), "it was to be a copy")?;
    same(&bytes_of(&mapping, &memory.stream)?, &bytes, "the bytes of the copy")?;
    let mapping = memory.ipc.open(share.descriptor()).copy(CopyPolicy::StagedIfNeeded).at_home()?;
    that(!mapping.is_copy(), "at home there is no need for a copy")?;
    drop(mapping);
    nobody_holds(&share, "the copies of this process")?;
    context.two_devices()?;
    let mapping = memory.ipc.open(share.descriptor()).copy(CopyPolicy::StagedIfNeeded).on_device(1)?;
    that(mapping.is_copy(), "on another card of the exporting process it is a copy")?;
    let stream = memory.ipc.create_stream(1)?;
    same(&bytes_of(&mapping, &stream)?, &bytes, "the bytes on device 1")?;
    nobody_holds(&share, "the copy on device 1")
}

/// Nothing can be ordered by a copy: the next one has what is new.
pub fn no_timeline(context: &Context) -> Outcome {
    context.needs_timelines(1)?;
    let memory = Memory::with_bytes(context, 0, &pattern(4096))?;
    let share = memory.share()?;
    let mut receiver = context.agent()?;
    copied(&mut receiver, "m", always(share.descriptor(), Place::Device(0)))?;
    let answer = receiver.request(&Command::Timeline { name: "t".into(), of: Some("m".into()) })?;
    refused(answer.result, "the timeline of a copy", "Unsupported", &["copy", "open the export again"])
}

/// A copy is released like any mapping: when the stream reaches this point, and its memory is free again.
pub fn released_on_a_stream(context: &Context) -> Outcome {
    let mut exporter = context.agent()?;
    exporter.allocate("e", 0, &pattern(1 << 20))?;
    let descriptor = exporter.share("e", Sharing::default())?;
    let ipc = context.ipc();
    let stream = ipc.create_stream(0)?;
    let free = || Ok::<_, Stop>(context.backend().memory().memory_info(stream.device())?.free_bytes);
    drop(ipc.open(&descriptor).copy(CopyPolicy::Staged).on(&stream)?);
    device_ipc_core::close_unused(SOON)?;
    let before = free()?;
    let mapping = ipc.open(&descriptor).copy(CopyPolicy::Staged).on(&stream)?;
    let gate = Gate::close(&stream)?;
    gate.open_soon();
    let view = bytes_of(&mapping, &stream)?;
    mapping.release(&stream)?;
    same(&view, &pattern(1 << 20), "the bytes")?;
    stream.synchronize()?;
    let until = Instant::now() + SOON;
    while free()? < before {
        that(Instant::now() < until, "the memory of a released copy should be free again")?;
        thread::yield_now();
    }
    Ok(())
}
