//! An agent, seen from the test.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::str::FromStr;
use std::time::Duration;

use device_ipc_conformance::agent::{self, Agent};
use device_ipc_conformance::check::Refusal;
use device_ipc_conformance::{Peer, ReceiveError};
use device_ipc_core::Descriptor;
use device_ipc_test_process::{Census, Heap, wait_for_state};
use rustix::process::{Signal, WaitIdOptions};

use crate::agent::Request;
use crate::wait::DEADLINE;
use crate::{ASCEND, CUDA};

/// The parameters of an agent.
#[derive(Clone, Copy, Debug, Default)]
pub struct Setup<'a> {
    /// The agent's program.
    pub program: &'a str,
    /// The machine: a backend, or the specification of a mock.
    pub machine: &'a str,
    /// The kill point at which the agent kills itself.
    pub dies_at: Option<&'a str>,
    /// A program, with its arguments, that starts the agent.
    pub through: &'a [&'a str],
}

/// The reply of an agent, with its answer as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The command succeeded.
    Done(String),
    /// The library returned an error.
    Failed(Refusal),
    /// The agent exited, or was killed by this signal.
    Ended(Option<i32>),
}

/// An agent. Dropping it kills it.
///
/// Every method panics if the agent does otherwise than it says, or not in time.
#[derive(Debug)]
pub struct Child {
    agent: Agent,
}

impl Child {
    /// Starts an agent and waits until it has its machine.
    #[track_caller]
    pub fn start(setup: &Setup<'_>) -> Self {
        let mut words = setup.through.iter().chain(std::iter::once(&setup.program));
        let mut command = Command::new(words.next().expect("a program"));
        command.args(words).env_remove("DEVICE_IPC_SOCKET_DIR").env_remove("DEVICE_IPC_KILL_POINT");
        match setup.machine {
            // A library that is named is that of a GPU.
            CUDA if std::env::var_os(device_ipc_cuda::LIBRARY_VARIABLE).is_none() => {
                let library = device_ipc_sim_cuda::library().expect("the simulator is built with the tests");
                command.env(device_ipc_cuda::LIBRARY_VARIABLE, library);
            }
            ASCEND => {
                let library =
                    device_ipc_sim_ascendcl::library().expect("the simulator is built with the tests");
                command.env(device_ipc_ascend::LIBRARY_VARIABLE, library);
            }
            _ => {}
        }
        if let Some(point) = setup.dies_at {
            command.env("DEVICE_IPC_KILL_POINT", point);
        }
        let peer = Peer::start("agent", command).expect("the agent starts");
        let mut child = Self { agent: Agent::new(peer) };
        child.ok(&format!("ipc machine={}", setup.machine));
        child
    }

    /// Returns its process id.
    pub fn id(&self) -> u32 {
        self.agent.process().id()
    }

    /// Counts its descriptors, mappings and threads.
    pub fn census(&self) -> Census {
        Census::of(self.id())
    }

    /// Sends a command.
    #[track_caller]
    pub fn send(&mut self, command: &str) {
        // If the agent has exited, the answer says so.
        let _ = self.agent.send(&Request::parse(command));
    }

    /// Waits for the answer to the last command.
    #[track_caller]
    pub fn receive(&mut self) -> Answer {
        match self.agent.receive(DEADLINE) {
            Ok(reply) => match reply.result {
                Ok(answer) => {
                    if let agent::Answer::Received { bytes, .. } = &answer {
                        let counts_up = bytes.iter().enumerate().all(|(index, byte)| *byte == index as u8);
                        assert!(counts_up, "the bytes received are the bytes sent");
                    }
                    Answer::Done(answer.to_string())
                }
                Err(refusal) => Answer::Failed(refusal),
            },
            Err(ReceiveError::Closed) => {
                let status = self.agent.peer().wait(DEADLINE).expect("it can be reaped");
                Answer::Ended(status.signal())
            }
            Err(error) => panic!("process {}: {error}", self.id()),
        }
    }

    /// Returns whether the last command has not been answered.
    pub fn has_not_answered(&mut self) -> bool {
        matches!(self.agent.receive(Duration::ZERO), Err(ReceiveError::Timeout(_)))
    }

    /// Sends a command and waits for the answer.
    #[track_caller]
    pub fn ask(&mut self, command: &str) -> Answer {
        self.send(command);
        self.receive()
    }

    /// Sends a command that succeeds; returns the answer.
    #[track_caller]
    pub fn ok(&mut self, command: &str) -> String {
        match self.ask(command) {
            Answer::Done(text) => text,
            other => panic!("{command:.60}: {other:?}"),
        }
    }

