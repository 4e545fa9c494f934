//! `device-ipc keep`: keeps the weights of a model in device memory, for processes that start and end as they like.

mod files;
mod hand_over;
mod list;
mod placement;
mod serve;
mod weights;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use device_ipc::{Access, Error, Export, Ipc, Listener};
use indicatif::HumanBytes;
use serde_json::json;
use signal_hook::consts::SIGHUP;

use crate::arguments::{AllowArguments, positive_duration};
use crate::output::warning;
use crate::selection::{Selection, check_device, select_backend};
use crate::transcript::Transcript;
use hand_over::Predecessor;
use placement::DeviceMap;

#[derive(clap::Args)]
#[command(
    group = clap::ArgGroup::new("what").required(true).multiple(true).args(["files", "hand_over", "list"]),
    after_long_help = EXAMPLES
)]
pub(crate) struct Arguments {
    /// Safetensors files of one model, or a directory of such files
    #[arg(value_name = "FILE|DIRECTORY")]
    files: Vec<PathBuf>,
    /// Name that processes open the weights by, as keeper:NAME: at most 48 ASCII letters, digits, dots, hyphens, underscores
    #[arg(long, value_name = "NAME", value_parser = keeper_name, required_unless_present = "list", conflicts_with = "list")]
    name: Option<String>,
    /// Ordinal of the device to load to
    #[arg(long, value_name = "N", default_value_t = 0)]
    device: u32,
    /// Other devices for parts of the model: MODULE=N,MODULE=N, or @FILE for a JSON object {"MODULE": N}. A tensor is loaded to the
    /// device of the longest module name that its name begins with, else to that of --device
    #[arg(long, value_name = "MAP", value_parser = DeviceMap::parse, requires = "files")]
    device_map: Option<DeviceMap>,
    /// Take the name over from the keeper that runs under it: with its weights, or with those of the files. Its weights stay
    /// available until this process has its own
    #[arg(long)]
    hand_over: bool,
    /// Share the weights read-write, on a backend without memory that can be opened read-only
    #[arg(long)]
    writable: bool,
    /// List the keepers on this machine
    #[arg(long, conflicts_with_all = ["files", "hand_over"])]
    list: bool,
    /// Backend to use; default: the first that has a device, or the mock where none has
    #[arg(long, value_name = "NAME", value_parser = crate::arguments::backend())]
    backend: Option<String>,
    /// Timeout for other keepers to answer
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = positive_duration)]
    timeout: Duration,
    #[command(flatten)]
    allow: AllowArguments,
}

const EXAMPLES: &str = "\
Examples:
  keep a model, and read one of its tensors in another terminal:
    device-ipc keep model-*.safetensors --device 0 --name llama
    device-ipc attach keeper:llama read --tensor model.norm.weight

  on two devices:
    device-ipc keep /models/llama --name llama --device-map model.layers.16=1,model.layers.17=1

  another version, while processes that read the present one go on:
    device-ipc keep /models/llama-v2 --name llama --hand-over
    kill -HUP PID             (the same files, read again)

  another keeper process with the same weights, for example of a newer version of this program:
    device-ipc keep --name llama --hand-over

Stop it with Ctrl-C or SIGTERM. Processes that have opened the weights keep them on backends whose mappings outlive the exporter.";

pub(crate) fn run(arguments: &Arguments, json: bool) -> Result<()> {
    let Selection { ipc, fallback } = select_backend(arguments.backend.as_deref(), arguments.allow.list())?;
    let Some(name) = &arguments.name else { return list::run(&ipc, arguments.timeout, json) };
    let transcript = Transcript::new(json, false);
    if let Some(reasons) = fallback {
        let backend = ipc.backend().info().name;
        let text = format!(
            "No accelerator can be used here, so this runs on the {backend}, which needs none:{reasons}"
        );
        transcript.event("fallback", json!({ "backend": backend }), text)?;
    }
    // By default SIGHUP ends a process; it is a request to load a new version only once this one has loaded its first.
    signal_hook::flag::register(SIGHUP, Arc::default()).context("cannot register a signal handler")?;
    let source = Source::new(arguments, &ipc)?;
    let predecessor = if arguments.hand_over {
        hand_over::connect(&ipc, name, arguments.timeout, !arguments.files.is_empty())?
    } else {
        None
    };
    match predecessor {
        Some(predecessor) => take_over(predecessor, source, ipc, name, transcript),
        None => {
            // Before the files are read, so that a name in use is reported immediately.
            let control = listen(&ipc, name)?;
            let export = source.load(&ipc)?;
            let kept = ipc.keep(name, 1, export);
            let keeper = kept.map_err(|error| explain(Error::from(error), name))?;
            serve::Server::new(ipc, serve::Names { keeper, control }, source, transcript)?.run()
        }
    }
}

