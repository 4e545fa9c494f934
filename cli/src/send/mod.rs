//! `device-ipc send`: a tensor for receivers in other terminals.

mod server;
mod stop;
mod tensor;

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use device_ipc::{Error, Export};

use crate::road::file::DescriptorFile;
use crate::road::key::KeyArguments;
use device_ipc_cli::output::line;
use device_ipc_cli::selection::{Selection, check_device, select_backend};
use server::{Server, Told};
use tensor::{SentTensor, TensorArguments};

/// How long those who have let go may take to say good-bye.
const FAREWELL: Duration = Duration::from_secs(2);

/// How long the end of the export may take when nobody holds it.
const CLOSING: Duration = Duration::from_secs(10);

#[derive(clap::Args)]
#[command(
    group = clap::ArgGroup::new("road").required(true).multiple(true).args(["listen", "file", "print"]),
    after_long_help = EXAMPLES
)]
pub(crate) struct Arguments {
    /// Hand the descriptor to receivers that connect here and prove that they know the key. Port 0 takes a free one.
    #[arg(long, value_name = "HOST:PORT", conflicts_with = "file")]
    listen: Option<String>,
    /// Write the descriptor to this file, which this user alone can read and which is removed at the end.
    #[arg(long, value_name = "PATH")]
    file: Option<PathBuf>,
    /// Print the descriptor, and nothing else, to standard output; it holds a secret.
    #[arg(long)]
    print: bool,
    #[command(flatten)]
    key: KeyArguments,
    /// This backend; the first that has a device unless given, and the mock where none has.
    #[arg(long, value_name = "NAME")]
    backend: Option<String>,
    /// The device that the tensor shall live on.
    #[arg(long, value_name = "N", default_value_t = 0)]
    device: u32,
    #[command(flatten)]
    tensor: TensorArguments,
    /// End when so many receivers are done; 0: serve until stopped. By TCP a receiver is done when it says so or has ended,
    /// else when a process that had the tensor open has let go of it.
    #[arg(long, value_name = "N", default_value_t = 1)]
    receivers: u64,
}

const EXAMPLES: &str = "\
Examples:
  two terminals and a file:
    device-ipc send --file w.ipc --shape 4,5 --value 1.5
    device-ipc recv --file w.ipc --add 1

  over TCP, to another card, two receivers:
    (umask 077; head -c 32 /dev/urandom | base64 > key)
    device-ipc send --listen 127.0.0.1:29531 --key-file key --receivers 2
    device-ipc recv --connect 127.0.0.1:29531 --key-file key --device 1

  through the environment:
    device-ipc send --print --receivers 0 > descriptor &
    DEVICE_IPC_DESCRIPTOR=$(cat descriptor) device-ipc recv

  raw bytes out of a file, as float16:
    device-ipc send --file w.ipc --in weights.bin --dtype float16 --shape 1024,1024

Stop it with Ctrl-C or SIGTERM: the export ends, the file is removed, and who still held the tensor is named.";

/// Why serving ended.
#[derive(Debug, PartialEq, Eq)]
enum End {
    ReceiversDone,
    Stopped(&'static str),
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    // The descriptor has standard output for itself.
    let say = |text: String| if arguments.print { eprintln_line(&text) } else { line(text) };
    let (tell, told) = channel();
    stop::on_signals(tell.clone())?;
    // Before any work is done: a key that is missing and a port that is taken are told at once.
    let listener =
        arguments.listen.as_deref().map(|address| server::bind(address, &arguments.key)).transpose()?;

    let Selection { ipc, fallback } = select_backend(arguments.backend.as_deref())?;
    if let Some(reasons) = fallback {
        let name = ipc.backend().info().name;
        say(format!(
            "No accelerator can be used here, so this runs on the {name}, which needs none:{reasons}"
        ))?;
    }
    check_device(&ipc, "--device", arguments.device)?;
    let tensor = SentTensor::make(&ipc, arguments.device, &arguments.tensor)?;
    say(format!("[sender]   pid={} {}", std::process::id(), tensor.place()))?;
    let before = tensor.summary()?;
    say(format!("[sender]   {before}"))?;
    let export = tensor.share(&ipc)?;
    let changed = tell.clone();
    export.on_change(move || {
        // Nobody listens any more where the process is about to end.
        let _ = changed.send(Told::Changed);
    });

    let file =
        arguments.file.as_deref().map(|path| DescriptorFile::write(path, export.descriptor())).transpose()?;
    if let Some(path) = &arguments.file {
        say(format!("[sender]   wrote {}; receive it with: device-ipc recv --file {0}", path.display()))?;
    }
    let mut serving = None;
    if let Some(listener) = listener {
        say(format!("[sender]   listening at {}", listener.address()))?;
        serving = Some(listener.serve(export.descriptor().to_string(), tell));
    }
    if arguments.print {
        line(export.descriptor())?;
    }

    let end = serve(&export, serving.as_ref(), arguments.receivers, &told, &say)?;
    // First the ways in, then the export.
    drop((file, serving));
    if let End::Stopped(signal) = end {
        say(format!("[sender]   stopped by {signal}"))?;
        return stopped(export, &say);
    }
    let after = tensor.summary()?;
    say(format!("[sender]   afterwards: {after}"))?;
    if let (Some(before), Some(after)) = (before.mean, after.mean) {
        say(format!("[sender]   mean delta={:.6}", after - before))?;
    }
    Ok(export.close(CLOSING)?)
}

fn eprintln_line(text: &str) -> Result<()> {
    eprintln!("{text}");
    Ok(())
}

/// Until enough receivers are done, or a signal says to stop.
fn serve(
    export: &Export,
    server: Option<&Server>,
    receivers: u64,
    told: &Receiver<Told>,
    say: &impl Fn(String) -> Result<()>,
) -> Result<End> {
    // With a server, receivers are counted by what they say; else by what they have had open.
    let (mut done, mut farewell_until) = (0, None);
    loop {
        let holders = export.holders();
        let count = if server.is_some() { done } else { holders.opened() };
        if receivers == 0 || count < receivers || holders.iter().len() > 0 {
            farewell_until = None;
        } else if server.is_none_or(|server| server.talking() == 0) {
            return Ok(End::ReceiversDone);
        } else {
            // What the last ones say shall be in the transcript.
            farewell_until.get_or_insert_with(|| Instant::now() + FAREWELL);
        }
        let next = match farewell_until {
            None => told.recv().map_err(RecvTimeoutError::from),
            Some(end) => told.recv_timeout(end.saturating_duration_since(Instant::now())),
        };
        match next {
            Ok(Told::Note(text)) => say(text)?,
            Ok(Told::Done(text)) => {
                done += 1;
                say(text)?;
            }
            Ok(Told::Changed) => {}
            Ok(Told::Stop(signal)) => return Ok(End::Stopped(signal)),
            Err(RecvTimeoutError::Timeout) => return Ok(End::ReceiversDone),
            Err(RecvTimeoutError::Disconnected) => bail!("nothing can stop this process any more"),
        }
    }
}

/// Ends the export, and says from whom it was taken.
fn stopped(export: Export, say: &impl Fn(String) -> Result<()>) -> Result<()> {
    let holders = export.holders();
    if holders.iter().len() == 0 {
        say(format!("[sender]   {holders}; the export has ended"))?;
        return Ok(export.close(CLOSING)?);
    }
    say(format!("[sender]   it was still held: {holders}"))?;
    match export.close(Duration::ZERO) {
        Ok(()) | Err(Error::StillHeld { .. } | Error::Timeout { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    say("[sender]   the export has ended; those who held it are told, and cannot rely on the bytes any longer".into())
}
