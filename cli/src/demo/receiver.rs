//! The child process of the demonstration.

use anyhow::{Context, Result};
use device_ipc::{Descriptor, Ipc};

use super::message::Message;
use super::{mean, read};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    #[arg(long)]
    backend: String,
    #[arg(long)]
    device: u32,
}

/// Reads a descriptor from standard input, opens the tensor on its device and adds 1 in place.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).context("cannot read the descriptor from standard input")?;
    let descriptor: Descriptor = line.parse()?;

    let ipc = Ipc::named(&arguments.backend)?;
    let stream = ipc.create_stream(arguments.device)?;
    let tensor = ipc.open(&descriptor).on(&stream)?;
    let mut view = tensor.view_mut::<f32, _>(&stream)?;
    let received = Message::Received {
        shape: tensor.layout().map(|layout| layout.shape().to_vec()).unwrap_or_default(),
        device: tensor.device().get(),
        at_home: tensor.is_at_home(),
        mean: mean(&read(&view, &stream)?),
    };
    received.send()?;
    view.add(1.0)?;
    let added = Message::Added { mean: mean(&read(&view, &stream)?) };
    tensor.release(&stream)?;
    added.send()
}
