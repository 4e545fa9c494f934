//! An agent, seen from the test: told lines, answers lines, never left behind.

use std::collections::{BTreeMap, VecDeque};
use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::str::FromStr;
use std::time::{Duration, Instant};

use device_ipc_core::Descriptor;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

use crate::census::Census;
use crate::wait::{DEADLINE, eventually};
use crate::{ASCEND, CUDA};

/// How an agent is started.
#[derive(Clone, Copy, Debug, Default)]
pub struct Setup<'a> {
    /// The agent's program.
    pub program: &'a str,
    /// The machine that it plays.
    pub machine: &'a str,
    /// The point at which it kills itself.
    pub dies_at: Option<&'a str>,
    /// Words before the program: another program that starts it.
    pub through: &'a [&'a str],
}

/// What an agent answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It has done so.
    Done(String),
    /// It could not.
    Failed(Failure),
    /// It has ended, by this signal if by any.
    Ended(Option<i32>),
}

/// An error, as the agent tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The variant's name.
    pub variant: String,
    /// What it says to people.
    pub text: String,
}

/// A process of a test. Dropping it kills it.
#[derive(Debug)]
pub struct Child {
    process: std::process::Child,
    stdin: Option<ChildStdin>,
    stdout: ChildStdout,
    unread: Vec<u8>,
    events: VecDeque<String>,
}

