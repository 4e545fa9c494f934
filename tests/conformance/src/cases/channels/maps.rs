//! Device maps: where what comes is opened, and what cannot be sent.

use device_ipc_core::{DeviceMap, Message};

use super::bundles::{bundle, bytes_of_tensor, has_tensors, open_tensors};
use super::{BYTES, is_dropped, map, name, open_at, opening, pair_mapped, receive, send, refused_pair};
use crate::agent::{TensorSharing, SharedTensor, Command, Place, Sharing};
use crate::check::{equal, refused, same};
use crate::flows::{Memory, nobody_holds, pattern, tensor_bytes};
use crate::{Context, Outcome, PATIENCE, fail, skip};

/// The map of one side applies to its messages, and the inverse to the messages and replies of the peer.
pub fn mapped_there_and_back(context: &Context) -> Outcome {
    context.two_peers()?;
    if !context.backend().peer_access(0.into(), 1.into())? {
        return skip("needs peer access in both directions");
    }
    let (channel, mut agent) = pair_mapped(context, &[(0, 1), (1, 0)], &[])?;
    let bytes = pattern(BYTES);
    let memory = Memory::with_bytes(context, 0, &bytes)?;
    let share = memory.share()?;
    channel.send(Message::new().export(&share), PATIENCE)?;
    receive(&mut agent, "r")?;
    let device: u64 = agent.get(&Command::DeviceOfReceived { of: "r".into() })?;
    equal(device, 1, "the device that the map says")?;
    let elsewhere = agent.request(&opening("no", "r", 0, Some(Place::Home)))?.result;
    refused(elsewhere, "opening where the map does not say", "InvalidDeviceMap", &["device 1"])?;
    let mapped = open_at(&mut agent, "r", 0, None)?;
    equal((mapped.device, mapped.at_home), (1, false), "where it was opened")?;
    same(&agent.bytes("r.0")?, &bytes, "the bytes of the tensor")?;
    // The agent has no map: what it sends, and what it answers, goes by the inverse.
    agent.allocate("y", 1, &bytes)?;
    agent.share("y", Sharing::default())?;
    let answer =
        Command::Answer { of: "r".into(), bytes: Vec::new(), tensors: vec!["y".into()], timeout: PATIENCE };
    agent.must(&answer)?;
    send(&mut agent, b"", &["y"], None)?;
    for what in ["the answer", "the message"] {
        let received = channel.receive(PATIENCE)?;
        let [export] = received.exports() else { return fail("the message should hold one export") };
        let device = export.device().map(|device| device.get());
        equal(device, Some(0), format!("the device that the map says for {what}"))?;
        let mapping = export.open().on_mapped_devices(&export.device_map())?;
        equal(mapping.device().get(), 0, format!("where {what} was opened"))?;
    }
    Ok(())
}

/// A device outside the map is refused by the sender, with the device, the peer and the call; and nothing is kept.
pub fn device_that_is_not_mapped(context: &Context) -> Outcome {
    let [_, second] = context.two_devices()?;
    let (channel, mut agent) = pair_mapped(context, &[(0, 0)], &[])?;
    let memory = Memory::with_bytes(context, 1, &pattern(BYTES))?;
    let share = memory.share()?;
    let home = second.identity.to_string();
    let pid = agent.peer().id().to_string();
    let sent = channel.send(Message::new().export(&share), PATIENCE);
    refused(sent, "memory that is not mapped", "NotInDeviceMap", &[&home, &pid, "device_map"])?;
    nobody_holds(&share, "a message that was not sent")?;
    agent.allocate("y", 1, &pattern(BYTES))?;
    agent.share("y", Sharing::default())?;
    let own = Command::Send {
        by: "c".into(),
        len: 0,
        bytes: None,
        drops: false,
        of: vec!["y".into()],
        ready_on: None,
        timeout: PATIENCE,
    };
    refused(agent.request(&own)?.result, "memory that the inverse does not map", "NotInDeviceMap", &[&home])?;
    // The receiver's own memory is on its home device there, and needs no map.
    let theirs = Memory::with_bytes(context, 1, &pattern(BYTES))?.share()?;
    let forwarded = theirs.descriptor().clone();
    channel.send(Message::new().bytes(forwarded.to_bytes()), PATIENCE)?;
    equal(receive(&mut agent, "r")?, forwarded.to_bytes(), "the bytes of a descriptor, which no map concerns")
}

