//! Copies of named tensors through host memory.

use std::sync::Arc;

use device_ipc_core::{CopyPolicy, DeviceMap, Dtype, Export, TensorLayout};

use super::{CHUNK, always, copied, if_needed, short_chunks};
use crate::agent::{Agent, Command, Mapped, Opening, Place};
use crate::check::{equal, refused, same, that};
use crate::flows::{Memory, SOON, nobody_holds, pattern, tensor_bytes};
use crate::{Context, Outcome, Stop};

/// The length of each memory: some chunks and a rest.
const LEN: usize = 3 * CHUNK as usize + 100;

/// The tensors in each memory: name, offset and length. `view` overlaps `base`, `near` touches it, `far` lies behind a gap, and
/// `none` has no elements.
const TENSORS: [(&str, usize, usize); 5] =
    [("base", 3, 70_000), ("view", 60_003, 20_000), ("near", 80_003, 50), ("far", 150_001, 46_000), ("none", 9, 0)];

fn bytes(memory: usize) -> Vec<u8> {
    pattern(LEN + memory)[memory..].to_vec()
}

fn part(memory: usize, (_, offset, len): (&str, usize, usize)) -> Vec<u8> {
    bytes(memory)[offset..offset + len].to_vec()
}

/// A memory on each of these devices and an export of [`TENSORS`] in each: `0.base`, `0.view`, …, `1.base`, ….
fn share(context: &Context, devices: &[u32]) -> Result<(Vec<Memory>, Export), Stop> {
    short_chunks()?;
    let ipc = context.ipc();
    let mut set = ipc.tensors();
    let mut memories = Vec::new();
    for (index, device) in devices.iter().enumerate() {
        let memory = Memory::with_bytes(context, *device, &bytes(index))?;
        let all = set.memory(Arc::clone(&memory.buffer));
        for (name, offset, len) in TENSORS {
            let layout = TensorLayout::contiguous(Dtype::U8, [len as u64])?;
            set.tensor(format!("{index}.{name}"), all, offset as u64, layout)?;
        }
        memories.push(memory);
    }
    Ok((memories, ipc.share_all(set).start()?))
}

#[track_caller]
fn has_all(receiver: &mut Agent, name: &str, memories: usize) -> Outcome {
    for memory in 0..memories {
        for tensor in TENSORS {
            let full = format!("{memory}.{}", tensor.0);
            let read = Command::TensorBytes { name: name.into(), tensor: full.clone() };
            same(&receiver.get::<Vec<u8>>(&read)?, &part(memory, tensor), format!("the bytes of {full}"))?;
        }
    }
    Ok(())
}

#[track_caller]
fn is_copy_of_all(mapped: &Mapped, device: u32, memories: usize) -> Outcome {
    let tensors = Some(memories * TENSORS.len());
    equal((mapped.is_copy, mapped.device, mapped.tensors), (true, device, tensors), "copy, device, tensors")
}

/// All tensors of one open are copied, wherever the importer places them, and the export is free when the open returns.
pub fn named_tensors(context: &Context) -> Outcome {
    let (_memories, share) = share(context, &[0, 0])?;
    let mut receiver = context.agent()?;
    for (name, place) in [("home", Place::Home), ("device", Place::Device(0)), ("stream", Place::Stream(0))] {
        let mapped = copied(&mut receiver, name, always(share.descriptor(), place))?;
        is_copy_of_all(&mapped, 0, 2)?;
        nobody_holds(&share, "the copy")?;
        has_all(&mut receiver, name, 2)?;
    }
    Ok(share.wait_released(SOON)?)
}

/// Tensors that overlap are copied once: in the copy they overlap too. The original stays as it is.
pub fn named_tensors_that_overlap(context: &Context) -> Outcome {
    let (memories, share) = share(context, &[0])?;
    let mut receiver = context.agent()?;
    copied(&mut receiver, "m", always(share.descriptor(), Place::Device(0)))?;
    receiver.must(&Command::TensorFill { name: "m".into(), tensor: "0.view".into(), byte: 7 })?;
    let read = |receiver: &mut Agent, tensor: &str| {
        receiver.get::<Vec<u8>>(&Command::TensorBytes { name: "m".into(), tensor: tensor.into() })
    };
    let mut base = part(0, TENSORS[0]);
    base[60_000..].fill(7);
    same(&read(&mut receiver, "0.base")?, &base, "the tensor under the view")?;
    same(&read(&mut receiver, "0.near")?, &part(0, TENSORS[2]), "the tensor behind the view")?;
    same(&memories[0].bytes()?, &bytes(0), "the original")
}

