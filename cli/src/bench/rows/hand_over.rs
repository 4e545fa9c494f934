//! One tensor handed to another process, which opens it and acknowledges, over a bare Unix socket.

use std::sync::Arc;

use anyhow::{Result, ensure};
use device_ipc::{Buffer, Export};

use super::super::frame::{Bench, PATIENCE, Row, timed};
use super::super::line::{Line, Subject, Target, Unit};
use super::super::peer::message::Command;
use super::super::peer::{Remote, Socket, request};

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
    let (receiver, echo) = (importer.socket(&Command::Receive)?, importer.socket(&Command::Echo)?);
    let mut state = State { receiver, echo, _importer: importer, block, export };
    let subject = |case: &str| Subject {
        case: case.into(),
        against: "bare socket ping-pong of the same bytes".into(),
        unit: Unit::Nanoseconds,
        target: Target::times(1.3),
        needs_hardware: false,
        note: None,
    };
    let again = bench.compare(subject("an export that the receiver knows"), &mut state, ours_again, raw)?;
    let new = subject("shared anew each time, in memory that the receiver has open");
    let new = bench.compare(new, &mut state, |state| ours_anew(bench, state), raw)?;
    drop((state.receiver, state.echo));
    state._importer.finish()?;
    state.export.close(PATIENCE)?;
    Ok(vec![again, new])
}

fn hand_over(socket: &Socket, export: &Export) -> Result<()> {
    let mut acknowledgement = [0; 8];
    socket.send(&export.descriptor().to_bytes())?;
    let received = socket.receive(&mut acknowledgement)?;
    ensure!(received == 1, "the receiver did not acknowledge");
    Ok(())
}

fn ours_again(state: &mut State) -> Result<f64> {
    timed(CALLS, |_| hand_over(&state.receiver, &state.export))
}

fn ours_anew(bench: &Bench, state: &mut State) -> Result<f64> {
    let mut exports = Vec::with_capacity(CALLS);
    let took = timed(CALLS, |_| {
        let export = bench.ipc.share(Arc::clone(&state.block)).start()?;
        hand_over(&state.receiver, &export)?;
        exports.push(export);
        Ok(())
    })?;
    for export in exports {
        export.close(PATIENCE)?;
    }
    Ok(took)
}

fn raw(state: &mut State) -> Result<Option<f64>> {
    let bytes = state.export.descriptor().to_bytes().len();
    let (request, mut answer) = (request(bytes, 1), [0; 1]);
    timed(CALLS, |_| state.echo.round_trip(&request, &mut answer)).map(Some)
}
