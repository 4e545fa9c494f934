//! The purpose of sharing: the same bytes, in two processes, without a copy.

use std::sync::Arc;

use device_ipc_core::{
    Bool, DeviceOrdinal, DevicePtr, DeviceRange, Dtype, Region, TensorLayout, TensorTable,
    counters,
};

use crate::agent::{Command, Place};
use crate::check::{equal, refused, same, that};
use crate::flows::{Memory, OLD, SOON, float_bytes, pattern};
use crate::{Context, Outcome, unchecked};

/// A tensor without elements is shared, opened and viewed as any other, whether its owner has bytes or not.
pub fn tensor_without_elements(context: &Context) -> Outcome {
    let memory = Memory::with_floats(context, 20)?;
    let name = context.backend().info().name;
    let null = DeviceRange::new(DeviceOrdinal::new(0), DevicePtr::NULL, 0);
    let without_bytes = || unchecked::not_owned(Region::new(name, null).with_dtype(Dtype::F32));
    let borrowed = unchecked::share_borrowed_without_bytes(&memory.ipc, Region::new(name, null));
    let empty_slice = memory.buffer.slice(80, 0)?;
    let shares = [
        ("in memory of others", memory.ipc.share(Arc::clone(&memory.buffer)).dtype(Dtype::F32).shape([0, 5]).start()?),
        ("of an empty part", memory.ipc.share(empty_slice).dtype(Dtype::F32).shape([0, 5]).start()?),
        ("of an owner without bytes", memory.ipc.share(without_bytes()).shape([0, 5]).start()?),
        ("as a copy", memory.ipc.share_copy(&without_bytes(), &memory.stream)?.shape([0, 5]).start()?),
        ("borrowed", borrowed.dtype(Dtype::F32).shape([0, 5]).start()?),
    ];
    for (what, share) in shares {
        let mut receiver = context.agent()?;
        let mapped = receiver.open("m", share.descriptor(), Place::Stream(0))?;
        equal(mapped.tensor, Some(("float32".to_owned(), vec![0, 5])), format!("{what}: type and shape of the tensor"))?;
        same(&receiver.floats("m")?, &[], format!("{what}: the elements"))?;
        receiver.add("m", 1.0)?;
        receiver.must(&Command::Release { name: "m".into(), device: None })?;
        let own = memory.ipc.open(share.descriptor()).at_home()?;
        let tensor = own.tensor()?;
        equal(tensor.range().len, 0, format!("{what}: the bytes of the tensor in the own process"))?;
        let mut view = tensor.view_mut::<f32, _>(&memory.stream)?;
        view.copy_from(&[])?;
        view.fill_bytes(1)?;
        view.copy_from_device(&tensor.view::<f32, _>(&memory.stream)?)?;
        refused(view.copy_from(&[1.0]), "an element for a tensor without", "InvalidRegion", &["4 bytes"])?;
        drop(own);
        share.close(SOON)?;
    }
    same(&memory.floats()?, &[OLD; 20], "the memory that one of them lies in")?;
    let typed = memory.ipc.share(without_bytes()).start()?;
    equal(typed.descriptor().layout().map(|layout| layout.shape().to_vec()), Some(vec![0]), "without a shape")?;
    let needs = memory.ipc.share(without_bytes()).shape([1]).start();
    refused(needs, "an element without bytes", "Layout", &["needs 4 bytes", "0 bytes"])
}

