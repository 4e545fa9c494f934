//! This program again, as a process that may crash or hang.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

/// More than anybody reads of a program that says too much.
const MAX_OUTPUT_BYTES: u64 = 1024 * 1024;

/// How long a process that was killed may take to be gone. One that hangs inside a driver, in the kernel, cannot be killed,
/// and is left behind.
const DEATH: Duration = Duration::from_secs(2);

/// Runs this program with these arguments: what it printed, or why it failed.
pub(super) fn run(arguments: &[&str], time: Duration) -> Result<String, String> {
    let program = std::env::current_exe().map_err(|error| format!("this program was not found: {error}"))?;
    let mut command = Command::new(program);
    command.args(arguments);
    finish(command, time)
}

/// Runs a program and whatever it starts, and kills them when the time is over.
fn finish(mut command: Command, time: Duration) -> Result<String, String> {
    let deadline = Instant::now() + time;
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut child =
        command.spawn().map_err(|error| format!("a second process could not be started: {error}"))?;
    let printed = heard(child.stdout.take().expect("piped"));
    let said = heard(child.stderr.take().expect("piped"));
    // Its end closes the pipes, and that is what is waited for.
    let text =
        |from: Receiver<String>| from.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok();
    let texts = text(printed).zip(text(said));
    // Somebody who wrote too much, or closed its output, is not waited for.
    kill_group(&child);
    let status = ended(child);
    let Some((printed, said)) = texts else {
        return Err(format!("it did not end within {} s", time.as_secs()));
    };
    match status {
        Some(status) if status.success() => Ok(printed),
        Some(status) if said.is_empty() => Err(format!("it failed without a word ({status})")),
        None if said.is_empty() => Err("it closed its output and cannot be killed".into()),
        _ => Err(said),
    }
}

/// All that comes out of a pipe, once it is closed.
fn heard(pipe: impl Read + Send + 'static) -> Receiver<String> {
    let (send, text) = channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = pipe.take(MAX_OUTPUT_BYTES).read_to_end(&mut bytes);
        let _ = send.send(String::from_utf8_lossy(&bytes).trim().to_owned());
    });
    text
}

/// The end of a process that has ended or was killed; `None` where it cannot be.
fn ended(mut child: Child) -> Option<ExitStatus> {
    let (send, status) = channel();
    std::thread::spawn(move || send.send(child.wait()));
    status.recv_timeout(DEATH).ok()?.ok()
}

fn kill_group(child: &Child) {
    if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process_group(group, Signal::KILL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, time: Duration) -> Result<String, String> {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        finish(command, time)
    }

    #[test]
    fn a_second_process_is_heard_out_or_killed_with_all_it_started() {
        let long = Duration::from_secs(20);
        assert_eq!(shell("exit 0", long), Ok(String::new()));
        assert_eq!(shell("echo yes; echo 'a warning' >&2", long), Ok("yes".into()));
        assert_eq!(shell("echo 'error: no' >&2; exit 1", long), Err("error: no".into()));
        assert!(shell("exit 3", long).unwrap_err().contains("without a word"));
        let killed = shell("sleep 60 & sleep 60", Duration::from_millis(50)).unwrap_err();
        assert!(killed.contains("did not end"), "{killed}");
    }
}
