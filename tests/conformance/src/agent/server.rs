//! The agent's side: does what it is told, on guards that it keeps by name.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use device_ipc_core::{
    Access, AsStream, Buffer, BundleExport, BundleMapping, Channel, DeviceEvent, DeviceMap, DeviceOrdinal,
    DeviceOwner, Dtype, Element, Error, Export, Generation, HandleBytes, HandleKind, Ipc, Mapping, Received,
    ReceivedHandle, Region, Result, RingReader, StagingLimits, Stream, TensorLayout, Timeline, ViewMut,
};

use super::command::{
    Answer, BareHandle, BundleSharing, Command, Copying, Mapped, Opening, Place, Reply, Sharing,
};
use crate::check::Refusal;
use crate::context::Context;
use crate::flows::tensor_bytes;
use crate::outcome::Outcome;
use crate::unchecked;
use crate::usage::Usage;

/// An agent waits for commands as long as its starter lives.
const FOR_EVER: Duration = Duration::from_secs(24 * 60 * 60);

/// The role of every agent.
pub(crate) fn run(context: &Context) -> Outcome {
    let mut agent = Server::new(context);
    loop {
        let line = match context.starter().receive(FOR_EVER) {
            Ok(line) => line,
            // The case is over.
            Err(_) => return Ok(()),
        };
        let command: Command = serde_json::from_str(&line)?;
        if matches!(command, Command::Exit) {
            std::process::exit(0);
        }
        let begun = Instant::now();
        let result = agent.obey(command).map_err(Refusal::from);
        let reply = Reply { took: begun.elapsed(), result };
        context.send_line(&serde_json::to_string(&reply)?)?;
    }
}

pub(super) struct Server<'a> {
    context: &'a Context,
    pub(super) ipc: Ipc,
    pub(super) exports: HashMap<String, Export>,
    mappings: HashMap<String, Mapping>,
    buffers: HashMap<String, Arc<Buffer>>,
    streams: HashMap<u32, Stream>,
    timelines: HashMap<String, Timeline>,
    events: HashMap<String, Box<dyn DeviceEvent>>,
    pub(super) channels: HashMap<String, Channel>,
    pub(super) received: HashMap<String, Received>,
    pub(super) bundles: HashMap<String, BundleExport>,
    pub(super) opened_bundles: HashMap<String, BundleMapping>,
    reader: Option<RingReader>,
}

impl<'a> Server<'a> {
    fn new(context: &'a Context) -> Self {
        Self {
            context,
            ipc: context.ipc(),
            exports: HashMap::new(),
            mappings: HashMap::new(),
            buffers: HashMap::new(),
            streams: HashMap::new(),
            timelines: HashMap::new(),
            events: HashMap::new(),
            channels: HashMap::new(),
            received: HashMap::new(),
            bundles: HashMap::new(),
            opened_bundles: HashMap::new(),
            reader: None,
        }
    }

