//! `device-ipc send`: shares a tensor with receivers in other terminals.

mod server;
mod stop;
mod tensor;

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use device_ipc::Export;
use serde_json::json;

use crate::arguments::{AllowArguments, address};
use crate::output::line;
use crate::selection::{Selection, check_device, select_backend};
use crate::transcript::Transcript;
use crate::transport::file::DescriptorFile;
use crate::transport::key::KeyArguments;
use server::{Event, Server};
use tensor::{SharedTensor, TensorArguments};

/// Timeout for the final messages of receivers that have released the tensor.
const FINAL_MESSAGE_TIMEOUT: Duration = Duration::from_secs(2);

/// Timeout for closing an export without holders.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(clap::Args)]
#[command(
    group = clap::ArgGroup::new("transport").required(true).multiple(true).args(["listen", "file", "print"]),
    after_long_help = EXAMPLES
)]
pub(crate) struct Arguments {
    /// Listen here and send the descriptor to receivers that prove that they know the key; port 0 selects a free port
    #[arg(long, value_name = "HOST:PORT", conflicts_with = "file", value_parser = address)]
    listen: Option<String>,
    /// Write the descriptor to this file, readable by this user only and removed at exit
    #[arg(long, value_name = "PATH")]
    file: Option<PathBuf>,
    /// Print only the descriptor, which contains a secret, to standard output
    #[arg(long)]
    print: bool,
    #[command(flatten)]
    key: KeyArguments,
    /// Backend to use; default: the first that has a device, or the mock where none has
    #[arg(long, value_name = "NAME", value_parser = crate::arguments::backend())]
    backend: Option<String>,
    /// Ordinal of the device to allocate the tensor on
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = crate::arguments::device)]
    device: u32,
    #[command(flatten)]
    tensor: TensorArguments,
    /// Exit when N receivers are done; 0: run until stopped. Over TCP a receiver is done when it reports so or exits,
    /// otherwise when it has opened and released the tensor
    #[arg(long, value_name = "N", default_value_t = 1)]
    receivers: u64,
    #[command(flatten)]
    allow: AllowArguments,
    /// Let receivers on other hosts copy the tensor with 'recv --pull', by NIXL; the address is one of this host's network
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

  over TCP, to another device, two receivers:
    (umask 077; head -c 32 /dev/urandom | base64 > key)
    device-ipc send --listen 127.0.0.1:29531 --key-file key --receivers 2
    device-ipc recv --connect 127.0.0.1:29531 --key-file key --device 1

  through the environment:
    device-ipc send --print --receivers 0 > descriptor &
    DEVICE_IPC_DESCRIPTOR=$(cat descriptor) device-ipc recv

  to another host, by a copy (on trusted networks only; needs 'pip install nixl-cu13' on both hosts):
    device-ipc send --listen 10.0.0.1:29531 --key-file key --remote 10.0.0.1
    device-ipc recv --connect 10.0.0.1:29531 --key-file key --pull

  raw bytes from a file, as float16:
    device-ipc send --file w.ipc --in weights.bin --dtype float16 --shape 1024,1024

Stop it with Ctrl-C or SIGTERM: it closes the export, removes the file, and names the processes that still held the tensor.";

/// Why the sender stops serving.
#[derive(Debug, PartialEq, Eq)]
enum StopReason {
    ReceiversDone,
    Signal(&'static str),
}

pub(crate) fn run(arguments: &Arguments, json: bool) -> Result<()> {
    // With --print, standard output carries only the descriptor; in JSON it is one of the events.
    let transcript = Transcript::new(json, arguments.print && !json);
    let (events, event_receiver) = sync_channel(server::MAX_EVENTS);
    stop::on_signals(events.clone())?;
    // First, so that a missing key or a port in use is reported immediately.
    let listener =
        arguments.listen.as_deref().map(|address| server::bind(address, &arguments.key)).transpose()?;

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
    let change_events = events.clone();
    export.on_change(move || {
        // The receiver is dropped while the process exits, and looks for changes after each event that waits.
        let _ = change_events.try_send(Event::Changed);
    });

    let file =
        arguments.file.as_deref().map(|path| DescriptorFile::write(path, export.descriptor())).transpose()?;
    if let Some(path) = &arguments.file {
        let text =
            format!("[sender]   wrote {}; receive it with: device-ipc recv --file {0}", path.display());
        transcript.event("wrote", json!({ "file": path }), text)?;
    }
    let mut serving = None;
    if let Some(listener) = listener {
        let address = listener.address();
        let text = format!("[sender]   listening at {address}");
        transcript.event("listening", json!({ "address": address }), text)?;
        serving = Some(listener.serve(export.descriptor().to_string(), events));
    }
    if arguments.print {
        let descriptor = export.descriptor().to_string();
        if json {
            transcript.event("descriptor", json!({ "descriptor": descriptor }), "")?;
        } else {
            line(descriptor)?;
        }
    }

    let reason = serve(&export, serving.as_ref(), arguments.receivers, &event_receiver, transcript)?;
    // Receivers must not get the descriptor of an export that is being closed.
    drop((file, serving));
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

/// Serves until enough receivers are done or a signal arrives.
fn serve(
    export: &Export,
    server: Option<&Server>,
    receivers: u64,
    events: &Receiver<Event>,
    transcript: Transcript,
) -> Result<StopReason> {
    // A server counts the receivers that report completion; without one, the leases are counted.
    let (mut done, mut final_messages_until) = (0, None);
    loop {
        let holders = export.holders();
        let count = if server.is_some() { done } else { holders.opened() };
        if receivers == 0 || count < receivers || holders.iter().len() > 0 {
            final_messages_until = None;
        } else if server.is_none_or(|server| server.active_receivers() == 0) {
            return Ok(StopReason::ReceiversDone);
        } else {
            // The transcript includes the final messages of the last receivers.
            final_messages_until.get_or_insert_with(|| Instant::now() + FINAL_MESSAGE_TIMEOUT);
        }
        let next = match final_messages_until {
            None => events.recv().map_err(RecvTimeoutError::from),
            Some(end) => events.recv_timeout(end.saturating_duration_since(Instant::now())),
        };
        match next {
            Ok(Event::Transcript(entry)) => transcript.print(entry)?,
            Ok(Event::ReceiverDone(entry)) => {
                done += 1;
                transcript.print(entry)?;
            }
            Ok(Event::Changed) => {}
            Ok(Event::Stop(signal)) => return Ok(StopReason::Signal(signal)),
            Err(RecvTimeoutError::Timeout) => return Ok(StopReason::ReceiversDone),
            Err(RecvTimeoutError::Disconnected) => {
                bail!("the threads that receive signals and connections have exited")
            }
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
        Err(error) if !error.is_timeout() => return Err(error.into()),
        _ => {}
    }
    transcript.event(
        "closed",
        json!({}),
        "[sender]   the export is closed; its holders are notified and cannot rely on the bytes any longer",
    )
}
