//! Many named tensors in one descriptor: opened at once, or not at all.

mod again;
mod devices;
mod errors;
mod holders;

use std::sync::Arc;
use std::time::Duration;

use device_ipc_core::{Access, Descriptor, Export, Counters, DeviceOrdinal, DevicePtr, DeviceRange, Dtype, Ipc, Region, TensorLayout, TensorTable, counters};

use crate::agent::{Agent, TensorSharing, SharedTensor, Command, Place};
use crate::check::{equal, refused, same, that};
use crate::flows::{Memory, OLD, SOON, float_bytes, pattern, tensor_bytes, until};
use crate::gate::Gate;
use crate::{Context, Outcome, Stop, unchecked};

pub use again::{every_difference_from_the_last_time_counts, handed_over_again, stale_although_the_memory_is_open, what_looks_the_same_is_told_apart};
pub use errors::{altered_memory_is_refused, dropped_bundle, failed_start_gives_everything_back, refused_part_leaves_nothing_open, senseless_tensors_leave_the_rest, stale_tensor_is_named};
pub use devices::{each_device_waits_for_its_own_stream, released_on_a_stream_of_one_of_two_devices, two_devices_at_home, two_devices_by_a_map, two_devices_on_one};
pub use holders::{exporter_killed, holders_are_named_and_waited_for, importer_killed};

const SHORT: Duration = Duration::from_millis(50);

fn bytes_of_shape(shape: &[u64]) -> Result<TensorLayout, Stop> {
    Ok(TensorLayout::contiguous(Dtype::U8, shape)?)
}

fn tensor(name: impl Into<String>, memory: usize, offset: u64, dtype: &str, shape: &[u64]) -> SharedTensor {
    SharedTensor { name: name.into(), memory, offset, dtype: dtype.into(), shape: shape.to_vec() }
}

/// Has an agent share these buffers, whole.
#[track_caller]
fn share(agent: &mut Agent, of: &[&str], tensors: Vec<SharedTensor>) -> Result<Descriptor, Stop> {
    let memories = of.iter().map(|name| ((*name).to_owned(), None)).collect();
    let sharing = TensorSharing { memories, tensors, ..Default::default() };
    agent.get(&Command::ShareTensors { name: "b".into(), sharing })
}

/// An agent with three buffers of 4096 bytes, `m0` to `m2`, and a bundle of one tensor of bytes in each, `t0` to `t2`.
fn three_tensors(context: &Context) -> Result<(Agent, Descriptor), Stop> {
    let mut exporter = context.agent()?;
    for index in 0..3 {
        exporter.allocate(&format!("m{index}"), 0, &pattern(4096 + index)[index..])?;
    }
    let tensors = (0..3).map(|index| tensor(format!("t{index}"), index, 0, "uint8", &[4096])).collect();
    let descriptor = share(&mut exporter, &["m0", "m1", "m2"], tensors)?;
    Ok((exporter, descriptor))
}

/// Nothing is mapped any longer, and the driver closed what it had opened.
#[track_caller]
fn nothing_stays_open() -> Outcome {
    until("the close of everything that was opened", |seen| {
        seen.driver_closes_total == seen.driver_opens_total && seen.mapped_bytes == 0
    })
}

