//! Child processes of tests: each has a socket that carries lines both ways, and none outlives its test.

use std::fmt;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, getppid, kill_process, pidfd_open,
    set_parent_process_death_signal, waitid,
};

use crate::outcome::{Outcome, Stop};

const VARIANT_VARIABLE: &str = "DEVICE_IPC_CONFORMANCE_VARIANT";
const CASE_VARIABLE: &str = "DEVICE_IPC_CONFORMANCE_CASE";
const ROLE_VARIABLE: &str = "DEVICE_IPC_CONFORMANCE_ROLE";
const PARENT_VARIABLE: &str = "DEVICE_IPC_CONFORMANCE_PARENT";

/// How long a line may take to be written to a process that does not read.
const SEND_PATIENCE: Duration = Duration::from_secs(30);

/// The part of the suite that a process runs.
#[derive(Clone, Debug)]
pub(crate) struct Address {
    pub(crate) variant: String,
    pub(crate) case: String,
    pub(crate) role: String,
}

impl Address {
    /// Returns the address of this process; `None` for the runner.
    pub(crate) fn of_this_process() -> Option<Self> {
        let variable = |name| std::env::var(name).ok();
        Some(Self {
            variant: variable(VARIANT_VARIABLE)?,
            case: variable(CASE_VARIABLE)?,
            role: variable(ROLE_VARIABLE)?,
        })
    }

    pub(crate) fn with_role(&self, role: &str) -> Self {
        Self { role: role.to_owned(), ..self.clone() }
    }

    /// Runs this binary again, as a process of the case.
    pub(crate) fn start(&self, environment: &[(&str, String)], output: Option<&File>) -> io::Result<Peer> {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .env(VARIANT_VARIABLE, &self.variant)
            .env(CASE_VARIABLE, &self.case)
            .env(ROLE_VARIABLE, &self.role)
            .envs(environment.iter().map(|(name, value)| (name, value)));
        if let Some(file) = output {
            command.stdout(file.try_clone()?).stderr(file.try_clone()?);
        }
        Peer::start(&self.role, command)
    }
}

/// A child process of a test. Dropping it kills and reaps it.
#[derive(Debug)]
pub struct Peer {
    role: String,
    child: Child,
    lines: Lines,
}

impl Peer {
    /// Starts a program whose standard input is a socket to this process. Errors call it the `role` process.
    // Takes the command by value: as long as it exists, it keeps the child's end of the socket open.
    pub fn start(role: &str, mut command: Command) -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        command.env(PARENT_VARIABLE, std::process::id().to_string()).stdin(OwnedFd::from(theirs));
        Ok(Self { role: role.to_owned(), child: command.spawn()?, lines: Lines::new(ours)? })
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a line.
    ///
    /// # Errors
    ///
    /// The system's error; [`ErrorKind::BrokenPipe`] if the process has exited.
    pub fn send_line(&mut self, line: &str) -> io::Result<()> {
        self.lines.send(line)
    }

    /// Receives a line.
    ///
    /// # Errors
    ///
    /// [`ReceiveError`] if none arrives in time, or the process has exited.
    pub fn receive_line(&mut self, deadline: Duration) -> Result<String, ReceiveError> {
        self.lines.receive(deadline)
    }

    /// Explains why it sends no more lines: describes its exit status if it has exited.
    pub(crate) fn explain(&mut self, error: &ReceiveError) -> Stop {
        let process = format!("the {} process", self.role);
        let ended = matches!(error, ReceiveError::Closed).then(|| self.wait(SEND_PATIENCE));
        match ended {
            Some(Ok(status)) => Stop::failed(describe(&process, status)),
            Some(Err(error)) => Stop::failed(error),
            None => Stop::failed(format_args!("{process}: {error}")),
        }
    }

    /// Kills it, without waiting until it exits.
    pub fn kill(&mut self) -> io::Result<()> {
        self.child.kill()
    }

    /// Stops it where it stands, as a debugger would: it lives and answers nothing.
    pub fn stop(&self) -> io::Result<()> {
        let pid = self.pid()?;
        kill_process(pid, Signal::STOP)?;
        // The signal is on its way when the call returns; the kernel reports the stop when every thread is stopped.
        waitid(WaitId::Pid(pid), WaitIdOptions::STOPPED)?;
        Ok(())
    }

    /// Resumes a stopped process.
    pub fn resume(&self) -> io::Result<()> {
        Ok(kill_process(self.pid()?, Signal::CONT)?)
    }

    /// Waits until it exits, and kills it if it does not.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::TimedOut`] where it had to be killed; else what the system says.
    pub fn wait(&mut self, deadline: Duration) -> io::Result<ExitStatus> {
        if let Some(status) = self.child.try_wait()? {
            return Ok(status);
        }
        let process = pidfd_open(self.pid()?, PidfdFlags::empty())?;
        if wait_readable(&process, deadline)? {
            return self.child.wait();
        }
        self.child.kill()?;
        self.child.wait()?;
        let seconds = deadline.as_secs_f32();
        Err(io::Error::new(
            ErrorKind::TimedOut,
            format!("the {} process did not end within {seconds} s", self.role),
        ))
    }

    /// Waits until it exits, which must be a success.
    ///
    /// # Errors
    ///
    /// [`Stop::Failed`] if it failed, or did not exit in time.
    pub fn finish(mut self, deadline: Duration) -> Outcome {
        let status = self.wait(deadline)?;
        if status.success() {
            return Ok(());
        }
        Err(Stop::failed(format_args!(
            "the {} process ended with {status}; its output stands above",
            self.role
        )))
    }

