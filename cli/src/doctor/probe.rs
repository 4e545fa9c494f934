//! Probes of the devices of a backend that the user has named: those of the backend itself, and one that needs two processes.
//!
//! They run in a child process, which starts another one for memory to open.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use device_ipc::backend::{Backends, Finding, HandleKindInfo, environment};
use device_ipc::{Descriptor, Error, Ipc};

use super::libraries::Library;
use super::process;
use crate::output::line;

const CHECK: &str = "two devices of one process";
const BYTES: u64 = 2 << 20;
const PATTERN: u8 = 0x5a;
const CHILD_TIMEOUT: Duration = Duration::from_secs(60);

/// Arguments of the child process that probes the devices, and of the child process that it starts in turn.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    backend: String,
    /// Open the descriptor in this file on two devices
    #[arg(long, value_name = "FILE")]
    open: Option<PathBuf>,
}

/// Returns the findings of a child process.
pub(super) fn findings(library: &Library, timeout: Duration) -> Vec<Finding> {
    let seen = process::run(&["__doctor-probe", library.name()], timeout).and_then(|printed| {
        // The vendor library may print additional lines.
        let last = printed.lines().last().unwrap_or_default();
        serde_json::from_str::<Vec<Finding>>(last).map_err(|error| format!("{error}: {last}"))
    });
    seen.unwrap_or_else(|why| {
        let check = format!("devices of {}", library.name());
        vec![Finding::problem(check, why, "fix the reported cause")]
    })
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let ipc = Ipc::named(&arguments.backend)?;
    if let Some(file) = &arguments.open {
        return open_on_two_devices(&ipc, file);
    }
    let backends = Backends::registered();
    let registration = backends.registrations().iter().find(|one| one.name() == arguments.backend);
    let diagnosis = registration.and_then(|one| one.diagnosis());
    let mut findings = diagnosis.map(|diagnosis| diagnosis.probe_devices()).unwrap_or_default();
    let backend = ipc.backend();
    if ipc.devices()?.len() > 1 && backend.peer_access(1.into(), 0.into())? {
        for kind in backend.handle_kinds() {
            findings.extend(two_devices_of_one_process(&ipc, &kind));
        }
    }
    line(serde_json::to_string(&findings)?)
}

/// Shares memory of device 0 with a child process that opens it on devices 0 and 1 at the same time. `None` if device 0 has no
/// memory of this kind.
fn two_devices_of_one_process(ipc: &Ipc, kind: &HandleKindInfo) -> Option<Finding> {
    let buffer = match ipc.allocate_for(0, BYTES, kind.kind) {
        Err(Error::Unsupported { .. }) => return None,
        allocated => allocated,
    };
    let outcome = buffer.map_err(anyhow::Error::from).and_then(|buffer| {
        let stream = ipc.create_stream(0)?;
        buffer.view_mut::<u8, _>(&stream)?.fill_bytes(PATTERN)?;
        stream.synchronize()?;
        let export = ipc.share(buffer).start()?;
        let text = export.descriptor().to_string();
        open_in_child(ipc.backend().info().name, &text, kind.kind.0)
    });
    let name = kind.name;
    Some(match outcome {
        Ok(()) => Finding::ok(CHECK, format!("{name}: opened on both")),
        Err(error) => Finding::warning(
            CHECK,
            format!("{name}: {error:#}"),
            "open memory of this kind on one device only, and report this line to the project",
        ),
    })
}

fn open_in_child(backend: &str, descriptor: &str, kind: u16) -> Result<()> {
    // A file, because other users can read arguments.
    let directory = environment::variable("TMPDIR").map_or_else(|| PathBuf::from("/tmp"), PathBuf::from);
    let file = directory.join(format!("device-ipc-doctor-{}-{kind}", std::process::id()));
    let mut written = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&file)?;
    let opened = written.write_all(descriptor.as_bytes()).map_err(anyhow::Error::from).and_then(|()| {
        let path = file
            .to_str()
            .context("the path of the directory for temporary files is not UTF-8; set TMPDIR")?;
        let arguments = ["__doctor-probe", backend, "--open", path];
        process::run(&arguments, CHILD_TIMEOUT).map_err(anyhow::Error::msg)
    });
    std::fs::remove_file(&file)?;
    opened.map(drop)
}

fn open_on_two_devices(ipc: &Ipc, file: &Path) -> Result<()> {
    let descriptor: Descriptor = std::fs::read_to_string(file)?.parse()?;
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