/// Thousands of tensors in three allocations are one request, one answer and three driver calls, and nothing when they are
/// opened again.
pub fn thousands_of_tensors_in_few_allocations(context: &Context) -> Outcome {
    const TENSORS: usize = 3000;
    let contents: Vec<Vec<u8>> = (0..3).map(|index| pattern(64_000 + index)[index..].to_vec()).collect();
    let mut exporter = context.agent()?;
    for (index, bytes) in contents.iter().enumerate() {
        exporter.allocate(&format!("m{index}"), 0, bytes)?;
    }
    let place = |index: usize| (index % 3, (index / 3) * 64);
    let tensors = (0..TENSORS).map(|index| {
        let (memory, offset) = place(index);
        tensor(format!("layers.{index}.weight"), memory, offset as u64, "float32", &[4, 4])
    });
    let descriptor = share(&mut exporter, &["m0", "m1", "m2"], tensors.collect())?;
    equal((descriptor.tensors().len(), descriptor.allocations()), (TENSORS, 3), "tensors, and allocations that they lie in")?;
    let ipc = context.ipc();
    let stream = ipc.create_stream(0)?;
    let mapping = ipc.open(&descriptor).on(&stream)?;
    let cost = |seen: Counters| (seen.requests_total, seen.driver_opens_total, seen.driver_closes_total);
    equal(cost(counters()), (1, 3, 0), "requests to the exporter, driver's opens and closes")?;
    equal(mapping.tensors().len(), TENSORS, "the number of tensors")?;
    for (index, (name, found)) in mapping.tensors().enumerate() {
        that(name == format!("layers.{index}.weight"), format!("tensor {index} is called {name}"))?;
        that(found.shape() == [4, 4] && found.dtype() == Dtype::F32, "it has its shape and element type")?;
        // Reading all of them takes long where a read waits for its stream.
        if index % 61 == 0 {
            let (memory, offset) = place(index);
            let expected = &contents[memory][offset..offset + 64];
            same(&tensor_bytes(&found, &stream)?, expected, format!("the bytes of tensor {index}"))?;
        }
    }
    for round in 0..3 {
        let again = ipc.open(&descriptor).on(&stream)?;
        let last = again.get("layers.2999.weight")?;
        same(&tensor_bytes(&last, &stream)?, &contents[2][63_936..], format!("the last tensor in round {round}"))?;
    }
    equal(cost(counters()), (1, 3, 0), "the same when it was opened three times again")
}

/// Hundreds of allocations are still one request; their handles come in as many packets as file descriptors need.
pub fn many_allocations(context: &Context) -> Outcome {
    const ALLOCATIONS: usize = 300;
    let mut exporter = context.agent()?;
    let names: Vec<String> = (0..ALLOCATIONS).map(|index| format!("m{index}")).collect();
    let bytes = pattern(512 + ALLOCATIONS);
    for (index, name) in names.iter().enumerate() {
        exporter.allocate(name, 0, &bytes[index..index + 512])?;
    }
    let of: Vec<&str> = names.iter().map(String::as_str).collect();
    let tensors = names.iter().enumerate().map(|(index, name)| tensor(name.as_str(), index, 0, "uint8", &[512]));
    let descriptor = share(&mut exporter, &of, tensors.collect())?;
    let ipc = context.ipc();
    let stream = ipc.create_stream(0)?;
    let mapping = ipc.open(&descriptor).on(&stream)?;
    equal(counters().requests_total, 1, "requests to the exporter")?;
    equal(counters().driver_opens_total as usize, descriptor.allocations(), "driver's opens, one for each allocation")?;
    that(descriptor.allocations() > 1, "blocks of the size of half a kilobyte should not all be one allocation")?;
    for index in (0..ALLOCATIONS).step_by(23).chain([ALLOCATIONS - 1]) {
        let found = tensor_bytes(&mapping.get(&names[index])?, &stream)?;
        same(&found, &bytes[index..index + 512], format!("the bytes of allocation {index}"))?;
    }
    mapping.release(&stream)?;
    exporter.must(&Command::Drop { names: vec!["b".into()] })?;
    nothing_stays_open()
}

