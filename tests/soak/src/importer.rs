//! The importing process: carries out the commands of the exporter and answers each.

use std::sync::mpsc::{Receiver, channel};
use std::task::Poll;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use cudarc::driver::CudaContext;
use device_ipc::{
    CopyPolicy, Descriptor, ErrorKind, Ipc, Mapping, RingReadSlot, RingReader, Stream, close_unused,
};
use device_ipc_conformance::Lines;

use crate::TIMEOUT;
use crate::rows::wait_readable;
use crate::rows::{ELEMENTS, Exchange, ipc};
use crate::sizes::Sizes;

/// Time that an importer waits for the next command; its exporter kills it long before.
const FOREVER: Duration = Duration::from_secs(24 * 60 * 60);

/// Carries out commands until the exporter closes the connection.
pub(crate) fn serve(device: u32) -> Result<()> {
    let ipc = ipc()?;
    let stream = ipc.create_stream(device)?;
    let mut held = Vec::new();
    let mut observed = None;
    let mut reserved = None;
    let lines = Lines::of_child()?;
    lines.send("ok")?;
    while let Ok(line) = lines.receive(FOREVER) {
        let (command, arguments) = line.split_once(' ').unwrap_or((&line, ""));
        let answer = match command {
            "sizes" => {
                drop(reserved.take());
                close_unused(TIMEOUT)?;
                Ok(Sizes::take(&ipc, device)?.to_line())
            }
            "hold" => open(&ipc, &stream, arguments).map(|mapping| {
                held.push(mapping);
                String::new()
            }),
            "observe" => observe(&ipc, &stream, arguments).map(|observing| {
                observed = Some(observing);
                String::new()
            }),
            "replace" => replace(&ipc, &stream, arguments, &mut reserved).map(|()| String::new()),
            "dropped" => dropped(&stream, observed.take()).map(|()| String::new()),
            _ => carry_out(&ipc, &stream, command, arguments).map(|()| String::new()),
        };
        match answer {
            Ok(text) => lines.send(&format!("ok {text}"))?,
            Err(error) => lines.send(&format!("error {error:#}"))?,
        }
    }
    Ok(())
}

/// Opens `VALUE DESCRIPTOR`: the memory holds that value everywhere.
fn open(ipc: &Ipc, stream: &Stream, arguments: &str) -> Result<Mapping> {
    let (value, descriptor) = value_and(arguments)?;
    let descriptor: Descriptor = descriptor.parse()?;
    let mapping = ipc.open(&descriptor).on(stream)?;
    check(&mapping.view::<f32, _>(stream)?.to_vec()?, value)?;
    Ok(mapping)
}

/// Replaces the memory at the reserved address by that of `VALUE KEEPER DESCRIPTOR`, in one of several ways.
fn replace(ipc: &Ipc, stream: &Stream, arguments: &str, reserved: &mut Option<Mapping>) -> Result<()> {
    let (value, rest) = value_and(arguments)?;
    let (keeper, descriptor) = rest.split_once(' ').context("a keeper, then the descriptor")?;
    let descriptor: Descriptor = descriptor.parse()?;
    let Some(mapping) = reserved else {
        let mapping = ipc.find(keeper, TIMEOUT)?.open().reserved().on(stream)?;
        check(&mapping.view::<f32, _>(stream)?.to_vec()?, value)?;
        *reserved = Some(mapping);
        return Ok(());
    };
    let address = mapping.range();
    match Exchange::of(value) {
        Exchange::Suspended => {
            mapping.suspend()?;
            mapping.resume(&descriptor)?;
        }
        Exchange::Replaced => mapping.replace_on(&descriptor, stream)?,
        Exchange::Followed => {
            ensure!(mapping.follow_on(stream)?.is_some(), "the keeper has a new version");
        }
    }
    ensure!(mapping.range() == address, "the memory is at {:?}, and was at {address:?}", mapping.range());
    check(&mapping.view::<f32, _>(stream)?.to_vec()?, value)
}

/// Opens `VALUE DESCRIPTOR`, copies the bytes to the host and drops the mapping: its lease is idle.
fn read(ipc: &Ipc, stream: &Stream, arguments: &str) -> Result<()> {
    let (value, descriptor) = value_and(arguments)?;
    check(&ipc.open(&descriptor.parse()?).at_home()?.to_host::<f32, _>(stream)?, value)
}

/// Opens `VALUE DESCRIPTOR`, and waits for the drop of the export from now on.
fn observe(ipc: &Ipc, stream: &Stream, arguments: &str) -> Result<(Mapping, Receiver<()>)> {
    let (value, descriptor) = value_and(arguments)?;
    let mapping = ipc.open(&descriptor.parse()?).at_home()?;
    check(&mapping.to_host::<f32, _>(stream)?, value)?;
    let (sender, receiver) = channel();
    mapping.on_dropped(move || sender.send(()).unwrap_or_default());
    Ok((mapping, receiver))
}

