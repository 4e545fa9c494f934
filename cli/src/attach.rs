//! `device-ipc attach`: one thing done to a tensor of another process.

use std::path::PathBuf;

use anyhow::{Result, bail};
use device_ipc::Descriptor;
use serde_json::{Value, json};

use crate::exporter::{self, Exporter};
use crate::memory::{Opened, Place};
use crate::output::line;
use crate::recv::write_out;
use crate::road::descriptor_of;

#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// The descriptor, or @FILE for the file that it is in (which keeps it from being seen by 'ps').
    #[arg(value_name = "DESCRIPTOR|@FILE")]
    descriptor: String,
    #[command(flatten)]
    place: Place,
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Print what the descriptor says, and what its exporter says of it, as JSON; never its secret. Opens nothing.
    Info {
        /// Do not ask the exporter.
        #[arg(long)]
        offline: bool,
    },
    /// Print shape, type, mean and first values, or write the bytes out.
    Read {
        /// Write the bytes, as they lie in memory, to this file; '-' is standard output.
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
    },
    /// Set every byte of the region.
    Fill {
        /// The byte, 0 to 255.
        byte: u8,
    },
    /// Add to every element in place: by a kernel to float32, through the host to others. Integers wrap around; bytes
    /// without a stated type are uint8.
    Add {
        /// What to add.
        #[arg(allow_hyphen_values = true)]
        summand: String,
    },
}

const EXAMPLES: &str = "\
Examples, with 'device-ipc send --file w.ipc --dtype uint8 --shape 1024 --receivers 0' in another terminal:
  device-ipc attach @w.ipc info
  device-ipc attach @w.ipc fill 8
  device-ipc attach @w.ipc add 3
  device-ipc attach @w.ipc read
  device-ipc attach @w.ipc read --out - | xxd | head";

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let descriptor = descriptor_of(&arguments.descriptor)?;
    if let Action::Info { offline } = arguments.action {
        return info(&descriptor, offline);
    }
    let tensor = Opened::open(&descriptor, &arguments.place)?;
    match &arguments.action {
        Action::Read { out: Some(path) } => write_out(&tensor, path)?,
        Action::Fill { byte } => {
            tensor.fill(*byte)?;
            line(format_args!("set every byte to {byte}: {}", tensor.place()))?;
            line(tensor.summary()?)?;
        }
        Action::Add { summand } => {
            let way = tensor.add(summand)?;
            line(format_args!("added {summand} {way}: {}", tensor.place()))?;
            line(tensor.summary()?)?;
        }
        Action::Read { out: None } | Action::Info { .. } => {
            line(tensor.place())?;
            line(tensor.summary()?)?;
        }
    }
    tensor.release()
}

/// One JSON document. An error, behind it, where the exporter no longer shares.
fn info(descriptor: &Descriptor, offline: bool) -> Result<()> {
    let view = serde_json::to_value(descriptor.view())?;
    if offline {
        return line(serde_json::to_string_pretty(&json!({ "descriptor": view }))?);
    }
    let (exporter, problem) = ask(descriptor)?;
    line(serde_json::to_string_pretty(&json!({ "descriptor": view, "exporter": exporter }))?)?;
    match problem {
        Some(problem) => bail!("{problem}"),
        None => Ok(()),
    }
}

/// What the exporter says of the export, and what is wrong with it.
fn ask(descriptor: &Descriptor) -> Result<(Value, Option<String>)> {
    let number = descriptor.exporter().pid;
    let process = match exporter::find(descriptor)? {
        Exporter::Answers(process) => process,
        Exporter::Silent => {
            let why = format!(
                "process {number}, the exporter, lives and does not answer; is it stopped or very busy?"
            );
            return Ok((json!({ "state": "silent", "pid": number }), Some(why)));
        }
        Exporter::Unseen => {
            let why = format!(
                "no process answers for this descriptor: its exporter (process {number} of its pid namespace) has ended, is \
                 another user's, or is in another network namespace (DEVICE_IPC_SOCKET_DIR)"
            );
            return Ok((json!({ "state": "no answer" }), Some(why)));
        }
    };
    let export = exporter::export(&process, descriptor)?;
    let (pid, program) = (process.pid, &process.program);
    let shared = export.is_some_and(|export| !export.dropped);
    let state = if shared { "sharing" } else { "dropped" };
    let problem =
        (!shared).then(|| format!("process {pid} has dropped this export; ask it for a new descriptor"));
    Ok((json!({ "state": state, "pid": pid, "program": program, "export": export }), problem))
}
