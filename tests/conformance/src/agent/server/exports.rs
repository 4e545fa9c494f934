//! Buffers and exports.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use device_ipc_core::backend::HandleKind;
use device_ipc_core::{
    Access, Buffer, DeviceOrdinal, DeviceOwner, DeviceRange, Export, HolderPolicy, Region, Result,
};

use super::{Server, gate_in, named, taken};
use crate::agent::{Answer, Command, Gating, Sharing};
use crate::unchecked;

/// Memory whose drop blocks until its gate opens.
struct Blocked {
    gate: Receiver<()>,
    _buffer: Buffer,
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // A gate that was dropped is open.
        let _ = self.gate.recv();
    }
}

impl Server {
    pub(super) fn carry_out_export(&mut self, command: Command) -> Result<Answer> {
        let done = |()| Answer::Done;
        match command {
            Command::Allocate { name, len, device, kind, bytes } => {
                let buffer = self.allocate(device, len, kind)?;
                if let Some(bytes) = bytes {
                    let stream = self.stream(device)?;
                    buffer.view_mut::<u8, _>(&stream)?.copy_from(&bytes)?;
                    stream.synchronize()?;
                }
                self.buffers.insert(name, Arc::new(buffer));
                Ok(Answer::Done)
            }
            Command::Free { name } => {
                taken(&mut self.buffers, &name);
                Ok(Answer::Done)
            }
            Command::Share(sharing) => self.share(&sharing),
            Command::ShareMany { name, count, len, from } => self.share_many(name, count, len, from),
            Command::ShareBorrowed { name, of } => {
                let region = named(&self.buffers, &of).region();
                let export = unchecked::share_borrowed(&self.ipc, region).start()?;
                Ok(self.keep_export(name, export))
            }
            Command::Unblock { name } => {
                taken(&mut self.gates, &name);
                Ok(Answer::Done)
            }
            Command::Descriptor { name } => {
                let descriptor = match self.exports.get(&name) {
                    Some(export) => export.descriptor(),
                    None => named(&self.mappings, &name).descriptor(),
                };
                Ok(Answer::Descriptor(Box::new(descriptor.clone())))
            }
            Command::Holders { name } => {
                let holders = named(&self.exports, &name).holders();
                let mut text = format!("{} opened={}", holders.iter().len(), holders.opened());
                for holder in holders.iter() {
                    text.push_str(&format!(" {}:{}:{}", holder.pid, holder.bytes, holder.program));
                }
                Ok(Answer::Text(text))
            }
            Command::WaitReleased { name, timeout } => {
                named(&self.exports, &name).wait_released(timeout).map(done)
            }
            Command::Close { name, timeout, free_anyway } => {
                let holders = if free_anyway { HolderPolicy::FreeAnyway } else { HolderPolicy::Keep };
                Ok(done(taken(&mut self.exports, &name).close_with(timeout, holders)?))
            }
            Command::Drop { names } => {
                for name in names {
                    let known = self.mappings.remove(&name).is_some() | self.exports.remove(&name).is_some();
                    assert!(known, "there is no {name:?}");
                }
                Ok(Answer::Done)
            }
            other => self.carry_out_import(other),
        }
    }

    fn allocate(&self, device: u32, len: u64, kind: Option<u16>) -> Result<Buffer> {
        match kind {
            Some(kind) => self.ipc.allocate_for(device, len, HandleKind(kind)),
            None => self.ipc.allocate(device, len),
        }
    }

    fn share(&mut self, sharing: &Sharing) -> Result<Answer> {
        if let Some(pause) = sharing.after_drop {
            drop(self.exports.remove(&sharing.name));
            let until = Instant::now() + Duration::from_micros(pause);
            while Instant::now() < until {
                std::hint::spin_loop();
            }
        }
        if sharing.gate != Gating::Open {
            let gate = gate_in(&self.stream(0)?, sharing.gate)?;
            self.closed.extend(gate);
        }
        let of_mapping = sharing.of.as_ref().and_then(|of| self.mappings.get(of));
        let export = if let Some(mapping) = of_mapping {
            let region = Region::new(self.backend.info().name, mapping.range());
            self.start_share(unchecked::not_owned(region), sharing)?
        } else if let Some(of) = &sharing.of {
            let buffer = named(&self.buffers, of);
            let len = sharing.len.unwrap_or_else(|| buffer.range().len - sharing.offset);
            let part = buffer.slice(sharing.offset, len)?;
            self.start_share(part, sharing)?
        } else {
            let len = sharing.len.expect("new memory has a length");
            let buffer = self.allocate(0, len, sharing.kind)?;
            if sharing.blocked {
                let region = buffer.region();
                let (open, gate) = channel();
                self.gates.insert(sharing.name.clone(), open);
                self.start_share(unchecked::owned(Blocked { gate, _buffer: buffer }, region), sharing)?
            } else {
                self.start_share(buffer, sharing)?
            }
        };
        Ok(self.keep_export(sharing.name.clone(), export))
    }

    fn start_share<O: DeviceOwner>(&mut self, owner: O, sharing: &Sharing) -> Result<Export> {
        let ready = sharing.ready_on.or((sharing.gate != Gating::Open).then_some(0));
        let stream = ready.map(|device| self.stream(device)).transpose()?;
        let builder = self.ipc.share(owner).access(sharing.access.unwrap_or(Access::ReadWrite));
        Ok(match &stream {
            Some(stream) => builder.ready_on(stream).start()?,
            None => builder.start()?,
        })
    }

    fn share_many(&mut self, name: String, count: u64, len: u64, from: u64) -> Result<Answer> {
        let buffers: Vec<_> = (0..count).map(|_| self.ipc.allocate(0, len)).collect::<Result<_>>()?;
        let first = buffers.iter().map(|buffer| buffer.range().ptr).min().expect("at least one allocation");
        let whole = DeviceRange::new(DeviceOrdinal::new(0), first, count * len);
        let range = whole.slice(from, whole.len - from).expect("the offset is inside");
        let region = Region::new(self.backend.info().name, range);
        // The share fails unless the buffers are adjacent.
        let export = self.ipc.share(unchecked::owned(buffers, region)).start()?;
        Ok(self.keep_export(name, export))
    }

    pub(super) fn keep_export(&mut self, name: String, export: Export) -> Answer {
        let descriptor = export.descriptor().clone();
        self.exports.insert(name, export);
        Answer::Descriptor(Box::new(descriptor))
    }
}
