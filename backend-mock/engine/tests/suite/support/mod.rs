//! A peer process for tests.
//!
//! The test binary starts itself with one test, `peer`, which serves commands over a socket on its standard input:
//! one line in, one line out, with an optional file descriptor. Every wait has a deadline, and dropping the guard
//! kills and reaps the process.

#![allow(dead_code, unreachable_pub)]

use std::fs;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use device_ipc_mock_engine::{
    Access, Address, BlockId, EngineError, EventId, Machine, MachineConfig, StreamId,
};
use device_ipc_test_process::{SocketProcess, hex, serve_socket, unhex};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const ROLE: &str = "MOCK_ENGINE_TEST_PEER";
pub const DEADLINE: Duration = Duration::from_secs(30);

/// Creates a machine from a description, with latency 0 by default.
pub fn machine(spec: &str) -> Arc<Machine> {
    Machine::new(MachineConfig::from_spec(&format!("latency=0;{spec}")).expect("a valid description"))
}

/// Returns the code of an error, to compare with a peer's.
pub fn code<T: std::fmt::Debug>(result: Result<T, EngineError>) -> i32 {
    result.expect_err("the call fails").code()
}

/// A peer process with its machine.
pub struct Peer(SocketProcess);

impl Peer {
    pub fn spawn(spec: &str) -> Self {
        Self::start(spec, None).expect("the peer starts")
    }

    /// Spawns a peer as another user. Requires root, and a test binary that the user may execute.
    pub fn spawn_as(user: u32, spec: &str) -> std::io::Result<Self> {
        Self::start(spec, Some(user))
    }

    fn start(spec: &str, user: Option<u32>) -> std::io::Result<Self> {
        let mut command = Command::new(std::env::current_exe().expect("our own path"));
        command
            .args(["--exact", "suite::support::peer", "--nocapture", "--test-threads=1"])
            .env(ROLE, format!("latency=0;{spec}"));
        if let Some(user) = user {
            command.uid(user);
        }
        SocketProcess::start(command).map(Self)
    }

    /// Sends a command that must succeed.
    pub fn ok(&self, command: &str) -> String {
        self.ok_with(command, None).0
    }

    /// Sends a command that must fail, and returns the error's code.
    pub fn fails(&self, command: &str) -> i32 {
        let (answer, _) = self.ask(command, None);
        let text = answer.strip_prefix("err ").unwrap_or_else(|| panic!("'{command}' answered {answer}"));
        text.split(' ').next().and_then(|code| code.parse().ok()).expect("a code")
    }

    /// Sends a command with a file descriptor, and returns the answer.
    pub fn ok_with(&self, command: &str, fd: Option<BorrowedFd<'_>>) -> (String, Option<OwnedFd>) {
        let (answer, fd) = self.ask(command, fd);
        let text = answer.strip_prefix("ok ").unwrap_or_else(|| panic!("'{command}' answered {answer}"));
        (text.to_owned(), fd)
    }

    fn ask(&self, command: &str, fd: Option<BorrowedFd<'_>>) -> (String, Option<OwnedFd>) {
        self.0.ask(command, fd).unwrap_or_else(|| panic!("the peer exited during '{command}'"))
    }

    pub fn address(&self, command: &str) -> u64 {
        self.ok(command).parse().expect("a number")
    }

    /// Kills the peer by SIGKILL and reaps it.
    pub fn kill(&mut self) {
        self.0.kill();
    }

    pub fn pid(&self) -> u32 {
        self.0.id()
    }
}

/// Serves commands if this process was started as a peer. The body of the test `peer`.
fn serve() {
    let Ok(spec) = std::env::var(ROLE) else { return };
    let machine = Machine::new(MachineConfig::from_spec(&spec).expect("a valid description"));
    serve_socket(|command, fd, passed| match execute(&machine, command, fd, passed) {
        Ok(text) => format!("ok {text}"),
        Err(error) => format!("err {} {error}", error.code()),
    });
    // Not by returning: streams may never complete.
    std::process::exit(0);
}

