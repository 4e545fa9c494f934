//! Messages of bytes: order, sizes, and waits.

use device_ipc_core::limits::MAX_MESSAGE_TENSORS;
use device_ipc_core::{Dtype, Message};

use super::{BYTES, SHORT, connecting, name, open_on_stream, pair, receive, send, went_well};
use crate::agent::Command;
use crate::check::{equal, refused, same, that};
use crate::flows::{Memory, SOON, nobody_holds, pattern};
use crate::{Context, Outcome, PATIENCE};

/// Messages that fit a packet and larger ones arrive in order, in both directions at once.
pub fn bytes_of_all_sizes_in_order(context: &Context) -> Outcome {
    let (channel, mut agent) = pair(context)?;
    let sizes = [0, 1, 100, 65_000, 65_530, 65_536, 70_000, 3_000_000];
    let answers =
        Command::Echo { by: "c".into(), times: sizes.len() as u32, answers: true, timeout: PATIENCE };
    agent.send(&answers)?;
    let messages = sizes.map(pattern);
    for message in &messages {
        channel.send(Message::new().bytes(message), PATIENCE)?;
    }
    for message in &messages {
        same(channel.receive(PATIENCE)?.bytes(), message, format!("the answer of {} bytes", message.len()))?;
    }
    went_well(agent.receive_reply()?.result)?;
    Ok(())
}

/// `close` returns when everything has been opened or discarded, and says how far it is when it is not.
pub fn close_waits_for_the_receiver(context: &Context) -> Outcome {
    let (channel, mut agent) = pair(context)?;
    agent.export("x", &pattern(BYTES))?;
    send(&mut agent, b"", &["x"], None)?;
    send(&mut agent, b"", &["x"], None)?;
    let first = channel.receive(PATIENCE)?;
    let close = |timeout| Command::CloseChannel { name: "c".into(), timeout };
    agent.send(&close(PATIENCE))?;
    let second = channel.receive(PATIENCE)?;
    let mapping = first.exports()[0].open().at_home()?;
    that(agent.peer().receive_line(SHORT).is_err(), "close should wait for a tensor that may be opened")?;
    drop(second);
    went_well(agent.receive_reply()?.result)?;
    refused(channel.receive(PATIENCE), "receiving behind a close", "ChannelClosed", &[])?;
    drop(mapping);
    let (channel, mut agent) = pair(context)?;
    send(&mut agent, b"", &[], None)?;
    let late = agent.request(&close(SHORT))?.result;
    refused(late, "a close before the peer receives", "Timeout", &["received 0 of 1 messages"])?;
    equal(channel.receive(PATIENCE)?.bytes(), b"", "what was sent all the same")
}

/// A closed side: its messages are received first, also those that did not fit a packet.
pub fn closed_after_everything_was_received(context: &Context) -> Outcome {
    let (channel, mut agent) = pair(context)?;
    let sent = [pattern(10), pattern(200_000), pattern(20)];
    for message in &sent {
        send(&mut agent, message, &[], None)?;
    }
    agent.must(&Command::DropChannel { name: "c".into() })?;
    for message in &sent {
        same(channel.receive(PATIENCE)?.bytes(), message, "a message before the end")?;
    }
    for _ in 0..2 {
        refused(channel.receive(PATIENCE), "receiving behind the end", "ChannelClosed", &["closed"])?;
    }
    Ok(())
}

/// A send that finds no room sends nothing and keeps nothing; when there is room again, the next one goes.
pub fn receiver_that_never_reads(context: &Context) -> Outcome {
    let (channel, mut agent) = pair(context)?;
    let memory = Memory::with_bytes(context, 0, &pattern(BYTES))?;
    let share = memory.share()?;
    let filler = vec![7; 8192];
    let mut sent = 0;
    let late = loop {
        match channel.send(Message::new().bytes(&filler).export(&share), SHORT) {
            Ok(()) => sent += 1,
            Err(error) => break error,
        }
        that(sent < 100_000, "the queue should be full at some time")?;
    };
    refused(
        Err::<(), _>(late),
        "a send without room",
        "Timeout",
        &["has not received", "Nothing of the message"],
    )?;
    agent.must(&Command::Echo { by: "c".into(), times: sent, answers: false, timeout: PATIENCE })?;
    channel.send(Message::new().bytes(b"next"), PATIENCE)?;
    equal(receive(&mut agent, "r")?, b"next".to_vec(), "the message behind those that fit")?;
    share.close(SOON)?;
    Ok(())
}