    /// Sends a command that fails with this variant; returns the error's text.
    #[track_caller]
    pub fn fails(&mut self, command: &str, variant: &str) -> String {
        self.send(command);
        self.receive_failure(command, variant)
    }

    /// Waits for the failure of the last command with this variant; returns the error's text.
    #[track_caller]
    pub fn receive_failure(&mut self, what: &str, variant: &str) -> String {
        match self.receive() {
            Answer::Failed(refusal) if refusal.kind == variant => refusal.text,
            other => panic!("{what:.60}: expected {variant}, not {other:?}"),
        }
    }

    /// Asserts that neither an answer nor an event arrives within this time.
    #[track_caller]
    pub fn says_nothing_for(&mut self, time: Duration) {
        let received = self.agent.event(time);
        assert!(matches!(received, Err(ReceiveError::Timeout(_))), "unexpected {received:?}");
    }

    /// Waits for the next event.
    #[track_caller]
    pub fn event(&mut self, begins: &str) -> String {
        let event = self.agent.event(DEADLINE).expect("an event");
        assert!(event.starts_with(begins), "expected {begins:?}, not {event:?}");
        event
    }

    /// Returns the events that have arrived.
    #[track_caller]
    pub fn take_events(&mut self) -> Vec<String> {
        self.ok("nothing");
        self.agent.take_events()
    }

    /// Waits until it is killed. The answer to its last command may arrive first: a kill point may be on another thread.
    #[track_caller]
    pub fn is_killed(&mut self) {
        let mut answer = self.receive();
        if let Answer::Done(_) = answer {
            answer = self.receive();
        }
        assert_eq!(answer, Answer::Ended(Some(Signal::KILL.as_raw())), "it is to be killed");
    }

    /// Kills and reaps it.
    pub fn kill(&mut self) {
        let _ = self.agent.peer().kill();
        let _ = self.agent.peer().wait(DEADLINE);
    }

    /// Stops it; returns when every thread is stopped.
    pub fn stop(&self) {
        self.agent.process().stop().expect("it can be signalled");
    }

    /// Waits until it has stopped itself at a point of the protocol.
    #[track_caller]
    pub fn has_stopped(&self) {
        wait_for_state(self.id(), WaitIdOptions::STOPPED);
    }

    /// Resumes it.
    pub fn resume(&self) {
        self.agent.process().resume().expect("it can be signalled");
    }

    /// Waits until every queue of the process is empty; returns the number of jobs and events so far.
    #[track_caller]
    pub fn idle(&mut self) -> u64 {
        self.ok("idle").parse().expect("a number")
    }

    /// Returns the memory on its heap.
    #[track_caller]
    pub fn heap(&mut self) -> Heap {
        let text = self.ok("heap");
        let numbers =
            text.split_once(' ').and_then(|(blocks, bytes)| blocks.parse().ok().zip(bytes.parse().ok()));
        let (blocks, bytes) = numbers.expect("two numbers");
        Heap { blocks, bytes }
    }

    /// Returns a counter of the library (`leases`, `mapped_bytes`, …).
    #[track_caller]
    pub fn counter(&mut self, name: &str) -> u64 {
        let counts = self.ok("counters");
        number(&counts, name)
    }

    /// Returns whether its first device has timelines.
    #[track_caller]
    pub fn has_timelines(&mut self) -> bool {
        self.ok("has-timelines") == "true"
    }

    /// Returns the number of calls of an operation of its machine (`open`, `close`, `export`, …).
    #[track_caller]
    pub fn calls(&mut self, operation: &str) -> u64 {
        let counts = self.ok("engine");
        number(&counts, operation)
    }

    /// Returns the bytes in use on device 0.
    #[track_caller]
    pub fn allocated(&mut self) -> u64 {
        self.ok("memory-in-use").parse().expect("a number")
    }

    /// Returns the number of processes that hold an export.
    #[track_caller]
    pub fn holders(&mut self, export: &str) -> usize {
        let holders = self.ok(&format!("holders {export}"));
        holders.split_whitespace().next().and_then(|count| count.parse().ok()).expect("a number first")
    }

    /// Shares memory; returns the descriptor.
    #[track_caller]
    pub fn share(&mut self, arguments: &str) -> Descriptor {
        let text = self.ok(&format!("share {arguments}"));
        Descriptor::from_str(&text).expect("it is a descriptor")
    }
}

#[track_caller]
fn number(counts: &str, name: &str) -> u64 {
    let mut counts = counts.split_whitespace().filter_map(|one| one.split_once('='));
    let found = counts.find(|(known, _)| *known == name).and_then(|(_, count)| count.parse().ok());
    found.unwrap_or_else(|| panic!("no counter is called {name}"))
}
