//! A second process: this program, which executes commands line by line, with optional file descriptors.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::process::Command;

use device_ipc_test_process::{SocketProcess, serve_socket, unhex};

use crate::driver::{Driver, Handle, R};

/// The second process.
pub(crate) struct Other(SocketProcess);

impl Other {
    /// Starts the process, with the primary context of device 0.
    pub(crate) fn start(library: &Path) -> R<Self> {
        Self::start_through(library, &[])
    }

    /// Starts the process through another program, such as `unshare` with its arguments.
    pub(crate) fn start_through(library: &Path, through: &[&str]) -> R<Self> {
        let own = std::env::current_exe().map_err(|error| error.to_string())?;
        let mut command = match through {
            [] => Command::new(&own),
            [program, arguments @ ..] => {
                let mut command = Command::new(program);
                command.args(arguments).arg(&own);
                command
            }
        };
        command.arg("--other").arg(library);
        let started = SocketProcess::start(command);
        let other = Self(started.map_err(|error| format!("cannot start a process: {error}"))?);
        other.ask("start")?;
        Ok(other)
    }

    /// Sends a command; the error is the text of the answer.
    pub(crate) fn ask(&self, command: &str) -> R<String> {
        Ok(self.ask_with(command, None)?.0)
    }

    pub(crate) fn ask_with(&self, command: &str, fd: Option<BorrowedFd<'_>>) -> R<(String, Option<OwnedFd>)> {
        let (answer, fd) = self.0.ask(command, fd).ok_or("the other process ended")?;
        match answer.split_once(' ') {
            Some(("ok", text)) => Ok((text.to_owned(), fd)),
            Some((_, text)) => Err(text.to_owned()),
            None => Err(format!("the other process said '{answer}'")),
        }
    }

    pub(crate) fn number(&self, command: &str) -> R<u64> {
        self.ask(command)?.parse().map_err(|_| "no number".to_owned())
    }

    pub(crate) fn handle(&self, command: &str) -> R<Handle> {
        from_hex(&self.ask(command)?)
    }

    /// Sends a command, and returns the descriptor of its answer.
    pub(crate) fn fd(&self, command: &str) -> R<OwnedFd> {
        self.ask_with(command, None)?.1.ok_or_else(|| "no descriptor came".to_owned())
    }

    /// Kills the process by SIGKILL and reaps it.
    pub(crate) fn kill(&mut self) {
        self.0.kill();
    }
}

pub(crate) fn hex(handle: Handle) -> String {
    device_ipc_test_process::hex(&handle.0)
}

fn from_hex(text: &str) -> R<Handle> {
    unhex(text).try_into().map(Handle).map_err(|_| "no handle".to_owned())
}

/// Serves commands until the first process exits.
pub(crate) fn serve(library: &Path) -> R {
    // Killed with the parent process.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .map_err(|error| error.to_string())?;
    let driver = Driver::load(library)?;
    serve_socket(|command, fd, passed| match obey(&driver, command, fd, passed) {
        Ok(text) => format!("ok {text}"),
        Err(text) => format!("err {text}"),
    });
    // Not by returning: streams may never complete.
    std::process::exit(0);
}

fn obey(driver: &Driver, command: &str, fd: Option<OwnedFd>, passed: &mut Option<OwnedFd>) -> R<String> {
    let words: Vec<&str> = command.split(' ').collect();
    let number = |at: usize| words.get(at).and_then(|word| word.parse::<u64>().ok()).unwrap_or(0);
    let size = |at| number(at) as usize;
    let text = |number: u64| number.to_string();
    let nothing = |()| String::new();
    // SAFETY: the driver has just opened it for this process.
    let owned = |fd: c_int| unsafe { OwnedFd::from_raw_fd(fd) };
    match words[0] {
        "start" => driver.start(0).map(|_| String::new()),
        "pid" => Ok(std::process::id().to_string()),
        "alloc" => driver.alloc(size(1)).map(text),
        "free" => driver.mem_free(number(1)).map(nothing),
        "fill" => driver.fill(number(1), number(2) as u8, size(3)).map(nothing),
        "byte" => driver.byte(number(1)).map(|byte| byte.to_string()),
        "export" => driver.handle(number(1)).map(hex),
        "open" => driver.open(from_hex(words[1])?).map(text),
        "close" => driver.ipc_close_mem_handle(number(1)).map(nothing),
        "stream" => driver.stream().map(text),
        "write-value" => driver.stream_write_value(number(1), number(2), number(3), 0).map(nothing),
        "wait-value" => driver.stream_wait_value(number(1), number(2), number(3), 0).map(nothing),
        "synchronize" => driver.stream_synchronize(number(1)).map(nothing),
        "event" => driver.event(6).map(text),
        "export-event" => driver.event_handle(number(1)).map(hex),
        "open-event" => driver.open_event(from_hex(words[1])?).map(text),
        "destroy-event" => driver.event_destroy(number(1)).map(nothing),
        "record" => driver.event_record(number(1), number(2)).map(nothing),
        "query-event" => driver.event_query(number(1)).map(nothing),
        "create" => driver.create(size(1), 1).map(text),
        "map" => driver.map(number(1), size(2), 3).map(text),
        "export-fd" => {
            *passed = Some(owned(driver.export_fd(number(1))?));
            Ok(String::new())
        }
        "create-fabric" => driver.create(size(1), 8).map(text),
        "export-fabric" => driver.export_fabric(number(1)).map(hex),
        "import-fd" => {
            let fd = fd.ok_or("no descriptor came")?;
            driver.import_fd(fd.as_raw_fd()).map(text)
        }
        "pool" => driver.pool(1).map(text),
        "pool-fd" => {
            *passed = Some(owned(driver.pool_fd(number(1))?));
            Ok(String::new())
        }
        "from-pool" => driver.allocate_from(number(1), size(2)).map(text),
        "export-pointer" => driver.pool_pointer(number(1)).map(hex),
        other => Err(format!("no command {other}")),
    }
}
