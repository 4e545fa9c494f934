//! The commands of the broker's agent.

use std::time::Duration;

use device_ipc_conformance::agent::{Command, words};
use device_ipc_core::Descriptor;
use serde::{Deserialize, Serialize};

/// A command to the agent of this crate.
#[allow(clippy::large_enum_variant, reason = "one command exists at a time")]
#[derive(Debug, Serialize, Deserialize)]
pub enum Request {
    /// Uses the library, as the agents of the conformance suite do.
    Library(Command),
    /// Concerns the agent as a process, its sockets or the sockets of others.
    System(SystemCommand),
}

impl Request {
    /// Parses a command in words.
    #[track_caller]
    pub fn parse(text: &str) -> Self {
        let library = words::parse(text).unwrap_or_else(|error| panic!("{error}")).map(Self::Library);
        let system = || words::parse(text).unwrap_or_else(|error| panic!("{error}")).map(Self::System);
        library.or_else(system).unwrap_or_else(|| panic!("no command: {text:.60}"))
    }
}

/// A command that concerns the agent as a process, its sockets or the sockets of others. In words, the fields are arguments
/// in the order below.
#[allow(missing_docs, reason = "the line above each command describes its fields")]
#[allow(clippy::large_enum_variant, reason = "one command exists at a time")]
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", rename_all_fields = "kebab-case")]
pub enum SystemCommand {
    /// Replaces the `Ipc`, and the backend if a machine is named.
    Ipc { machine: Option<String>, allow_uid: Option<u32>, allow_gid: Option<u32>, directory: Option<String> },
    /// Returns the operations of the mock, as `NAME=COUNT`.
    Engine,
    /// Shares memory by a second copy of the library in this process.
    ShareBySecondCopy,
    /// Opens memory of this process, of another copy of the library; returns its first float, read by the host.
    Peek { name: String, descriptor: Descriptor },
    /// Returns the address of a mapping.
    Address { name: String },
    /// Keeps an export under a name.
    KeepUnder { export: String, name: String },
    /// Keeps another export under the name, and drops the former one, unless it is to be kept.
    KeepNext { export: String, name: String, version: u64, keep_former: bool },
    /// Frees the name, and keeps the export.
    KeepNoLonger { name: String },
    /// Opens the answer of a keeper as the mapping `name` at reserved addresses, or resumes the suspended mapping.
    OpenReservedKept { name: String, keeper: String },
    /// Has a mapping follow its keeper; returns the version, or `none`.
    Follow { name: String, device: Option<u32> },
    /// Finds an export by the name of its keeper `times` times on each of `threads` threads, and opens it three times of four.
    OpenKept { name: String, threads: usize, times: usize },
    /// Waits until every queue of the process is empty; returns the number of jobs and events so far.
    Idle,
    /// Returns the memory on the heap, as `BLOCKS BYTES`.
    Heap,
    /// Lists the exports of each process, as `PID:EXPORT:BYTES:HELD_BY`.
    List,
    /// Lists exporting processes with a time limit; returns the ms that it took, then their ids.
    TimedList { timeout: Duration },
    /// Opens, uses and closes an export until that fails.
    OpenUntilError { descriptor: Descriptor },
    /// Opens two exports at a time, the second once the first request is sent; returns the result and the ms of each.
    TwoOpens { one: Descriptor, one_timeout: Duration, other: Descriptor, other_timeout: Duration },
    /// Shares `count` parts of 256 B of one allocation as `NAME0`, `NAME1` and so on, with leases ahead, and if a device is named, ready
    /// behind the work of its stream; returns the descriptors.
    ShareParts { name: String, count: u64, ready_on: Option<u32> },
    /// Makes a grant of an export with this time limit; returns its bytes in hex.
    Grant { name: String, limit: Duration },
    /// Makes a grant of the export of a mapping with this time limit; returns its bytes in hex.
    GrantOf { name: String, limit: Duration },
    /// Opens an export by a grant, whose bytes are in hex.
    OpenBy { name: String, descriptor: Descriptor, grant: String },
    /// Replaces the memory of a mapping by that of an export that a grant opens, whose bytes are in hex; resumes a suspended mapping.
    ReplaceBy { name: String, descriptor: Descriptor, grant: String },
    /// Gives a grant back.
    GiveBack { grant: String },
    /// Makes every call that waits, in the next callback of the export or the mapping.
    WaitIn { name: String, time: Duration },
    /// Registers a callback on changes of an export that takes this time.
    OnChange { name: String, time: Duration },
    /// Takes the idle leases on an export back.
    Recall { name: String },
    /// Returns the holders of an export, as `PID:STATE`.
    States { name: String },
    /// Closes an export, and keeps it if that fails; returns the error's text, or `closed`.
    CloseKeeping { name: String, timeout: Duration },
    /// Reports the event `dropped NAME` when the exporter drops the export of a mapping.
    OnDropped { name: String },
    /// Keeps the library's worker in a callback from the drop of a mapping's export on, which the event `worker-held` reports.
    HoldWorker { name: String },
    /// Lets the worker go on.
    FreeWorker,
    /// Reports the event `changed NAME` on changes of an export's holders.
    ReportChanges { name: String },
    /// Opens, reads and drops an export until it has been dropped; returns how often. Every byte is to be `byte`, at the begin and
    /// at the end of each mapping.
    ReopenUntilDropped { descriptor: Descriptor, byte: u8 },
    /// Opens an export, copies it to the host and drops the mapping, without any device work of its own.
    ReadOnHost { descriptor: Descriptor },
    /// Drops an export and exits at once, without exit handlers.
    DropAndExit { name: String },

