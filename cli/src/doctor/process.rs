//! Child processes that may crash or hang.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

/// Maximum length of the output that is read from a child process.
const MAX_OUTPUT_BYTES: u64 = 1024 * 1024;

/// Timeout for the termination of a killed process. A process that hangs in a driver in the kernel cannot be killed and is
/// abandoned.
const KILL_TIMEOUT: Duration = Duration::from_secs(2);

/// Runs this program with these arguments, and returns its standard output or the reason for its failure.
pub(super) fn run(arguments: &[&str], timeout: Duration) -> Result<String, String> {
    let program =
        std::env::current_exe().map_err(|error| format!("cannot find the path of this program: {error}"))?;
    let mut command = Command::new(program);
    command.args(arguments);
    finish(command, timeout)
}

/// Runs a command in a new process group, and kills the group at the end or on timeout.
fn finish(mut command: Command, timeout: Duration) -> Result<String, String> {
    let deadline = Instant::now() + timeout;
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut child = command.spawn().map_err(|error| format!("cannot start a child process: {error}"))?;
    let stdout = read_all(child.stdout.take().expect("piped"));
    let stderr = read_all(child.stderr.take().expect("piped"));
    // The exit of the process closes the pipes, which ends the reads.
    let text =
        |from: Receiver<String>| from.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok();
    let texts = text(stdout).zip(text(stderr));
    // A process that writes too much or closes its output is not waited for.
    kill_group(&child);
    let status = wait(child);
    let Some((stdout, stderr)) = texts else {
        return Err(format!("timed out after {timeout:?}"));
    };
    match status {
        Some(status) if status.success() => Ok(stdout),
        Some(status) if stderr.is_empty() => Err(format!("failed without an error message ({status})")),
        None if stderr.is_empty() => Err("the process closed its output and cannot be killed".into()),
        _ => Err(stderr),
    }
}

/// Reads a pipe until it is closed, on a thread.
fn read_all(pipe: impl Read + Send + 'static) -> Receiver<String> {
    let (send, text) = channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = pipe.take(MAX_OUTPUT_BYTES).read_to_end(&mut bytes);
        let _ = send.send(String::from_utf8_lossy(&bytes).trim().to_owned());
    });
    text
}

/// Returns the exit status of a process that has exited or was killed; `None` if it cannot be killed.
fn wait(mut child: Child) -> Option<ExitStatus> {
    let (send, status) = channel();
    std::thread::spawn(move || send.send(child.wait()));
    status.recv_timeout(KILL_TIMEOUT).ok()?.ok()
}

fn kill_group(child: &Child) {
    if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process_group(group, Signal::KILL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, timeout: Duration) -> Result<String, String> {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        finish(command, timeout)
    }

    #[test]
    fn output_is_returned_and_timeout_kills_the_group() {
        let long = Duration::from_secs(20);
        assert_eq!(shell("exit 0", long), Ok(String::new()));
        assert_eq!(shell("echo yes; echo 'a warning' >&2", long), Ok("yes".into()));
        assert_eq!(shell("echo 'error: no' >&2; exit 1", long), Err("error: no".into()));
        assert!(shell("exit 3", long).unwrap_err().contains("without an error message"));
        let killed = shell("sleep 60 & sleep 60", Duration::from_millis(50)).unwrap_err();
        assert!(killed.contains("timed out"), "{killed}");
    }
}