/// Regions of one allocation that are open at the same time lie in one mapping: the driver opened it once, as some
/// drivers refuse the second time and others map it twice.
pub fn regions_of_one_allocation(context: &Context) -> Outcome {
    let bytes = pattern(1 << 20);
    let memory = Memory::with_bytes(context, 0, &bytes)?;
    let regions = [("a", 0_u64, 512_u64), ("b", 70_001, 333), ("c", (1 << 20) - 7, 7)];
    let mut receiver = context.agent()?;
    let mut shares = Vec::new();
    let mut bases = Vec::new();
    for (name, offset, len) in regions {
        let share = memory.share_part(offset, len)?;
        let mapped = receiver.open(name, share.descriptor(), Place::Home)?;
        bases.push(mapped.address.wrapping_sub(offset));
        shares.push(share);
    }
    equal(bases[1], bases[0], "where the allocation begins, by the second region and by the first")?;
    equal(bases[2], bases[0], "where the allocation begins, by the third region and by the first")?;
    for (name, offset, len) in regions {
        let expected = &bytes[offset as usize..(offset + len) as usize];
        same(&receiver.bytes(name)?, expected, format!("the bytes of region {name}"))?;
    }
    receiver.drop_mapping("a")?;
    shares[0].wait_released(SOON)?;
    same(&receiver.bytes("c")?, &bytes[bytes.len() - 7..], "the bytes of region c after a was dropped")
}

/// Two receivers have the memory open at the same time, and see each other's writes.
pub fn two_receivers(context: &Context) -> Outcome {
    let memory = Memory::with_floats(context, 64)?;
    let share = memory.share()?;
    let (mut one, mut other) = (context.agent()?, context.agent()?);
    one.open("m", share.descriptor(), Place::Home)?;
    other.open("m", share.descriptor(), Place::Home)?;
    equal(share.holders().iter().len(), 2, "the number of holders")?;
    one.add("m", 1.0)?;
    one.synchronize(0)?;
    other.add("m", 2.0)?;
    other.synchronize(0)?;
    same(&one.floats("m")?, &[OLD + 3.0; 64], "the floats that the first receiver reads")?;
    same(&memory.floats()?, &[OLD + 3.0; 64], "the floats that the sender reads")
}

/// An importer forwards the descriptor, and a third process opens the memory by it; it stays open there after the first
/// importer has released it. Handles of opened memory cannot be exported again, so this is how memory is forwarded.
pub fn forwarded_descriptor(context: &Context) -> Outcome {
    let bytes = pattern(4096);
    let memory = Memory::with_bytes(context, 0, &bytes)?;
    let share = memory.share()?;
    let (mut middle, mut last) = (context.agent()?, context.agent()?);
    middle.open("m", share.descriptor(), Place::Home)?;
    let forwarded = middle.get::<device_ipc_core::Descriptor>(&Command::Descriptor { name: "m".into() })?;
    last.open("m", &forwarded, Place::Home)?;
    middle.drop_mapping("m")?;
    middle.exit()?;
    same(&last.bytes("m")?, &bytes, "the bytes that the third process reads")?;
    last.drop_mapping("m")?;
    Ok(share.wait_released(SOON)?)
}

/// In the exporting process itself nothing is opened: the mapping is the original address, and writes are seen. Drivers
/// refuse to open a handle in the process that made it.
pub fn own_process(context: &Context) -> Outcome {
    let memory = Memory::with_floats(context, 256)?;
    let share = memory.share_part(64, 512)?;
    let mapping = memory.ipc.open(share.descriptor()).on(&memory.stream)?;
    let original = memory.buffer.range().slice(64, 512);
    equal(Some(mapping.range()), original, "the range of the mapping, which is the original's")?;
    that(mapping.is_at_home(), "memory of this very process is at home")?;
    equal(share.holders().iter().len(), 1, "the number of holders, this process itself")?;
    let seen = counters();
    equal((seen.requests_total, seen.driver_opens_total), (0, 0), "requests to an exporter, and driver's opens")?;
    mapping.view_mut::<f32, _>(&memory.stream)?.add(1.0)?;
    let expected = [[OLD; 16].as_slice(), &[OLD + 1.0; 128], &[OLD; 112]].concat();
    same(&memory.floats()?, &expected, "the whole buffer after writing through the mapping")?;
    mapping.release(&memory.stream)?;
    Ok(share.wait_released(SOON)?)
}

