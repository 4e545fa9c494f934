//! Channels: messages of bytes and tensors between two processes, their fate when either exits, and device maps.

mod bundles;
mod copies;
mod ends;
mod grants;
mod maps;
mod messages;
mod ready;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::time::Duration;

use device_ipc_core::{Channel, DeviceMap, DeviceOwner, Error, Export, Message};

pub use bundles::*;
pub use copies::*;
pub use ends::*;
pub use grants::*;
pub use maps::*;
pub use messages::*;
pub use ready::*;

use crate::agent::{Agent, Answer, Command, Copying, Mapped, Place};
use crate::check::{Refusal, equal, that};
use crate::flows::{Memory, SOON, Witness};
use crate::{Context, Outcome, PATIENCE, Stop, fail, unchecked};

const BYTES: usize = 4096;
const COUNT: usize = 1024;
const SHORT: Duration = Duration::from_millis(50);

/// A name that no other process has.
fn name(what: &str) -> String {
    format!("conformance-{}-{what}", std::process::id())
}

fn map(pairs: &[(u32, u32)]) -> Result<DeviceMap, Error> {
    pairs.iter().try_fold(DeviceMap::new(), |map, (from, to)| map.insert(*from, *to))
}

/// This process as the listener, and an agent whose channel is called `c`.
fn pair(context: &Context) -> Result<(Channel, Agent), Stop> {
    pair_mapped(context, &[], &[])
}

fn pair_mapped(
    context: &Context,
    own: &[(u32, u32)],
    agents: &[(u32, u32)],
) -> Result<(Channel, Agent), Stop> {
    let mut agent = context.agent()?;
    let (own, agents) = tried_pair(context, &mut agent, own, agents)?;
    went_well(agents)?;
    Ok((own?, agent))
}

/// An agent's answer that had to be one.
#[track_caller]
fn went_well<T>(answer: Result<T, Refusal>) -> Outcome {
    match answer {
        Ok(_) => Ok(()),
        Err(refusal) => fail(format!("the agent got {}: {}", refusal.kind, refusal.text)),
    }
}

/// The results of both sides of a connection: this process, the agent.
type Both = (Result<Channel, Error>, Result<Answer, Refusal>);

/// Connects, and returns the results of both sides.
fn tried_pair(
    context: &Context,
    agent: &mut Agent,
    own: &[(u32, u32)],
    agents: &[(u32, u32)],
) -> Result<Both, Stop> {
    let under = name("pair");
    let listener = context.ipc().listen(&under).device_map(map(own)?).start()?;
    let map = agents.to_vec();
    agent.send(&Command::Connect { under, name: "c".into(), timeout: PATIENCE, user: None, map })?;
    let channel = listener.accept(PATIENCE);
    Ok((channel, agent.receive_reply()?.result))
}

/// Has the agent connect to a listener that refuses it, and returns its result.
fn refused_pair(
    context: &Context,
    agent: &mut Agent,
    own: &[(u32, u32)],
    agents: &[(u32, u32)],
) -> Result<Result<Answer, Refusal>, Stop> {
    let under = name("pair");
    let listener = context.ipc().listen(&under).device_map(map(own)?).start()?;
    let map = agents.to_vec();
    let answered = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !answered.load(Ordering::Acquire) {
                // It refuses the process while it waits, and returns no channel.
                let _ = listener.accept(Duration::from_millis(20));
            }
        });
        let result = agent.request(&Command::Connect { under, name: "c".into(), timeout: PATIENCE, user: None, map });
        answered.store(true, Ordering::Release);
        Ok(result?.result)
    })
}

fn receive(agent: &mut Agent, into: &str) -> Result<Vec<u8>, Stop> {
    match agent.must(&Command::Receive { name: into.into(), by: "c".into(), timeout: PATIENCE })? {
        Answer::Received { bytes, .. } => Ok(bytes),
        other => fail(format!("the agent answered {other:?}")),
    }
}

/// The command that opens the export at this index of a message that the agent has received.
fn opening(name: &str, of: &str, index: usize, place: Option<Place>) -> Command {
    Command::OpenReceived {
        of: of.into(),
        name: name.into(),
        place,
        index,
        timeout: Some(PATIENCE),
        copying: Copying::Never,
    }
}

