//! Ping-pong with a device map: the peer opens a tensor of the first device on the second one, modifies it in place across
//! devices, and replies with a tensor of its own device, which the inverse of the map opens on the first device. With one
//! device, both sides use it. Runs on the mock if there is no accelerator:
//!
//! ```text
//! cargo run --example ping_pong
//! ```

mod roles;

use std::io::{BufRead, stdin};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use device_ipc::{
    Buffer, DeviceMap, Dtype, ErrorKind, Export, Ipc, Listener, Mapping, Message, Received, Stream,
};
use roles::{Role, TIMEOUT};

const ROUNDS: usize = 10;
const SIDE: usize = 1000;

fn ping() -> Result<()> {
    let ipc = Ipc::builder().allow_simulated(true).auto()?;
    let far = if ipc.devices()?.len() > 1 { 1 } else { 0 };
    let stream = ipc.create_stream(0)?;
    let name = format!("ping-pong-{}", std::process::id());
    let listener = ipc.listen(&name).device_map(DeviceMap::new().insert(0u32, far)?).start()?;
    let mut peer = Role::start("pong")?;
    peer.send_line(&name)?;
    peer.send_line(&far.to_string())?;
    println!("[ping] what lies on device 0 arrives on device {far}, and the other way round");
    let outcome = rounds(&ipc, &listener, &stream);
    peer.finish()?; // where it failed, its own error says more
    outcome
}

fn rounds(ipc: &Ipc, listener: &Listener, stream: &Stream) -> Result<()> {
    let channel = listener.accept(TIMEOUT)?;
    let values: Vec<f32> = (0..SIDE * SIDE).map(|index| (index % 1000) as f32).collect();
    let (tensor, export) = shared_tensor(ipc, 0)?;
    tensor.view_mut::<f32, _>(stream)?.copy_from(&values)?;
    let begun = Instant::now();
    for round in 1..=ROUNDS {
        channel.send(Message::new().export(&export).ready_on(stream), TIMEOUT)?;
        let answer = open_tensor(&channel.receive(TIMEOUT)?, stream)?;
        ensure!(answer.device().get() == 0, "the answer was opened on device {}", answer.device());
        let second = answer.view::<f32, _>(stream)?.to_vec()?[1];
        ensure!(second == 1.0 + round as f32, "round {round}: the answer's second number is {second}");
        answer.release(stream)?;
    }
    println!("[ping] {ROUNDS} rounds, checked on the host: {:.1} ms", begun.elapsed().as_secs_f64() * 1e3);
    channel.close(TIMEOUT)?;
    let after = tensor.view::<f32, _>(stream)?.to_vec()?;
    let changed = values.iter().zip(&after).all(|(before, after)| before + ROUNDS as f32 == *after);
    ensure!(changed, "not every number has grown by {ROUNDS}");
    println!("[ping] every number has grown by {ROUNDS}, in place");
    Ok(())
}

fn pong() -> Result<()> {
    let mut lines = stdin().lock().lines();
    let name = lines.next().context("no channel name on standard input")??;
    let device: u32 = lines.next().context("no device on standard input")??.parse()?;
    let ipc = Ipc::builder().allow_simulated(true).auto()?;
    let stream = ipc.create_stream(device)?;
    let channel = ipc.connect(&name).timeout(TIMEOUT).start()?; // without a map: the inverse of the peer's map
    let (reply, export) = shared_tensor(&ipc, device)?;
    loop {
        let received = match channel.receive(TIMEOUT) {
            Ok(received) => received,
            Err(error) if error.kind() == ErrorKind::Closed => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let mapping = open_tensor(&received, &stream)?;
        ensure!(mapping.device().get() == device, "the tensor was opened on device {}", mapping.device());
        // A program launches a kernel of its own here; the one of the library's tests stands for it.
        mapping.view_mut::<f32, _>(&stream)?.add(1.0)?;
        reply.view_mut::<f32, _>(&stream)?.copy_from_device(&mapping.view::<f32, _>(&stream)?)?;
        mapping.release(&stream)?;
        received.reply(Message::new().export(&export).ready_on(&stream), TIMEOUT)?;
    }
}

fn shared_tensor(ipc: &Ipc, device: u32) -> Result<(Arc<Buffer>, Export)> {
    let tensor = Arc::new(ipc.allocate(device, (SIDE * SIDE * size_of::<f32>()) as u64)?);
    let export = ipc.share(tensor.clone()).dtype(Dtype::F32).shape([SIDE as u64; 2]).start()?;
    Ok((tensor, export))
}

/// Opens the only tensor of a message on the device that the map selects; `stream` waits until the tensor is ready.
fn open_tensor(received: &Received, stream: &Stream) -> Result<Mapping> {
    let [tensor] = received.exports() else {
        bail!("a message has {} tensors instead of 1", received.exports().len());
    };
    ensure!(tensor.device() == Some(stream.device()), "the map selects {:?}", tensor.device());
    Ok(tensor.open().on(stream)?)
}

fn main() -> Result<()> {
    match std::env::args().nth(1).as_deref() {
        None => ping(),
        Some("pong") => pong(),
        Some(other) => bail!("role {other} not found; without an argument, the program starts all roles"),
    }
}