fn execute(
    machine: &Arc<Machine>,
    command: &str,
    fd: Option<OwnedFd>,
    passed: &mut Option<OwnedFd>,
) -> Result<String, EngineError> {
    let words: Vec<&str> = command.split(' ').collect();
    let number = |at: usize| words[at].parse::<u64>().expect("a number");
    let ordinal = |at: usize| usize::try_from(number(at)).expect("an ordinal");
    let address = |at| Address::new(number(at));
    let stream = |at| StreamId::new(number(at));
    let event = |at| EventId::new(number(at));
    let done = |()| String::new();
    match words[0] {
        "allocate" => machine.allocate(ordinal(1), number(2)).map(|address| address.get().to_string()),
        "free" => machine.free(address(1)).map(done),
        "export" => machine.export_bytes(address(1)).map(|handle| hex(&handle)),
        "export_fd" => machine.export_fd(address(1)).map(|(fd, handle)| {
            *passed = Some(fd);
            hex(&handle)
        }),
        "unexport" => machine.unexport(address(1)).map(done),
        "open" => {
            let access = if words[3] == "rw" { Access::ReadWrite } else { Access::ReadOnly };
            machine.open(&unhex(words[1]), fd, ordinal(2), access).map(|address| address.get().to_string())
        }
        "close" => machine.close(address(1)).map(done),
        "stream" => machine.create_stream(ordinal(1)).map(|stream| stream.get().to_string()),
        "fill" => machine.fill(address(1), number(2), number(3) as u8, stream(4)).map(done),
        "add" => machine.add_u8(address(1), number(2), number(3) as u8, stream(4)).map(done),
        "read" => machine.read_to_host(address(1), number(2), stream(3)).map(|bytes| hex(&bytes)),
        "host_fn" => machine.host_fn(Box::new(|| ()), stream(1)).map(done),
        "synchronize" => machine.synchronize(stream(1)).map(done),
        "event" => machine.create_event(ordinal(1), true).map(|event| event.get().to_string()),
        "export_event" => machine.export_event(event(1)).map(|handle| hex(&handle)),
        "export_event_fd" => machine.export_event_fd(event(1)).map(|fd| {
            *passed = Some(fd);
            String::new()
        }),
        "open_event" => machine.open_event(&unhex(words[1]), ordinal(2)).map(|event| event.get().to_string()),
        "destroy_event" => machine.destroy_event(event(1)).map(done),
        "record" => machine.record(event(1), stream(2)).map(done),
        "wait" => machine.wait(stream(1), event(2)).map(done),
        "write_value" => machine.write_value64(stream(1), address(2), number(3)).map(done),
        "wait_value" => machine.wait_value64(stream(1), address(2), number(3)).map(done),
        "create_block" => machine.create_block(ordinal(1), number(2)).map(|block| block.get().to_string()),
        "release_block" => machine.release_block(BlockId::new(number(1))).map(done),
        "export_block_fd" => machine.export_block_fd(BlockId::new(number(1))).map(|fd| {
            *passed = Some(fd);
            String::new()
        }),
        "export_block_number" => {
            machine.export_block_number(BlockId::new(number(1))).map(|number| number.to_string())
        }
        "map_block" => {
            let size = machine.block_info(BlockId::new(number(1)))?.size;
            let address = machine.reserve(size, 0)?;
            machine.map_block(address, size, 0, BlockId::new(number(1)))?;
            machine.set_access(address, size, ordinal(2), Some(Access::ReadWrite))?;
            Ok(address.get().to_string())
        }
        "descriptors" => Ok(fs::read_dir("/proc/self/fd").expect("/proc").count().to_string()),
        "limit" => {
            let maximum = getrlimit(Resource::Nofile).maximum;
            let soft = Rlimit { current: Some(number(1)), maximum };
            setrlimit(Resource::Nofile, soft).expect("a soft limit can be lowered");
            Ok(String::new())
        }
        other => panic!("unknown command {other}"),
    }
}

/// The test that a peer runs as; it does nothing otherwise.
#[test]
fn peer() {
    serve();
}