    fn obey(&mut self, command: Command) -> Result<Answer> {
        let done = |()| Answer::Done;
        match command {
            Command::Devices => {
                let devices = self.ipc.devices()?;
                Ok(Answer::Devices(devices.iter().map(|device| device.identity).collect()))
            }
            Command::Prepare { device } => self.stream(device)?.synchronize().map(done),
            Command::Allocate { name, device, bytes, kind } => {
                self.allocate(name, device, &bytes, kind).map(done)
            }
            Command::Share { name, of, sharing } => self.share(name, &of, &sharing),
            Command::DropExport { name } => {
                drop(self.exports.remove(&name));
                Ok(Answer::Done)
            }
            Command::WaitReleased { name, timeout } => {
                named(&self.exports, &name).wait_released(timeout).map(done)
            }
            Command::Open { name, opening } => self.open(name, &opening),
            Command::Bytes { name } => Ok(Answer::Bytes(self.read(&name)?)),
            Command::Checksum { name } => {
                Ok(Answer::Number(u64::from(crc32fast::hash(&self.read::<u8>(&name)?))))
            }
            Command::Floats { name } => Ok(Answer::Floats(self.read(&name)?)),
            Command::Copy { name } => self.copy(&name),
            Command::Keep { name, into } => self.keep(&name, &into).map(done),
            Command::Add { name, value } => self.write::<f32>(&name, |view| view.add(value)).map(done),
            Command::Fill { name, byte } => self.write::<u8>(&name, |view| view.fill_bytes(byte)).map(done),
            Command::FillUnchecked { name, byte } => {
                let stream = self.stream_of(&name)?;
                let mapping = named(&self.mappings, &name);
                unchecked::fill_mapping(&**self.context.backend(), mapping, byte, &stream).map(done)
            }
            Command::Delay { device, time } => self.stream(device)?.delay(time).map(done),
            Command::Synchronize { device } => self.stream(device)?.synchronize().map(done),
            Command::Drop { name } => {
                drop(taken(&mut self.mappings, &name));
                Ok(Answer::Done)
            }
            Command::Release { name } => {
                let stream = self.stream_of(&name)?;
                Ok(taken(&mut self.mappings, &name).release(&stream).map(done)?)
            }
            Command::Forward { name } => {
                Ok(Answer::Descriptor(Box::new(named(&self.mappings, &name).descriptor().clone())))
            }
            Command::PeerId { device } => {
                Ok(Answer::Bytes(self.context.backend().local_peer_id(DeviceOrdinal::new(device))?))
            }
            Command::BareOpen { handle, device } => self.bare_open(handle, device),
            Command::Usage => {
                let usage =
                    Usage::of_this_process().map_err(|error| Error::io("counting mappings", error))?;
                Ok(Answer::Usage(usage))
            }
            Command::FreeMemory { device } => {
                let info = self.context.backend().memory().memory_info(DeviceOrdinal::new(device))?;
                Ok(Answer::Number(info.free_bytes))
            }
            Command::Shutdown { timeout } => device_ipc_core::shutdown(timeout).map(done),
            Command::Exit => Ok(Answer::Done),
            Command::StagingLimits { chunk_bytes, total_bytes } => {
                device_ipc_core::set_staging_limits(StagingLimits { chunk_bytes, total_bytes }).map(done)
            }
            Command::Join { .. } | Command::ReadNext { .. } | Command::LeaveRing => self.obey_ring(command),
            other => self.obey_order(other),
        }
    }

    /// What concerns the ring that the agent has joined.
    fn obey_ring(&mut self, command: Command) -> Result<Answer> {
        match command {
            Command::Join { descriptor, device } => {
                let stream = self.stream(device)?;
                let reader = self.ipc.open_ring(&descriptor.parse()?).on(&stream)?;
                let start = reader.sequence();
                self.reader = Some(reader);
                Ok(Answer::Number(start))
            }
            Command::ReadNext { device, timeout } => {
                let stream = self.stream(device)?;
                let reader = self.reader.as_mut().unwrap_or_else(|| panic!("the case never joined a ring"));
                let slot = reader.wait_next(timeout)?;
                let bytes = slot.view::<u8, _>(&stream)?.to_vec()?;
                slot.check()?;
                slot.release(&stream)?;
                Ok(Answer::Bytes(bytes))
            }
            _ => {
                self.reader = None;
                Ok(Answer::Done)
            }
        }
    }

