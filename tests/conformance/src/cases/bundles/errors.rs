//! Bundles that cannot be shared or opened: the error names a tensor, and nothing stays open.

use std::sync::Arc;

use device_ipc_core::{Descriptor, Error, counters};

use crate::agent::Command;
use crate::check::{equal, refused, same, that};
use crate::flows::{Memory, SOON, Witness, pattern, tensor_bytes};
use crate::{Context, Outcome, Stop, fail, unchecked};
use super::{SHORT, bytes_of_shape, nothing_stays_open, three_tensors};
use super::devices::on_two_devices;

/// An invalid tensor is refused by its name and not added; the tensors added before are shared.
pub fn senseless_tensors_leave_the_rest(context: &Context) -> Outcome {
    let memory = Memory::with_bytes(context, 0, &pattern(4096))?;
    let mut bundle = memory.ipc.tensors();
    let all = bundle.memory(Arc::clone(&memory.buffer));
    bundle.tensor("good", all, 0, bytes_of_shape(&[4096])?)?;
    let mut refuse = |name: &str, offset, layout, what: &str, phrases: &[&str]| {
        refused(bundle.tensor(name, all, offset, layout), what, "Descriptor", phrases)
    };
    refuse("good", 0, bytes_of_shape(&[1])?, "the same name again", &["\"good\"", "has this name"])?;
    refuse("", 0, bytes_of_shape(&[1])?, "no name", &["at least one byte"])?;
    refuse(&"n".repeat(1025), 0, bytes_of_shape(&[1])?, "a long name", &["at most 1024 bytes"])?;
    refuse("long", 1, bytes_of_shape(&[4096])?, "a tensor behind the end", &["\"long\"", "4097 bytes", "4096 bytes"])?;
    refuse("far", u64::MAX, bytes_of_shape(&[1])?, "a place without an end", &["\"far\"", "64 bits"])?;
    let stranger = memory.ipc.tensors().memory(Arc::clone(&memory.buffer));
    let result = bundle.tensor("w", stranger, 0, bytes_of_shape(&[1])?);
    refused(result, "memory of another bundle", "InvalidRegion", &["\"w\"", "another set"])?;
    let untyped = bundle.owned("untyped", Arc::clone(&memory.buffer), None);
    let Err(untyped) = untyped else { return fail("an owner without an element type needs a layout") };
    refused(Err::<(), _>(untyped.error()), "no type", "Layout", &["element type"])?;
    equal(untyped.into_inner().range(), memory.buffer.range(), "the owner that is given back")?;
    let export = memory.ipc.share_all(bundle).start()?;
    equal(export.descriptor().tensors().map(|(name, _)| name).collect(), vec!["good"], "the tensors")
}

/// Where memory cannot be shared, the error names the first tensor in it, nothing is shared, and everything that was put in
/// comes back.
pub fn failed_start_gives_everything_back(context: &Context) -> Outcome {
    let memory = Memory::with_bytes(context, 0, &pattern(4096))?;
    let (witness, dropped) = Witness::of(&memory);
    let mut bundle = memory.ipc.tensors();
    refused(memory.ipc.share_all(memory.ipc.tensors()).start(), "a bundle without tensors", "InvalidRegion", &["at least one tensor"])?;
    let host = vec![0_u8; 4096];
    let device = memory.buffer.range().device;
    let address = device_ipc_core::DevicePtr::new(host.as_ptr() as u64);
    let range = device_ipc_core::DeviceRange::new(device, address, 4096);
    let region = device_ipc_core::Region::new(context.backend().info().name, range);
    bundle.owned("good", Arc::clone(&memory.buffer), Some(bytes_of_shape(&[4096])?))?;
    let owner = unchecked::owned(witness, memory.buffer_region(context));
    bundle.owned("kept", owner, Some(bytes_of_shape(&[1])?))?;
    bundle.owned("bad", unchecked::not_owned(region), Some(bytes_of_shape(&[16])?))?;
    let Err(failed) = memory.ipc.share_all(bundle).start() else { return fail("host memory should not be shared") };
    refused(Err::<(), _>(failed.error()), "host memory in a bundle", "InBundle", &["\"bad\""])?;
    that(matches!(failed.error().innermost(), Error::NotDeviceMemory { .. }), "the cause is that of a plain share")?;
    equal(counters().exports, 0, "exports after a bundle that failed")?;
    that(dropped.recv_timeout(SHORT).is_err(), "the owners are kept by the error")?;
    let again = failed.into_inner();
    that(memory.ipc.share_all(again).start().is_err(), "the set that came back has the same memory in it")?;
    that(dropped.recv_timeout(SOON).is_ok(), "the owners go with the error")
}

