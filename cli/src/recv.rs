//! `device-ipc recv`: opens a tensor that `device-ipc send` shares from another terminal.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use device_ipc::Descriptor;
use device_ipc::backend::environment;
use serde_json::json;

use crate::arguments::{self, duration, number};
use crate::memory::{OpenArguments, OpenTensor};
use crate::output::{RawOutput, UsageError, notice};
use crate::transcript::Transcript;
use crate::transport::descriptor::AnyDescriptor;
use crate::transport::{DESCRIPTOR_VARIABLE, descriptor_argument, descriptor_of, file};

#[derive(clap::Args)]
#[command(group = clap::ArgGroup::new("transport").args(["file", "descriptor"]), after_long_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// Read the descriptor from this file; waits for the file until --timeout
    #[arg(long, value_name = "PATH")]
    file: Option<PathBuf>,
    /// Descriptor: @FILE reads it from a file, '-' from standard input; given as text it is visible to every user of this
    /// machine in 'ps'. Default: the variable DEVICE_IPC_DESCRIPTOR
    #[arg(long, value_name = "@FILE|-|TEXT")]
    descriptor: Option<String>,
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
  device-ipc recv --file w.ipc --out weights.bin
  ssh other-host device-ipc send --print --remote 10.0.0.1 | device-ipc recv --descriptor - --copy if-needed
  DEVICE_IPC_DESCRIPTOR=dipc1:… device-ipc recv
  device-ipc recv --file w.ipc --out - | sha256sum";

pub(crate) fn run(arguments: &Arguments, json: bool) -> Result<()> {
    let to_stdout = |path: &PathBuf| path.as_os_str() == "-";
    let transcript = Transcript::new(json, arguments.out.as_ref().is_some_and(to_stdout));
    receive(arguments, &descriptor(arguments)?, transcript)
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
            "no descriptor given: use --file PATH or --descriptor TEXT, or set {DESCRIPTOR_VARIABLE}"
        ))),
    }
}

/// Opens the tensor and applies the arguments.
fn receive(arguments: &Arguments, descriptor: &Descriptor, transcript: Transcript) -> Result<()> {
    let tensor = OpenTensor::open(descriptor, &arguments.open)?;
    let pid = std::process::id();
    let mut opened = tensor.report()?;
    opened["pid"] = json!(pid);
    transcript.event(
        "opened",
        opened,
        format_args!("[receiver] pid={pid} got tensor: {}", tensor.place()),
    )?;
    let read = tensor.summary()?;
    transcript.event("read", read.report(), format_args!("[receiver] {read}"))?;
    if let Some(summand) = &arguments.add {
        let path = tensor.add(summand)?;
        let after = tensor.summary()?;
        let text = format!("[receiver] added {summand} {path}, {after}");
        transcript.event("added", after.report(), text)?;
    }
    if let Some(path) = &arguments.out {
        write_out(&tensor, path)?;
    }
    if !arguments.hold.is_zero() {
        let text = format!("[receiver] holding it for {}", arguments::shown(arguments.hold));
        transcript.event("holding", json!({ "hold_ms": arguments.hold.as_millis() as u64 }), text)?;
        tensor.hold(arguments.hold)?;
    }
    tensor.release()
}

/// Writes the tensor's bytes to a file, or to standard output for `-`.
pub(crate) fn write_out(tensor: &OpenTensor, path: &Path) -> Result<()> {
    let mut raw = RawOutput::create(path)?;
    tensor.bytes()?.read(|piece| raw.write(piece))?;
    // The bytes are unreliable if the sender exited during the copy.
    tensor.check()?;
    raw.finish()
}
