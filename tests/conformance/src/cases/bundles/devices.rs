//! Bundles over two devices.

use std::sync::Arc;

use device_ipc_core::{Descriptor, DeviceMap, counters};

use crate::agent::{Agent, Command, Place};
use crate::check::{equal, refused, same, that};
use crate::flows::{Memory, pattern, tensor_bytes};
use crate::gate::Gate;
use crate::{Context, Outcome, Stop, fail};
use super::{bytes_of_shape, nothing_stays_open, share, tensor, three_tensors};

/// An agent with a buffer of 4096 bytes on each of the first two devices, and a bundle of both: `near` on device 0 and
/// `far` on device 1.
pub(super) fn on_two_devices(context: &Context) -> Result<(Agent, Descriptor), Stop> {
    let mut exporter = context.agent()?;
    exporter.allocate("near", 0, &pattern(4096))?;
    exporter.allocate("far", 1, &pattern(4097)[1..])?;
    let tensors = vec![tensor("near", 0, 0, "uint8", &[4096]), tensor("far", 1, 0, "uint8", &[64, 64])];
    let descriptor = share(&mut exporter, &["near", "far"], tensors)?;
    Ok((exporter, descriptor))
}

/// A bundle over two devices has a lease for each, and its tensors are where they live.
pub fn two_devices_at_home(context: &Context) -> Outcome {
    let devices = context.two_devices()?;
    let (_exporter, descriptor) = on_two_devices(context)?;
    let homes: Vec<_> = descriptor.homes().collect();
    equal(homes, devices.iter().map(|device| device.identity).collect(), "the homes that the descriptor names")?;
    equal(descriptor.home_of("far"), Some(devices[1].identity), "the home of a tensor")?;
    let ipc = context.ipc();
    let mapping = ipc.open(&descriptor).at_home()?;
    that(mapping.is_at_home(), "it is opened at home")?;
    let seen = counters();
    equal((seen.requests_total, seen.driver_opens_total), (2, 2), "requests to the exporter, and driver's opens")?;
    let on = mapping.devices();
    equal(on, devices.iter().map(|device| device.ordinal).collect(), "the devices of the mapping")?;
    for (index, (name, bytes)) in [("near", &pattern(4096)[..]), ("far", &pattern(4097)[1..])].into_iter().enumerate() {
        let tensor = mapping.get(name)?;
        equal(tensor.device(), devices[index].ordinal, "the device of a tensor")?;
        let stream = ipc.create_stream(devices[index].ordinal)?;
        same(&tensor_bytes(&tensor, &stream)?, bytes, "its bytes")?;
        let other = ipc.create_stream(devices[1 - index].ordinal)?;
        refused(tensor.view::<u8, _>(&other).map(drop), "a view on the other device", "WrongStream", &["device"])?;
    }
    drop(ipc.open(&descriptor).at_home()?);
    equal(counters().requests_total, 2, "requests after it was opened again")
}

/// Everything on one stream's device, where that one reaches the other.
pub fn two_devices_on_one(context: &Context) -> Outcome {
    let devices = context.two_peers()?;
    let (_exporter, descriptor) = on_two_devices(context)?;
    let ipc = context.ipc();
    let stream = ipc.create_stream(devices[1].ordinal)?;
    let mapping = ipc.open(&descriptor).on(&stream)?;
    equal(mapping.devices(), vec![devices[1].ordinal], "the devices of the mapping")?;
    that(!mapping.is_at_home(), "one of the tensors is not at home")?;
    same(&tensor_bytes(&mapping.get("near")?, &stream)?, &pattern(4096), "the bytes of the other device")?;
    same(&tensor_bytes(&mapping.get("far")?, &stream)?, &pattern(4097)[1..], "the bytes at home")?;
    Ok(mapping.release(&stream)?)
}

/// By a device map each tensor is opened where the map says for its home; a home that is not in it is an error that names
/// the tensor.
pub fn two_devices_by_a_map(context: &Context) -> Outcome {
    let devices = context.two_devices()?;
    let (_exporter, descriptor) = on_two_devices(context)?;
    let ipc = context.ipc();
    let home = |map: DeviceMap, index: usize| map.insert(devices[index].identity, devices[index].ordinal);
    let half = home(DeviceMap::new(), 0)?;
    let result = ipc.open(&descriptor).on_mapped_devices(&half);
    let name = devices[1].identity.to_string();
    refused(result, "a home that is not in the map", "InBundle", &["\"far\"", &name, "DeviceMap::insert"])?;
    equal(counters().opens_total, 0, "opens, where it is known before that a tensor has no place")?;
    let mapping = ipc.open(&descriptor).on_mapped_devices(&home(half, 1)?)?;
    equal(mapping.get("far")?.device(), devices[1].ordinal, "the device that the map names")
}