impl Child {
    /// Starts it, and waits until it has its machine.
    ///
    /// # Panics
    ///
    /// Where it cannot be started.
    #[track_caller]
    pub fn start(setup: &Setup<'_>) -> Self {
        let mut words = setup.through.iter().chain(std::iter::once(&setup.program));
        let mut command = Command::new(words.next().expect("a program"));
        command.args(words).stdin(Stdio::piped()).stdout(Stdio::piped());
        command.env_remove("DEVICE_IPC_SOCKET_DIR").env_remove("DEVICE_IPC_KILL_POINT");
        match setup.machine {
            // Whoever names a library runs these tests on a GPU.
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
        let mut process = command.spawn().expect("the agent starts");
        let (stdin, stdout) = (process.stdin.take(), process.stdout.take().expect("it is piped"));
        let mut child = Self { process, stdin, stdout, unread: Vec::new(), events: VecDeque::new() };
        child.ok(&format!("ipc machine={}", setup.machine));
        child
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// What it has now.
    pub fn census(&self) -> Census {
        Census::of(self.id())
    }

    /// Tells it to do something, and does not wait.
    pub fn tell(&mut self, command: &str) {
        // Where it has ended, the answer says so.
        let _ = self.stdin.as_mut().map(|stdin| stdin.write_all(format!("{command}\n").as_bytes()));
    }

    /// Its next answer.
    ///
    /// # Panics
    ///
    /// Where none comes in time.
    #[track_caller]
    pub fn hear(&mut self) -> Answer {
        self.hear_for(DEADLINE)
    }

    /// Its next answer, for which it has this long.
    ///
    /// # Panics
    ///
    /// Where none comes in time.
    #[track_caller]
    pub fn hear_for(&mut self, patience: Duration) -> Answer {
        let until = Instant::now() + patience;
        loop {
            let Some(line) = self.line(until) else {
                let status = self.process.wait().expect("it can be reaped");
                return Answer::Ended(status.signal());
            };
            if let Some(event) = line.strip_prefix("event ") {
                self.events.push_back(event.to_owned());
            } else if let Some(text) = line.strip_prefix("ok") {
                return Answer::Done(text.trim_start().to_owned());
            } else if let Some((variant, text)) =
                line.strip_prefix("err ").and_then(|rest| rest.split_once(' '))
            {
                return Answer::Failed(Failure { variant: variant.to_owned(), text: text.to_owned() });
            } else {
                panic!("the agent says {line:?}");
            }
        }
    }

    /// Tells it to do something, and waits for the answer.
    ///
    /// # Panics
    ///
    /// Where none comes in time.
    #[track_caller]
    pub fn ask(&mut self, command: &str) -> Answer {
        self.tell(command);
        self.hear()
    }

    /// Has it do something that goes well.
    ///
    /// # Panics
    ///
    /// Where it does not.
    #[track_caller]
    pub fn ok(&mut self, command: &str) -> String {
        match self.ask(command) {
            Answer::Done(text) => text,
            other => panic!("{command:.60}: {other:?}"),
        }
    }

    /// Has it do something that gives this error; what that says to people.
    ///
    /// # Panics
    ///
    /// Where it gives another one, or none.
    #[track_caller]
    pub fn fails(&mut self, command: &str, variant: &str) -> String {
        match self.ask(command) {
            Answer::Failed(failure) if failure.variant == variant => failure.text,
            other => panic!("{command:.60}: expected {variant}, not {other:?}"),
        }
    }

    /// It says nothing for as long as this.
    ///
    /// # Panics
    ///
    /// Where it does, or ends.
    #[track_caller]
    pub fn says_nothing_for(&mut self, time: Duration) {
        let time = Timespec::try_from(time).expect("not that long");
        let ready = poll(&mut [PollFd::new(&self.stdout, PollFlags::IN)], Some(&time));
        assert!(self.unread.is_empty() && ready == Ok(0), "it was to say nothing");
    }

    /// Its next event, which begins so.
    ///
    /// # Panics
    ///
    /// Where none comes in time, or another one.
    #[track_caller]
    pub fn event(&mut self, begins: &str) -> String {
        let until = Instant::now() + DEADLINE;
        let event = self.events.pop_front().unwrap_or_else(|| {
            let line = self.line(until).expect("it goes on");
            line.strip_prefix("event ").unwrap_or_else(|| panic!("no event, but {line:?}")).to_owned()
        });
        assert!(event.starts_with(begins), "expected {begins:?}, not {event:?}");
        event
    }

    /// Events that have come and that nobody asked for yet.
    pub fn take_events(&mut self) -> Vec<String> {
        self.ok("nothing");
        self.events.drain(..).collect()
    }

    /// Waits until it is killed.
    ///
    /// # Panics
    ///
    /// Where it answers, or ends in another way, or not in time.
    #[track_caller]
    pub fn is_killed(&mut self) {
        let answer = self.hear();
        assert_eq!(answer, Answer::Ended(Some(Signal::KILL.as_raw())), "it is to be killed");
    }

    /// Kills it, and waits for its end.
    pub fn kill(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    /// Stops it where it stands; returns when every thread stands still.
    ///
    /// # Panics
    ///
    /// Where that fails.
    pub fn stop(&self) {
        kill_process(self.pid(), Signal::STOP).expect("it can be signalled");
        waitid(WaitId::Pid(self.pid()), WaitIdOptions::STOPPED).expect("it is our child");
    }

    /// It has come to the point of the protocol at which it was to stand still, or does so soon.
    ///
    /// # Panics
    ///
    /// Where it does not.
    #[track_caller]
    pub fn has_stopped(&self) {
        let options = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG;
        eventually("it stands still", true, || {
            waitid(WaitId::Pid(self.pid()), options).expect("it is our child").is_some()
        });
    }

    /// Lets it go on.
    ///
    /// # Panics
    ///
    /// Where that fails.
    pub fn go_on(&self) {
        kill_process(self.pid(), Signal::CONT).expect("it can be signalled");
    }

    /// A number that the library counts in it (`leases`, `mapped_bytes`, …).
    ///
    /// # Panics
    ///
    /// Where there is no such count.
    #[track_caller]
    pub fn counter(&mut self, name: &str) -> u64 {
        let counts = self.ok("counters");
        number(&counts, name)
    }

    /// Has its first device timelines?
    #[track_caller]
    pub fn has_timelines(&mut self) -> bool {
        self.ok("has-timelines") == "true"
    }

    /// How often an operation of its machine was called (`open`, `close`, `export`, …).
    ///
    /// # Panics
    ///
    /// Where there is no such operation.
    #[track_caller]
    pub fn calls(&mut self, operation: &str) -> u64 {
        let counts = self.ok("engine");
        number(&counts, operation)
    }

    /// Bytes that it has allocated on device 0.
    #[track_caller]
    pub fn allocated(&mut self) -> u64 {
        self.ok("allocated").parse().expect("a number")
    }

    /// How many processes hold this export of it.
    #[track_caller]
    pub fn holders(&mut self, export: &str) -> usize {
        let holders = self.ok(&format!("holders {export}"));
        holders.split_whitespace().next().and_then(|count| count.parse().ok()).expect("a number first")
    }

    /// Has it share something; the descriptor.
    #[track_caller]
    pub fn share(&mut self, command: &str) -> Descriptor {
        let text = self.ok(&format!("share {command}"));
        Descriptor::from_str(&text).expect("it is a descriptor")
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.process)
    }

    /// The next line; `None` when it has ended.
    #[track_caller]
    fn line(&mut self, until: Instant) -> Option<String> {
        let mut chunk = [0; 4096];
        loop {
            if let Some(end) = self.unread.iter().position(|byte| *byte == b'\n') {
                let rest = self.unread.split_off(end + 1);
                let line = std::mem::replace(&mut self.unread, rest);
                return Some(String::from_utf8_lossy(&line[..end]).into_owned());
            }
            let left = until.saturating_duration_since(Instant::now());
            let time = Timespec::try_from(left).expect("not that long");
            let ready = poll(&mut [PollFd::new(&self.stdout, PollFlags::IN)], Some(&time));
            match ready {
                Ok(0) => panic!("process {} did not answer in time", self.id()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => panic!("{error}"),
                Ok(_) => match self.stdout.read(&mut chunk).expect("a pipe can be read") {
                    0 => return None,
                    count => self.unread.extend_from_slice(&chunk[..count]),
                },
            }
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.kill();
    }
}

#[track_caller]
fn number(counts: &str, name: &str) -> u64 {
    let counts: BTreeMap<_, _> = counts.split_whitespace().filter_map(|one| one.split_once('=')).collect();
    counts.get(name).and_then(|count| count.parse().ok()).unwrap_or_else(|| panic!("nothing counts {name}"))
}