/// Two processes that export to each other, and release at the same time, do not wait for each other.
pub fn two_processes_export_to_each_other(context: &Context) -> Outcome {
    let bytes = pattern(8192);
    let memory = Memory::with_bytes(context, 0, &bytes)?;
    let share = memory.share()?;
    let mut other = context.agent()?;
    let theirs = other.export("theirs", &bytes)?;
    other.open("ours", share.descriptor(), Place::Home)?;
    let mapping = memory.ipc.open(&theirs).on(&memory.stream)?;
    same(&crate::flows::bytes_of(&mapping, &memory.stream)?, &bytes, "the bytes of the other process")?;
    same(&other.bytes("ours")?, &bytes, "the bytes that the other process reads")?;
    other.send(&Command::Drop { names: vec!["theirs".into()] })?;
    drop(share);
    drop(mapping);
    other.receive_reply()?;
    other.drop_mapping("ours")?;
    other.must(&Command::Shutdown { timeout: SOON })?;
    device_ipc_core::shutdown(SOON)?;
    other.exit()
}

/// A tensor that does not begin at the start of its region: the view is of its own elements, and the region stays whole.
pub fn tensor_with_an_offset(context: &Context) -> Outcome {
    let floats: Vec<f32> = (0..16_u8).map(f32::from).collect();
    let memory = Memory::with_bytes(context, 0, &float_bytes(&floats))?;
    let builder = || memory.ipc.share(Arc::clone(&memory.buffer)).dtype(Dtype::F32);
    let share = builder().shape([2, 3]).element_offset(5).start()?;
    let mut receiver = context.agent()?;
    let mapped = receiver.open("m", share.descriptor(), Place::Home)?;
    equal(mapped.len, 64, "the bytes of the region")?;
    equal(mapped.tensor, Some(("float32".into(), vec![2, 3])), "the tensor that the receiver is told of")?;
    same(&receiver.floats("m")?, &floats[5..11], "the tensor's elements")?;
    let rest = builder().element_offset(12).start()?;
    receiver.open("rest", rest.descriptor(), Place::Home)?;
    same(&receiver.floats("rest")?, &floats[12..], "without a shape, what is behind the offset")?;
    let own = memory.ipc.open(share.descriptor()).at_home()?;
    equal(Some(own.tensor()?.range()), memory.buffer.range().slice(20, 24), "the tensor's bytes in the own process")?;
    let result = builder().shape([2, 3]).element_offset(11).start();
    refused(result, "a tensor behind the end", "Layout", &["68 bytes", "64 bytes"])?;
    let untyped = memory.ipc.share(Arc::clone(&memory.buffer)).element_offset(1).start();
    refused(untyped, "an offset without an element type", "Layout", &["element type", "ShareBuilder::dtype"])
}

