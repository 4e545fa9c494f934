//! The agent's process: carries out commands on buffers, exports, mappings and so on, which it keeps by name.

mod channels;
mod exports;
mod imports;
mod order;
mod rings;
mod tensors;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use device_ipc_core::backend::{DeviceEvent, DeviceIpc};
use device_ipc_core::limits::{CacheLimits, StagingLimits};
use device_ipc_core::{
    Buffer, Channel, DeviceOrdinal, Error, Export, Ipc, Listener, Mapping, Received, Result, Stream, Timeline,
};
use serde::de::DeserializeOwned;

use super::{Answer, Command, EVENT, Gating, Reply};
use crate::check::Refusal;
use crate::context::Context;
use crate::gate::Gate;
use crate::outcome::Outcome;
use crate::process::Lines;
use crate::unchecked;
use crate::usage::Usage;
pub use imports::touch;
pub use rings::Rings;

/// An agent waits for commands until its parent exits.
const FOREVER: Duration = Duration::from_secs(24 * 60 * 60);

/// The role of every agent of the suite.
pub(crate) fn run(context: &Context) -> Outcome {
    let lines = context.starter();
    let mut server = Server::new(context.ipc(), Arc::clone(context.backend()), Arc::clone(lines));
    serve(lines, |command| server.carry_out(command))
}

/// Carries out commands until the parent exits or closes the connection.
///
/// # Errors
///
/// An error if a line is no command or a reply cannot be sent.
pub fn serve<C: DeserializeOwned>(lines: &Lines, mut carry_out: impl FnMut(C) -> Result<Answer>) -> Outcome {
    while let Ok(line) = lines.receive(FOREVER) {
        let command: C = serde_json::from_str(&line)?;
        let begin = Instant::now();
        let result = carry_out(command).map_err(Refusal::from);
        reply(lines, &Reply { took: begin.elapsed(), result })?;
    }
    Ok(())
}

/// Sends a reply to the parent.
pub fn reply(lines: &Lines, reply: &Reply) -> Outcome {
    Ok(lines.send(&serde_json::to_string(reply)?)?)
}

/// The state of an agent.
#[allow(missing_docs, reason = "the fields are called as the commands call their contents")]
#[allow(missing_debug_implementations, reason = "events of backends have no debug form")]
pub struct Server {
    pub ipc: Ipc,
    pub backend: Arc<dyn DeviceIpc>,
    pub lines: Arc<Lines>,
    pub streams: HashMap<u32, Stream>,
    pub buffers: HashMap<String, Arc<Buffer>>,
    pub exports: HashMap<String, Export>,
    pub mappings: HashMap<String, Mapping>,
    pub timelines: HashMap<String, Timeline>,
    pub events: HashMap<String, Box<dyn DeviceEvent>>,
    pub listeners: HashMap<String, Listener>,
    pub channels: HashMap<String, Channel>,
    pub received: HashMap<String, Received>,
    pub rings: Rings,
    /// Gates in streams.
    closed: Vec<Gate>,
    /// Unblock the drops of owners.
    gates: HashMap<String, Sender<()>>,
}

impl Server {
    /// Returns an agent without any guards.
    pub fn new(ipc: Ipc, backend: Arc<dyn DeviceIpc>, lines: Arc<Lines>) -> Self {
        Self {
            ipc,
            backend,
            lines,
            streams: HashMap::new(),
            buffers: HashMap::new(),
            exports: HashMap::new(),
            mappings: HashMap::new(),
            timelines: HashMap::new(),
            events: HashMap::new(),
            listeners: HashMap::new(),
            channels: HashMap::new(),
            received: HashMap::new(),
            rings: Rings::default(),
            closed: Vec::new(),
            gates: HashMap::new(),
        }
    }