/// A message that is too large is refused before any part of it is sent, and nothing is kept for it.
pub fn too_much_for_a_message(context: &Context) -> Outcome {
    let under = name("limits");
    let ipc = context.ipc();
    let listener = ipc.listen(&under).start()?;
    let near = connecting(move || ipc.connect(&under).message_limit(100_000).timeout(PATIENCE).start());
    let far = listener.accept(PATIENCE)?;
    let near = near()?;
    equal(
        (near.message_limit(), far.message_limit()),
        (100_000, 100_000),
        "the limits, the smaller of both",
    )?;
    let memory = Memory::with_bytes(context, 0, &pattern(BYTES))?;
    let share = memory.share()?;
    for end in [&near, &far] {
        let large = end.send(Message::new().bytes(vec![0; 100_000]).export(&share), PATIENCE);
        refused(large, "too many bytes", "MessageTooLarge", &["100000", "message_limit"])?;
    }
    let many = (0..=MAX_MESSAGE_TENSORS).fold(Message::new(), |message, _| message.export(&share));
    refused(near.send(many, PATIENCE), "too many tensors", "MessageTooLarge", &["1025 tensors", "1024"])?;
    nobody_holds(&share, "messages that were not sent")?;
    let most = (0..MAX_MESSAGE_TENSORS / 8).fold(Message::new(), |message, _| message.export(&share));
    near.send(most, PATIENCE)?;
    equal(far.receive(PATIENCE)?.exports().len(), MAX_MESSAGE_TENSORS / 8, "the tensors of a message")?;
    nobody_holds(&share, "a message that was discarded")
}

/// Messages by inbox and by socket alternate, to a receiver that spins and to one that sleeps.
pub fn small_and_large_in_order(context: &Context) -> Outcome {
    const MESSAGES: u32 = 4000;
    let (channel, mut agent) = pair(context)?;
    let large = pattern(5000);
    let length = |index: u32| match index % 7 {
        0..4 => 4,
        4 => 3000,
        _ => large.len(),
    };
    let message = |index: u32| [&index.to_le_bytes(), &large[4..length(index)]].concat();
    agent.send(&Command::Echo { by: "c".into(), times: MESSAGES, answers: true, timeout: PATIENCE })?;
    // With one message on its way at a time, both sides wait for each other.
    let (mut sent, mut ahead) = (0, 1);
    for index in 0..MESSAGES {
        channel.set_spinning(index % 200 < 100);
        while sent < MESSAGES && sent < index + ahead {
            channel.send(Message::new().bytes(message(sent)), PATIENCE)?;
            sent += 1;
        }
        same(channel.receive(PATIENCE)?.bytes(), &message(index), format!("message {index}"))?;
        ahead = if index % 50 < 25 { 1 } else { 8 };
    }
    went_well(agent.receive_reply()?.result)
}

/// A tensor without elements travels as any other.
pub fn tensor_without_elements(context: &Context) -> Outcome {
    let (channel, mut agent) = pair(context)?;
    let memory = Memory::with_floats(context, 4)?;
    let share = memory.ipc.share(memory.buffer.slice(0, 0)?).dtype(Dtype::F32).shape([2, 0]).start()?;
    channel.send(Message::new().export(&share), PATIENCE)?;
    drop(share);
    let mapped = open_on_stream(&mut agent)?;
    equal(mapped.tensor, Some(("float32".to_owned(), vec![2, 0])), "type and shape of the tensor")?;
    same(&agent.floats("r.0")?, &[], "its elements")
}