/// Memory that is put in twice, or in parts that overlap, is one allocation for importers, and its bytes count once.
pub fn shared_memory_is_listed_once(context: &Context) -> Outcome {
    let bytes = pattern(4096);
    let memory = Memory::with_bytes(context, 0, &bytes)?;
    let mut bundle = memory.ipc.tensors();
    // Later parts first: the order in which they are put in is no matter.
    for (index, (offset, len)) in [(2048, 2048), (0, 1024), (512, 1024), (0, 1024)].into_iter().enumerate() {
        let part = bundle.memory(memory.buffer.slice(offset, len)?);
        bundle.tensor(format!("{index}.last"), part, len - 16, bytes_of_shape(&[16])?)?;
    }
    let export = memory.ipc.share_all(bundle).start()?;
    let descriptor = export.descriptor();
    equal((descriptor.allocations(), descriptor.tensors().len()), (1, 4), "allocations, and tensors in them")?;
    let mut importer = context.agent()?;
    importer.open("b", descriptor, Place::Home)?;
    for (index, end) in [4096, 1024, 1536, 1024].into_iter().enumerate() {
        let found: Vec<u8> = importer.get(&Command::TensorBytes { name: "b".into(), tensor: format!("{index}.last") })?;
        same(&found, &bytes[end - 16..end], format!("the end of part {index}"))?;
    }
    let held: Vec<u64> = export.holders().iter().map(|holder| holder.bytes).collect();
    equal(held, vec![1536 + 2048], "the bytes that the importer holds, those given twice counted once")
}

/// A bundle's descriptor is the same after each of its forms; none of them says more than it should.
pub fn forms_are_read_back(context: &Context) -> Outcome {
    let (_exporter, descriptor) = three_tensors(context)?;
    equal(Descriptor::from_bytes(&descriptor.to_bytes()).ok().as_ref(), Some(&descriptor), "the binary form")?;
    equal(descriptor.to_string().parse::<Descriptor>()?, descriptor.clone(), "the text")?;
    let json = serde_json::to_string(&descriptor)?;
    equal(serde_json::from_str::<Descriptor>(&json)?, descriptor.clone(), "the text in JSON")?;
    let view = serde_json::to_string(&descriptor.view())?;
    that(view.contains("\"t1\"") && view.contains("uint8"), format!("the view names tensors and types: {view}"))?;
    let bytes = descriptor.to_bytes();
    for len in 0..bytes.len() {
        that(Descriptor::from_bytes(&bytes[..len]).is_err(), format!("{len} bytes of it are no bundle"))?;
    }
    Ok(())
}

/// A write of the importer through a view of one tensor is visible to the exporter, and no other tensor changes.
pub fn written_and_read_through_views(context: &Context) -> Outcome {
    let memory = Memory::with_floats(context, 64)?;
    let mut bundle = memory.ipc.tensors();
    let all = bundle.memory(Arc::clone(&memory.buffer));
    for (index, name) in ["a", "b", "c"].into_iter().enumerate() {
        let layout = TensorLayout::contiguous(Dtype::F32, [2, 8])?;
        bundle.tensor(name, all, index as u64 * 64, layout)?;
    }
    let export = memory.ipc.share_all(bundle).start()?;
    let mut importer = context.agent()?;
    importer.open("b", export.descriptor(), Place::Stream(0))?;
    importer.must(&Command::TensorAdd { name: "b".into(), tensor: "b".into(), value: 2.0 })?;
    importer.must(&Command::Release { name: "b".into(), device: Some(0) })?;
    export.wait_released(SOON)?;
    let expected = [[OLD; 16].as_slice(), &[OLD + 2.0; 16], &[OLD; 32]].concat();
    same(&memory.floats()?, &expected, "all the floats after the importer wrote one tensor")
}