fn dropped(stream: &Stream, observed: Option<(Mapping, Receiver<()>)>) -> Result<()> {
    let (mapping, dropped) = observed.context("observe comes first")?;
    dropped.recv_timeout(TIMEOUT).context("the drop of the export was not reported")?;
    mapping.release(stream)?;
    Ok(())
}

fn value_and(arguments: &str) -> Result<(f32, &str)> {
    let (value, rest) = arguments.split_once(' ').context("a value, then more")?;
    Ok((value.parse()?, rest))
}

fn check(seen: &[f32], value: f32) -> Result<()> {
    let wrong = seen.iter().position(|element| *element != value);
    ensure!(seen.len() == ELEMENTS, "there are {} elements, not {ELEMENTS}", seen.len());
    wrong.map_or(Ok(()), |at| bail!("element {at} is {}, not {value}", seen[at]))
}

fn carry_out(ipc: &Ipc, stream: &Stream, command: &str, arguments: &str) -> Result<()> {
    match command {
        "open" => open(ipc, stream, arguments)?.release(stream)?,
        "read" => read(ipc, stream, arguments)?,
        "staged" => {
            let (value, descriptor) = value_and(arguments)?;
            let copy = ipc.open(&descriptor.parse()?).copy(CopyPolicy::Staged).on(stream)?;
            ensure!(copy.is_copy(), "a staged open gave the exporter's memory");
            check(&copy.view::<f32, _>(stream)?.to_vec()?, value)?;
            copy.release(stream)?;
        }
        "timeline" => {
            let (value, descriptor) = value_and(arguments)?;
            let mapping = ipc.open(&descriptor.parse()?).on(stream)?;
            let timeline = mapping.timeline()?;
            timeline.wait(1, stream)?;
            check(&mapping.view::<f32, _>(stream)?.to_vec()?, value)?;
            timeline.signal(1, stream)?;
            mapping.release(stream)?;
        }
        "bundle" => {
            let (value, descriptor) = value_and(arguments)?;
            let mapping = ipc.open(&descriptor.parse()?).on(stream)?;
            for (name, tensor) in mapping.tensors() {
                check(&tensor.view::<f32, _>(stream)?.to_vec()?, value).with_context(|| name.to_owned())?;
            }
            mapping.release(stream)?;
        }
        "cudarc" => {
            let (value, descriptor) = value_and(arguments)?;
            let context = CudaContext::new(stream.device().index())?;
            let stream = context.default_stream();
            let mapping = ipc.open(&descriptor.parse()?).on(&stream)?;
            check(&stream.clone_dtoh(&mapping.view::<f32, _>(&stream)?)?, value)?;
            mapping.release(&stream)?;
        }
        "ring" => ring(ipc, stream, arguments)?,
        "channel" => receive_all(ipc, stream, arguments)?,
        _ => bail!("unknown command {command:?}"),
    }
    Ok(())
}

/// Reads `FIRST COUNT DESCRIPTOR`: `COUNT` publications, whose values count up from the first.
fn ring(ipc: &Ipc, stream: &Stream, arguments: &str) -> Result<()> {
    let (first, rest) = value_and(arguments)?;
    let (count, descriptor) = rest.split_once(' ').context("a count, then the descriptor")?;
    let mut reader = ipc.open_ring(&descriptor.parse()?).timeout(TIMEOUT).on(stream)?;
    for number in 0..count.parse::<u16>()? {
        let taken = if number % 2 == 0 { reader.next(TIMEOUT)? } else { next_by_descriptor(&mut reader)? };
        let slot = taken.context("the ring was closed too early")?;
        check(&slot.view::<f32, _>(stream)?.to_vec()?, first + f32::from(number))?;
        slot.release(stream)?;
    }
    reader.close();
    Ok(())
}

/// Takes the next slot as an event loop does.
fn next_by_descriptor(reader: &mut RingReader) -> Result<Option<RingReadSlot>> {
    loop {
        match reader.try_next()? {
            Poll::Ready(taken) => return Ok(taken),
            Poll::Pending => wait_readable(reader)?,
        }
    }
}

/// Receives from the channel of this name until it is closed: tensors, and their values as bytes.
fn receive_all(ipc: &Ipc, stream: &Stream, name: &str) -> Result<()> {
    let channel = ipc.connect(name).timeout(TIMEOUT).start()?;
    loop {
        let message = match channel.receive(TIMEOUT) {
            Err(error) if error.kind() == ErrorKind::Closed => return Ok(()),
            message => message?,
        };
        let value = std::str::from_utf8(message.bytes())?.parse()?;
        let [tensor] = message.exports() else { bail!("a message has one tensor") };
        let mapping = tensor.open().on(stream)?;
        check(&mapping.view::<f32, _>(stream)?.to_vec()?, value)?;
        mapping.release(stream)?;
    }
}
