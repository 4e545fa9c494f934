//! `device-ipc send`: shares a tensor with receivers in other terminals.

mod stop;
mod tensor;

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

use anyhow::{Context, Result};
use device_ipc::{ErrorKind, Export};
use serde_json::json;

use crate::arguments::AllowArguments;
use crate::output::line;
use crate::selection::{Selection, check_device, select_backend};
use crate::transcript::Transcript;
use crate::transport::file::DescriptorFile;
use tensor::{SharedTensor, TensorArguments};

/// Timeout for closing an export without holders.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(clap::Args)]
#[command(
    group = clap::ArgGroup::new("transport").required(true).multiple(true).args(["file", "print"]),
    after_long_help = EXAMPLES
)]
pub(crate) struct Arguments {
    /// Write the descriptor to this file, readable by this user only and removed at exit
    #[arg(long, value_name = "PATH")]
    file: Option<PathBuf>,
    /// Print only the descriptor, which contains a secret, to standard output
    #[arg(long)]
    print: bool,
    /// Backend to use; default: the first that has a device, or the mock where none has
    #[arg(long, value_name = "NAME", value_parser = crate::arguments::backend())]
    backend: Option<String>,
    /// Ordinal of the device to allocate the tensor on
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = crate::arguments::device)]
    device: u32,
    #[command(flatten)]
    tensor: TensorArguments,
    /// Exit when N receivers have opened and released the tensor; 0: run until stopped
    #[arg(long, value_name = "N", default_value_t = 1)]
    receivers: u64,
    #[command(flatten)]
    allow: AllowArguments,
    /// Let receivers on other hosts copy the tensor with 'recv --copy if-needed', by NIXL; the address is one of this host's network
    /// interfaces. On trusted networks only: UCX, which NIXL uses, listens on every interface without authentication, and every
    /// process that reaches its port can read and write the memory of this one. Default: the variable DEVICE_IPC_REMOTE
    #[cfg(feature = "nixl")]
    #[arg(long, value_name = "IP[:PORT]", value_parser = crate::arguments::interface)]
    remote: Option<String>,
}

const EXAMPLES: &str = "\
Examples:
  two terminals, by a file:
    device-ipc send --file w.ipc --shape 4,5 --value 1.5
    device-ipc recv --file w.ipc --add 1

  to another device, two receivers:
    device-ipc send --file w.ipc --receivers 2
    device-ipc recv --file w.ipc --device 1

  through the environment:
    device-ipc send --print --receivers 0 > descriptor &
    DEVICE_IPC_DESCRIPTOR=$(cat descriptor) device-ipc recv

  to another host, by a copy (on trusted networks only; needs 'pip install nixl-cu13' on both hosts):
    device-ipc send --print --remote 10.0.0.1 | ssh other-host device-ipc recv --descriptor - --copy if-needed

  raw bytes from a file, as float16:
    device-ipc send --file w.ipc --in weights.bin --dtype float16 --shape 1024,1024

Stop it with Ctrl-C or SIGTERM: it closes the export, removes the file, and names the processes that still held the tensor.";