    /// What orders streams: timelines and events.
    fn obey_order(&mut self, command: Command) -> Result<Answer> {
        let done = |()| Answer::Done;
        match command {
            Command::Timeline { name, of } => {
                let timeline = named(&self.mappings, &of).timeline()?;
                self.timelines.insert(name, timeline);
                Ok(Answer::Done)
            }
            Command::ExportTimeline { name, of, timeout } => {
                let mut timelines = named(&self.exports, &of).timelines(1, timeout)?;
                self.timelines.insert(name, timelines.remove(0));
                Ok(Answer::Done)
            }
            Command::Signal { name, value, device } => {
                let stream = self.stream(device)?;
                named(&self.timelines, &name).signal(value, &stream).map(done)
            }
            Command::Wait { name, value, device } => {
                let stream = self.stream(device)?;
                named(&self.timelines, &name).wait(value, &stream).map(done)
            }
            Command::SignalNow { name, value } => named(&self.timelines, &name).signal_now(value).map(done),
            Command::WaitNow { name, value, timeout } => {
                named(&self.timelines, &name).wait_now(value, timeout).map(done)
            }
            Command::Value { name } => Ok(Answer::Number(named(&self.timelines, &name).value()?)),
            Command::Check { name } => named(&self.timelines, &name).check().map(done),
            Command::OpenEvent { name, handle, device } => {
                let event = self.context.backend().open_event(&handle, DeviceOrdinal::new(device))?;
                self.events.insert(name, event);
                Ok(Answer::Done)
            }
            Command::RecordEvent { name, device } => {
                let stream = self.stream(device)?;
                named(&self.events, &name).record(stream.as_stream()).map(done)
            }
            Command::WaitEvent { name, device } => {
                let stream = self.stream(device)?;
                named(&self.events, &name).wait_on(stream.as_stream()).map(done)
            }
            Command::QueryEvent { name } => Ok(Answer::Truth(named(&self.events, &name).query()?)),
            Command::SynchronizeEvent { name, timeout } => {
                named(&self.events, &name).synchronize(timeout).map(done)
            }
            Command::ExportEvent { name } => {
                Ok(Answer::Bytes(named(&self.events, &name).export()?.as_slice().to_vec()))
            }
            other => self.obey_bundle(other),
        }
    }

    /// What concerns bundles.
    fn obey_bundle(&mut self, command: Command) -> Result<Answer> {
        match command {
            Command::ShareBundle { name, sharing } => self.share_bundle(name, &sharing),
            Command::DropBundle { name } => {
                drop(self.bundles.remove(&name));
                Ok(Answer::Done)
            }
            Command::OpenBundle { name, descriptor, place } => {
                let ipc = self.ipc.clone();
                let builder = ipc.open_bundle(&descriptor);
                let mapping = match place {
                    Place::Home => builder.at_home()?,
                    Place::Device(device) => builder.on_device(device)?,
                    Place::Stream(device) => builder.on(&self.stream(device)?)?,
                    Place::Map(pairs) => {
                        let insert = |map: DeviceMap, (home, device): &(_, u32)| map.insert(*home, *device);
                        builder.mapped_by(&pairs.iter().try_fold(DeviceMap::new(), insert)?)?
                    }
                };
                self.opened_bundles.insert(name, mapping);
                Ok(Answer::Done)
            }
            Command::TensorBytes { name, tensor } => {
                let device = named(&self.opened_bundles, &name).tensor(&tensor)?.device();
                let stream = self.stream(device.get())?;
                let found = named(&self.opened_bundles, &name).tensor(&tensor)?;
                Ok(Answer::Bytes(tensor_bytes(&found, &stream)?))
            }
            Command::TensorAdd { name, tensor, value } => {
                let device = named(&self.opened_bundles, &name).tensor(&tensor)?.device();
                let stream = self.stream(device.get())?;
                let found = named(&self.opened_bundles, &name).tensor(&tensor)?;
                found.view_mut::<f32, _>(&stream)?.add(value).map(|()| Answer::Done)
            }
            Command::ReleaseBundle { name, device } => {
                let stream = self.stream(device)?;
                taken(&mut self.opened_bundles, &name).release(&stream)?;
                Ok(Answer::Done)
            }
            other => self.obey_about_channels(other),
        }
    }

