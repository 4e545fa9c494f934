//! A queue of tensors: the producer sends and drops each tensor, the consumer opens them in order and replies with their sums.
//! Runs on the mock if there is no accelerator:
//!
//! ```text
//! cargo run --example queue
//! ```

mod roles;

use std::io::{BufRead, stdin};

use anyhow::{Context, Result, bail, ensure};
use device_ipc::{Channel, Dtype, ErrorKind, Ipc, Listener, Message, Received, Stream};
use roles::{Role, TIMEOUT};

const TENSORS: usize = 8;
const SHAPE: [u64; 2] = [4, 5];
const ELEMENTS: usize = 20;

fn producer() -> Result<()> {
    let ipc = Ipc::builder().allow_simulated(true).auto()?;
    let stream = ipc.create_stream(0)?;
    let name = format!("queue-{}", std::process::id());
    let listener = ipc.listen(&name).start()?;
    let mut consumer = Role::start("consumer")?;
    consumer.send_line(&name)?;
    let outcome = produce(&ipc, &listener, &stream);
    consumer.finish()?; // if the consumer failed, its error is the cause
    outcome
}

fn produce(ipc: &Ipc, listener: &Listener, stream: &Stream) -> Result<()> {
    let channel = listener.accept(TIMEOUT)?;
    for number in 0..TENSORS {
        put(ipc, &channel, number, stream)?;
    }
    for number in 0..TENSORS {
        let sum: f32 = std::str::from_utf8(channel.receive(TIMEOUT)?.bytes())?.parse()?;
        let expected: f32 = values(number).iter().sum();
        println!("[producer] tensor {number}: the consumer's sum is {sum}");
        ensure!(sum == expected, "tensor {number} has the sum {expected}, and the consumer saw {sum}");
    }
    Ok(channel.close(TIMEOUT)?)
}

/// Sends a tensor. The producer drops memory and export; the message keeps them for the consumer.
fn put(ipc: &Ipc, channel: &Channel, number: usize, stream: &Stream) -> Result<()> {
    let tensor = ipc.allocate(0, (ELEMENTS * size_of::<f32>()) as u64)?;
    tensor.view_mut::<f32, _>(stream)?.copy_from(&values(number))?;
    let export = ipc.share(tensor).dtype(Dtype::F32).shape(SHAPE).start()?;
    let message = Message::new().bytes(number.to_string().into_bytes()).export(&export).ready_on(stream);
    Ok(channel.send(message, TIMEOUT)?)
}

fn values(number: usize) -> Vec<f32> {
    (0..ELEMENTS).map(|index| (number * ELEMENTS + index) as f32).collect()
}

fn consumer() -> Result<()> {
    let mut name = String::new();
    stdin().lock().read_line(&mut name).context("cannot read the name of the queue")?;
    let ipc = Ipc::builder().allow_simulated(true).auto()?;
    let stream = ipc.create_stream(0)?;
    let channel = ipc.connect(name.trim()).timeout(TIMEOUT).start()?;
    let mut count = 0;
    loop {
        match channel.receive(TIMEOUT) {
            Ok(received) => process(&received, count, &channel, &stream)?,
            Err(error) if error.kind() == ErrorKind::Closed => break, // the producer closed it, and all messages are received
            Err(error) => return Err(error.into()),
        }
        count += 1;
    }
    ensure!(count == TENSORS, "received {count} tensors instead of {TENSORS}");
    Ok(())
}

fn process(received: &Received, expected: usize, channel: &Channel, stream: &Stream) -> Result<()> {
    let number: usize = std::str::from_utf8(received.bytes())?.parse()?;
    ensure!(number == expected, "received tensor {number} instead of {expected}");
    let [tensor] = received.exports() else {
        bail!("a message has {} tensors instead of 1", received.exports().len());
    };
    let mapping = tensor.open().on(stream)?; // the stream waits until the producer's stream has written it
    let elements = mapping.view::<f32, _>(stream)?.to_vec()?;
    ensure!(elements == values(number), "tensor {number} contains {elements:?}");
    mapping.release(stream)?;
    let sum: f32 = elements.iter().sum();
    Ok(channel.send(Message::new().bytes(sum.to_string().into_bytes()), TIMEOUT)?)
}

fn main() -> Result<()> {
    match std::env::args().nth(1).as_deref() {
        None => producer(),
        Some("consumer") => consumer(),
        Some(other) => bail!("role {other} not found; without an argument, the program starts all roles"),
    }
}
