//! Probes of Ascend card behaviour that the project could not test on hardware; users report the output of
//! `doctor --backend ascend`.
//!
//! The probes run in a child process; those that need a second process start another one.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use device_ipc::ascend::{AscendBackend, KEY, SHAREABLE};
use device_ipc::backend::{DeviceIpc, HandleKind, environment};
use device_ipc::{Descriptor, Ipc};
use serde::{Deserialize, Serialize};

use super::finding::Finding;
use super::process;
use device_ipc_cli::output::line;

const CHECK: &str = "Ascend card";
const REPORT: &str = "send us this line: docs/guide/ascend.md, \"What to send us when it fails\"";
const BYTES: u64 = 2 << 20;
const PATTERN: u8 = 0x5a;
const CHILD_TIMEOUT: Duration = Duration::from_secs(60);

/// Arguments of the child process that probes the cards, and of the child process that it starts in turn.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Open the descriptor in this file on two devices
    #[arg(long, value_name = "FILE")]
    open: Option<PathBuf>,
}

/// An observation that the child process reports.
#[derive(Debug, Serialize, Deserialize)]
struct Observation {
    topic: String,
    result: String,
    expected: bool,
}

/// Returns the observations of a child process as findings.
pub(super) fn findings(timeout: Duration) -> Vec<Finding> {
    let seen = process::run(&["__doctor-ascend"], timeout).and_then(|printed| {
        // The vendor library may print additional lines.
        let last = printed.lines().last().unwrap_or_default();
        serde_json::from_str::<Vec<Observation>>(last).map_err(|error| format!("{error}: {last}"))
    });
    match seen {
        Ok(seen) => seen.into_iter().map(finding).collect(),
        Err(why) => vec![Finding::problem(CHECK, why, REPORT)],
    }
}

fn finding(observation: Observation) -> Finding {
    let found = format!("{}: {}", observation.topic, observation.result);
    if observation.expected { Finding::ok(CHECK, found) } else { Finding::warning(CHECK, found, REPORT) }
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    if let Some(file) = &arguments.open {
        return open_on_two_devices(file);
    }
    let backend = AscendBackend::load()?;
    let observed = backend.observe()?.into_iter();
    let mut seen: Vec<Observation> = observed
        .map(|one| Observation { topic: one.topic.to_owned(), result: one.result, expected: one.as_assumed })
        .collect();
    if backend.devices()?.len() > 1 && backend.peer_access(1.into(), 0.into())? {
        seen.extend([KEY, SHAREABLE].map(|kind| two_devices_of_one_process(&backend, kind)));
    }
    line(serde_json::to_string(&seen)?)
}

/// Shares memory of device 0 with a child process that opens it on devices 0 and 1 at the same time.
fn two_devices_of_one_process(backend: &Arc<AscendBackend>, kind: HandleKind) -> Observation {
    let name = if kind == KEY { "keys" } else { "shareable handles" };
    let outcome = share_with_two_devices(backend, kind);
    Observation {
        topic: "two devices of one process".into(),
        expected: outcome.is_ok(),
        result: match outcome {
            Ok(()) => format!("{name}: opened on both"),
            Err(error) => format!("{name}: {error:#}"),
        },
    }
}

fn share_with_two_devices(backend: &Arc<AscendBackend>, kind: HandleKind) -> Result<()> {
    let ipc = Ipc::with_backend(Arc::clone(backend) as Arc<dyn DeviceIpc>);
    let buffer = Arc::new(ipc.allocate_for(0, BYTES, kind)?);
    let stream = ipc.create_stream(0)?;
    buffer.view_mut::<u8, _>(&stream)?.fill_bytes(PATTERN)?;
    stream.synchronize()?;
    let share = ipc.share(buffer).start()?;
    // A file, because other users can read arguments.
    let directory = environment::variable("TMPDIR").map_or_else(|| PathBuf::from("/tmp"), PathBuf::from);
    let file = directory.join(format!("device-ipc-doctor-{}-{}", std::process::id(), kind.0));
    let mut written = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&file)?;
    let opened = written
        .write_all(share.descriptor().to_string().as_bytes())
        .map_err(anyhow::Error::from)
        .and_then(|()| {
            let path = file
                .to_str()
                .context("the path of the directory for temporary files is not UTF-8; set TMPDIR")?;
            process::run(&["__doctor-ascend", "--open", path], CHILD_TIMEOUT).map_err(anyhow::Error::msg)
        });
    std::fs::remove_file(&file)?;
    opened.map(drop)
}

fn open_on_two_devices(file: &Path) -> Result<()> {
    let descriptor: Descriptor = std::fs::read_to_string(file)?.parse()?;
    let ipc = Ipc::named("ascend")?;
    let open = |device: u32| {
        ipc.open(&descriptor)
            .on_device(device)
            .with_context(|| format!("cannot open the memory on device {device}"))
    };
    for mapping in [open(0)?, open(1)?] {
        let stream = ipc.create_stream(mapping.device())?;
        let bytes = mapping.view::<u8, _>(&stream)?.to_vec()?;
        ensure!(
            bytes.iter().all(|byte| *byte == PATTERN),
            "device {} reads bytes that differ from those written",
            mapping.device()
        );
    }
    Ok(())
}