    fn share_bundle(&mut self, name: String, sharing: &BundleSharing) -> Result<Answer> {
        let streams: Result<Vec<_>> = sharing.ready_on.iter().map(|device| self.stream(*device)).collect();
        let (streams, ipc) = (streams?, self.ipc.clone());
        let mut bundle = ipc.bundle().access(sharing.access.unwrap_or(Access::ReadWrite));
        let mut memories = Vec::new();
        for (of, part) in &sharing.memories {
            let buffer = named(&self.buffers, of);
            let (offset, len) = part.unwrap_or((0, buffer.range().len));
            memories.push(bundle.memory(buffer.slice(offset, len)?));
        }
        for tensor in &sharing.tensors {
            let dtype = Dtype::from_name(&tensor.dtype).expect("the case names a type of PyTorch's");
            let layout = TensorLayout::contiguous(dtype, tensor.shape.as_slice())?;
            bundle.tensor(&tensor.name, memories[tensor.memory], tensor.offset, layout)?;
        }
        let export = streams.iter().fold(bundle, |bundle, stream| bundle.ready_on(stream)).start()?;
        let descriptor = export.descriptor().clone();
        self.bundles.insert(name, export);
        Ok(Answer::Bundle(descriptor))
    }

    pub(super) fn stream(&mut self, device: u32) -> Result<Stream> {
        if let Some(known) = self.streams.get(&device) {
            return Ok(known.clone());
        }
        let stream = self.ipc.create_stream(device)?;
        self.streams.insert(device, stream.clone());
        Ok(stream)
    }

    /// The stream of the device that a mapping or a buffer is on.
    fn stream_of(&mut self, name: &str) -> Result<Stream> {
        let device = match self.mappings.get(name) {
            Some(mapping) => mapping.device(),
            None => named(&self.buffers, name).range().device,
        };
        self.stream(device.get())
    }

    fn allocate(&mut self, name: String, device: u32, bytes: &[u8], kind: Option<u16>) -> Result<()> {
        let len = bytes.len() as u64;
        let buffer = match kind {
            Some(kind) => self.ipc.allocate_as(device, len, HandleKind(kind))?,
            None => self.ipc.allocate(device, len)?,
        };
        let stream = self.stream(device)?;
        buffer.view_mut::<u8>(&stream)?.copy_from(bytes)?;
        stream.synchronize()?;
        self.buffers.insert(name, Arc::new(buffer));
        Ok(())
    }

    fn share(&mut self, name: String, of: &str, sharing: &Sharing) -> Result<Answer> {
        let ready = sharing.ready_on.map(|device| self.stream(device)).transpose()?;
        let export = if let Some(mapping) = self.mappings.get(of) {
            let region = Region::new(self.context.backend().info().name, mapping.range());
            self.start_share(unchecked::not_owned(region), sharing, ready.as_ref())?
        } else {
            let buffer = named(&self.buffers, of);
            let (offset, len) = sharing.part.unwrap_or((0, buffer.range().len));
            self.start_share(buffer.slice(offset, len)?, sharing, ready.as_ref())?
        };
        let descriptor = export.descriptor().clone();
        self.exports.insert(name, export);
        Ok(Answer::Descriptor(Box::new(descriptor)))
    }

    fn start_share(
        &self,
        owner: impl DeviceOwner,
        sharing: &Sharing,
        ready: Option<&Stream>,
    ) -> Result<Export> {
        let builder = self.ipc.share(owner).access(sharing.access.unwrap_or(Access::ReadWrite));
        Ok(match ready {
            Some(stream) => builder.ready_on(stream).start()?,
            None => builder.start()?,
        })
    }

    fn open(&mut self, name: String, opening: &Opening) -> Result<Answer> {
        let ipc = self.ipc.clone();
        let mut builder = ipc.open(&opening.descriptor);
        if let Some(access) = opening.access {
            builder = builder.access(access);
        }
        if let Some(timeout) = opening.timeout {
            builder = builder.timeout(timeout);
        }
        builder = match opening.copying {
            Copying::Never => builder,
            Copying::IfNeeded => builder.or_staged(),
            Copying::Always => builder.staged(),
        };
        let mapping = match &opening.place {
            Place::Home => builder.at_home()?,
            Place::Device(device) => builder.on_device(*device)?,
            Place::Stream(device) => builder.on(&self.stream(*device)?)?,
            Place::Map(pairs) => {
                let insert = |map: DeviceMap, (home, device): &(_, u32)| map.insert(*home, *device);
                builder.mapped_by(&pairs.iter().try_fold(DeviceMap::new(), insert)?)?
            }
        };
        Ok(self.keep_mapping(name, mapping))
    }