/// Element types without a Rust type and strided tensors are read by the host and viewed as bytes, in the memory of another
/// process and in the own process.
pub fn elements_of_any_type_and_strides(context: &Context) -> Outcome {
    let bytes = pattern(256);
    let ipc = context.ipc();
    let stream = ipc.create_stream(0)?;
    let mut exporter = context.agent()?;
    let theirs = exporter.export("theirs", &bytes)?;
    let mapping = ipc.open(&theirs).on(&stream)?;
    let strided = |dtype, shape: &[u64], strides: &[u64]| TensorLayout::strided(dtype, shape, strides);
    let layouts = [
        ("contiguous", TensorLayout::contiguous(Dtype::BF16, [4, 5])?),
        ("packed", TensorLayout::contiguous(Dtype::F4_E2M1FN_X2, [7])?),
        ("transposed", strided(Dtype::F16, &[3, 4], &[1, 3])?.with_element_offset(2)?),
        ("rows", strided(Dtype::BOOL, &[5, 3], &[9, 1])?),
        ("repeated", strided(Dtype::F32, &[3, 2], &[0, 5])?),
        ("complex", strided(Dtype::COMPLEX128, &[2, 2], &[1, 4])?),
        ("scalar", TensorLayout::contiguous(Dtype::F8_E5M2, [])?.with_element_offset(9)?),
        ("none", strided(Dtype::BF16, &[0, 3], &[7, 2])?),
    ];
    let table = TensorTable::new(layouts.clone().map(|(name, layout)| (name, 0, layout)))?;
    for (name, layout) in &layouts {
        let element = layout.dtype().bytes().unwrap_or(0) as usize;
        let mut expected = Vec::new();
        for number in 0..layout.elements() {
            let (mut rest, mut at) = (number, layout.element_offset());
            for (size, stride) in layout.shape().iter().zip(layout.strides()).rev() {
                at += (rest % size) * stride;
                rest /= size;
            }
            expected.extend_from_slice(&bytes[at as usize * element..][..element]);
        }
        let tensor = mapping.tensor_in(&table, name)?;
        same(&tensor.to_host_bytes(&stream)?, &expected, format!("{name}: the bytes of the elements"))?;
        let start = layout.element_offset() as usize * element;
        let span = if layout.is_empty() { 0 } else { layout.span_bytes() as usize - start };
        let viewed = tensor.view_bytes(&stream)?.to_vec()?;
        same(&viewed, &bytes[start..][..span], format!("{name}: the bytes from the first element to the last"))?;
        if layout.dtype() != Dtype::F32 {
            refused(tensor.to_host::<f32, _>(&stream), "elements of another type", "Layout", &["float32"])?;
        }
    }
    let repeated: Vec<f32> = mapping.tensor_in(&table, "repeated")?.to_host(&stream)?;
    equal((repeated.len(), repeated[0] == repeated[4]), (6, true), "the floats of a tensor with a stride of 0")?;
    let endless = TensorTable::new([("endless", 0, strided(Dtype::F32, &[1 << 57, 5], &[0, 1])?)])?;
    let endless = mapping.tensor_in(&endless, "endless")?.to_host_bytes(&stream);
    refused(endless, "more repeated elements than the limit", "Layout", &["20 B of memory", "[0, 1]"])?;
    let flags: Vec<Bool> = mapping.tensor_in(&table, "rows")?.to_host(&stream)?;
    let expected = [0, 1, 2, 9, 10, 11].map(|at| Bool::from(bytes[at] != 0));
    equal(&flags[..6], &expected[..], "booleans of bytes that are neither 0 nor 1")?;
    mapping.tensor_in(&table, "packed")?.view_bytes_mut(&stream)?.copy_from(&[3; 7])?;
    stream.synchronize()?;
    same(&exporter.bytes("theirs")?[..8], &[&[3; 7], &bytes[7..8]].concat(), "bytes written to packed elements")?;
    same(&mapping.to_host::<u8, _>(&stream)?[7..], &bytes[7..], "the bytes of the region")?;

    // A tensor that the exporter describes, in its own process.
    let memory = Memory::with_bytes(context, 0, &bytes)?;
    let share = memory.ipc.share(Arc::clone(&memory.buffer)).dtype(Dtype::BF16).shape([2, 3]).strides([1, 2]).start()?;
    let own = memory.ipc.open(share.descriptor()).at_home()?;
    let expected: Vec<u8> = [0, 2, 4, 1, 3, 5].iter().flat_map(|at| bytes[2 * at..][..2].to_vec()).collect();
    same(&own.to_host_bytes(&memory.stream)?, &expected, "transposed elements in the own process")?;
    same(&own.view_bytes(&memory.stream)?.to_vec()?, &bytes[..12], "their bytes with the gaps")?;
    same(&memory.buffer.to_host::<u8, _>(&memory.stream)?, &bytes, "the bytes of the buffer")?;
    drop(memory.buffer.view_bytes(&memory.stream)?);
    if let Ok([_, second]) = context.two_devices() {
        let other = ipc.create_stream(second.ordinal)?;
        refused(own.to_host_bytes(&other), "a stream of another device", "WrongStream", &[])?;
        refused(memory.buffer.to_host::<u8, _>(&other), "a stream of another device", "WrongStream", &[])?;
    }
    Ok(())
}
