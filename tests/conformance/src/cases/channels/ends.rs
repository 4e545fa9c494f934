//! The two sides of a channel: names, how either closes, and both in one process.

use std::sync::mpsc::RecvTimeoutError;
use std::time::Instant;

use device_ipc_core::{Message, ReceivedExport};

use super::{
    BYTES, SHORT, connecting, is_dropped, is_kept, local_pair, name, pair, receive, send, went_well,
    witnessed,
};
use crate::agent::Command;
use crate::check::{equal, refused, same, that};
use crate::flows::{SOON, bytes_of, pattern};
use crate::{Context, Outcome, PATIENCE};

/// A process that closes and exits before the receiver has opened: its exports are gone, and `on_gone` is not called.
pub fn sender_that_ends_takes_its_exports(context: &Context) -> Outcome {
    let (channel, mut agent) = pair(context)?;
    let (told, hear) = std::sync::mpsc::channel();
    channel.on_gone(move |error| drop(told.send(error.to_string())));
    agent.export("x", &pattern(BYTES))?;
    send(&mut agent, b"one", &["x"], None)?;
    agent.must(&Command::DropChannel { name: "c".into() })?;
    agent.exit()?;
    let one = channel.receive(PATIENCE)?;
    equal(one.bytes(), b"one", "what was sent before the end")?;
    refused(channel.receive(PATIENCE), "receiving behind the end", "ChannelClosed", &["closed"])?;
    equal(hear.recv_timeout(SOON), Err(RecvTimeoutError::Disconnected), "on_gone's call after a close")?;
    refused(one.exports()[0].open().at_home(), "opening what has ended", "ExporterGone", &[])
}

/// Each client has its own channel, and closing one does not close the others.
pub fn several_clients(context: &Context) -> Outcome {
    let under = name("clients");
    let listener = context.ipc().listen(&under).start()?;
    let mut clients = Vec::new();
    for index in 0..3_u8 {
        let mut agent = context.agent()?;
        let (under, map) = (under.clone(), Vec::new());
        agent.send(&Command::Connect { under, name: "c".into(), timeout: PATIENCE, user: None, map })?;
        let channel = listener.accept(PATIENCE)?;
        went_well(agent.receive_reply()?.result)?;
        equal(channel.peer().pid, agent.peer().id(), "the process at the other end")?;
        send(&mut agent, &[index], &[], None)?;
        clients.push((channel, agent));
    }
    let (_, agent) = clients.remove(1);
    agent.kill()?;
    for ((channel, agent), index) in clients.iter_mut().zip([0, 2]) {
        equal(channel.receive(PATIENCE)?.bytes(), &[index], "what a client sent")?;
        channel.send(Message::new().bytes(&[index]), PATIENCE)?;
        equal(receive(agent, "r")?, vec![index], "what a client was sent")?;
    }
    refused(listener.accept(SHORT), "accepting without a connection", "Timeout", &[&under])
}

/// Both sides in this process: a tensor is opened by its address.
pub fn both_ends_in_one_process(context: &Context) -> Outcome {
    let (near, far) = local_pair(context, "own")?;
    let bytes = pattern(BYTES);
    let (share, dropped) = witnessed(context, &bytes)?;
    let address = share.descriptor().len();
    near.send(Message::new().bytes(b"own").export(&share).export(&share), PATIENCE)?;
    drop(share);
    let received = far.receive(PATIENCE)?;
    equal(received.bytes(), b"own", "the bytes of the message")?;
    let stream = context.ipc().create_stream(0)?;
    let mapping = received.exports()[0].open().on(&stream)?;
    equal(mapping.len(), address, "the length of the tensor")?;
    same(&bytes_of(&mapping, &stream)?, &bytes, "the bytes of the tensor")?;
    received.reply(Message::new().bytes(b"thanks"), PATIENCE)?;
    equal(near.receive(PATIENCE)?.bytes(), b"thanks", "the answer")?;
    drop((mapping, near));
    is_kept(&dropped, "by the tensor that was not opened")?;
    refused(far.receive(PATIENCE), "receiving behind the end", "ChannelClosed", &[])?;
    let kept: Vec<ReceivedExport> = received.into_exports();
    drop(far);
    drop(kept);
    is_dropped(&dropped, "when both have gone")
}

/// Names that are invalid, taken, unknown, and available again.
pub fn names(context: &Context) -> Outcome {
    let ipc = context.ipc();
    for bad in ["", "a/b", "a b", "ä", &"x".repeat(65)] {
        refused(ipc.listen(bad).start(), "listening under no name", "InvalidInput", &[])?;
        refused(ipc.connect(bad).start(), "connecting to no name", "InvalidInput", &[])?;
    }
    let under = name("names");
    let begun = Instant::now();
    let nobody = ipc.connect(&under).timeout(SHORT).start();
    refused(nobody, "connecting without a listener", "NoListener", &[&under, "DEVICE_IPC_SOCKET_DIR"])?;
    that(begun.elapsed() >= SHORT, "somebody who is not there should be waited for")?;
    let listener = ipc.listen(&under).start()?;
    let pid = std::process::id().to_string();
    refused(ipc.listen(&under).start(), "listening twice", "ChannelNameInUse", &[&under, &pid])?;
    let unaccepted = ipc.connect(&under).timeout(SHORT).start();
    refused(unaccepted, "connecting to who does not accept", "Timeout", &["has not called accept"])?;
    drop(listener);
    // A listener that comes later is waited for.
    let waiting = connecting({
        let (ipc, under) = (ipc.clone(), under.clone());
        move || ipc.connect(&under).timeout(PATIENCE).start()
    });
    let listener = ipc.listen(&under).start()?;
    let accepted = listener.accept(PATIENCE)?;
    let connected = waiting()?;
    drop(listener);
    connected.send(Message::new().bytes(b"on"), PATIENCE)?;
    equal(accepted.receive(PATIENCE)?.bytes(), b"on", "the channel that outlives its listener")
}
