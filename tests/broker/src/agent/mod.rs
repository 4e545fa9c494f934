//! The agent of the conformance suite, with commands for hostile processes and for forks.

mod callbacks;
mod command;
mod forked;
mod hostile;
mod observe;
mod opens;
mod process;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use device_ipc_ascend::AscendBackend;
use device_ipc_conformance::Lines;
use device_ipc_conformance::agent::{Answer, Reply, Server, reply, serve};
use device_ipc_core::backend::{DeviceIpc, Unavailable};
use device_ipc_core::{AllowList, Export, Ipc, Keeper, Result, TestClock, wait_until_idle};
use device_ipc_cuda::CudaBackend;
use device_ipc_mock::MockBackend;
use device_ipc_test_process::Heap;
use rustix::process::Pid;

pub use command::{Request, SystemCommand};

use crate::raw::{Connection, FakeServer};
use crate::{ASCEND, CUDA, DEADLINE};

/// The argument of an agent that `exec` runs.
const RUN_AGAIN: &str = "again";

/// The state of an agent.
struct Agent {
    lines: Arc<Lines>,
    /// Since the first `ipc`.
    server: Option<Server>,
    /// The backend, if it is the mock.
    mock: Option<Arc<MockBackend>>,
    connections: Vec<Connection>,
    swarm: Vec<Pid>,
    /// Descriptors that keep those open that were sent away.
    descriptors: Vec<std::os::fd::OwnedFd>,
    sockets_before_connect: Vec<String>,
    squatted: Vec<FakeServer>,
    keepers: HashMap<String, Keeper>,
    /// Exports that keepers no longer answer with.
    former: Vec<Arc<Export>>,
    /// Keeps the worker in a callback until it is dropped.
    worker_hold: Option<Sender<()>>,
}

/// Carries out commands until the test exits or closes the connection.
pub fn run() {
    let lines = Arc::new(Lines::of_child().expect("standard input is a socket"));
    if std::env::args().nth(1).as_deref() == Some(RUN_AGAIN) {
        let done = Reply { took: Duration::ZERO, result: Ok(Answer::Done) };
        reply(&lines, &done).expect("the test reads");
    }
    let mut agent = Agent {
        lines: Arc::clone(&lines),
        server: None,
        mock: None,
        connections: Vec::new(),
        swarm: Vec::new(),
        descriptors: Vec::new(),
        sockets_before_connect: Vec::new(),
        squatted: Vec::new(),
        keepers: HashMap::new(),
        former: Vec::new(),
        worker_hold: None,
    };
    serve(&lines, |request| match request {
        Request::Library(command) => agent.server().carry_out(command),
        Request::System(command) => agent.carry_out(command),
    })
    .expect("the test sends commands");
}

