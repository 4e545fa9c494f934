//! The transport of PyTorch's tutorial on device maps: a tensor to the other process's device and back, ten times. Both sides
//! copy the received tensor to memory of their own device, as TensorPipe does.

#![allow(unsafe_code, reason = "raw copies between buffers that live as long as the row")]

use anyhow::{Result, ensure};
use device_ipc::{AsStream, Buffer, Channel, DeviceMap, Stream};

use crate::frame::{Bench, Row, timed};
use crate::line::{Line, Subject};
use crate::peer::Transport;
use crate::peer::message::Command;
use crate::wait::{TIMEOUT, settle};

pub(super) const ROW: Row =
    Row { name: "device-map", title: "ten rounds over two devices by a device map", run };

const ROUNDS: usize = 10;

/// 1000 x 1000 floats.
const BYTES: u64 = 4_000_000;

struct State {
    channel: Channel,
    transport: Transport,
    /// Buffers of this process, one on each device, each with a stream of its device.
    here: (Buffer, Stream),
    there: (Buffer, Stream),
}

fn run(bench: &Bench) -> Result<Vec<Line>> {
    let (mapped, staged) = ("ten rounds", "ten rounds through the host");
    if bench.device == bench.other {
        return Ok([mapped, staged].map(|case| bench.skipped(case, "requires two devices")).into());
    }
    let first = if bench.has_peer_device()? {
        measure(bench, mapped, false)?
    } else {
        bench.skipped(mapped, "requires peer access between the two devices")
    };
    Ok(vec![first, measure(bench, staged, true)?])
}

fn measure(bench: &Bench, case: &str, staged: bool) -> Result<Line> {
    let mut remote = bench.remote(bench.other)?;
    let name: String = remote.request(&Command::Transport { staged, bytes: BYTES })?;
    let map = DeviceMap::new().insert(bench.device, bench.other)?;
    let on = |device| {
        Ok::<_, device_ipc::Error>((bench.ipc.allocate(device, BYTES)?, bench.ipc.create_stream(device)?))
    };
    let mut state = State {
        channel: bench.ipc.connect(&name).device_map(map).timeout(TIMEOUT).start()?,
        transport: Transport::new(&bench.ipc, bench.device, BYTES, staged)?,
        here: on(bench.device)?,
        there: on(bench.other)?,
    };
    let subject = Subject::new(
        case,
        format!(
            "twenty copies between the two devices in one process, each synchronized, by {}",
            bench.raw.name()
        ),
    )
    .needs_hardware(true)
    .note("benches/compare.py compares it with PyTorch's RPC");
    let line = bench.compare(subject, &mut state, ours, |state| raw(bench, state))?;
    drop(state);
    settle()?;
    remote.finish()?;
    Ok(line)
}

fn ours(state: &mut State) -> Result<f64> {
    let State { channel, transport, .. } = state;
    timed(1, |_| {
        for _ in 0..ROUNDS {
            channel.send(transport.message(), TIMEOUT)?;
            let received = channel.receive(TIMEOUT)?;
            transport.copy(&received)?;
        }
        transport.synchronize()
    })
}

fn raw(bench: &Bench, state: &mut State) -> Result<Option<f64>> {
    let (here, there) = (&state.here, &state.there);
    ensure!(here.0.range().len == there.0.range().len, "both buffers have the same length");
    let copy = |to: &(Buffer, Stream), from: &(Buffer, Stream)| -> Result<()> {
        // SAFETY: both buffers live in `state`, which outlives the synchronisation.
        unsafe { bench.raw.copy_peer(to.0.range(), from.0.range(), to.1.as_stream())? };
        Ok(to.1.synchronize()?)
    };
    let rounds = |_| (0..ROUNDS).try_for_each(|_| copy(there, here).and_then(|()| copy(here, there)));
    timed(1, rounds).map(Some)
}
