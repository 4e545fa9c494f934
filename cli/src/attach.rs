//! `device-ipc attach`: one thing done to a tensor of another process.

use std::path::PathBuf;

use anyhow::{Result, bail};
use device_ipc::BundleDescriptor;
use serde_json::{Value, json};

use crate::exporter::{self, Exporter};
use crate::memory::{Opened, Place};
use crate::recv::write_out;
use crate::road::descriptor::{AnyDescriptor, RING_IS_JOINED};
use crate::road::{descriptor_argument, printable};
use device_ipc_cli::output::{self, line};

#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// @FILE for the file that the descriptor is in, '-' for standard input, or the descriptor itself, which every user of the
    /// machine sees in 'ps'. Of an export, a bundle or, for 'info', a ring.
    #[arg(value_name = "@FILE|-|DESCRIPTOR")]
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
        /// Write the tensor's bytes, as they lie in memory, to this file; '-' is standard output.
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
        #[command(flatten)]
        which: Which,
    },
    /// Set every byte of the tensor, or of the region where no tensor is stated.
    Fill {
        /// The byte, 0 to 255.
        byte: u8,
        #[command(flatten)]
        which: Which,
    },
    /// Add to every element in place: by a kernel to float32, through the host to others. Integers wrap around; bytes
    /// without a stated type are uint8.
    Add {
        /// What to add.
        #[arg(allow_hyphen_values = true)]
        summand: String,
        #[command(flatten)]
        which: Which,
    },
}

/// Which of many tensors.
#[derive(clap::Args)]
struct Which {
    /// The tensor of this name, of a bundle.
    #[arg(long, value_name = "NAME")]
    tensor: Option<String>,
}

impl Action {
    /// The name of a tensor, for what is done to one.
    fn tensor(&self) -> Option<&str> {
        match self {
            Self::Info { .. } => None,
            Self::Read { which, .. } | Self::Fill { which, .. } | Self::Add { which, .. } => {
                which.tensor.as_deref()
            }
        }
    }
}

const EXAMPLES: &str = "\
Examples, with 'device-ipc send --file w.ipc --dtype uint8 --shape 1024 --receivers 0' in another terminal:
  device-ipc attach @w.ipc info
  device-ipc attach @w.ipc fill 8
  device-ipc attach @w.ipc add 3
  device-ipc attach @w.ipc read
  device-ipc attach @w.ipc read --out - | xxd | head

With the descriptor of a bundle in a file:
  device-ipc attach @bundle info --offline
  device-ipc attach @bundle read --tensor layers.0.weight";

/// How many names are shown to somebody who has to choose one.
const SHOWN: usize = 8;

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let descriptor = descriptor_argument(&arguments.descriptor, arguments.place.patience())?;
    if let Action::Info { offline } = arguments.action {
        return info(&descriptor, offline);
    }
    let tensor = open(&descriptor, arguments)?;
    match &arguments.action {
        Action::Read { out: Some(path), .. } => write_out(&tensor, path)?,
        Action::Fill { byte, .. } => {
            tensor.fill(*byte)?;
            line(format_args!("set every byte to {byte}: {}", tensor.place()))?;
            line(tensor.summary()?)?;
        }
        Action::Add { summand, .. } => {
            let way = tensor.add(summand)?;
            line(format_args!("added {summand} {way}: {}", tensor.place()))?;
            line(tensor.summary()?)?;
        }
        Action::Read { out: None, .. } | Action::Info { .. } => {
            line(tensor.place())?;
            line(tensor.summary()?)?;
        }
    }
    tensor.release()
}

fn open(descriptor: &AnyDescriptor, arguments: &Arguments) -> Result<Opened> {
    match (descriptor, arguments.action.tensor()) {
        (AnyDescriptor::Export(descriptor), None) => Opened::open(descriptor, &arguments.place),
        (AnyDescriptor::Export(_), Some(name)) => {
            bail!(
                "--tensor {name}: the descriptor is one of memory without names, not of a bundle; leave --tensor away"
            )
        }
        (AnyDescriptor::Bundle(bundle), Some(name)) if bundle.layout(name).is_some() => {
            Opened::open_in(bundle, name, &arguments.place)
        }
        (AnyDescriptor::Bundle(bundle), Some(name)) => {
            bail!("--tensor {name}: the bundle has no tensor of this name; it has {}", names(bundle))
        }
        (AnyDescriptor::Bundle(bundle), None) => {
            bail!("the descriptor is of a bundle; name one of its tensors with --tensor: {}", names(bundle))
        }
        (AnyDescriptor::Ring(_), _) => bail!("{RING_IS_JOINED}"),
    }
}

/// The first names in a bundle.
fn names(bundle: &BundleDescriptor) -> String {
    let first: Vec<String> = bundle.tensors().take(SHOWN).map(|(name, _)| printable(name)).collect();
    let more = bundle.len() - first.len();
    let rest = if more > 0 { format!(" and {more} more ('info' lists them)") } else { String::new() };
    format!("{}{rest}", first.join(", "))
}

/// One JSON document. An error, behind it, where the exporter no longer shares.
fn info(descriptor: &AnyDescriptor, offline: bool) -> Result<()> {
    let (kind, view) = (descriptor.kind(), descriptor.view()?);
    if offline {
        return output::json(&json!({ "kind": kind, "descriptor": view }));
    }
    let (exporter, problem) = ask(descriptor)?;
    let told = json!({ "kind": kind, "descriptor": view, "exporter": exporter });
    output::json(&told)?;
    match problem {
        Some(problem) => bail!("{problem}"),
        None => Ok(()),
    }
}

/// What the exporter says of what is shared, and what is wrong with it.
fn ask(descriptor: &AnyDescriptor) -> Result<(Value, Option<String>)> {
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
    let exports = exporter::exports(&process, descriptor);
    let (pid, program) = (process.pid, &process.program);
    let shared = exports.iter().all(|export| export.is_some_and(|export| !export.dropped));
    let state = if shared { "sharing" } else { "dropped" };
    let problem = (!shared).then(|| {
        format!("process {pid} has dropped this {}; ask it for a new descriptor", descriptor.kind())
    });
    let mut told = json!({ "state": state, "pid": pid, "program": program });
    // A bundle has one for each device.
    match (descriptor, &*exports) {
        (AnyDescriptor::Bundle(_), exports) => told["exports"] = json!(exports),
        (_, exports) => told["export"] = json!(exports[0]),
    }
    Ok((told, problem))
}