impl Agent {
    fn carry_out(&mut self, command: SystemCommand) -> Result<Answer> {
        use SystemCommand as C;
        Ok(match command {
            C::Ipc { machine, allow_uid, allow_gid, directory } => {
                self.make_ipc(machine.as_deref(), allow_uid, allow_gid, directory)
            }
            C::Engine => Answer::Text(self.engine()),
            C::ShareBySecondCopy => Answer::Text(crate::second::share_by_second_copy()),
            C::Peek { name, descriptor } => self.peek(name, &descriptor)?,
            C::Address { name } => Answer::Text(self.server().mappings[&name].range().ptr.to_string()),
            C::KeepUnder { export, name } => self.keep_under(&export, &name)?,
            C::KeepNext { export, name, version, keep_former } => {
                self.keep_next(&export, &name, version, keep_former)
            }
            C::KeepNoLonger { name } => self.keep_no_longer(&name),
            C::OpenReservedKept { name, keeper } => self.open_reserved_kept(name, &keeper)?,
            C::Follow { name, device } => self.follow(&name, device)?,
            C::OpenKept { name, threads, times } => self.open_kept(&name, threads, times)?,
            C::Idle => Answer::Number(wait_until_idle(DEADLINE).expect("every queue is emptied")),
            C::Heap => {
                let heap = Heap::now();
                Answer::Text(format!("{} {}", heap.blocks, heap.bytes))
            }
            C::List => process::list()?,
            C::TimedList { timeout } => hostile::timed_list(timeout)?,
            C::OpenUntilError { descriptor } => self.open_until_error(&descriptor)?,
            C::TwoOpens { one, one_timeout, other, other_timeout } => {
                self.two_opens((&one, one_timeout), (&other, other_timeout))
            }
            C::ShareParts { name, count, ready_on } => self.share_parts(&name, count, ready_on)?,
            C::Grant { name, limit } => self.grant(&name, limit)?,
            C::GrantOf { name, limit } => self.grant_of(&name, limit)?,
            C::OpenBy { name, descriptor, grant } => self.open_by(name, &descriptor, &grant)?,
            C::ReplaceBy { name, descriptor, grant } => self.replace_by(&name, &descriptor, &grant)?,
            C::GiveBack { grant } => opens::give_back(&grant)?,
            C::WaitIn { name, time } => self.wait_in_callback(&name, time)?,
            C::OnChange { name, time } => {
                self.server().exports[&name].on_change(move || std::thread::sleep(time));
                Answer::Done
            }
            C::Recall { name } => {
                self.server().exports[&name].recall();
                Answer::Done
            }
            C::States { name } => self.states(&name),
            C::CloseKeeping { name, timeout } => self.close_keeping(&name, timeout),
            C::OnDropped { name } => self.on_dropped(&name),
            C::HoldWorker { name } => self.hold_worker(&name),
            C::FreeWorker => {
                self.worker_hold = None;
                Answer::Done
            }
            C::ReportChanges { name } => self.report_changes(&name),
            C::ReopenUntilDropped { descriptor, byte } => self.reopen_until_dropped(&descriptor, byte)?,
            C::ReadOnHost { descriptor } => self.read_on_host(&descriptor)?,
            C::DropAndExit { name } => self.drop_and_exit(&name),
            C::Become { uid, gid } => process::become_user(uid, gid),
            C::LeaveNetwork => process::leave_network(),
            C::DropCapabilities => process::drop_capabilities(),
            C::Identity => Answer::Text(format!("{:?}", device_ipc_core::ProcessIdentity::current()?)),
            C::Advance { time } => {
                TestClock::take().advance(time);
                Answer::Done
            }
            C::Hurry => process::hurry(),
            C::LimitDescriptors { count } => process::limit_descriptors(count),
            C::LimitThreads { more } => process::limit_threads(&more),
            C::Deny { names } => hostile::deny(&names),
            C::Alarms { every } => hostile::alarms(every),
            C::Fork => self.fork(),
            C::ForkAndExit => hostile::fork_and_exit(),
            C::Exec => process::run_again(),
            C::Scribble { byte, value } => process::scribble("words", byte, value),
            C::ScribbleStates { byte, value } => process::scribble("leases", byte, value),
            C::ConnectMany { socket, count } => self.connect_many(&socket, count),
            C::Disconnect => {
                self.connections.clear();
                Answer::Done
            }
            C::Swarm { socket, count, processes, open } => {
                self.swarm(&socket, count, processes.unwrap_or(1), open.as_ref())
            }
            C::EndSwarm => self.end_swarm(),
            C::Linger { socket, seconds, count } => self.linger(&socket, seconds, count),
            C::Converse { socket, packets } => hostile::converse(&socket, &packets),
            C::RememberSockets => self.remember_sockets(),
            C::FloodChannel { threads, .. } => self.flood_channel(threads),
            C::Squat { name } => {
                self.squatted.push(FakeServer::at(format!("device-ipc.0.{name}").as_bytes()));
                Answer::Done
            }
            C::Squatted => self.squatted(),
        })
    }

    fn make_ipc(
        &mut self,
        machine: Option<&str>,
        allow_uid: Option<u32>,
        allow_gid: Option<u32>,
        directory: Option<String>,
    ) -> Answer {
        let backend = match machine {
            Some(machine) => self.load(machine).unwrap_or_else(|error| panic!("{machine}: {error}")),
            None => Arc::clone(&self.server().backend),
        };
        let mut allow = AllowList::own_user();
        if let Some(uid) = allow_uid {
            allow = allow.user(uid);
        }
        if let Some(gid) = allow_gid {
            allow = allow.group(gid);
        }
        let mut builder = Ipc::builder().allow(allow);
        if let Some(directory) = directory {
            builder = builder.socket_directory(directory);
        }
        let ipc = builder.with_backend(Arc::clone(&backend));
        match &mut self.server {
            None => self.server = Some(Server::new(ipc, backend, Arc::clone(&self.lines))),
            Some(server) => {
                server.ipc = ipc;
                if machine.is_some() {
                    server.backend = backend;
                    server.streams.clear();
                }
            }
        }
        Answer::Done
    }

    fn server(&mut self) -> &mut Server {
        self.server.as_mut().expect("`ipc machine=…` is the first command")
    }

    /// Loads the backend of a vendor on its simulator, or the mock on a machine that the text describes.
    fn load(&mut self, machine: &str) -> std::result::Result<Arc<dyn DeviceIpc>, Unavailable> {
        self.mock = None;
        Ok(match machine {
            CUDA => CudaBackend::load()?,
            ASCEND => AscendBackend::load()?,
            described => {
                let mock = MockBackend::from_spec(described)?;
                self.mock = Some(Arc::clone(&mock));
                mock
            }
        })
    }

    fn engine(&self) -> String {
        let counters = self.mock.as_ref().expect("only the mock counts").machine().counters();
        counters.iter().map(|(operation, calls)| format!("{operation}={calls} ")).collect()
    }
}