/// A release on a stream of one device also ends the mappings on the other.
pub fn released_on_a_stream_of_one_of_two_devices(context: &Context) -> Outcome {
    let devices = context.two_devices()?;
    let (mut exporter, descriptor) = on_two_devices(context)?;
    let ipc = context.ipc();
    let streams = [ipc.create_stream(devices[0].ordinal)?, ipc.create_stream(devices[1].ordinal)?];
    let mapping = ipc.open(&descriptor).at_home()?;
    drop(mapping.get("near")?.view::<u8, _>(&streams[0])?);
    drop(mapping.get("far")?.view::<u8, _>(&streams[1])?);
    mapping.wait_ready(&streams[1])?;
    mapping.release(&streams[0])?;
    exporter.must(&Command::Drop { names: vec!["b".into()] })?;
    nothing_stays_open()?;
    // One that is mapped on the first device alone comes back from a stream of the second.
    let (_exporter, descriptor) = three_tensors(context)?;
    let mapping = ipc.open(&descriptor).at_home()?;
    let Err(failed) = mapping.release(&streams[1]) else { return fail("a stream of another device should be refused") };
    refused(Err::<(), _>(failed.error()), "a stream of another device", "WrongStream", &["device 1", "device 0"])?;
    same(&tensor_bytes(&failed.into_inner().get("t0")?, &streams[0])?, &pattern(4096), "what came back")
}

/// Memory of a device is ready when the stream of that device reaches that point: each part has its own event.
pub fn each_device_waits_for_its_own_stream(context: &Context) -> Outcome {
    context.two_devices()?;
    let memories = [Memory::with_bytes(context, 0, &[1; 64])?, Memory::with_bytes(context, 1, &[1; 64])?];
    let mut importer = context.agent()?;
    let mut gates = Vec::new();
    for (index, memory) in memories.iter().enumerate() {
        importer.must(&Command::Prepare { device: index as u32 })?;
        let gate = Gate::close(&memory.stream)?;
        // Without timelines, one thread runs the gates of both streams, and the other gate waits for this one.
        gate.open_soon();
        gates.push(gate);
        memory.buffer.view_mut::<u8, _>(&memory.stream)?.fill_bytes(2 + index as u8)?;
    }
    let mut bundle = memories[0].ipc.tensors();
    for (index, memory) in memories.iter().enumerate() {
        bundle.owned(index.to_string(), Arc::clone(&memory.buffer), Some(bytes_of_shape(&[64])?))?;
    }
    let export = memories[0].ipc.share_all(bundle).ready_on(&memories[0].stream).ready_on(&memories[1].stream).start()?;
    importer.open("b", export.descriptor(), Place::Home)?;
    gates.iter().try_for_each(|gate| gate.was_passed("opening without a stream"))?;
    gates.into_iter().try_for_each(|gate| gate.open("a call before the open"))?;
    for index in 0..2 {
        let read: Vec<u8> = importer.get(&Command::TensorBytes { name: "b".into(), tensor: index.to_string() })?;
        same(&read, &[2 + index; 64], "the bytes, which a stream of their device wrote late")?;
    }
    // A later stream of the same device replaces the earlier one.
    let idle = memories[0].ipc.create_stream(0)?;
    let gate = Gate::close(&memories[0].stream)?;
    memories[0].buffer.view_mut::<u8, _>(&memories[0].stream)?.fill_bytes(4)?;
    let mut again = memories[0].ipc.tensors();
    again.owned("w", Arc::clone(&memories[0].buffer), Some(bytes_of_shape(&[64])?))?;
    gate.open_soon();
    let export = memories[0].ipc.share_all(again).ready_on(&idle).ready_on(&memories[0].stream).start()?;
    importer.open("w", export.descriptor(), Place::Home)?;
    gate.was_passed("opening without a stream")?;
    let read: Vec<u8> = importer.get(&Command::TensorBytes { name: "w".into(), tensor: "w".into() })?;
    same(&read, &[4; 64], "the bytes, which the later stream wrote")
}