/// It has opened it, under the message's name, a dot and the index.
fn open_at(agent: &mut Agent, of: &str, index: usize, place: Option<Place>) -> Result<Mapped, Stop> {
    mapped(agent, &opening(&format!("{of}.{index}"), of, index, place))
}

fn mapped(agent: &mut Agent, opening: &Command) -> Result<Mapped, Stop> {
    agent.get(opening)
}

/// The agent receives a message, and opens its tensor on its stream.
fn open_on_stream(agent: &mut Agent) -> Result<Mapped, Stop> {
    receive(agent, "r")?;
    open_at(agent, "r", 0, Some(Place::Stream(0)))
}

fn discard(agent: &mut Agent, name: &str) -> Outcome {
    agent.must(&Command::Discard { name: name.into() }).map(drop)
}

fn send(agent: &mut Agent, bytes: &[u8], of: &[&str], ready_on: Option<u32>) -> Outcome {
    let of = of.iter().map(|name| (*name).to_owned()).collect();
    let (by, bytes) = ("c".into(), Some(bytes.to_vec()));
    agent.must(&Command::Send { by, len: 0, timeout: PATIENCE, of, drops: false, ready_on, bytes }).map(drop)
}

/// Returns the number of the agent's messages to brokers: requests, and messages without a reply.
fn said(agent: &mut Agent) -> Result<(u64, u64), Stop> {
    let counters: BTreeMap<String, u64> = agent.get(&Command::Counters)?;
    Ok((counters["requests_total"], counters["releases_total"]))
}

/// Sends a message there and back `rounds` times: once its exports are open, the agent sends no other message. Requests of
/// other processes to this process's broker, such as a listing of all exports of the host, are not counted.
fn says_nothing_else<'m>(
    (channel, agent): (&Channel, &mut Agent),
    rounds: u32,
    message: impl Fn() -> Message<'m>,
) -> Outcome {
    let trips = |agent: &mut Agent, times| -> Outcome {
        agent.send(&Command::Echo { by: "c".into(), times, answers: true, timeout: PATIENCE })?;
        for _ in 0..times {
            channel.send(message().bytes(b"ping"), PATIENCE)?;
            equal(channel.receive(PATIENCE)?.bytes(), b"ping", "the answer")?;
        }
        went_well(agent.receive_reply()?.result)
    };
    trips(agent, 1)?;
    let before = said(agent)?;
    trips(agent, rounds)?;
    equal(said(agent)?, before, "the messages to this process's broker in these round trips")
}

/// Memory with known bytes, whose owner reports its drop.
fn witnessed(context: &Context, bytes: &[u8]) -> Result<(Export, Receiver<()>), Stop> {
    let memory = Memory::with_bytes(context, 0, bytes)?;
    let (owner, dropped) = Witness::of(&memory);
    let owner = unchecked::owned(owner, memory.buffer.region());
    Ok((memory.ipc.share(owner).start()?, dropped))
}

#[track_caller]
fn is_kept(dropped: &Receiver<()>, why: &str) -> Outcome {
    that(dropped.recv_timeout(SHORT).is_err(), format!("the owner should be kept {why}"))
}

#[track_caller]
fn is_dropped(dropped: &Receiver<()>, why: &str) -> Outcome {
    that(dropped.recv_timeout(SOON).is_ok(), format!("the owner should be dropped {why}"))
}

/// Returns both sides of a channel in this process.
fn local_pair(context: &Context, what: &str) -> Result<(Channel, Channel), Stop> {
    let under = name(what);
    let listener = context.ipc().listen(&under).start()?;
    let ipc = context.ipc();
    let near = connecting(move || ipc.connect(&under).timeout(PATIENCE).start());
    let far = listener.accept(PATIENCE)?;
    Ok((near()?, far))
}

/// Begins to connect; returns the thread that waits for the result.
fn connecting(
    connect: impl FnOnce() -> Result<Channel, Error> + Send + 'static,
) -> impl FnOnce() -> Result<Channel, Stop> {
    let thread = std::thread::spawn(connect);
    move || Ok(thread.join().map_err(|_| Stop::failed("the connecting thread panicked"))??)
}
