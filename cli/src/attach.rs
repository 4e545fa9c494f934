//! `device-ipc attach`: describes, reads, fills or adds to a tensor that another process shares.

use std::path::PathBuf;

use anyhow::{Result, bail};
use device_ipc::{AllowList, Descriptor};
use serde_json::{Value, json};

use crate::arguments::{byte, number};
use crate::exporter::{self, ExporterState};
use crate::memory::{OpenArguments, OpenTensor};
use crate::output::{self, UsageError};
use crate::recv::write_out;
use crate::transcript::Transcript;
use crate::transport::descriptor::{AnyDescriptor, RING_IS_NOT_READABLE};
use crate::transport::{descriptor_argument, printable};

#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// Descriptor of an export or a bundle (for 'info' also of a ring): @FILE reads it from a file, '-' from standard input;
    /// given as text it is visible to every user of this machine in 'ps'. Or keeper:NAME, what 'device-ipc keep' keeps under this
    /// name; keeper:UID/NAME for a keeper of another user
    #[arg(value_name = "@FILE|-|DESCRIPTOR|keeper:NAME")]
    descriptor: String,
    /// Name of the tensor in a bundle
    #[arg(long, value_name = "NAME", global = true)]
    tensor: Option<String>,
    #[command(flatten)]
    open: OpenArguments,
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Print the contents of the descriptor and the state of its export, without the token; opens nothing
    Info {
        /// Do not query the exporter
        #[arg(long)]
        offline: bool,
    },
    /// Print shape, element type, mean and first values, or write the bytes to a file
    Read {
        /// File to write the tensor's bytes to, in memory order; '-' is standard output
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
    },
    /// Set every byte of the tensor, or of the whole region if the descriptor states no tensor
    Fill {
        /// Value of each byte, 0 to 255
        #[arg(value_parser = byte)]
        byte: u8,
    },
    /// Add a number to every element in place: float32 by a kernel on the device, other types through host memory.
    /// Integers wrap around; a region without an element type is treated as uint8
    Add {
        /// Number to add
        #[arg(allow_hyphen_values = true, value_parser = number)]
        summand: String,
    },
}

const EXAMPLES: &str = "\
Examples, while 'device-ipc send --file w.ipc --dtype uint8 --shape 1024 --receivers 0' runs in another terminal:
  device-ipc attach @w.ipc info
  device-ipc attach @w.ipc fill 8
  device-ipc attach @w.ipc add 3
  device-ipc attach @w.ipc read
  device-ipc attach @w.ipc read --out - | xxd | head

With the descriptor of a bundle in the file 'bundle':
  device-ipc attach @bundle info --offline
  device-ipc attach @bundle read --tensor layers.0.weight

With 'device-ipc keep model.safetensors --name llama' in another terminal:
  device-ipc attach keeper:llama info
  device-ipc attach keeper:llama read --tensor model.norm.weight";

/// The prefix of a keeper's name.
const KEEPER_SCHEME: &str = "keeper:";

/// Maximum number of tensor names in an error message.
const MAX_NAMES: usize = 8;

pub(crate) fn run(arguments: &Arguments, as_json: bool) -> Result<()> {
    let keeper = arguments.descriptor.starts_with(KEEPER_SCHEME);
    let descriptor = if keeper {
        arguments.open.find_kept(&arguments.descriptor)?
    } else {
        descriptor_argument(&arguments.descriptor, arguments.open.timeout)?
    };
    if let Action::Info { offline } = arguments.action {
        if arguments.tensor.is_some() {
            bail!(UsageError("info describes all tensors; remove --tensor".into()));
        }
        return info(&descriptor, offline, &arguments.open.allow.list(), as_json);
    }
    let tensor = match open(&descriptor, arguments) {
        // The keeper may have replaced the version, or handed over, since it answered.
        Err(error) if keeper => {
            let now = arguments.open.find_kept(&arguments.descriptor)?;
            if now.descriptor().to_string() == descriptor.descriptor().to_string() {
                return Err(error);
            }
            open(&now, arguments)?
        }
        opened => opened?,
    };
    let (event, done) = match &arguments.action {
        Action::Read { out: Some(path) } => {
            write_out(&tensor, path)?;
            return tensor.release();
        }
        Action::Fill { byte } => {
            tensor.fill(*byte)?;
            ("filled", format!("set every byte to {byte}: "))
        }
        Action::Add { summand } => {
            let path = tensor.add(summand)?;
            ("added", format!("added {summand} {path}: "))
        }
        Action::Read { out: None } | Action::Info { .. } => ("read", String::new()),
    };
    let summary = tensor.summary()?;
    let (mut fields, text) = (tensor.report()?, format!("{done}{}\n{summary}", tensor.place()));
    if let (Some(fields), Value::Object(summary)) = (fields.as_object_mut(), summary.report()) {
        fields.extend(summary);
    }
    Transcript::new(as_json, false).event(event, fields, text)?;
    tensor.release()
}