    /// Becomes another user, for good.
    Become { uid: u32, gid: u32 },
    /// Enters a new network namespace.
    LeaveNetwork,
    /// Drops all capabilities; before there are other threads, which would keep theirs.
    DropCapabilities,
    /// Returns the process identity.
    Identity,
    /// Advances the clock. Waits that have begun before the first advance do not notice it.
    Advance { time: Duration },
    /// Lets the clock run a hundred times as fast, for limits of this agent's own calls.
    Hurry,
    /// Limits the number of file descriptors.
    LimitDescriptors { count: u64 },
    /// Lets the user start this many more threads; `any` restores the limit.
    LimitThreads { more: String },
    /// Makes system calls fail with `ENOSYS`. `passrights` is the socket option `SO_PASSRIGHTS`, as on an older kernel.
    Deny { names: Vec<String> },
    /// Sends itself a signal every number of µs, whose handler restarts no system call.
    Alarms { every: i64 },
    /// Forks. The child tries everything with its parent's guards, reports the results as events and stays; returns its id.
    Fork,
    /// Forks a child that exits with its exit handlers.
    ForkAndExit,
    /// Runs this program again in the same process.
    Exec,

    /// Writes a number at a byte of every counter page that this process shares; returns the number of pages.
    Scribble { byte: u64, value: u64 },
    /// Does the same with the pages of lease states: two of them.
    ScribbleStates { byte: u64, value: u64 },
    /// Connects to a socket `count` times and sends nothing; returns the number of connections.
    ConnectMany { socket: String, count: usize },
    /// Closes the connections of `connect-many`.
    Disconnect,
    /// Starts processes that connect `count` times each, and open an export if one is given; returns the number of
    /// connections.
    Swarm { socket: String, count: usize, processes: Option<usize>, open: Option<Descriptor> },
    /// Kills the swarm.
    EndSwarm,
    /// Connects `count` times, and sends each time the last descriptor of a socket whose close takes `seconds`; returns the
    /// number of descriptors sent.
    Linger { socket: String, seconds: u64, count: usize },
    /// Connects and sends packets in hex, each after the reply to the last; returns the replies as hex, `closed` or
    /// `nothing`.
    Converse { socket: String, packets: Vec<String> },
    /// Remembers its sockets, before a channel is connected.
    RememberSockets,
    /// Floods the channel that was connected last with messages that take longer to read than to send.
    FloodChannel { channel: String, threads: usize },
    /// Listens at the address of a channel of user 0, without being one.
    Squat { name: String },
    /// Returns the bytes that the first visitor of the squatter sent.
    Squatted,
}