    fn pid(&self) -> io::Result<Pid> {
        let id = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        id.ok_or_else(|| io::Error::other("a child without a process id"))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It may have exited long ago; then there is nothing to kill and nothing to reap.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// In a process of the suite: connects to the process that started it, and dies with that process.
pub(crate) fn attach_to_starter() -> io::Result<Lines> {
    let lines = Lines::of_child()?;
    let starter = std::env::var(PARENT_VARIABLE).ok().and_then(|id| id.parse().ok());
    if getppid().map(Pid::as_raw_nonzero).map(std::num::NonZero::get) != starter {
        return Err(io::Error::other("the process that started this one has exited"));
    }
    Ok(lines)
}

/// Describes how a process of a case ended without an answer.
pub(crate) fn describe(process: &str, status: ExitStatus) -> String {
    let Some(number) = status.signal() else {
        return format!("{process} ended with {status} before the case did; see its output");
    };
    let (name, meaning) = match number {
        4 => ("SIGILL", "it executed an invalid instruction"),
        6 => (
            "SIGABRT",
            "it aborted, as after a panic that must not unwind or a failed assertion of a C library",
        ),
        7 => {
            ("SIGBUS", "it accessed a page whose file has become shorter, or an address that is not aligned")
        }
        8 => ("SIGFPE", "it divided by zero"),
        9 => ("SIGKILL", "another process killed it, or the kernel did because memory was short (see dmesg)"),
        11 => (
            "SIGSEGV",
            "it accessed an address that is not mapped; a backend that unmaps memory in free or close while submitted \
             work uses it does this, and so does a wrong pointer in a call of the vendor's library",
        ),
        13 => ("SIGPIPE", "it wrote to a pipe that nobody reads"),
        15 => ("SIGTERM", "another process ended it"),
        31 => ("SIGSYS", "a system call was refused by a filter"),
        _ => ("a signal", "see signal(7)"),
    };
    format!("{process} was killed by {name} ({number}): {meaning}")
}

fn wait_readable(fd: &OwnedFd, deadline: Duration) -> io::Result<bool> {
    let until = Instant::now() + deadline;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let time = Timespec::try_from(left).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&time)) {
            Ok(0) if left.is_zero() => return Ok(false),
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return Ok(true),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Why no line came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReceiveError {
    /// It took too long.
    Timeout(Duration),
    /// The peer has exited, or closed the connection.
    Closed,
    /// The system's error.
    Io(String),
}

impl fmt::Display for ReceiveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Timeout(after) => write!(f, "it said nothing within {} s", after.as_secs_f32()),
            Self::Closed => f.write_str("it has ended, or closed the connection"),
            Self::Io(error) => f.write_str(error),
        }
    }
}

impl std::error::Error for ReceiveError {}

/// One side of a connection that carries lines both ways. Any thread may send.
#[derive(Debug)]
pub struct Lines {
    socket: UnixStream,
    sending: Mutex<()>,
    unread: Mutex<Vec<u8>>,
}

impl Lines {
    fn new(socket: UnixStream) -> io::Result<Self> {
        socket.set_write_timeout(Some(SEND_PATIENCE))?;
        Ok(Self { socket, sending: Mutex::default(), unread: Mutex::default() })
    }

    /// Returns the child's end, in a process that [`Peer::start`] started. The child is killed when the thread that
    /// started it exits.
    pub fn of_child() -> io::Result<Self> {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        Self::new(UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?))
    }

    /// Sends a line.
    ///
    /// # Errors
    ///
    /// The system's error; [`ErrorKind::BrokenPipe`] if the peer has exited.
    pub fn send(&self, line: &str) -> io::Result<()> {
        let mut bytes = line.replace('\n', "\u{2028}").into_bytes();
        bytes.push(b'\n');
        let _sending = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
        (&self.socket).write_all(&bytes)
    }

    /// Receives a line.
    ///
    /// # Errors
    ///
    /// [`ReceiveError`] if none arrives in time, or the peer has exited.
    pub fn receive(&self, deadline: Duration) -> Result<String, ReceiveError> {
        let until = Instant::now() + deadline;
        let mut unread = self.unread.lock().unwrap_or_else(PoisonError::into_inner);
        let mut chunk = [0; 16 * 1024];
        let mut searched = 0;
        loop {
            if let Some(end) = unread[searched..].iter().position(|byte| *byte == b'\n') {
                let rest = unread.split_off(searched + end + 1);
                let line = std::mem::replace(&mut *unread, rest);
                return Ok(String::from_utf8_lossy(&line[..line.len() - 1]).replace('\u{2028}', "\n"));
            }
            searched = unread.len();
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ReceiveError::Timeout(deadline));
            }
            let read =
                self.socket.set_read_timeout(Some(left)).and_then(|()| (&self.socket).read(&mut chunk));
            match read {
                Ok(0) => return Err(ReceiveError::Closed),
                Ok(count) => unread.extend_from_slice(&chunk[..count]),
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => {}
                    ErrorKind::ConnectionReset => return Err(ReceiveError::Closed),
                    _ => return Err(ReceiveError::Io(error.to_string())),
                },
            }
        }
    }
}

/// An anonymous file for the output of a process: writing to it never blocks.
pub(crate) fn output_file() -> io::Result<File> {
    let fd = rustix::fs::memfd_create("conformance-output", rustix::fs::MemfdFlags::CLOEXEC)?;
    Ok(File::from(fd))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signal_is_named_and_explained() {
        let text = describe("the case's process", ExitStatus::from_raw(11));
        assert!(text.starts_with("the case's process was killed by SIGSEGV (11): it accessed"), "{text}");
        assert!(describe("it", ExitStatus::from_raw(64)).contains("it was killed by a signal (64)"));
        assert!(describe("it", ExitStatus::from_raw(3 << 8)).contains("exit status: 3"));
    }
}
