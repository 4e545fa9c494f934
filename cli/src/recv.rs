//! `device-ipc recv`: opens a tensor that `device-ipc send` shares from another terminal.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result, anyhow, bail};
use device_ipc::Descriptor;
use device_ipc::backend::environment;
use device_ipc_tcp::{AuthenticatedConnection, TcpError};
use serde_json::json;

use crate::arguments::{self, address, duration, number};
use crate::memory::{OpenArguments, OpenTensor};
use crate::output::{RawOutput, UsageError, notice};
use crate::transcript::Transcript;
use crate::transport::descriptor::AnyDescriptor;
use crate::transport::key::{KEY_ID, KEY_VARIABLE, KeyArguments};
use crate::transport::message::{self, FromReceiver, FromSender};
use crate::transport::{DESCRIPTOR_VARIABLE, connect, descriptor_argument, descriptor_of, file};

/// Timeout of each message to the sender after it has sent the descriptor.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(clap::Args)]
#[command(group = clap::ArgGroup::new("transport").args(["connect", "file", "descriptor"]), after_long_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// Get the descriptor from 'device-ipc send --listen' at this address; retries until --timeout
    #[arg(long, value_name = "HOST:PORT", value_parser = address)]
    connect: Option<String>,
    /// Read the descriptor from this file; waits for the file until --timeout
    #[arg(long, value_name = "PATH")]
    file: Option<PathBuf>,
    /// Descriptor: @FILE reads it from a file, '-' from standard input; given as text it is visible to every user of this
    /// machine in 'ps'. Default: the variable DEVICE_IPC_DESCRIPTOR
    #[arg(long, value_name = "@FILE|-|TEXT")]
    descriptor: Option<String>,
    #[command(flatten)]
    key: KeyArguments,
    #[command(flatten)]
    open: OpenArguments,
    /// Add this number to every element in place: float32 on the device, other types through host memory; integers wrap around
    #[arg(long, value_name = "X", allow_hyphen_values = true, value_parser = number)]
    add: Option<String>,
    /// File to write the tensor's bytes to, in memory order; '-' is standard output
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Keep the tensor open for this time before releasing it, for example 10s; fails if the sender exits meanwhile
    #[arg(long, value_name = "DURATION", default_value = "0s", value_parser = duration)]
    hold: Duration,
}

const EXAMPLES: &str = "\
Examples:
  device-ipc recv --file w.ipc --device 1 --add 1
  device-ipc recv --connect 127.0.0.1:29531 --key-file key --out weights.bin
  DEVICE_IPC_DESCRIPTOR=dipc1:… device-ipc recv
  device-ipc recv --file w.ipc --out - | sha256sum";

pub(crate) fn run(arguments: &Arguments, json: bool) -> Result<()> {
    let to_stdout = |path: &PathBuf| path.as_os_str() == "-";
    let transcript = Transcript::new(json, arguments.out.as_ref().is_some_and(to_stdout));
    let Some(address) = &arguments.connect else {
        let descriptor = descriptor(arguments)?;
        return receive(arguments, &descriptor, transcript, |_| Ok(())).map(drop);
    };
    let limit = Instant::now() + arguments.open.timeout;
    let mut sender = connect_to_sender(arguments, address, limit)?;
    let outcome = over_tcp(arguments, transcript, &mut sender, limit);
    if let Err(error) = &outcome {
        // The sender prints the reason. It may have exited already.
        let failed = FromReceiver::Failed { error: format!("{error:#}") };
        let _ = message::send(&mut sender, &failed, Some(Instant::now() + HANDSHAKE_TIMEOUT));
    }
    outcome.with_context(|| format!("cannot receive the tensor from {address}"))
}

/// Reads the descriptor from a file, an argument or the environment.
fn descriptor(arguments: &Arguments) -> Result<Descriptor> {
    if let Some(path) = &arguments.file {
        let (timeout, shown) = (arguments.open.timeout, path.display());
        let limit = arguments::shown(timeout);
        let waiting = || notice(format_args!("waiting up to {limit} for a sender to write {shown}"));
        return file::read(path, timeout, waiting);
    }
    if let Some(text) = &arguments.descriptor {
        return descriptor_argument(text, arguments.open.timeout)?.into_single_tensor();
    }
    match environment::variable(DESCRIPTOR_VARIABLE) {
        Some(text) => {
            let descriptor = descriptor_of(&text.to_string_lossy(), arguments.open.timeout)
                .and_then(AnyDescriptor::into_single_tensor);
            descriptor
                .with_context(|| format!("cannot read a descriptor from the variable {DESCRIPTOR_VARIABLE}"))
        }
        None => bail!(UsageError(format!(
            "no descriptor given: use --connect HOST:PORT, --file PATH or --descriptor TEXT, or set {DESCRIPTOR_VARIABLE}"
        ))),
    }
}