/// Tensors of two devices are copied from both, to one device, by a device map, and each to its home.
pub fn named_tensors_of_two_devices(context: &Context) -> Outcome {
    let [first, second] = context.two_devices()?;
    let (_memories, share) = share(context, &[0, 1])?;
    let mut receiver = context.agent()?;
    let crossed = vec![(first.identity, 1), (second.identity, 0)];
    for (name, place, device) in [
        ("home", Place::Home, 0),
        ("first", Place::Device(0), 0),
        ("second", Place::Stream(1), 1),
        ("crossed", Place::Map(crossed), 1),
    ] {
        let mapped = copied(&mut receiver, name, always(share.descriptor(), place))?;
        is_copy_of_all(&mapped, device, 2)?;
        nobody_holds(&share, "the copy")?;
        has_all(&mut receiver, name, 2)?;
        receiver.drop_mapping(name)?;
    }
    let refusal = receiver.try_open("m", always(share.descriptor(), Place::Map(vec![(first.identity, 0)])))?;
    refused(refusal, "a copy to no device", "InBundle", &["\"1.base\"", "DeviceMap::insert"])
}

/// Only tensors that the device cannot reach are copied, and the mapping states it.
pub fn named_tensors_where_needed(context: &Context) -> Outcome {
    let [first, second] = context.two_devices()?;
    let (_memories, share) = share(context, &[0, 1])?;
    let mut receiver = context.agent()?;
    let reaches = context.backend().peer_access(second.ordinal, first.ordinal)?;
    if !reaches {
        let refusal = receiver.try_open("m", Opening::new(share.descriptor(), Place::Device(1)))?;
        refused(refusal, "opening without peer access", "InBundle", &["\"0.base\"", "StagedIfNeeded"])?;
    }
    let mapped = copied(&mut receiver, "m", if_needed(share.descriptor(), Place::Device(1)))?;
    equal((mapped.is_copy, mapped.device), (!reaches, 1), "whether it is a copy, and its device")?;
    has_all(&mut receiver, "m", 2)?;
    let mapped = copied(&mut receiver, "home", if_needed(share.descriptor(), Place::Home))?;
    equal((mapped.is_copy, mapped.at_home), (false, true), "whether it is a copy, and at home")
}

/// A receiver that does not see one of the devices gets copies on the device that it sees.
pub fn named_tensors_of_a_hidden_home(context: &Context) -> Outcome {
    context.two_devices()?;
    let (_memories, share) = share(context, &[0, 1])?;
    let mut receiver = context.agent_seeing(&[1])?;
    let refusal = receiver.try_open("m", if_needed(share.descriptor(), Place::Home))?;
    refused(refusal, "a copy at a home that is hidden", "InBundle", &["\"0.base\"", "StagedIfNeeded", "on_device"])?;
    let mapped = copied(&mut receiver, "m", always(share.descriptor(), Place::Device(0)))?;
    is_copy_of_all(&mapped, 0, 2)?;
    has_all(&mut receiver, "m", 2)?;
    receiver.drop_mapping("m")?;
    Ok(share.wait_released(SOON)?)
}

/// Tensors without elements only are a copy too.
pub fn named_tensors_without_elements(context: &Context) -> Outcome {
    let memory = Memory::with_bytes(context, 0, &pattern(4096))?;
    let mut set = memory.ipc.tensors();
    let all = set.memory(Arc::clone(&memory.buffer));
    set.tensor("none", all, 4096, TensorLayout::contiguous(Dtype::F32, [0, 3])?)?;
    let share = memory.ipc.share_all(set).start()?;
    let mut receiver = context.agent()?;
    let mapped = copied(&mut receiver, "m", always(share.descriptor(), Place::Device(0)))?;
    equal((mapped.is_copy, mapped.tensors), (true, Some(1)), "whether it is a copy, and its tensors")?;
    let read = Command::TensorBytes { name: "m".into(), tensor: "none".into() };
    same(&receiver.get::<Vec<u8>>(&read)?, &[], "the bytes of a tensor without elements")?;
    Ok(share.wait_released(SOON)?)
}

/// Within the exporting process the tensors are copied as well.
pub fn named_tensors_in_own_process(context: &Context) -> Outcome {
    let (_memories, share) = share(context, &[0, 0])?;
    let ipc = context.ipc();
    let check = |device: u32| -> Outcome {
        let mapping = ipc.open(share.descriptor()).copy(CopyPolicy::Staged).on_device(device)?;
        that(mapping.is_copy(), "it was to be a copy")?;
        let stream = ipc.create_stream(device)?;
        for memory in 0..2 {
            for tensor in TENSORS {
                let found = mapping.get(&format!("{memory}.{}", tensor.0))?;
                same(&tensor_bytes(&found, &stream)?, &part(memory, tensor), tensor.0)?;
            }
        }
        refused(mapping.timeline().map(drop), "the timeline of a copy", "Unsupported", &[])?;
        Ok(mapping.release(&stream)?)
    };
    check(0)?;
    nobody_holds(&share, "the copy of this process")?;
    let [first, second] = context.two_devices()?;
    check(1)?;
    let map = DeviceMap::new().insert(first.identity, second.ordinal)?;
    that(ipc.open(share.descriptor()).copy(CopyPolicy::Staged).on_mapped_devices(&map)?.is_copy(), "by a map it is a copy too")
}
