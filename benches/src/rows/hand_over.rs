//! The hand-over of one tensor to another process, which opens and acknowledges it: over a raw Unix socket, and through a
//! channel, whose receiver spins or sleeps like the raw one.

use std::sync::Arc;

use anyhow::{Result, ensure};
use device_ipc::{Buffer, Channel, Export, Message};

use crate::frame::{Bench, Row, timed};
use crate::line::{Line, Subject, Target};
use crate::peer::message::Command;
use crate::peer::{Remote, Socket, request};
use crate::wait::TIMEOUT;

pub(super) const ROW: Row = Row { name: "hand-over", title: "one tensor handed over and acknowledged", run };

const CALLS: usize = 100;
const BYTES: u64 = 1 << 20;

struct State {
    _importer: Remote,
    receiver: Socket,
    echo: Socket,
    block: Arc<Buffer>,
    export: Export,
}

fn run(bench: &Bench) -> Result<Vec<Line>> {
    let mut importer = bench.remote(bench.device)?;
    let block = Arc::new(bench.ipc.allocate(bench.device, BYTES)?);
    let export = bench.ipc.share(Arc::clone(&block)).start()?;
    let (receiver, echo) =
        (importer.socket(&Command::Receive)?, importer.socket(&Command::Echo { spins: false })?);
    let mut state = State { receiver, echo, _importer: importer, block, export };
    let subject =
        |case: &str| Subject::new(case, "raw socket ping-pong of the same bytes").target(Target::times(1.3));
    let again = bench.compare(subject("an export that the receiver knows"), &mut state, ours_again, raw)?;
    let new = subject("shared anew each time, in memory that the receiver has open");
    let new = bench.compare(new, &mut state, |state| ours_new(bench, state), raw)?;
    drop((state.receiver, state.echo));
    state._importer.finish()?;
    state.export.close(TIMEOUT)?;
    let mut lines = vec![again, new];
    for spins in [true, false] {
        lines.extend(through_a_channel(bench, spins)?);
    }
    Ok(lines)
}

/// Bytes of a message besides the descriptor, and of an acknowledgement, as specified in `docs/spec/channel.md`.
const HEAD_BYTES: usize = 25;
const ACKNOWLEDGEMENT_BYTES: usize = 22;

struct ByChannel {
    channel: Channel,
    echo: Socket,
    spins: bool,
    block: Arc<Buffer>,
    export: Export,
}

fn through_a_channel(bench: &Bench, spins: bool) -> Result<Vec<Line>> {
    let mut importer = bench.remote(bench.device)?;
    let name: String = importer.request(&Command::ReceiveByChannel { spins })?;
    let block = Arc::new(bench.ipc.allocate(bench.device, BYTES)?);
    let mut state = ByChannel {
        channel: bench.ipc.connect(&name).timeout(TIMEOUT).start()?,
        echo: importer.socket(&Command::Echo { spins })?,
        spins,
        export: bench.ipc.share(Arc::clone(&block)).start()?,
        block,
    };
    state.channel.set_spinning(spins);
    let (both, mode) = if spins { ("both spin", ", spinning") } else { ("both sleep", "") };
    let subject = |case: String| {
        Subject::new(case, format!("raw socket ping-pong of the same bytes{mode}")).target(Target::times(1.3))
    };
    let again = subject(format!("through a channel, an export that the receiver knows, {both}"));
    let again = bench.compare(again, &mut state, by_channel_again, raw_of_a_channel)?;
    let new = subject(format!("through a channel, shared anew each time, {both}"));
    let new = bench.compare(new, &mut state, |state| by_channel_new(bench, state), raw_of_a_channel)?;
    drop((state.channel, state.echo));
    importer.finish()?;
    state.export.close(TIMEOUT)?;
    Ok(vec![again, new])
}

fn send(channel: &Channel, export: &Export) -> Result<()> {
    channel.send(Message::new().export(export), TIMEOUT)?;
    channel.receive(TIMEOUT)?;
    Ok(())
}

fn by_channel_again(state: &mut ByChannel) -> Result<f64> {
    timed(CALLS, |_| send(&state.channel, &state.export))
}

fn by_channel_new(bench: &Bench, state: &mut ByChannel) -> Result<f64> {
    new_each_time(bench, &state.block, |export| send(&state.channel, export))
}

/// Measures hand-overs of a new export each time; closing the exports is not measured.
fn new_each_time(
    bench: &Bench,
    block: &Arc<Buffer>,
    mut hand_over: impl FnMut(&Export) -> Result<()>,
) -> Result<f64> {
    let mut exports = Vec::with_capacity(CALLS);
    let took = timed(CALLS, |_| {
        let export = bench.ipc.share(Arc::clone(block)).start()?;
        hand_over(&export)?;
        exports.push(export);
        Ok(())
    })?;
    for export in exports {
        export.close(TIMEOUT)?;
    }
    Ok(took)
}

fn raw_of_a_channel(state: &mut ByChannel) -> Result<Option<f64>> {
    let bytes = state.export.descriptor().to_bytes().len() + HEAD_BYTES;
    let request = request(bytes, ACKNOWLEDGEMENT_BYTES);
    let mut answer = [0; ACKNOWLEDGEMENT_BYTES];
    timed(CALLS, |_| {
        if !state.spins {
            return state.echo.round_trip(&request, &mut answer);
        }
        state.echo.send(&request)?;
        ensure!(state.echo.spin(&mut answer)? == answer.len(), "an answer was truncated");
        Ok(())
    })
    .map(Some)
}

fn hand_over(socket: &Socket, export: &Export) -> Result<()> {
    let mut acknowledgement = [0; 8];
    socket.send(&export.descriptor().to_bytes())?;
    let received = socket.receive(&mut acknowledgement)?;
    ensure!(received == 1, "protocol violation: the receiver did not acknowledge");
    Ok(())
}

fn ours_again(state: &mut State) -> Result<f64> {
    timed(CALLS, |_| hand_over(&state.receiver, &state.export))
}

fn ours_new(bench: &Bench, state: &mut State) -> Result<f64> {
    new_each_time(bench, &state.block, |export| hand_over(&state.receiver, export))
}

fn raw(state: &mut State) -> Result<Option<f64>> {
    let bytes = state.export.descriptor().to_bytes().len();
    let (request, mut answer) = (request(bytes, 1), [0; 1]);
    timed(CALLS, |_| state.echo.round_trip(&request, &mut answer)).map(Some)
}
