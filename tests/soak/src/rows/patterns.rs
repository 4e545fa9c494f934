//! Bundles, rings and channels.

use std::os::fd::AsFd;

use anyhow::{Result, ensure};
use device_ipc::{Dtype, Message, TensorLayout};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{ELEMENTS, Exporter};
use crate::TIMEOUT;

/// Waits until the descriptor of a reader or a writer is readable.
pub(crate) fn wait_readable(object: &impl AsFd) -> Result<()> {
    let timeout = Timespec::try_from(TIMEOUT)?;
    let readable = poll(&mut [PollFd::new(object, PollFlags::IN)], Some(&timeout))?;
    ensure!(readable == 1, "a descriptor did not become readable within {TIMEOUT:?}");
    Ok(())
}

impl Exporter {
    pub(super) fn bundle(&mut self) -> Result<()> {
        let bytes = (ELEMENTS * size_of::<f32>()) as u64;
        let layout = || TensorLayout::contiguous(Dtype::F32, [ELEMENTS as u64]);
        let mut bundle = self.ipc.tensors();
        for memory in ["a", "b"] {
            let buffer = self.ipc.allocate(self.device, 2 * bytes)?;
            buffer.view_mut::<f32, _>(&self.stream)?.copy_from(&[self.value(); 2 * ELEMENTS])?;
            let id = bundle.memory(buffer);
            bundle.tensor(format!("{memory}.0"), id, 0, layout()?)?;
            bundle.tensor(format!("{memory}.1"), id, bytes, layout()?)?;
        }
        let export = self.ipc.share_all(bundle).ready_on(&self.stream).start()?;
        self.importer.ask(&format!("bundle {} {}", self.value(), export.descriptor()))?;
        export.wait_released(TIMEOUT)?;
        Ok(export.close(TIMEOUT)?)
    }

    /// Hands `count` publications over through a new ring.
    pub(super) fn ring(&mut self, count: u64) -> Result<u64> {
        let bytes = (ELEMENTS * size_of::<f32>()) as u64;
        let mut ring = self.ipc.ring(self.ipc.allocate(self.device, 2 * bytes)?).slots(2).start()?;
        let first = self.value();
        self.importer.send(&format!("ring {first} {count} {}", ring.descriptor()))?;
        ring.wait_readers(1, TIMEOUT)?;
        for number in 0..count {
            if number % 2 == 1 {
                while ring.try_write(&self.stream)?.is_none() {
                    wait_readable(&ring)?;
                }
            }
            let mut slot = ring.write(&self.stream)?;
            let elements = [first + number as f32; ELEMENTS];
            slot.view_mut::<f32, _>(&self.stream)?.copy_from(&elements)?;
            slot.publish()?;
        }
        self.importer.answer()?;
        ring.close(TIMEOUT)?;
        Ok(count)
    }

    /// Hands `count` messages over through a new channel.
    pub(super) fn channel(&mut self, count: u64) -> Result<u64> {
        let name = format!("device-ipc-soak-{}", std::process::id());
        let listener = self.ipc.listen(&name).start()?;
        self.importer.send(&format!("channel {name}"))?;
        let channel = listener.accept(TIMEOUT)?;
        let first = self.done;
        for _ in 0..count {
            let export = self.ipc.share(self.new_tensor()?).start()?;
            let message = Message::new()
                .bytes(self.value().to_string().into_bytes())
                .export(&export)
                .ready_on(&self.stream);
            channel.send(message, TIMEOUT)?;
            self.done += 1;
        }
        self.done = first;
        channel.close(TIMEOUT)?;
        self.importer.answer()?;
        Ok(count)
    }
}
