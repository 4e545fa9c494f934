//! Mappings, and the bytes of mappings and buffers.

use device_ipc_core::backend::{Generation, HandleBytes, HandleKind, ReceivedHandle};
use device_ipc_core::{
    Access, CopyPolicy, DeviceMap, DeviceName, DeviceOrdinal, DevicePtr, DeviceRange, Element, Error,
    Mapping, OpenBuilder, Result, Stream, ViewMut,
};

use super::{Server, named, taken};
use crate::agent::{Answer, BareHandle, Command, Copying, Mapped, Opening, Place};
use crate::check::Refusal;
use crate::unchecked;

impl Server {
    pub(super) fn carry_out_import(&mut self, command: Command) -> Result<Answer> {
        let done = |()| Answer::Done;
        match command {
            Command::Open(opening) => self.open(*opening),
            Command::Suspend { name } => {
                self.mappings.get_mut(&name).expect("the name of a mapping").suspend().map(done)
            }
            Command::Resume { name, descriptor } => {
                let descriptor = descriptor.parse()?;
                self.mappings.get_mut(&name).expect("the name of a mapping").resume(&descriptor).map(done)
            }
            Command::Replace { name, descriptor, device } => {
                let descriptor = descriptor.parse()?;
                let stream = device.map(|device| self.stream(device)).transpose()?;
                let mapping = self.mappings.get_mut(&name).expect("the name of a mapping");
                match stream {
                    Some(stream) => mapping.replace_on(&descriptor, &stream).map(done),
                    None => mapping.replace(&descriptor).map(done),
                }
            }
            Command::Release { name, device } => {
                let device = device.unwrap_or_else(|| named(&self.mappings, &name).device().get());
                let stream = self.stream(device)?;
                taken(&mut self.mappings, &name).release(&stream)?;
                Ok(Answer::Done)
            }
            Command::OnGone { name } => {
                let (lines, event) = (self.lines.clone(), format!("gone {name}"));
                let report = move |error: &Error| {
                    Self::event(&lines, &format!("{event} {}", Refusal::from(error).kind));
                };
                match self.mappings.get(&name) {
                    Some(mapping) => mapping.on_gone(report),
                    None => named(&self.channels, &name).on_gone(report),
                }
                Ok(Answer::Done)
            }
            Command::CheckMapping { name } => {
                named(&self.mappings, &name).check()?;
                Ok(Answer::Done)
            }
            Command::Bytes { name } => Ok(Answer::Bytes(self.read(&name)?)),
            Command::Checksum { name } => {
                Ok(Answer::Number(u64::from(crc32fast::hash(&self.read::<u8>(&name)?))))
            }
            Command::Floats { name } => Ok(Answer::Floats(self.read(&name)?)),
            Command::Float { name, last } => {
                let floats: Vec<f32> = self.read(&name)?;
                let float = if last { floats.last() } else { floats.first() };
                Ok(Answer::Text(float.expect("there are bytes").to_string()))
            }
            Command::Touch { name } => {
                let stream = self.stream_of(&name)?;
                let touched = touch(named(&self.mappings, &name), &stream);
                if touched.is_err() {
                    self.replace_stream(stream)?;
                }
                Ok(Answer::Text(touched?.to_string()))
            }
            Command::Pattern { name } => {
                let stream = self.stream_of(&name)?;
                let mapping = named(&self.mappings, &name);
                let byte = |index: u32| (index.wrapping_mul(2_654_435_761) >> 24) as u8;
                let bytes: Vec<u8> = (0..mapping.len() as u32).map(byte).collect();
                mapping.view_mut::<u8, _>(&stream)?.copy_from(&bytes)?;
                stream.synchronize().map(done)
            }
            Command::Copy { name } => {
                let stream = self.stream_of(&name)?;
                let mapping = named(&self.mappings, &name);
                let here = self.ipc.allocate(mapping.device(), mapping.len())?;
                here.view_mut::<u8, _>(&stream)?.copy_from_device(&mapping.view::<u8, _>(&stream)?)?;
                Ok(Answer::Bytes(here.view::<u8, _>(&stream)?.to_vec()?))
            }
            Command::Keep { name, into } => {
                let stream = self.stream_of(&name)?;
                let view = named(&self.mappings, &name).view::<u8, _>(&stream)?;
                named(&self.buffers, &into).view_mut::<u8, _>(&stream)?.copy_from_device(&view).map(done)
            }
            Command::Add { name, value } => self.write::<f32>(&name, |view| view.add(value)).map(done),
            Command::Fill { name, byte } => self.write::<u8>(&name, |view| view.fill_bytes(byte)).map(done),
            Command::FillUnchecked { name, byte } => {
                let stream = self.stream_of(&name)?;
                let mapping = named(&self.mappings, &name);
                unchecked::fill_mapping(&*self.backend, mapping, byte, &stream).map(done)
            }
            Command::BareOpen { handle, device } => self.bare_open(handle, device),
            other => self.carry_out_order(other),
        }
    }