/// An event for the main thread.
enum Event {
    /// The holders of the export have changed.
    Changed,
    /// A signal with this name has arrived.
    Stop(&'static str),
}

/// Why the sender stops serving.
#[derive(Debug, PartialEq, Eq)]
enum StopReason {
    ReceiversDone,
    Signal(&'static str),
}

pub(crate) fn run(arguments: &Arguments, json: bool) -> Result<()> {
    // With --print, standard output carries only the descriptor; in JSON it is one of the events.
    let transcript = Transcript::new(json, arguments.print && !json);
    let (events, event_receiver) = sync_channel(16);
    stop::on_signals(events.clone())?;
    #[cfg(feature = "nixl")]
    if let Some(address) = &arguments.remote {
        let address = device_ipc::nixl::listen(address)?.address();
        let shown = address.map_or_else(String::new, |address| address.to_string());
        let text = format!("[sender]   receivers on other hosts copy from {shown}");
        transcript.event("remote", json!({ "address": shown }), text)?;
    }
    let Selection { ipc, fallback } = select_backend(arguments.backend.as_deref(), arguments.allow.list())?;
    if let Some(reasons) = fallback {
        let name = ipc.backend().info().name;
        let text = format!(
            "No accelerator can be used here, so this runs on the {name}, which needs none:{reasons}"
        );
        transcript.event("fallback", json!({ "backend": name }), text)?;
    }
    check_device(&ipc, "--device", arguments.device)?;
    let tensor = SharedTensor::make(&ipc, arguments.device, &arguments.tensor)?;
    let text = format!("[sender]   pid={} {}", std::process::id(), tensor.place());
    transcript.event("allocated", tensor.report(), text)?;
    let before = tensor.summary()?;
    transcript.event("before", before.report(), format_args!("[sender]   {before}"))?;
    let export = tensor.share(&ipc)?;
    export.on_change(move || {
        // The receiver is dropped while the process exits, and looks for changes after each event that waits.
        let _ = events.try_send(Event::Changed);
    });

    let file =
        arguments.file.as_deref().map(|path| DescriptorFile::write(path, export.descriptor())).transpose()?;
    if let Some(path) = &arguments.file {
        let text =
            format!("[sender]   wrote {}; receive it with: device-ipc recv --file {0}", path.display());
        transcript.event("wrote", json!({ "file": path }), text)?;
    }
    if arguments.print {
        let descriptor = export.descriptor().to_string();
        if json {
            transcript.event("descriptor", json!({ "descriptor": descriptor }), "")?;
        } else {
            line(descriptor)?;
        }
    }

    let reason = serve(&export, arguments.receivers, &event_receiver)?;
    // Receivers must not get the descriptor of an export that is being closed.
    drop(file);
    if let StopReason::Signal(signal) = reason {
        let text = format!("[sender]   stopped by {signal}");
        transcript.event("stopped", json!({ "signal": signal }), text)?;
        return stopped(export, transcript);
    }
    let after = tensor.summary()?;
    transcript.event("after", after.report(), format_args!("[sender]   afterwards: {after}"))?;
    if let (Some(before), Some(after)) = (before.mean, after.mean) {
        let delta = after - before;
        transcript.event(
            "mean_delta",
            json!({ "mean_delta": delta }),
            format_args!("[sender]   mean delta={delta:.6}"),
        )?;
    }
    Ok(export.close(CLOSE_TIMEOUT)?)
}

/// Serves until enough receivers have released the tensor, or a signal arrives.
fn serve(export: &Export, receivers: u64, events: &Receiver<Event>) -> Result<StopReason> {
    loop {
        let holders = export.holders();
        if receivers > 0 && holders.opened() >= receivers && holders.iter().len() == 0 {
            return Ok(StopReason::ReceiversDone);
        }
        if let Event::Stop(signal) = events.recv().context("the thread that receives signals has exited")? {
            return Ok(StopReason::Signal(signal));
        }
    }
}

/// Closes the export, and prints the processes that held it.
fn stopped(export: Export, transcript: Transcript) -> Result<()> {
    let holders = export.holders();
    if holders.iter().len() == 0 {
        transcript.event("closed", json!({}), format_args!("[sender]   {holders}; the export is closed"))?;
        return Ok(export.close(CLOSE_TIMEOUT)?);
    }
    let pids: Vec<u32> = holders.iter().map(|holder| holder.pid).collect();
    let text = format!("[sender]   the tensor is still held: {holders}");
    transcript.event("still_held", json!({ "holder_pids": pids }), text)?;
    match export.close(Duration::ZERO) {
        Err(error) if error.kind() != ErrorKind::Timeout => return Err(error.into()),
        _ => {}
    }
    transcript.event(
        "closed",
        json!({}),
        "[sender]   the export is closed; its holders are notified and cannot rely on the bytes any longer",
    )
}
