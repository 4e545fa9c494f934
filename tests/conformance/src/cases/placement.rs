//! On which card: by position, by identity, by a map, by a stream. Positions differ between processes; identities do not.

use device_ipc_core::DeviceMap;

use crate::agent::{Agent, Command, Mapped, Opening, Place};
use crate::check::{equal, refused, refused_as_one_of, same, that};
use crate::flows::{Memory, OLD, SOON, float_bytes, pattern};
use crate::{Context, Outcome, Stop, skip};

/// Memory of device 0 is opened on device 1 of the receiver: it says where the bytes live, and kernels and copies of
/// device 1 read and write them.
pub fn on_another_device(context: &Context) -> Outcome {
    let [first, _] = context.two_peers()?;
    let memory = Memory::with_floats(context, 1024)?;
    let share = memory.share()?;
    let mut receiver = context.agent()?;
    let mapped = receiver.open("m", share.descriptor(), Place::Device(1))?;
    equal((mapped.device, mapped.at_home), (1, false), "the mapping's device, and whether that is the bytes' home")?;
    equal(mapped.home, first.identity, "the device where the bytes live")?;
    same(&receiver.floats("m")?, &[OLD; 1024], "the floats as a copy on device 1 reads them")?;
    receiver.add("m", 3.0)?;
    receiver.synchronize(1)?;
    same(&memory.floats()?, &[OLD + 3.0; 1024], "the floats after a kernel of device 1")?;
    let copied: Vec<u8> = receiver.get(&Command::Copy { name: "m".into() })?;
    same(&copied, &float_bytes(&[OLD + 3.0; 1024]), "the bytes copied into memory of device 1")?;
    receiver.drop_mapping("m")?;
    Ok(share.wait_released(SOON)?)
}

/// A device that cannot reach the memory's home is refused, and the error says what to do instead.
pub fn no_peer_access(context: &Context) -> Outcome {
    let [first, second] = context.two_devices()?;
    if context.backend().peer_access(second.ordinal, first.ordinal)? {
        return skip("device 1 has peer access to device 0");
    }
    let memory = Memory::with_floats(context, 64)?;
    let share = memory.share()?;
    let mut receiver = context.agent()?;
    let refusal = receiver.try_open("m", Opening::new(share.descriptor(), Place::Device(1)))?;
    refused(refusal, "opening on a device without peer access", "NoPeerAccess", &["peer access", "at_home"])?;
    receiver.open("m", share.descriptor(), Place::Home)?;
    same(&receiver.floats("m")?, &[OLD; 64], "the floats at home, after the refusal")
}

/// An ordinal out of range is refused, with the number of devices.
pub fn no_such_device(context: &Context) -> Outcome {
    let count = context.devices()?.len();
    let memory = Memory::with_floats(context, 64)?;
    let share = memory.share()?;
    let mut receiver = context.agent()?;
    let refusal = receiver.try_open("m", Opening::new(share.descriptor(), Place::Device(count as u32)))?;
    refused(refusal, "opening on a device that there is not", "NoSuchDevice", &[&format!("{count} device(s)")])?;
    refused(memory.ipc.open(share.descriptor()).on_device(u32::MAX), "the same here", "NoSuchDevice", &[])?;
    refused(memory.ipc.create_stream(count as u32), "a stream on such a device", "NoSuchDevice", &[])?;
    refused(memory.ipc.allocate(count as u32, 1), "memory of such a device", "NoSuchDevice", &[])
}

/// Opening on a stream opens on the stream's device.
pub fn on_the_streams_device(context: &Context) -> Outcome {
    let memory = Memory::with_floats(context, 64)?;
    let share = memory.share()?;
    let mut receiver = context.agent()?;
    let mapped = receiver.open("m", share.descriptor(), Place::Stream(0))?;
    equal((mapped.device, mapped.at_home), (0, true), "the mapping's device, and whether that is its home")?;
    let other = crate::unchecked::stream_of_another_backend();
    refused(memory.ipc.open(share.descriptor()).on(&other), "opening on another backend's stream", "WrongBackend", &[])
}

/// The receiver sees the cards in another order, and "at home" is still the card where the bytes live: descriptors carry
/// identities, not positions.
pub fn home_is_found_by_identity(context: &Context) -> Outcome {
    let devices = context.two_devices()?;
    let bytes = [pattern(4096), vec![9; 4096]];
    let mut receiver = context.agent_seeing(&[1, 0])?;
    for (ordinal, home) in [0_u32, 1].into_iter().zip(&devices) {
        let contents = &bytes[ordinal as usize];
        let memory = Memory::with_bytes(context, ordinal, contents)?;
        let share = memory.share()?;
        let mapped = receiver.open("m", share.descriptor(), Place::Home)?;
        at_home_on(&mapped, 1 - ordinal, &format!("device {ordinal} of the exporter"))?;
        equal(mapped.home, home.identity, "the device where the bytes live")?;
        same(&receiver.bytes("m")?, contents, format!("the bytes on device {ordinal} of the exporter"))?;
        receiver.drop_mapping("m")?;
        share.wait_released(SOON)?;
    }
    Ok(())
}

