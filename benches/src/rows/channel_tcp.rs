//! Messages of bytes to another host, over the loopback interface: a channel, and a plain TCP socket.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use device_ipc::{Channel, Message};

use crate::frame::{Bench, Row, timed};
use crate::line::{Line, Subject, Unit};
use crate::peer::message::Command;
use crate::peer::{ANSWER_BYTES, Remote, key};
use crate::wait::TIMEOUT;

pub(super) const ROW: Row = Row { name: "channel-tcp", title: "messages of a channel of another host", run };

/// Round trips of a round.
const CALLS: usize = 100;
/// Messages of a round in one direction.
const MESSAGES: usize = 64;
const MIB: usize = 1 << 20;

struct State {
    importer: Remote,
    channel: Channel,
    plain: TcpStream,
    small: Vec<u8>,
    large: Vec<u8>,
    buffer: Vec<u8>,
}

fn run(bench: &Bench) -> Result<Vec<Line>> {
    let mut importer = bench.remote(bench.device)?;
    let address: String = importer.request(&Command::EchoByTcpChannel)?;
    let channel = bench.ipc.connect_tcp(&address, &key()).timeout(TIMEOUT).start()?;
    let plain = TcpStream::connect(importer.request::<String>(&Command::EchoByTcp)?)?;
    plain.set_nodelay(true)?;
    let small = [&[1][..], &[7; ANSWER_BYTES - 1]].concat();
    let (large, buffer) = (vec![0; MIB], Vec::new());
    let mut state = State { importer, channel, plain, small, large, buffer };
    let subject = |case: &str, unit| Subject::new(case, "plain TCP socket of the same bytes").unit(unit);
    let there_and_back = subject("64 B there and back", Unit::Nanoseconds);
    let there_and_back = bench.compare(there_and_back, &mut state, round_trip, plain_round_trip)?;
    let stream = subject("64 messages of 1 MiB", Unit::BytesPerSecond);
    let stream = bench.compare(stream, &mut state, send_many, plain_send_many)?;
    drop((state.channel, state.plain));
    state.importer.finish()?;
    Ok(vec![there_and_back, stream])
}

fn round_trip(state: &mut State) -> Result<f64> {
    timed(CALLS, |_| {
        state.channel.send(Message::new().bytes(&state.small), TIMEOUT)?;
        let answer = state.channel.receive(TIMEOUT)?;
        ensure!(answer.bytes() == state.small, "another answer arrived");
        Ok(())
    })
}

fn plain_round_trip(state: &mut State) -> Result<Option<f64>> {
    let State { plain, small, buffer, .. } = state;
    timed(CALLS, |_| {
        send(plain, buffer, small)?;
        receive(plain)
    })
    .map(Some)
}

/// Sends messages, and then a small one, whose answer shows that all have arrived.
fn send_many(state: &mut State) -> Result<f64> {
    let begin = Instant::now();
    for _ in 0..MESSAGES {
        state.channel.send(Message::new().bytes(&state.large), TIMEOUT)?;
    }
    state.channel.send(Message::new().bytes(&state.small), TIMEOUT)?;
    state.channel.receive(TIMEOUT)?;
    Ok(speed(begin))
}

fn plain_send_many(state: &mut State) -> Result<Option<f64>> {
    let State { plain, small, large, buffer, .. } = state;
    let begin = Instant::now();
    for _ in 0..MESSAGES {
        send(plain, buffer, large)?;
    }
    send(plain, buffer, small)?;
    receive(plain)?;
    Ok(Some(speed(begin)))
}

fn speed(begin: Instant) -> f64 {
    (MESSAGES * MIB) as f64 / begin.elapsed().as_secs_f64()
}

/// Sends a message behind its length, by one call.
fn send(plain: &mut TcpStream, buffer: &mut Vec<u8>, message: &[u8]) -> Result<()> {
    buffer.clear();
    buffer.extend_from_slice(&(message.len() as u32).to_le_bytes());
    buffer.extend_from_slice(message);
    plain.write_all(buffer).context("sending by TCP")
}

fn receive(plain: &mut TcpStream) -> Result<()> {
    let mut answer = [0; ANSWER_BYTES];
    plain.read_exact(&mut answer).context("receiving by TCP")
}