/// Connects to the sender and authenticates both sides.
///
/// The timeout covers the wait for the sender, the handshake, and the wait for the descriptor together.
fn connect_to_sender(arguments: &Arguments, address: &str, end: Instant) -> Result<AuthenticatedConnection> {
    let key = arguments.key.read(arguments.open.timeout)?;
    let limit = arguments::shown(arguments.open.timeout);
    let waiting = || notice(format_args!("waiting up to {limit} for a sender to listen at {address}"));
    let wire = connect(address, end, arguments.open.timeout, waiting)?;
    device_ipc_tcp::connect(wire, KEY_ID, &key, end)
        .map_err(|error| match error {
            TcpError::Refused => {
                anyhow!("{error}; use the same key on both sides (--key-file or {KEY_VARIABLE})")
            }
            error => Error::new(error),
        })
        .with_context(|| format!("cannot authenticate with the sender at {address}"))
}

fn over_tcp(
    arguments: &Arguments,
    transcript: Transcript,
    sender: &mut AuthenticatedConnection,
    end: Instant,
) -> Result<()> {
    let deadline = || Some(Instant::now() + HANDSHAKE_TIMEOUT);
    message::send(sender, &FromReceiver::Ready, Some(end))?;
    let (descriptor, pid) = FromSender::receive_offer(sender, Some(end))?;
    let descriptor = AnyDescriptor::parse(&descriptor)?.into_single_tensor()?;
    let text = format!("[receiver] got the descriptor from process {pid}");
    transcript.event("offered", json!({ "sender_pid": pid }), text)?;
    let summary = receive(arguments, &descriptor, transcript, |opened| {
        let opened = FromReceiver::Opened { pid: std::process::id(), place: opened.place() };
        message::send(sender, &opened, deadline())
    })?;
    // A sender that has exited by now does not need this message.
    let _ = message::send(sender, &FromReceiver::Finished { summary }, deadline());
    Ok(())
}

/// Opens the tensor and applies the arguments. Returns the last summary.
fn receive(
    arguments: &Arguments,
    descriptor: &Descriptor,
    transcript: Transcript,
    on_open: impl FnOnce(&OpenTensor) -> Result<()>,
) -> Result<String> {
    let tensor = OpenTensor::open(descriptor, &arguments.open)?;
    on_open(&tensor)?;
    let pid = std::process::id();
    let mut opened = tensor.report()?;
    opened["pid"] = json!(pid);
    transcript.event(
        "opened",
        opened,
        format_args!("[receiver] pid={pid} got tensor: {}", tensor.place()),
    )?;
    let read = tensor.summary()?;
    let mut summary = read.to_string();
    transcript.event("read", read.report(), format_args!("[receiver] {summary}"))?;
    if let Some(summand) = &arguments.add {
        let path = tensor.add(summand)?;
        let after = tensor.summary()?;
        summary = format!("added {summand} {path}, {after}");
        transcript.event("added", after.report(), format_args!("[receiver] {summary}"))?;
    }
    if let Some(path) = &arguments.out {
        write_out(&tensor, path)?;
    }
    if !arguments.hold.is_zero() {
        let text = format!("[receiver] holding it for {}", arguments::shown(arguments.hold));
        transcript.event("holding", json!({ "hold_ms": arguments.hold.as_millis() as u64 }), text)?;
        tensor.hold(arguments.hold)?;
    }
    tensor.release()?;
    Ok(summary)
}

/// Writes the tensor's bytes to a file, or to standard output for `-`.
pub(crate) fn write_out(tensor: &OpenTensor, path: &Path) -> Result<()> {
    let mut raw = RawOutput::create(path)?;
    tensor.bytes()?.read(|piece| raw.write(piece))?;
    // The bytes are unreliable if the sender exited during the copy.
    tensor.check()?;
    raw.finish()
}
