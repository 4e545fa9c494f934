//! The hand-over of one tensor to another process, which opens and acknowledges it: over a raw Unix socket, and through a
//! channel, whose receiver spins or sleeps like the raw one.

use std::sync::Arc;

use anyhow::{Result, ensure};
use device_ipc::{Export, Message};

use crate::frame::{Bench, Row, timed};
use crate::line::{Line, Subject, Target};
use crate::peer::message::Command;
use crate::peer::{Remote, Socket, request};
use crate::wait::TIMEOUT;

pub(super) const ROW: Row = Row { name: "hand-over", title: "one tensor handed over and acknowledged", run };

const CALLS: usize = 100;
const BYTES: u64 = 1 << 20;

/// Bytes of a message besides the descriptor, and of an acknowledgement, as specified in `docs/spec/channel.md`.
const HEAD_BYTES: usize = 25;
const ACKNOWLEDGEMENT_BYTES: usize = 22;

/// A raw ping-pong of as many bytes.
struct Raw {
    echo: Socket,
    spins: bool,
    /// Bytes besides the descriptor.
    head: usize,
    answer: usize,
}

fn run(bench: &Bench) -> Result<Vec<Line>> {
    let mut importer = bench.remote(bench.device)?;
    let receiver = importer.socket(&Command::Receive)?;
    let raw =
        Raw { echo: importer.socket(&Command::Echo { spins: false })?, spins: false, head: 0, answer: 1 };
    let again = "an export that the receiver knows".to_owned();
    let new = "shared anew each time, in memory that the receiver has open".to_owned();
    let by_socket = move |export: &Export| {
        let mut acknowledgement = [0; 8];
        receiver.send(&export.descriptor().to_bytes())?;
        let received = receiver.receive(&mut acknowledgement)?;
        ensure!(received == 1, "protocol violation: the receiver did not acknowledge");
        Ok(())
    };
    let mut lines = measure(bench, importer, raw, [again, new], by_socket)?;
    for (spins, both) in [(true, "both spin"), (false, "both sleep")] {
        let mut importer = bench.remote(bench.device)?;
        let name: String = importer.request(&Command::ReceiveByChannel { spins })?;
        let channel = bench.ipc.connect(&name).timeout(TIMEOUT).start()?;
        channel.set_spinning(spins);
        let echo = importer.socket(&Command::Echo { spins })?;
        let raw = Raw { echo, spins, head: HEAD_BYTES, answer: ACKNOWLEDGEMENT_BYTES };
        let cases = ["an export that the receiver knows", "shared anew each time"]
            .map(|case| format!("through a channel, {case}, {both}"));
        let by_channel = move |export: &Export| {
            channel.send(Message::new().export(export), TIMEOUT)?;
            channel.receive(TIMEOUT)?;
            Ok(())
        };
        lines.extend(measure(bench, importer, raw, cases, by_channel)?);
    }
    Ok(lines)
}

/// Measures hand-overs of one export again, and of a new export each time, whose close is not measured.
fn measure(
    bench: &Bench,
    importer: Remote,
    raw: Raw,
    [again, new]: [String; 2],
    hand_over: impl Fn(&Export) -> Result<()>,
) -> Result<Vec<Line>> {
    let block = Arc::new(bench.ipc.allocate(bench.device, BYTES)?);
    let export = bench.ipc.share(Arc::clone(&block)).start()?;
    let bytes = export.descriptor().to_bytes().len();
    let subject = |case| {
        let mode = if raw.spins { ", spinning" } else { "" };
        Subject::new(case, format!("raw socket ping-pong of the same bytes{mode}")).target(Target::times(1.3))
    };
    let again = bench.compare(
        subject(again),
        &mut (),
        |()| timed(CALLS, |_| hand_over(&export)),
        |()| raw.ping_pong(bytes),
    )?;
    let new = bench.compare(
        subject(new),
        &mut (),
        |()| {
            let mut exports = Vec::with_capacity(CALLS);
            let took = timed(CALLS, |_| {
                let export = bench.ipc.share(Arc::clone(&block)).start()?;
                hand_over(&export)?;
                exports.push(export);
                Ok(())
            })?;
            exports.into_iter().try_for_each(|export| export.close(TIMEOUT))?;
            Ok(took)
        },
        |()| raw.ping_pong(bytes),
    )?;
    drop((hand_over, raw));
    importer.finish()?;
    export.close(TIMEOUT)?;
    Ok(vec![again, new])
}

impl Raw {
    fn ping_pong(&self, bytes: usize) -> Result<Option<f64>> {
        let (request, mut answer) = (request(bytes + self.head, self.answer), vec![0; self.answer]);
        let took = timed(CALLS, |_| {
            if !self.spins {
                return self.echo.round_trip(&request, &mut answer);
            }
            self.echo.send(&request)?;
            ensure!(self.echo.spin(&mut answer)? == answer.len(), "an answer was truncated");
            Ok(())
        });
        took.map(Some)
    }
}