    fn open(&mut self, opening: Opening) -> Result<Answer> {
        let ipc = self.ipc.clone();
        let descriptor = opening.descriptor.parse()?;
        let range = |(address, len)| DeviceRange::new(DeviceOrdinal::new(0), DevicePtr::new(address), len);
        let reservation = opening.reserved_at.map(|at| ipc.reserve_at(range(at))).transpose()?;
        let mut builder = ipc.open(&descriptor);
        if let Some(access) = opening.access {
            builder = builder.access(access);
        }
        if let Some(timeout) = opening.timeout {
            builder = builder.timeout(timeout);
        }
        if opening.reserved {
            builder = builder.reserved();
        }
        if let Some(reservation) = &reservation {
            builder = builder.reserved_in(reservation, 0);
        }
        builder = match opening.copying {
            Copying::Never => builder,
            Copying::IfNeeded => builder.copy(CopyPolicy::StagedIfNeeded),
            Copying::Always => builder.copy(CopyPolicy::Staged),
        };
        let mapping = self.open_at(builder, opening.place)?;
        assert!(mapping.is_copy() || opening.copying != Copying::Always, "`Staged` always copies");
        Ok(self.keep_mapping(opening.name, mapping))
    }

    pub(super) fn open_at(&mut self, builder: OpenBuilder<'_>, place: Place) -> Result<Mapping> {
        match place {
            Place::Home => builder.at_home(),
            Place::Device(device) => builder.on_device(device),
            Place::Stream(device) => builder.on(&self.stream(device)?),
            Place::Map(pairs) => builder.on_mapped_devices(&device_map(&pairs)?),
        }
    }

    pub(super) fn keep_mapping(&mut self, name: String, mapping: Mapping) -> Answer {
        let is_named = mapping.descriptor().is_named();
        let mapped = Mapped {
            address: if is_named { 0 } else { mapping.range().ptr.get() },
            len: mapping.len(),
            device: mapping.device().get(),
            home: mapping.home(),
            at_home: mapping.is_at_home(),
            access: mapping.access(),
            tensor: mapping.layout().map(|layout| (layout.dtype().to_string(), layout.shape().to_vec())),
            tensors: is_named.then(|| mapping.tensors().len()),
            is_copy: mapping.is_copy(),
        };
        self.mappings.insert(name, mapping);
        Answer::Mapping(mapped)
    }

    /// Replaces a stream whose work has failed.
    pub fn replace_stream(&mut self, stream: Stream) -> Result<()> {
        let device = stream.device().get();
        drop((stream, self.streams.remove(&device)));
        self.stream(device).map(drop)
    }

    fn read<T: Element>(&mut self, name: &str) -> Result<Vec<T>> {
        let stream = self.stream_of(name)?;
        match self.mappings.get(name) {
            Some(mapping) => mapping.view::<T, _>(&stream)?.to_vec(),
            None => named(&self.buffers, name).view::<T, _>(&stream)?.to_vec(),
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
            None => write(&mut named(&self.buffers, name).view_mut::<T, _>(&stream)?),
        }
    }

    fn bare_open(&self, handle: BareHandle, device: u32) -> Result<Answer> {
        let device = DeviceOrdinal::new(device);
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
            home_identity: None,
            exporter: handle.exporter,
        };
        let opened = self.backend.open(vec![handle], device, Access::ReadWrite)?;
        let extents = self.backend.extents_of(opened.range, None);
        let extents = extents.map(|extents| extents.len()).map_err(Refusal::from);
        let len = opened.range.len;
        self.backend.close(opened)?;
        Ok(Answer::BareOpened { len, extents })
    }
}

/// Adds one to every float of a mapping and returns the first.
pub fn touch(mapping: &Mapping, stream: &Stream) -> Result<f32> {
    let mut view = mapping.view_mut::<f32, _>(stream)?;
    view.add(1.0)?;
    Ok(view.to_vec()?[0])
}

pub(super) fn device_map<D>(pairs: &[(D, u32)]) -> Result<DeviceMap>
where
    D: Copy + Into<DeviceName>,
{
    pairs.iter().try_fold(DeviceMap::new(), |map, (home, device)| map.insert(*home, *device))
}
