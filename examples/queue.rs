//! A queue of tensors: the producer sends each and forgets it, the consumer opens them in order and answers with what it saw.
//! Runs on the mock where there is no accelerator:
//!
//! ```text
//! cargo run --example queue
//! ```

mod roles;

use std::io::{BufRead, stdin};

use anyhow::{Context, Result, bail, ensure};
use device_ipc::{Channel, Dtype, Error, Ipc, Listener, Message, Received, Stream};
use roles::{Role, TIME};

const TENSORS: usize = 8;
const SHAPE: [u64; 2] = [4, 5];
const ELEMENTS: usize = 20;

fn producer() -> Result<()> {
    let ipc = Ipc::builder().allow_simulated(true).auto()?;
    let stream = ipc.create_stream(0)?;
    let name = format!("queue-{}", std::process::id());
    let listener = ipc.listen(&name).start()?;
    let mut consumer = Role::start("consumer")?;
    consumer.tell(&name)?;
    let outcome = produce(&ipc, &listener, &stream);
    consumer.finish()?; // where it failed, its own error says more
    outcome
}

fn produce(ipc: &Ipc, listener: &Listener, stream: &Stream) -> Result<()> {
    let channel = listener.accept(TIME)?;
    for number in 0..TENSORS {
        put(ipc, &channel, number, stream)?;
    }
    for number in 0..TENSORS {
        let sum: f32 = std::str::from_utf8(channel.receive(TIME)?.bytes())?.parse()?;
        let expected: f32 = values(number).iter().sum();
        println!("[producer] tensor {number}: the consumer's sum is {sum}");
        ensure!(sum == expected, "tensor {number} has the sum {expected}, and the consumer saw {sum}");
    }
    Ok(channel.close(TIME)?)
}

/// Memory, export and tensor end here, as far as the producer is concerned: the message keeps them for the consumer.
fn put(ipc: &Ipc, channel: &Channel, number: usize, stream: &Stream) -> Result<()> {
    let tensor = ipc.allocate(0, (ELEMENTS * size_of::<f32>()) as u64)?;
    tensor.view_mut::<f32>(stream)?.copy_from(&values(number))?;
    let export = ipc.share(tensor).dtype(Dtype::F32).shape(SHAPE).start()?;
    let message = Message::new().bytes(number.to_string().into_bytes()).tensor(&export).ready_on(stream);
    Ok(channel.send(message, TIME)?)
}

fn values(number: usize) -> Vec<f32> {
    (0..ELEMENTS).map(|index| (number * ELEMENTS + index) as f32).collect()
}

fn consumer() -> Result<()> {
    let mut name = String::new();
    stdin().lock().read_line(&mut name).context("reading the queue's name")?;
    let ipc = Ipc::builder().allow_simulated(true).auto()?;
    let stream = ipc.create_stream(0)?;
    let channel = ipc.connect(name.trim()).timeout(TIME).start()?;
    let mut seen = 0;
    loop {
        match channel.receive(TIME) {
            Ok(received) => take(&received, seen, &channel, &stream)?,
            Err(Error::ChannelClosed { .. }) => break, // the producer has ended it, and everything was received
            Err(error) => return Err(error.into()),
        }
        seen += 1;
    }
    ensure!(seen == TENSORS, "{seen} tensors came instead of {TENSORS}");
    Ok(())
}

fn take(received: &Received, expected: usize, channel: &Channel, stream: &Stream) -> Result<()> {
    let number: usize = std::str::from_utf8(received.bytes())?.parse()?;
    ensure!(number == expected, "tensor {number} came in place of {expected}");
    let [tensor] = received.tensors() else {
        bail!("a message has one tensor, not {}", received.tensors().len());
    };
    let mapping = tensor.open().on(stream)?; // the stream waits until the producer's has written it
    let seen = mapping.view::<f32, _>(stream)?.to_vec()?;
    ensure!(seen == values(number), "tensor {number} holds {seen:?}");
    mapping.release(stream)?;
    let sum: f32 = seen.iter().sum();
    Ok(channel.send(Message::new().bytes(sum.to_string().into_bytes()), TIME)?)
}

fn main() -> Result<()> {
    match std::env::args().nth(1).as_deref() {
        None => producer(),
        Some("consumer") => consumer(),
        Some(other) => bail!("there is no role {other}; without one, the program starts all of them"),
    }
}