/// Loads the files, or copies the weights, while the predecessor still answers; then takes the name.
fn take_over(
    predecessor: Predecessor,
    source: Source,
    ipc: Ipc,
    name: &str,
    transcript: Transcript,
) -> Result<()> {
    let (version, export) = if source.files.is_empty() {
        (predecessor.version(), predecessor.copy(&ipc)?)
    } else {
        (predecessor.version() + 1, source.load(&ipc)?)
    };
    let taking = predecessor.release_name()?;
    let names = taking.take(&ipc, name, version, export)?;
    let server = serve::Server::new(ipc, names, source, transcript)?;
    // Whatever becomes of the predecessor now, this process has the weights and the name.
    if let Err(error) = taking.finish() {
        warning(format_args!("the former keeper has not confirmed the hand-over: {error:#}"));
    }
    server.run()
}

/// Listens for processes that take the name over. The name of this listener is taken as long as the keeper runs.
fn listen(ipc: &Ipc, name: &str) -> Result<Listener> {
    let channel = hand_over::channel_name(name);
    let listening = hand_over::own_user_only(ipc)?.listen(&channel).start();
    listening.map_err(|error| explain(error, name))
}

/// Checks the form of a keeper's name.
fn keeper_name(text: &str) -> Result<String, String> {
    let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
    if (1..=48).contains(&text.len()) && text.bytes().all(is_valid) {
        return Ok(text.to_owned());
    }
    Err("the name of a keeper has 1 to 48 ASCII letters, digits, dots, hyphens and underscores".into())
}

/// Adds what to do on the command line to an error about the name.
fn explain(error: Error, name: &str) -> anyhow::Error {
    match error {
        Error::ChannelNameInUse { pid, program, .. } => anyhow::anyhow!(
            "process {pid} ({program}) has the name {name:?} already: if it is a keeper of this user, take the name over with \
             --hand-over; else stop that process, choose another --name, or set DEVICE_IPC_SOCKET_DIR, here and for the readers, \
             to a directory that only this user can write to"
        ),
        error => error.into(),
    }
}

/// Where the weights come from, and where they are loaded to.
struct Source {
    files: Vec<PathBuf>,
    device: u32,
    map: DeviceMap,
    access: Access,
}

impl Source {
    fn new(arguments: &Arguments, ipc: &Ipc) -> Result<Self> {
        check_device(ipc, "--device", arguments.device)?;
        let map = arguments.device_map.clone().unwrap_or_default();
        map.devices().try_for_each(|device| check_device(ipc, "--device-map", device))?;
        let mut files = Vec::new();
        for path in &arguments.files {
            // The current directory may change before the files are read again.
            files.push(
                std::path::absolute(path).with_context(|| format!("cannot resolve {}", path.display()))?,
            );
        }
        let access = if arguments.writable { Access::ReadWrite } else { Access::ReadOnly };
        Ok(Self { files, device: arguments.device, map, access })
    }

    /// Loads the files.
    fn load(&self, ipc: &Ipc) -> Result<Export> {
        if self.files.is_empty() {
            bail!(
                "there are no files to read: the weights were taken over from another keeper; use --hand-over with the files"
            );
        }
        let mut shards = files::read_headers(&self.files)?;
        self.map.warn_of_unused(&shards);
        weights::load(ipc, &mut shards, (self.device, &self.map), self.access)
    }
}

/// Returns a description of weights for the transcript, and the same for programs.
fn describe(export: &Export) -> (String, serde_json::Value) {
    let descriptor = export.descriptor();
    let (tensors, bytes) = (descriptor.tensors().len(), descriptor.len());
    let devices = descriptor.homes().len();
    let access = if descriptor.access().is_writable() { "read-write" } else { "read-only" };
    let text = format!(
        "{tensors} tensors, {} on {devices} device{} of {}, {access}",
        HumanBytes(bytes),
        if devices == 1 { "" } else { "s" },
        descriptor.backend()
    );
    let fields = json!({
        "tensors": tensors,
        "bytes": bytes,
        "devices": devices,
        "backend": descriptor.backend(),
        "access": descriptor.access().to_string(),
    });
    (text, fields)
}
