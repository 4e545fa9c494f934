//! Repeated opens: some drivers refuse to open a handle twice, some count, some map it a second time. Users see no difference.

use std::sync::Arc;

use device_ipc_core::Mapping;

use crate::agent::{Agent, Command, Place, Sharing};
use crate::check::{equal, refused, same, that};
use crate::flows::{Memory, SOON, bytes_of, pattern};
use crate::{Context, Outcome, Stop, fail};

const THREADS: usize = 8;
const ROUNDS: usize = 20;

fn wait_released(exporter: &mut Agent, name: &str) -> Outcome {
    exporter.must(&Command::WaitReleased { name: name.into(), timeout: SOON }).map(drop)
}

/// Mappings of one export nest: each is valid until its own drop, all have one address, and the lease ends with the last.
pub fn nested_in_one_process(context: &Context) -> Outcome {
    let bytes = pattern(5000);
    let mut exporter = context.agent()?;
    let descriptor = exporter.export("e", &bytes)?;
    let ipc = context.ipc();
    let stream = ipc.create_stream(0)?;
    let outer = ipc.open(&descriptor).on(&stream)?;
    let inner = ipc.open(&descriptor).on(&stream)?;
    equal(inner.range(), outer.range(), "the ranges of two mappings of one export")?;
    drop(outer);
    same(&bytes_of(&inner, &stream)?, &bytes, "the bytes of the second mapping after the first was dropped")?;
    let again = ipc.open(&descriptor).on(&stream)?;
    equal(again.range(), inner.range(), "the range of a third mapping")?;
    drop(inner);
    same(&bytes_of(&again, &stream)?, &bytes, "the bytes of the third mapping after the second was dropped")?;
    let waited = exporter.request(&Command::WaitReleased { name: "e".into(), timeout: std::time::Duration::ZERO })?;
    refused(waited.result, "waiting while a mapping is open", "StillHeld", &["still held"])?;
    drop(again);
    wait_released(&mut exporter, "e")
}

/// After the last mapping has ended, the memory can be opened again while the exporter lives; also at once, while the
/// first one is still being closed.
pub fn again_after_release(context: &Context) -> Outcome {
    let bytes = pattern(5000);
    let mut exporter = context.agent()?;
    let descriptor = exporter.export("e", &bytes)?;
    let ipc = context.ipc();
    let stream = ipc.create_stream(0)?;
    for round in 0..ROUNDS {
        let mapping = ipc.open(&descriptor).on(&stream)?;
        same(&bytes_of(&mapping, &stream)?, &bytes, format!("the bytes in round {round}"))?;
        drop(mapping);
        if round % 4 == 0 {
            wait_released(&mut exporter, "e")?;
        }
    }
    wait_released(&mut exporter, "e")
}

/// Threads that open, read and drop the same export at the same time never see anything but its bytes.
pub fn by_many_threads(context: &Context) -> Outcome {
    let bytes = pattern(5000);
    let mut exporter = context.agent()?;
    let descriptor = exporter.export("e", &bytes)?;
    let ipc = context.ipc();
    in_threads(|_| {
        let stream = ipc.create_stream(0)?;
        for round in 0..ROUNDS {
            let mapping = ipc.open(&descriptor).on(&stream)?;
            same(&bytes_of(&mapping, &stream)?, &bytes, format!("the bytes in round {round}"))?;
            if round % 2 == 0 {
                mapping.release(&stream)?;
            }
        }
        Ok(())
    })?;
    wait_released(&mut exporter, "e")
}

/// Threads that share parts of one allocation at the same time make exports that can all be open at once, in one
/// mapping.
pub fn shared_by_many_threads(context: &Context) -> Outcome {
    const PART: u64 = 4096;
    let bytes = pattern(THREADS * PART as usize);
    let memory = Memory::with_bytes(context, 0, &bytes)?;
    let (ipc, buffer) = (&memory.ipc, &memory.buffer);
    let mut shares = Vec::new();
    std::thread::scope(|scope| {
        let share = |index: usize| ipc.share(buffer.slice(index as u64 * PART, PART)?).start().map_err(Stop::from);
        let threads: Vec<_> = (0..THREADS).map(|index| scope.spawn(move || share(index))).collect();
        for thread in threads {
            shares.push(thread.join().map_err(|_| Stop::failed("a thread that shares panicked"))??);
        }
        Ok::<_, Stop>(())
    })?;
    let mut importer = context.agent()?;
    let mut bases = Vec::new();
    for (index, share) in shares.iter().enumerate() {
        let mapped = importer.open(&index.to_string(), share.descriptor(), Place::Home)?;
        bases.push(mapped.address.wrapping_sub(index as u64 * PART));
    }
    that(
        bases.iter().all(|base| *base == bases[0]),
        format!("parts of one allocation that threads shared at once are mapped apart: {bases:x?}"),
    )?;
    for index in 0..THREADS {
        let part = &bytes[index * PART as usize..][..PART as usize];
        same(&importer.bytes(&index.to_string())?, part, format!("the bytes of part {index}"))?;
    }
    Ok(())
}

