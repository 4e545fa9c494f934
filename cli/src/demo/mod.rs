//! `device-ipc demo`: a child process opens a tensor of this process and adds 1 to it in place.

mod message;
pub(crate) mod receiver;

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use device_ipc::{AllowList, Dtype, Stream, View};
use serde::Serialize;

use crate::child::ChildProcess;
use crate::output::line;
use crate::selection::{check_device, select_backend};
use message::Message;

const SHAPE: [u64; 2] = [4, 5];
const ELEMENTS: usize = 20;

/// Timeout of the whole demonstration; creating the first context on a device can take seconds.
const TIMEOUT: Duration = Duration::from_secs(120);

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Backend to use; default: the first that has a device, or the mock where none has
    #[arg(long, value_name = "NAME", value_parser = crate::arguments::backend())]
    backend: Option<String>,
    /// Ordinal of the sender's device, on which the tensor resides
    #[arg(long, value_name = "N", default_value_t = 0)]
    from: u32,
    /// Ordinal of the receiver's device; default: the sender's
    #[arg(long, value_name = "N")]
    to: Option<u32>,
}

/// The result of the demonstration.
#[derive(Serialize)]
struct Report {
    backend: String,
    version: String,
    simulated: bool,
    from: u32,
    to: u32,
    shape: [u64; 2],
    dtype: String,
    sender_pid: u32,
    receiver_pid: u32,
    mean_before: f32,
    mean_received: f32,
    mean_after: f32,
    mean_delta: f32,
    shared: bool,
}

pub(crate) fn run(arguments: &Arguments, json: bool) -> Result<()> {
    let print = |text: String| if json { Ok(()) } else { line(text) };
    let selection = select_backend(arguments.backend.as_deref(), AllowList::own_user())?;
    let ipc = &selection.ipc;
    let info = ipc.backend().info();
    if let Some(reasons) = &selection.fallback {
        print(format!(
            "No accelerator can be used here, so this runs on the {}, which needs none:{reasons}",
            info.name
        ))?;
    }
    print(format!("backend {} ({})", info.name, info.version))?;
    let (from, to) = (arguments.from, arguments.to.unwrap_or(arguments.from));
    check_device(ipc, "--from", from)?;
    check_device(ipc, "--to", to)?;

    let stream = ipc.create_stream(from)?;
    let tensor = Arc::new(ipc.allocate(from, (ELEMENTS * size_of::<f32>()) as u64)?);
    let values = random_values();
    tensor.view_mut::<f32, _>(&stream)?.copy_from(&values)?;
    let mean_before = mean(&values);
    print(format!(
        "[sender]   pid={} tensor shape=(4, 5) device={}:{from} dtype=float32",
        std::process::id(),
        info.name
    ))?;
    print(format!("[sender]   mean before sharing = {mean_before:.6}"))?;
    let share = ipc.share(tensor.clone()).dtype(Dtype::F32).shape(SHAPE).ready_on(&stream).start()?;
    let mut receiver = ChildProcess::start(
        &["__demo-receiver", "--backend", info.name, "--device", &to.to_string()],
        TIMEOUT,
    )?;
    let receiver_pid = receiver.pid();
    receiver.send(&share.descriptor().to_string())?;

    let Message::Received { shape, device, at_home, mean: mean_received } =
        Message::parse(&receiver.receive()?)?
    else {
        bail!("protocol violation: the receiver did not report the tensor that it opened");
    };
    let place = if at_home { "its home" } else { "across cards" };
    print(format!(
        "[receiver] pid={receiver_pid} got tensor: shape={shape:?} device={}:{device} ({place})",
        info.name
    ))?;
    print(format!("[receiver] mean={mean_received:.6}"))?;
    let Message::Added { mean: mean_added } = Message::parse(&receiver.receive()?)? else {
        bail!("protocol violation: the receiver did not acknowledge the addition");
    };
    print(format!("[receiver] added 1 in place, mean={mean_added:.6}; acknowledged"))?;
    receiver.finish()?;
    share.wait_released(TIMEOUT).context("the receiver exited, but its lease was not released")?;

    let after = read(&tensor.view::<f32, _>(&stream)?, &stream)?;
    let mean_after = mean(&after);
    let shared = values.iter().zip(&after).all(|(before, after)| before + 1.0 == *after);
    let report = Report {
        backend: info.name.to_owned(),
        version: info.version.clone(),
        simulated: selection.is_simulated(),
        from,
        to,
        shape: SHAPE,
        dtype: "float32".into(),
        sender_pid: std::process::id(),
        receiver_pid,
        mean_before,
        mean_received,
        mean_after,
        mean_delta: mean_after - mean_before,
        shared,
    };
    if json {
        line(serde_json::to_string_pretty(&report)?)?;
    }
    print(format!("[sender]   mean after the receiver's add = {mean_after:.6}"))?;
    print(format!("[sender]   mean delta = {:.6}", report.mean_delta))?;
    ensure!(
        shared && mean_received == mean_before,
        "the memory was not shared: after the receiver added 1, the sender reads a mean of {mean_after} instead of {}",
        mean_before + 1.0
    );
    print(format!(
        "[sender]   every element grew by 1: {} memory is shared, nothing was copied",
        report.backend
    ))?;
    Ok(())
}

/// Synchronizes the stream and reads the elements.
fn read(view: &View<'_, f32>, stream: &Stream) -> Result<Vec<f32>> {
    stream.synchronize()?;
    Ok(view.to_vec()?)
}

fn mean(values: &[f32]) -> f32 {
    values.iter().sum::<f32>() / values.len() as f32
}

/// Returns random values: the receiver cannot know their mean in advance. They are multiples of 1/16, so adding 1 is exact.
fn random_values() -> [f32; ELEMENTS] {
    let seed = RandomState::new();
    std::array::from_fn(|index| (seed.hash_one(index) % 65) as f32 / 16.0 - 2.0)
}