    /// Carries out a command.
    ///
    /// # Errors
    ///
    /// The library's error.
    ///
    /// # Panics
    ///
    /// Panics if the command names something that does not exist.
    pub fn carry_out(&mut self, command: Command) -> Result<Answer> {
        let done = |()| Answer::Done;
        match command {
            Command::Nothing => Ok(Answer::Done),
            Command::Exit => std::process::exit(0),
            Command::Devices => {
                let devices = self.ipc.devices()?;
                Ok(Answer::Devices(devices.iter().map(|device| device.identity).collect()))
            }
            Command::Prepare { device } | Command::Sync { device } => {
                self.stream(device)?.synchronize().map(done)
            }
            Command::WarmUp => self.warm_up().map(done),
            Command::CloseGate { device, gate } => {
                let gate = gate_in(&self.stream(device)?, gate)?;
                self.closed.extend(gate);
                Ok(Answer::Done)
            }
            Command::GatesAreOpen => Ok(Answer::Truth(self.closed.iter().all(Gate::is_open))),
            Command::OpenGates => {
                let opened: Vec<_> = self.closed.drain(..).map(Gate::open_in_time).collect();
                Ok(Answer::Truth(!opened.contains(&false)))
            }
            Command::FreeMemory { device } => {
                let info = self.backend.memory().memory_info(DeviceOrdinal::new(device))?;
                Ok(Answer::Number(info.free_bytes))
            }
            Command::MemoryInUse { device } => {
                let info = self.backend.memory().memory_info(DeviceOrdinal::new(device))?;
                Ok(Answer::Number(info.total_bytes - info.free_bytes))
            }
            Command::PeerId { device } => {
                Ok(Answer::Bytes(self.backend.local_peer_id(DeviceOrdinal::new(device))?))
            }
            Command::Usage => {
                let usage =
                    Usage::of_this_process().map_err(|error| Error::io("counting mappings", error))?;
                Ok(Answer::Usage(usage))
            }
            Command::Counters => {
                let text = device_ipc_core::counters().to_prometheus();
                let counters = text.lines().filter_map(|line| {
                    let (name, value) = line.strip_prefix("device_ipc_")?.split_once(' ')?;
                    Some((name.to_owned(), value.parse().ok()?))
                });
                Ok(Answer::Counters(counters.collect()))
            }
            Command::Cache { mappings, bytes } => device_ipc_core::limits::set_cache_limits(
                CacheLimits::default().with_mappings(mappings).with_bytes(bytes),
            )
            .map(done),
            Command::CloseUnused { timeout } => device_ipc_core::close_unused(timeout).map(done),
            Command::CloseMappingsOf { descriptor } => {
                let closed = unchecked::close_mappings_of(descriptor.exporter())?;
                Ok(Answer::Number(closed as u64))
            }
            Command::Shutdown { timeout } => device_ipc_core::shutdown(timeout).map(done),
            Command::StagingLimits { chunk_bytes, total_bytes } => {
                device_ipc_core::limits::set_staging_limits(
                    StagingLimits::default().with_chunk_bytes(chunk_bytes).with_total_bytes(total_bytes),
                )
                .map(done)
            }
            other => self.carry_out_export(other),
        }
    }

    /// Reports an event to the parent, which has not asked for it.
    pub fn event(lines: &Lines, event: &str) {
        // A parent that has exited needs no report.
        let _ = lines.send(&format!("{EVENT}{event}"));
    }

    /// Returns the agent's stream of a device.
    pub fn stream(&mut self, device: u32) -> Result<Stream> {
        if let Some(known) = self.streams.get(&device) {
            return Ok(known.clone());
        }
        let stream = self.ipc.create_stream(device)?;
        self.streams.insert(device, stream.clone());
        Ok(stream)
    }

    /// Returns the stream of the device that a mapping or a buffer is on.
    fn stream_of(&mut self, name: &str) -> Result<Stream> {
        let device = match self.mappings.get(name) {
            Some(mapping) => mapping.device(),
            None => named(&self.buffers, name).range().device,
        };
        self.stream(device.get())
    }

    fn warm_up(&mut self) -> Result<()> {
        let stream = self.stream(0)?;
        let buffer = self.ipc.allocate(0, 4096)?;
        let mut view = buffer.view_mut::<f32, _>(&stream)?;
        view.fill_bytes(0)?;
        view.add(1.0)?;
        // The first gate maps a page, where the device has gates.
        drop(stream.gate());
        stream.synchronize()
    }
}

/// Closes a gate in a stream.
fn gate_in(stream: &Stream, gating: Gating) -> Result<Option<Gate>> {
    if gating == Gating::Open {
        return Ok(None);
    }
    let gate = Gate::try_close(stream)?;
    if gating == Gating::Soon {
        gate.open_soon();
    }
    Ok(Some(gate))
}

fn named<'a, V>(map: &'a HashMap<String, V>, name: &str) -> &'a V {
    map.get(name).unwrap_or_else(|| panic!("there is no {name:?}"))
}

fn taken<V>(map: &mut HashMap<String, V>, name: &str) -> V {
    map.remove(name).unwrap_or_else(|| panic!("there is no {name:?}"))
}