fn open(descriptor: &AnyDescriptor, arguments: &Arguments) -> Result<OpenTensor> {
    match (descriptor, arguments.tensor.as_deref()) {
        (AnyDescriptor::Export(descriptor), None) => OpenTensor::open(descriptor, &arguments.open),
        (AnyDescriptor::Export(_), Some(name)) => {
            bail!(
                "--tensor {name} requires the descriptor of a bundle, but this is the descriptor of a single export; remove \
                 --tensor"
            )
        }
        (AnyDescriptor::Bundle(bundle), Some(name)) if bundle.layout_of(name).is_some() => {
            OpenTensor::open_in_bundle(bundle, name, &arguments.open)
        }
        (AnyDescriptor::Bundle(bundle), Some(name)) => {
            bail!(
                "--tensor {name} not found: the bundle has no tensor of this name; it has {}",
                names(bundle)
            )
        }
        (AnyDescriptor::Bundle(bundle), None) => {
            bail!(
                "this is the descriptor of a bundle: select one of its tensors with --tensor: {}",
                names(bundle)
            )
        }
        (AnyDescriptor::Ring(_), _) => bail!("{RING_IS_NOT_READABLE}"),
    }
}

/// Returns the first tensor names of a bundle, for an error message.
fn names(bundle: &Descriptor) -> String {
    let first: Vec<String> = bundle.tensors().take(MAX_NAMES).map(|(name, _)| printable(name)).collect();
    let more = bundle.tensors().len() - first.len();
    let rest = if more > 0 { format!(" and {more} more (list them with 'info')") } else { String::new() };
    format!("{}{rest}", first.join(", "))
}

/// Prints one document. Fails after that if the exporter no longer shares the memory.
fn info(descriptor: &AnyDescriptor, offline: bool, allow: &AllowList, as_json: bool) -> Result<()> {
    let (kind, view) = (descriptor.kind(), descriptor.view()?);
    if offline {
        return output::document(&json!({ "kind": kind, "descriptor": view }), as_json);
    }
    let (exporter, problem) = query_exporter(descriptor, allow)?;
    let document = json!({ "kind": kind, "descriptor": view, "exporter": exporter });
    output::document(&document, as_json)?;
    match problem {
        Some(problem) => bail!("{problem}"),
        None => Ok(()),
    }
}

/// Returns the state of the export as its exporter reports it, and the problem if it is not shared.
fn query_exporter(descriptor: &AnyDescriptor, allow: &AllowList) -> Result<(Value, Option<String>)> {
    let pid = descriptor.exporter().pid;
    let process = match exporter::find(descriptor, allow)? {
        ExporterState::Answered(process) => process,
        ExporterState::Unresponsive => {
            let why = format!(
                "the exporter, process {pid}, is alive and does not answer; check whether it is stopped or overloaded"
            );
            return Ok((json!({ "state": "silent", "pid": pid }), Some(why)));
        }
        ExporterState::NotFound => {
            let why = format!(
                "no process answers for this descriptor: its exporter (process {pid} of its pid namespace) has exited, \
                 belongs to another user, or is in another network namespace (set DEVICE_IPC_SOCKET_DIR in both processes)"
            );
            return Ok((json!({ "state": "no answer" }), Some(why)));
        }
    };
    let exports = exporter::exports(&process, descriptor);
    let (pid, program) = (process.pid, &process.program);
    let shared = exports.iter().all(|export| export.is_some_and(|export| !export.dropped));
    let state = if shared { "sharing" } else { "dropped" };
    let problem = (!shared).then(|| {
        format!("process {pid} has dropped this {}; get a new descriptor from it", descriptor.kind())
    });
    let mut document = json!({ "state": state, "pid": pid, "program": program });
    // A bundle has one export per device.
    match (descriptor, &*exports) {
        (AnyDescriptor::Bundle(_), exports) => document["exports"] = json!(exports),
        (_, exports) => document["export"] = json!(exports[0]),
    }
    Ok((document, problem))
}