/// A view has the tensor's element type, has no gaps, and is taken on a stream of its device.
pub fn what_a_view_refuses(context: &Context) -> Outcome {
    let memory = Memory::with_bytes(context, 0, &pattern(4096))?;
    let mut bundle = memory.ipc.tensors();
    let all = bundle.memory(Arc::clone(&memory.buffer));
    bundle.tensor("floats", all, 0, TensorLayout::contiguous(Dtype::F32, [16])?)?;
    bundle.tensor("gaps", all, 0, TensorLayout::strided(Dtype::U8, [4, 4], [8, 1])?)?;
    let odd = bundle.tensor("odd", all, 1, TensorLayout::contiguous(Dtype::F32, [4])?);
    refused(odd, "floats at an odd place", "Descriptor", &["\"odd\"", "a multiple of 4 bytes"])?;
    bundle.tensor("float8", all, 0, TensorLayout::contiguous(Dtype::F8_E4M3FN, [4])?)?;
    bundle.tensor("later", all, 64, bytes_of_shape(&[16])?.with_element_offset(8)?)?;
    let export = memory.ipc.share_all(bundle).start()?;
    let (ipc, stream) = (&memory.ipc, &memory.stream);
    let mapping = ipc.open(export.descriptor()).on(stream)?;
    let as_bytes = mapping.get("floats")?.view::<u8, _>(stream);
    refused(as_bytes.map(drop), "a view of another type", "Layout", &["float32", "uint8"])?;
    refused(mapping.get("gaps")?.view::<u8, _>(stream).map(drop), "a view with gaps", "Layout", &["not contiguous"])?;
    refused(mapping.get("float8")?.view::<u8, _>(stream).map(drop), "float8 as bytes", "Layout", &["float8_e4m3fn"])?;
    let gaps = mapping.get("gaps")?;
    equal(gaps.range().len, 3 * 8 + 4, "the bytes from the first element to the end of the last")?;
    let later = mapping.get("later")?;
    same(&tensor_bytes(&later, stream)?, &pattern(4096)[72..88], "the bytes of a tensor that begins behind its region's")
}

/// Tensors without elements arrive with their shapes, beside others, on a device of their own and alone, whether their owner has
/// bytes or not.
pub fn tensors_without_elements(context: &Context) -> Outcome {
    let memory = Memory::with_floats(context, 16)?;
    let name = context.backend().info().name;
    let without_bytes = |device| {
        let range = DeviceRange::new(DeviceOrdinal::new(device), DevicePtr::NULL, 0);
        unchecked::not_owned(Region::new(name, range).with_dtype(Dtype::F32))
    };
    let layout = |shape: &[u64]| TensorLayout::contiguous(Dtype::F32, shape);
    let last = context.devices()?.len() as u32 - 1;
    for (others, device) in [(true, 0), (true, last), (false, 0)] {
        for round in 0..2 {
            let when = format!("others: {others}, device {device}, round {round}");
            let mut bundle = memory.ipc.tensors();
            if others {
                let all = bundle.memory(Arc::clone(&memory.buffer));
                bundle.tensor("full", all, 0, layout(&[4, 4])?)?;
                bundle.tensor("inside", all, 8, layout(&[0, 4])?)?;
                bundle.tensor("behind", all, 64, layout(&[4, 0])?)?;
            }
            bundle.owned("empty", without_bytes(device), Some(layout(&[3, 0, 2])?))?;
            bundle.owned("untold", without_bytes(device), None)?;
            let too_large = bundle.owned("large", without_bytes(device), Some(layout(&[1])?));
            refused(too_large, "an element without bytes", "Descriptor", &["needs 4 bytes", "0 bytes"])?;
            let export = memory.ipc.share_all(bundle).start()?;
            let mut importer = context.agent()?;
            importer.open("b", export.descriptor(), Place::Home)?;
            let read = |importer: &mut Agent, tensor: &str| {
                importer.get::<Vec<u8>>(&Command::TensorBytes { name: "b".into(), tensor: tensor.into() })
            };
            let of_others: &[_] = if others { &["inside", "behind"] } else { &[] };
            for tensor in of_others.iter().chain(&["empty", "untold"]) {
                let found = read(&mut importer, tensor)?;
                that(found.is_empty(), format!("{when}: {tensor} has {} bytes", found.len()))?;
                let (name, tensor) = ("b".into(), (*tensor).into());
                importer.must(&Command::TensorAdd { name, tensor, value: 1.0 })?;
            }
            if others {
                let found = read(&mut importer, "full")?;
                same(&found, &float_bytes(&[OLD; 16]), format!("{when}: the tensor that has elements"))?;
            }
            let shapes: Vec<_> = export.descriptor().tensors().map(|(_, layout)| layout.shape().to_vec()).collect();
            that(shapes.ends_with(&[vec![3, 0, 2], vec![0]]), format!("{when}: the shapes are {shapes:?}"))?;
            importer.must(&Command::Release { name: "b".into(), device: Some(0) })?;
            export.close(SOON)?;
        }
    }
    Ok(())
}