    pub(super) fn keep_mapping(&mut self, name: String, mapping: Mapping) -> Answer {
        let mapped = Mapped {
            address: mapping.range().ptr.get(),
            len: mapping.len(),
            device: mapping.device().get(),
            home: mapping.home(),
            at_home: mapping.is_at_home(),
            access: mapping.access(),
            tensor: mapping.layout().map(|layout| (layout.dtype().to_string(), layout.shape().to_vec())),
            is_copy: mapping.is_copy(),
        };
        self.mappings.insert(name, mapping);
        Answer::Mapping(mapped)
    }

    fn read<T: Element>(&mut self, name: &str) -> Result<Vec<T>> {
        let stream = self.stream_of(name)?;
        match self.mappings.get(name) {
            Some(mapping) => mapping.view::<T, _>(&stream)?.to_vec(),
            None => named(&self.buffers, name).view::<T>(&stream)?.to_vec(),
        }
    }

    fn write<T: Element>(
        &mut self,
        name: &str,
        write: impl FnOnce(&mut ViewMut<'_, T>) -> Result<()>,
    ) -> Result<()> {
        let stream = self.stream_of(name)?;
        match self.mappings.get(name) {
            Some(mapping) => write(&mut mapping.view_mut::<T, _>(&stream)?),
            None => write(&mut named(&self.buffers, name).view_mut::<T>(&stream)?),
        }
    }

    fn copy(&mut self, name: &str) -> Result<Answer> {
        let stream = self.stream_of(name)?;
        let mapping = named(&self.mappings, name);
        let here = self.ipc.allocate(mapping.device(), mapping.len())?;
        here.view_mut::<u8>(&stream)?.copy_from_device(&mapping.view::<u8, _>(&stream)?)?;
        Ok(Answer::Bytes(here.view::<u8>(&stream)?.to_vec()?))
    }

    fn keep(&mut self, name: &str, into: &str) -> Result<()> {
        let stream = self.stream_of(name)?;
        let view = named(&self.mappings, name).view::<u8, _>(&stream)?;
        named(&self.buffers, into).view_mut::<u8>(&stream)?.copy_from_device(&view)
    }

    fn bare_open(&self, handle: BareHandle, device: u32) -> Result<Answer> {
        let (backend, device) = (self.context.backend(), DeviceOrdinal::new(device));
        let descriptors = handle.descriptors.into_iter().map(unchecked::inherited);
        let handle = ReceivedHandle {
            kind: HandleKind(handle.kind),
            bytes: HandleBytes::new(handle.bytes),
            fds: descriptors
                .collect::<std::io::Result<_>>()
                .map_err(|error| Error::io("duplicating an inherited descriptor", error))?,
            size: handle.size,
            generation: handle.generation.map(Generation),
            home: Some(device),
            exporter: handle.exporter,
        };
        let opened = backend.open(vec![handle], device, Access::ReadWrite)?;
        let extents = backend.extents_of(opened.range, None);
        let extents = extents.map(|extents| extents.len()).map_err(Refusal::from);
        let len = opened.range.len;
        backend.close(opened)?;
        Ok(Answer::BareOpened { len, extents })
    }
}

fn named<'a, V>(map: &'a HashMap<String, V>, name: &str) -> &'a V {
    map.get(name).unwrap_or_else(|| panic!("the case never made {name:?}"))
}

fn taken<V>(map: &mut HashMap<String, V>, name: &str) -> V {
    map.remove(name).unwrap_or_else(|| panic!("the case never made {name:?}"))
}
