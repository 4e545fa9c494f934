//! `device-ipc recv`: opens a tensor of another terminal.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use device_ipc::{Descriptor, environment};

use crate::memory::{Opened, Place};
use crate::road::descriptor::AnyDescriptor;
use crate::road::key::KeyArguments;
use crate::road::message::{FromReceiver, FromSender};
use crate::road::sealed::Sealed;
use crate::road::{DESCRIPTOR_VARIABLE, connect, descriptor_argument, descriptor_of, file, handshake};
use device_ipc_cli::output::{RawOutput, line};

/// How long the sender may take for the handshake, and to take in what is said to it.
const HANDSHAKE: Duration = Duration::from_secs(10);

#[derive(clap::Args)]
#[command(group = clap::ArgGroup::new("road").args(["connect", "file", "descriptor"]), after_long_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// Get the descriptor from 'device-ipc send --listen' there; tried until the time is over.
    #[arg(long, value_name = "HOST:PORT")]
    connect: Option<String>,
    /// Read the descriptor from this file; waits for it.
    #[arg(long, value_name = "PATH")]
    file: Option<PathBuf>,
    /// @FILE for the file that the descriptor is in, '-' for standard input, or the descriptor itself, which every user of the
    /// machine sees in 'ps'. The variable DEVICE_IPC_DESCRIPTOR is read where nothing is given.
    #[arg(long, value_name = "@FILE|-|TEXT")]
    descriptor: Option<String>,
    #[command(flatten)]
    key: KeyArguments,
    #[command(flatten)]
    place: Place,
    /// Add this to every element in place: on the device to float32, through the host to others; integers wrap around.
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    add: Option<String>,
    /// Write the bytes, as they lie in memory, to this file; '-' is standard output.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Keep the tensor open for so long at the end; the sender's end is an error then.
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    hold: u64,
}

const EXAMPLES: &str = "\
Examples:
  device-ipc recv --file w.ipc --device 1 --add 1
  device-ipc recv --connect 127.0.0.1:29531 --key-file key --out weights.bin
  DEVICE_IPC_DESCRIPTOR=dipc.… device-ipc recv
  device-ipc recv --file w.ipc --out - | sha256sum";

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let Some(address) = &arguments.connect else {
        let descriptor = descriptor(arguments)?;
        return receive(arguments, &descriptor, |_| Ok(())).map(drop);
    };
    let mut sender = join(arguments, address)?;
    let outcome = over_tcp(arguments, &mut sender);
    if let Err(error) = &outcome {
        // The sender's transcript shall say why. It may be gone already.
        let failed = FromReceiver::Failed { error: format!("{error:#}") };
        let _ = sender.say(&failed, Some(Instant::now() + HANDSHAKE));
    }
    outcome.with_context(|| format!("receiving from {address}"))
}

/// By any road but TCP.
fn descriptor(arguments: &Arguments) -> Result<Descriptor> {
    if let Some(path) = &arguments.file {
        let (seconds, shown) = (arguments.place.timeout, path.display());
        let waiting = || eprintln!("waiting up to {seconds} s for a sender to write {shown}");
        return file::read(path, arguments.place.patience(), waiting);
    }
    if let Some(text) = &arguments.descriptor {
        return descriptor_argument(text, arguments.place.patience())?.of_one_tensor();
    }
    match environment::variable(DESCRIPTOR_VARIABLE) {
        Some(text) => {
            let descriptor = descriptor_of(&text.to_string_lossy(), arguments.place.patience())
                .and_then(AnyDescriptor::of_one_tensor);
            descriptor.with_context(|| format!("reading the variable {DESCRIPTOR_VARIABLE}"))
        }
        None => bail!(
            "no descriptor: give --connect HOST:PORT, --file PATH or --descriptor TEXT, or set {DESCRIPTOR_VARIABLE}"
        ),
    }
}

/// Connects, and has both sides prove the key.
fn join(arguments: &Arguments, address: &str) -> Result<Sealed> {
    let key = arguments.key.read(arguments.place.patience())?;
    let seconds = arguments.place.timeout;
    let waiting = || eprintln!("waiting up to {seconds} s for a sender to listen at {address}");
    let wire = connect(address, arguments.place.patience(), waiting)?;
    handshake::join(wire, &key, Instant::now() + HANDSHAKE)
        .with_context(|| format!("the sender at {address}"))
}

fn over_tcp(arguments: &Arguments, sender: &mut Sealed) -> Result<()> {
    let soon = || Some(Instant::now() + HANDSHAKE);
    sender.say(&FromReceiver::Ready, soon())?;
    let (descriptor, pid) = FromSender::offer(sender, soon())?;
    let descriptor = AnyDescriptor::parse(&descriptor)?.of_one_tensor()?;
    transcript(arguments, format!("[receiver] got the descriptor from process {pid}"))?;
    let summary = receive(arguments, &descriptor, |opened| {
        let opened = FromReceiver::Opened { pid: std::process::id(), place: opened.place() };
        sender.say(&opened, soon())
    })?;
    // Where the sender has gone by now, it was done without us.
    let _ = sender.say(&FromReceiver::Finished { summary }, soon());
    Ok(())
}

/// Opens the tensor and does what the arguments say. Gives what was seen last, in words.
fn receive(
    arguments: &Arguments,
    descriptor: &Descriptor,
    opened: impl FnOnce(&Opened) -> Result<()>,
) -> Result<String> {
    let say = |text: String| transcript(arguments, text);
    let tensor = Opened::open(descriptor, &arguments.place)?;
    opened(&tensor)?;
    say(format!("[receiver] pid={} got tensor: {}", std::process::id(), tensor.place()))?;
    let mut summary = tensor.summary()?.to_string();
    say(format!("[receiver] {summary}"))?;
    if let Some(summand) = &arguments.add {
        let way = tensor.add(summand)?;
        summary = format!("added {summand} {way}, {}", tensor.summary()?);
        say(format!("[receiver] {summary}"))?;
    }
    if let Some(path) = &arguments.out {
        write_out(&tensor, path)?;
    }
    if arguments.hold > 0 {
        say(format!("[receiver] holding it for {} s", arguments.hold))?;
        tensor.hold(Duration::from_secs(arguments.hold))?;
    }
    tensor.release()?;
    Ok(summary)
}

/// Lines for people; where standard output is the tensor's bytes, they go to standard error.
fn transcript(arguments: &Arguments, text: String) -> Result<()> {
    if is_standard_output(arguments.out.as_deref()) {
        eprintln!("{text}");
        return Ok(());
    }
    line(text)
}

fn is_standard_output(path: Option<&Path>) -> bool {
    path.is_some_and(|path| path.as_os_str() == "-")
}

/// Writes the tensor's bytes to a file, or to standard output for `-`.
pub(crate) fn write_out(tensor: &Opened, path: &Path) -> Result<()> {
    let mut raw = RawOutput::create(path)?;
    tensor.bytes()?.read(|piece| raw.write(piece))?;
    // A file of a sender that died on the way is not taken for whole.
    tensor.check()?;
    raw.finish()
}