/// Read-only is what importers get, and what they may ask for.
pub fn read_only_is_kept(context: &Context) -> Outcome {
    let kind = context.kind_that(|kind| kind.read_only, "no kind of handle can be mapped read-only")?;
    let bytes = pattern(4096);
    let memory = Memory::of_kind(context, kind.kind, &bytes)?;
    let share = |access| -> Result<Export, Stop> {
        let mut bundle = memory.ipc.tensors();
        bundle.owned("w", Arc::clone(&memory.buffer), Some(bytes_of_shape(&[4096])?))?;
        Ok(memory.ipc.share_all(bundle).access(access).start()?)
    };
    let (locked, open) = (share(Access::ReadOnly)?, share(Access::ReadWrite)?);
    equal(locked.descriptor().access(), Access::ReadOnly, "the access that the descriptor tells")?;
    let ipc = &memory.ipc;
    let wanted = ipc.open(locked.descriptor()).access(Access::ReadWrite).at_home();
    refused(wanted, "opening for writing what is read-only", "InBundle", &["\"w\"", "read-write access denied"])?;
    for mapping in [
        ipc.open(locked.descriptor()).at_home()?,
        ipc.open(open.descriptor()).access(Access::ReadOnly).at_home()?,
    ] {
        equal(mapping.access(), Access::ReadOnly, "the access of the mapping")?;
        let tensor = mapping.get("w")?;
        let written = tensor.view_mut::<u8, _>(&memory.stream);
        refused(written.map(drop), "a view for writing", "AccessDenied", &["read-only"])?;
        same(&tensor_bytes(&tensor, &memory.stream)?, &bytes, "the bytes")?;
    }
    Ok(())
}

/// A name that is not in the bundle is an error that says so.
pub fn unknown_name(context: &Context) -> Outcome {
    let (_exporter, descriptor) = three_tensors(context)?;
    let ipc = context.ipc();
    let mapping = ipc.open(&descriptor).at_home()?;
    let phrases = ["\"t3\"", "there are 3", "\"t0\""];
    refused(mapping.get("t3"), "a tensor of another name", "NoSuchTensor", &phrases)?;
    equal(descriptor.layout_of("t3"), None, "its layout")?;
    that(mapping.get("t2").is_ok(), "the tensors that there are can be had")
}

/// In the exporting process itself nothing is opened: the tensors are where they were put in.
pub fn own_process(context: &Context) -> Outcome {
    let bytes = pattern(4096);
    let memory = Memory::with_bytes(context, 0, &bytes)?;
    let export = whole(&memory.ipc, &memory)?;
    let mapping = memory.ipc.open(export.descriptor()).on(&memory.stream)?;
    let expected = memory.buffer.range().slice(1024, 2048);
    equal(Some(mapping.get("middle")?.range()), expected, "the tensor's address, which is the original's")?;
    same(&tensor_bytes(&mapping.get("middle")?, &memory.stream)?, &bytes[1024..3072], "its bytes")?;
    equal(export.holders().iter().len(), 1, "the number of holders, this process itself")?;
    let seen = counters();
    equal((seen.requests_total, seen.driver_opens_total), (0, 0), "requests to an exporter, and driver's opens")?;
    mapping.release(&memory.stream)?;
    export.wait_released(SOON)?;
    Ok(export.close(SOON)?)
}

/// A bundle of the whole buffer and one tensor of bytes, `middle`.
fn whole(ipc: &Ipc, memory: &Memory) -> Result<Export, Stop> {
    let mut bundle = ipc.tensors();
    let all = bundle.memory(Arc::clone(&memory.buffer));
    bundle.tensor("middle", all, 1024, bytes_of_shape(&[2048])?)?;
    Ok(ipc.share_all(bundle).start()?)
}