/// A map that does not fit the devices of both sides is refused where the process connects, with the pair and the side; the listener
/// logs it, and accepts other processes. A map from a device that its own process does not see starts no listener.
pub fn maps_are_checked_at_connection(context: &Context) -> Outcome {
    let cases = [
        (vec![(0, 4711)], vec![], "device 0 to 4711", "the receiver sees no device 4711"),
        (vec![], vec![(0, 4711)], "device 0 to 4711", "the receiver sees no device 4711"),
    ];
    for (own, agents, pair, why) in cases {
        let mut agent = context.agent()?;
        let connected = refused_pair(context, &mut agent, &own, &agents)?;
        refused(connected, "connecting with a map that does not fit", "InvalidDeviceMap", &[pair, why])?;
    }
    let started = context.ipc().listen(&name("own")).device_map(map(&[(4711, 0)])?).start();
    let parts = ["device 4711 to 0 of this process's map", "the sender sees no device 4711"];
    refused(started, "listening with a map from a device that is not there", "InvalidDeviceMap", &parts)?;
    let twice = DeviceMap::new().insert(0, 1).and_then(|map| map.insert(1, 1));
    refused(twice, "a map that is not one to one", "InvalidDeviceMap", &["once"])
}

/// A map holds for every device of a bundle, and the answer takes its inverse.
pub fn bundle_mapped_there_and_back(context: &Context) -> Outcome {
    context.two_peers()?;
    if !context.backend().peer_access(0.into(), 1.into())? {
        return skip("needs peer access in both directions");
    }
    let (channel, mut agent) = pair_mapped(context, &[(0, 1), (1, 0)], &[])?;
    let (share, _dropped) = bundle(context, &[0, 1])?;
    channel.send(Message::new().export(&share), PATIENCE)?;
    drop(share);
    receive(&mut agent, "r")?;
    for place in [Place::Home, Place::Stream(0)] {
        let elsewhere = agent.request(&opening("no", "r", 0, Some(place)))?.result;
        refused(elsewhere, "opening where the map does not say", "InBundle", &["device 1"])?;
    }
    open_tensors(&mut agent, "r", 0, None)?;
    has_tensors(&mut agent, "r", 4)?;
    agent.allocate("y", 0, &bytes_of_tensor(0))?;
    agent.allocate("z", 1, &bytes_of_tensor(1))?;
    let tensor = |memory: usize| SharedTensor {
        name: format!("t{memory}"),
        memory,
        offset: 0,
        dtype: "uint8".into(),
        shape: vec![BYTES as u64],
    };
    let sharing = TensorSharing {
        memories: vec![("y".into(), None), ("z".into(), None)],
        tensors: vec![tensor(0), tensor(1)],
        ..Default::default()
    };
    agent.must(&Command::ShareTensors { name: "b".into(), sharing })?;
    let (of, bytes) = ("r".into(), Vec::new());
    agent.must(&Command::Answer { of, bytes, tensors: vec!["b".into()], timeout: PATIENCE })?;
    let received = channel.receive(PATIENCE)?;
    let [answer] = received.exports() else { return fail("the answer should hold one bundle") };
    let map = answer.device_map();
    let opened = answer.open().on_mapped_devices(&map)?;
    for (index, (home, elsewhere)) in answer.descriptor().homes().zip([1, 0]).enumerate() {
        equal(map.get(home), Some(elsewhere.into()), format!("the device that the map says for part {index}"))?;
        let tensor = opened.get(&format!("t{index}"))?;
        equal(tensor.device().get(), elsewhere, format!("where part {index} was opened"))?;
        let stream = context.ipc().create_stream(elsewhere)?;
        same(
            &tensor_bytes(&tensor, &stream)?,
            &bytes_of_tensor(index),
            format!("the bytes of part {index}"),
        )?;
    }
    Ok(())
}

/// Where one of its devices is not mapped, a bundle is refused where it is sent, and nothing is kept of the others.
pub fn bundle_on_a_device_that_is_not_mapped(context: &Context) -> Outcome {
    let [_, second] = context.two_devices()?;
    let (channel, mut agent) = pair_mapped(context, &[(0, 0)], &[])?;
    let (share, dropped) = bundle(context, &[0, 1])?;
    let (home, pid) = (second.identity.to_string(), agent.peer().id().to_string());
    let sent = channel.send(Message::new().export(&share), PATIENCE);
    refused(sent, "a bundle that is not all mapped", "NotInDeviceMap", &[&home, &pid, "device_map"])?;
    equal(share.holders().iter().len(), 0, "holders of a bundle that was not sent")?;
    drop(share);
    dropped.iter().try_for_each(|dropped| is_dropped(dropped, "when its export is"))
}
