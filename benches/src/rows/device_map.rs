//! The transport of PyTorch's tutorial on device maps: a tensor to the other process's device and back, ten times. Both sides
//! copy the received tensor to memory of their own device, as TensorPipe does.

#![allow(unsafe_code, reason = "raw copies between buffers that live as long as the row")]

use anyhow::Result;
use device_ipc::{AsStream, Buffer, DeviceMap, Stream};

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
    let channel = bench.ipc.connect(&name).device_map(map).timeout(TIMEOUT).start()?;
    let transport = Transport::new(&bench.ipc, bench.device, BYTES, staged)?;
    // Buffers of this process, one on each device, each with a stream of its device.
    let on = |device| {
        Ok::<_, device_ipc::Error>((bench.ipc.allocate(device, BYTES)?, bench.ipc.create_stream(device)?))
    };
    let (here, there) = (on(bench.device)?, on(bench.other)?);
    let subject = Subject::new(
        case,
        format!(
            "twenty copies between the two devices in one process, each synchronized, by {}",
            bench.raw.name()
        ),
    )
    .needs_hardware(true)
    .note("benches/compare.py compares it with PyTorch's RPC");
    let ours = |(): &mut ()| {
        timed(1, |_| {
            for _ in 0..ROUNDS {
                channel.send(transport.message(), TIMEOUT)?;
                transport.copy(&channel.receive(TIMEOUT)?)?;
            }
            transport.synchronize()
        })
    };
    let copy = |to: &(Buffer, Stream), from: &(Buffer, Stream)| -> Result<()> {
        // SAFETY: both buffers have the same length and outlive the synchronization.
        unsafe { bench.raw.copy_peer(to.0.range(), from.0.range(), to.1.as_stream())? };
        Ok(to.1.synchronize()?)
    };
    let rounds = |_| (0..ROUNDS).try_for_each(|_| copy(&there, &here).and_then(|()| copy(&here, &there)));
    let line = bench.compare(subject, &mut (), ours, |()| timed(1, rounds).map(Some))?;
    drop((channel, transport));
    settle()?;
    remote.finish()?;
    Ok(line)
}