/// The importer's stream waits on the device until the exporter's stream has written all of it. Where there are no events
/// that processes share, the exporter has waited before.
pub fn stream_waits_for_ready(context: &Context) -> Outcome {
    let memory = Memory::with_bytes(context, 0, &[1; 4096])?;
    let mut importer = context.agent()?;
    importer.must(&Command::Prepare { device: 0 })?;
    let gate = Gate::close(&memory.stream)?;
    memory.buffer.view_mut::<u8, _>(&memory.stream)?.fill_bytes(2)?;
    let mut bundle = memory.ipc.tensors();
    for (index, name) in ["a", "b"].into_iter().enumerate() {
        let part = memory.buffer.slice(2048 * index as u64, 2048)?;
        bundle.owned(name, part, Some(bytes_of_shape(&[2048])?))?;
    }
    if !context.backend().capabilities(memory.stream.device())?.ipc_events {
        gate.open_soon();
    }
    let export = memory.ipc.share_all(bundle).ready_on(&memory.stream).start()?;
    importer.open("b", export.descriptor(), Place::Stream(0))?;
    gate.open("opening on a stream")?;
    for name in ["a", "b"] {
        let read: Vec<u8> = importer.get(&Command::TensorBytes { name: "b".into(), tensor: name.into() })?;
        same(&read, &[2; 2048], "the bytes, which the exporter's stream wrote late")?;
    }
    Ok(())
}

/// An allocation that is open by a plain export needs no driver call for a bundle, nor the other way round.
pub fn shares_the_open_allocation_with_a_plain_export(context: &Context) -> Outcome {
    let (mut exporter, descriptor) = three_tensors(context)?;
    let plain = exporter.share("m1", Default::default())?;
    let ipc = context.ipc();
    let stream = ipc.create_stream(0)?;
    let mapping = ipc.open(&plain).on(&stream)?;
    let bundle = ipc.open(&descriptor).on(&stream)?;
    let seen = counters();
    equal((seen.requests_total, seen.driver_opens_total), (2, 3), "requests to the exporter, and driver's opens")?;
    equal(bundle.get("t1")?.range().ptr, mapping.range().ptr, "the address of the same memory")?;
    drop(mapping);
    same(&tensor_bytes(&bundle.get("t1")?, &stream)?, &pattern(4097)[1..], "the bytes when the plain one has gone")
}

/// A tensor table is sent over any transport, and finds the tensors in a mapping of one plain export.
pub fn tensors_of_a_table_in_a_mapping(context: &Context) -> Outcome {
    let floats = [OLD; 4];
    let layouts = [("a", bytes_of_shape(&[5])?), ("b", TensorLayout::contiguous(Dtype::F32, [2, 2])?)];
    let table = TensorTable::packed(16, layouts)?;
    let mut bytes = pattern(64);
    bytes[16..32].copy_from_slice(&float_bytes(&floats));
    let mut exporter = context.agent()?;
    let descriptor = exporter.export("e", &bytes)?;
    let table = TensorTable::from_bytes(&table.to_bytes())?;
    let ipc = context.ipc();
    let stream = ipc.create_stream(0)?;
    let mapping = ipc.open(&descriptor).on(&stream)?;
    same(&tensor_bytes(&mapping.tensor_in(&table, "a")?, &stream)?, &bytes[..5], "the first tensor")?;
    let second = mapping.tensor_in(&table, "b")?;
    same(&second.view::<f32, _>(&stream)?.to_vec()?, &floats, "the second, at a multiple of the alignment")?;
    refused(mapping.tensor_in(&table, "c"), "a name that is not in the table", "NoSuchTensor", &["\"c\""])?;
    let large = TensorTable::packed(16, [("large", bytes_of_shape(&[65])?)])?;
    let result = mapping.tensor_in(&large, "large");
    refused(result, "a tensor that leaves the region", "Descriptor", &["\"large\"", "65 bytes", "64 bytes"])?;
    refused(mapping.tensor(), "a tensor where none was stated", "Layout", &["no element type"])
}