/// Two exports of the same bytes, opened by one process, are one mapping of the driver with two leases.
pub fn two_exports_of_the_same_bytes(context: &Context) -> Outcome {
    let bytes = pattern(5000);
    let mut exporter = context.agent()?;
    exporter.allocate("e", 0, &bytes)?;
    let first = exporter.share("e", Sharing::default())?;
    let ipc = context.ipc();
    let stream = ipc.create_stream(0)?;
    let one = ipc.open(&first).on(&stream)?;
    // The agent's first export of that name is dropped here.
    let second = exporter.share("e", Sharing::default())?;
    let other = ipc.open(&second).on(&stream)?;
    equal(other.range(), one.range(), "the ranges of two exports of the same bytes")?;
    drop(one);
    same(&bytes_of(&other, &stream)?, &bytes, "the bytes of the second export after the first mapping was dropped")
}

/// Many exports, each of its own allocation, are open at once, and are released in another order.
pub fn many_exports(context: &Context) -> Outcome {
    const COUNT: usize = 32;
    let mut exporter = context.agent()?;
    let ipc = context.ipc();
    let stream = ipc.create_stream(0)?;
    let mut open: Vec<(usize, Mapping)> = Vec::new();
    let contents = |index: usize| vec![index as u8; 100 + index];
    for index in 0..COUNT {
        let descriptor = exporter.export(&index.to_string(), &contents(index))?;
        open.push((index, ipc.open(&descriptor).on(&stream)?));
    }
    while !open.is_empty() {
        let (index, mapping) = open.swap_remove(open.len() / 2);
        same(&bytes_of(&mapping, &stream)?, &contents(index), format!("the bytes of export {index}"))?;
        drop(mapping);
        wait_released(&mut exporter, &index.to_string())?;
    }
    Ok(())
}

/// Memory that was opened from another process cannot be exported again; the error says to forward the descriptor.
pub fn shared_on(context: &Context) -> Outcome {
    let mut exporter = context.agent()?;
    let descriptor = exporter.export("e", &pattern(5000))?;
    let mut importer = context.agent()?;
    importer.open("m", &descriptor, Place::Home)?;
    let shared = importer.request(&Command::Share(Box::new(Sharing { name: "m".into(), of: Some("m".into()), ..Default::default() })))?;
    refused(
        shared.result,
        "sharing a mapping on",
        "SharedOn",
        &["opened from another process", "forward the descriptor", "Mapping::descriptor"],
    )
}

/// A library object is cheap: any number of them, made at any time, share what is open.
pub fn by_two_library_objects(context: &Context) -> Outcome {
    let bytes = pattern(5000);
    let mut exporter = context.agent()?;
    let descriptor = exporter.export("e", &bytes)?;
    let (first, second) = (context.ipc(), context.ipc());
    let stream = first.create_stream(0)?;
    let one = first.open(&descriptor).on(&stream)?;
    let other = second.open(&descriptor).on(&stream)?;
    equal(other.range(), one.range(), "the ranges of mappings by two library objects")?;
    drop((first, one));
    same(&bytes_of(&other, &stream)?, &bytes, "the bytes of the second mapping")
}

fn in_threads(body: impl Fn(usize) -> Outcome + Sync) -> Outcome {
    let body = &body;
    let results: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|index| scope.spawn(move || body(index))).collect();
        threads.into_iter().map(std::thread::ScopedJoinHandle::join).collect()
    });
    for result in results {
        match result {
            Ok(outcome) => outcome?,
            Err(_) => return fail("a thread of the case panicked"),
        }
    }
    Ok(())
}

/// An owner behind an `Arc` is shared like an owner alone, by two exports that are dropped in any order.
pub fn one_owner_of_two_exports(context: &Context) -> Outcome {
    let memory = Memory::with_bytes(context, 0, &pattern(5000))?;
    let first = memory.ipc.share(Arc::clone(&memory.buffer)).start()?;
    let second = memory.ipc.share(Arc::clone(&memory.buffer)).start()?;
    first.close(SOON)?;
    let mut importer = context.agent()?;
    importer.open("m", second.descriptor(), Place::Home)?;
    same(&importer.bytes("m")?, &pattern(5000), "the bytes of the second export after the first was closed")
}