/// An importer that does not see the home device gets an error with the variable to set. Opening on a visible device either
/// works with the right bytes or is refused.
pub fn home_not_visible(context: &Context) -> Outcome {
    let [first, _] = context.two_devices()?;
    let memory = Memory::with_bytes(context, 0, &pattern(4096))?;
    let share = memory.share()?;
    let mut receiver = context.agent_seeing(&[1])?;
    let refusal = receiver.try_open("m", Opening::new(share.descriptor(), Place::Home))?;
    let variable = context.backend().visible_devices_variable();
    let home = first.identity.to_string();
    refused(refusal, "opening at a home that is hidden", "HomeNotVisible", &[variable, &home, "on_device"])?;
    match receiver.try_open("m", Opening::new(share.descriptor(), Place::Device(0)))? {
        Ok(mapped) => {
            that(!mapped.at_home, "memory of a hidden card cannot be at home")?;
            same(&receiver.bytes("m")?, &pattern(4096), "the bytes of a hidden card's memory")
        }
        error => refused_as_one_of(error, "opening on another card", &["NoPeerAccess", "Unsupported", "Vendor"], &[]),
    }
}

/// A device map says on which card memory of which home is opened; a home that is not in it is refused.
pub fn by_a_device_map(context: &Context) -> Outcome {
    let home = context.devices()?[0].identity;
    let memory = Memory::with_floats(context, 64)?;
    let share = memory.share()?;
    let mut receiver = context.agent()?;
    let mapped = receiver.open("m", share.descriptor(), Place::Map(vec![(home, 0)]))?;
    at_home_on(&mapped, 0, "a map to its own home")?;
    receiver.drop_mapping("m")?;
    let refusal = receiver.try_open("m", Opening::new(share.descriptor(), Place::Map(Vec::new())))?;
    refused(refusal, "opening by an empty map", "NotInDeviceMap", &["no entry", "DeviceMap::insert"])?;
    let twice = DeviceMap::new().insert(home, 0).and_then(|map| map.insert(home, 1));
    refused(twice, "a map with two devices for one home", "InvalidDeviceMap", &["once"])
}

/// A device map can name another card than the home.
pub fn by_a_device_map_to_another_device(context: &Context) -> Outcome {
    let [first, second] = context.two_peers()?;
    let memory = Memory::with_floats(context, 64)?;
    let share = memory.share()?;
    let mut receiver = context.agent()?;
    let map = vec![(second.identity, 0), (first.identity, 1)];
    let mapped = receiver.open("m", share.descriptor(), Place::Map(map))?;
    equal((mapped.device, mapped.at_home), (1, false), "the mapping's device, and whether that is the bytes' home")?;
    same(&receiver.floats("m")?, &[OLD; 64], "the floats")
}

/// In the exporting process there is one address, and an open on another device is refused.
pub fn own_process_on_another_device(context: &Context) -> Outcome {
    context.two_devices()?;
    let memory = Memory::with_floats(context, 64)?;
    let share = memory.share()?;
    let opened = memory.ipc.open(share.descriptor()).on_device(1);
    refused(opened, "opening memory of this very process on device 1", "Unsupported", &["same process", "home"])?;
    share.close(SOON).map_err(|error| Stop::failed(format!("the refused open still holds the export: {error}")))
}

/// A mapping on one card refuses streams of another one, before anything is submitted to them.
pub fn stream_of_another_device(context: &Context) -> Outcome {
    context.two_devices()?;
    let mut exporter: Agent = context.agent()?;
    let descriptor = exporter.export("e", &float_bytes(&[OLD; 64]))?;
    let ipc = context.ipc();
    let (right, wrong) = (ipc.create_stream(0)?, ipc.create_stream(1)?);
    let mapping = ipc.open(&descriptor).on(&right)?;
    let phrases = ["runs on device 1", "device 0"];
    refused(mapping.view::<f32, _>(&wrong), "a view on a stream of another device", "WrongStream", &phrases)?;
    refused(mapping.view_mut::<f32, _>(&wrong), "such a view for writing", "WrongStream", &phrases)?;
    refused(mapping.wait_ready(&wrong), "ordering such a stream", "WrongStream", &phrases)?;
    let released = mapping.release(&wrong).map_err(device_ipc_core::Error::from);
    refused(released, "a release on such a stream", "WrongStream", &phrases)?;
    exporter.must(&Command::WaitReleased { name: "e".into(), timeout: SOON }).map(drop)
}

fn at_home_on(mapped: &Mapped, device: u32, what: &str) -> Outcome {
    let found = (mapped.device, mapped.at_home);
    equal(found, (device, true), format!("{what}: the mapping's device, and whether that is its home"))
}