/// Where the exporter's allocation is another than the descriptor's, the error names the first tensor in it, and nothing is
/// opened of the others.
pub fn stale_tensor_is_named(context: &Context) -> Outcome {
    let (_exporter, descriptor) = three_tensors(context)?;
    let altered = altered(&descriptor, |bytes, parts| {
        // Behind the head of the part: each region is its number of allocations, and size and number of each.
        let generation = parts + 50 + 20 + 4 + 8;
        bytes[generation] ^= 1;
    })?;
    let name = altered.tensors().nth(1).map(|(name, _)| name.to_owned()).unwrap_or_default();
    let ipc = context.ipc();
    let result = ipc.open(&altered).at_home();
    let Err(error) = result else { return fail("an allocation of another number should be refused") };
    that(matches!(error.innermost(), Error::StaleGeneration(_)), format!("the cause is a stale allocation: {error}"))?;
    let second = first_in_the_second_region(&descriptor, &name)?;
    refused(Err::<(), _>(error), "a stale allocation", "InBundle", &[&format!("{second:?}")])?;
    nothing_stays_open()?;
    equal(counters().driver_opens_total, 0, "driver's opens: the handles were looked at first")
}

/// The name of the only tensor in the second region, by its address: regions are listed in the order of their addresses.
pub(super) fn first_in_the_second_region(descriptor: &Descriptor, fallback: &str) -> Result<String, Stop> {
    let view = serde_json::to_value(descriptor.view())?;
    let tensors = view["tensors"].as_array().cloned().unwrap_or_default();
    let found = tensors.iter().find(|tensor| tensor["region"] == 1).and_then(|tensor| tensor["name"].as_str());
    Ok(found.unwrap_or(fallback).to_owned())
}

/// The same descriptor with other bytes and a checksum that fits; the second number is where the parts begin.
pub(super) fn altered(
    descriptor: &Descriptor,
    alter: impl FnOnce(&mut Vec<u8>, usize),
) -> Result<Descriptor, Stop> {
    let mut bytes = descriptor.to_bytes();
    let parts = crate::wire::regions(&bytes);
    alter(&mut bytes, parts);
    let covered = bytes.len() - 4;
    let checksum = crc32fast::hash(&bytes[..covered]);
    bytes[covered..].copy_from_slice(&checksum.to_le_bytes());
    Ok(Descriptor::from_bytes(&bytes)?)
}

/// Where the memory on one device is refused, what was opened on the other is closed again, and the error names the first
/// tensor that cannot be had.
pub fn refused_part_leaves_nothing_open(context: &Context) -> Outcome {
    context.two_devices()?;
    let (_exporter, descriptor) = on_two_devices(context)?;
    // The second part stands behind the only region of the first; its token after the head of the section and its export.
    let altered = altered(&descriptor, |bytes, parts| bytes[parts + 50 + 20 + 8 + 8] ^= 1)?;
    let ipc = context.ipc();
    let result = ipc.open(&altered).at_home();
    refused(result, "a bundle with a wrong token", "InBundle", &["\"far\"", "token"])?;
    nothing_stays_open()?;
    equal(counters().driver_opens_total, 1, "driver's opens: the first part was opened before")?;
    let good = ipc.open(&descriptor).at_home()?;
    equal(good.tensors().len(), 2, "the tensors of the bundle as it was made")
}

/// A bundle that was dropped cannot be opened, also not by its holders; the error names a tensor.
pub fn dropped_bundle(context: &Context) -> Outcome {
    let (mut exporter, descriptor) = three_tensors(context)?;
    let ipc = context.ipc();
    let stream = ipc.create_stream(0)?;
    let mapping = ipc.open(&descriptor).on(&stream)?;
    exporter.must(&Command::Drop { names: vec!["b".into()] })?;
    let result = ipc.open(&descriptor).at_home();
    refused(result, "opening a dropped bundle", "InBundle", &["\"t0\"", "dropped", "new descriptor"])?;
    same(&tensor_bytes(&mapping.get("t1")?, &stream)?, &pattern(4097)[1..], "what is still open")?;
    mapping.release(&stream)?;
    nothing_stays_open()
}

/// A descriptor that names other pieces of memory than the export has is refused, also where the export is open already.
pub fn altered_memory_is_refused(context: &Context) -> Outcome {
    let (mut exporter, descriptor) = three_tensors(context)?;
    let ipc = context.ipc();
    let open = ipc.open(&descriptor).at_home()?;
    // A region less, with the tensors moved to the first.
    let less = |bytes: &mut Vec<u8>, parts: usize| {
        bytes[parts + 46] = 2;
        bytes.drain(parts + 50 + 40..parts + 50 + 60);
        let section = (50 + 40_u32).to_le_bytes();
        bytes[parts - 4..parts].copy_from_slice(&section);
        // After the head of the next section and the number of tensors.
        let mut at = parts + 50 + 40 + 8 + 4;
        for _ in 0..3 {
            bytes[at..at + 4].fill(0);
            at += 4 + 20 + 2 + 16;
        }
        let total = bytes.len() as u32;
        bytes[8..12].copy_from_slice(&total.to_le_bytes());
    };
    let altered = altered(&descriptor, less)?;
    refused(ipc.open(&altered).at_home(), "other memory than is open", "InBundle", &["\"t0\"", "regions"])?;
    drop(open);
    exporter.must(&Command::Drop { names: vec!["b".into()] })?;
    nothing_stays_open()
}
