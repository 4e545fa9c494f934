//! What an exporter is told.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use device_ipc_core::{
    Buffer, DeviceMemory, DeviceOrdinal, DeviceOwner, DeviceRange, Export, HandleKind, Hanging, OwnedRegion,
    Region, Result, ShareBuilder,
};

use super::{Agent, Words};

/// Memory whose drop waits for a word.
struct Blocked {
    gate: Receiver<()>,
    _buffer: Buffer,
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // Also goes on where nobody can say the word any longer.
        let _ = self.gate.recv();
    }
}

impl Agent {
    /// `alloc NAME BYTES`
    pub(super) fn allocate(&mut self, words: &Words<'_>) -> Result<String> {
        let buffer = self.ipc().allocate(0, words.number(1) as u64)?;
        self.buffers.insert(words.name(0).to_owned(), Arc::new(buffer));
        Ok(String::new())
    }

    /// `free NAME`
    pub(super) fn free(&mut self, words: &Words<'_>) -> Result<String> {
        self.buffers.remove(words.name(0)).expect("it was allocated");
        Ok(String::new())
    }

    /// `share NAME BYTES [blocked=1] [ready-in=MS] [kind=NUMBER] [buffer=NAME offset=BYTES]`: the descriptor.
    pub(super) fn share(&mut self, words: &Words<'_>) -> Result<String> {
        let (name, bytes) = (words.name(0).to_owned(), words.number(1) as u64);
        let stream = self.stream()?;
        let ready = words.number_of("ready-in").map(Duration::from_millis);
        if let Some(time) = ready {
            stream.delay(time)?;
        }
        fn finish<O: Send + 'static>(builder: ShareBuilder<'_, O>) -> Result<Export> {
            builder.start().map_err(|error| {
                let text = error.error().to_string();
                let forked = matches!(error.error(), device_ipc_core::Error::Forked);
                if forked { device_ipc_core::Error::Forked } else { device_ipc_core::Error::Protocol(text) }
            })
        }
        let ipc = self.ipc().clone();
        let export = if let Some(buffer) = words.setting("buffer") {
            let buffer = self.buffers.get(buffer).expect("it was allocated");
            finish(ipc.share(buffer.slice(words.number_of("offset").unwrap_or(0), bytes)?))?
        } else if words.setting("blocked").is_some() {
            let buffer = ipc.allocate(0, bytes)?;
            let region = buffer.region();
            let (word, gate) = channel();
            self.gates.insert(name.clone(), word);
            // SAFETY: the owner keeps the buffer, which frees its memory when it is dropped and not before.
            let owner = unsafe { OwnedRegion::new(Blocked { gate, _buffer: buffer }, region) };
            finish(ipc.share(owner))?
        } else {
            let kind = words.number_of("kind").map(|kind| HandleKind(kind as u16));
            let buffer =
                kind.map_or_else(|| ipc.allocate(0, bytes), |kind| ipc.allocate_as(0, bytes, kind))?;
            let builder = ipc.share(buffer);
            if ready.is_some() { finish(builder.ready_on(&stream))? } else { finish(builder)? }
        };
        let descriptor = export.descriptor().to_string();
        self.exports.insert(name, export);
        Ok(descriptor)
    }

    /// `share-many NAME COUNT BYTES [from=OFFSET]`: a region over so many allocations of so many bytes each, from that offset
    /// in the first of them on to the end of the last.
    pub(super) fn share_many(&mut self, words: &Words<'_>) -> Result<String> {
        let (count, bytes) = (words.number(1) as u64, words.number(2) as u64);
        let ipc = self.ipc().clone();
        let buffers: Vec<_> = (0..count).map(|_| ipc.allocate(0, bytes)).collect::<Result<_>>()?;
        let first = buffers.iter().map(|buffer| buffer.range().ptr).min().expect("there is one");
        let from = words.number_of("from").unwrap_or(0);
        let whole = DeviceRange::new(DeviceOrdinal::new(0), first, count * bytes);
        let range = whole.slice(from, whole.len - from).expect("it begins inside");
        let region = Region::new(self.backend().info().name, range);
        // SAFETY: the owner keeps all the buffers, which are neighbours: the share would fail where one is missing.
        let owner = unsafe { OwnedRegion::new(buffers, region) };
        let export = ipc.share(owner).start().map_err(device_ipc_core::Error::from)?;
        let descriptor = export.descriptor().to_string();
        self.exports.insert(words.name(0).to_owned(), export);
        Ok(descriptor)
    }

    /// `share-again NAME BYTES buffer=NAME after=MICROSECONDS`: ends an export and shares the same memory so soon after.
    pub(super) fn share_again(&mut self, words: &Words<'_>) -> Result<String> {
        drop(self.exports.remove(words.name(0)));
        let until = Instant::now() + Duration::from_micros(words.number_of("after").unwrap_or(0));
        while Instant::now() < until {
            std::hint::spin_loop();
        }
        self.share(words)
    }

    /// `unblock NAME`: the drop of the owner goes on.
    pub(super) fn unblock(&mut self, words: &Words<'_>) -> Result<String> {
        self.gates.remove(words.name(0)).expect("it is blocked");
        Ok(String::new())
    }

    /// `descriptor NAME`: that of an export, once more.
    pub(super) fn descriptor_of(&mut self, words: &Words<'_>) -> Result<String> {
        Ok(self.export(words).descriptor().to_string())
    }

    /// `holders NAME`: how many, how often opened, and each as `PID:BYTES:PROGRAM`.
    pub(super) fn holders(&mut self, words: &Words<'_>) -> Result<String> {
        let holders = self.export(words).holders();
        let mut text = format!("{} opened={}", holders.iter().len(), holders.opened());
        for holder in holders.iter() {
            text.push_str(&format!(" {}:{}:{}", holder.pid, holder.bytes, holder.program));
        }
        Ok(text)
    }

    /// `wait-released NAME MS`
    pub(super) fn wait_released(&mut self, words: &Words<'_>) -> Result<String> {
        self.export(words).wait_released(words.time(1))?;
        Ok(String::new())
    }

    /// `close NAME MS [free-anyway=1]`
    pub(super) fn close(&mut self, words: &Words<'_>) -> Result<String> {
        let export = self.exports.remove(words.name(0)).expect("it was shared");
        let hanging =
            if words.setting("free-anyway").is_some() { Hanging::FreeAnyway } else { Hanging::Keep };
        export.close_with(words.time(1), hanging)?;
        Ok(String::new())
    }

    /// Bytes in use on device 0.
    pub(super) fn allocated(&self) -> Result<String> {
        let memory: &dyn DeviceMemory = self.backend().memory();
        let info = memory.memory_info(DeviceOrdinal::new(0))?;
        Ok((info.total_bytes - info.free_bytes).to_string())
    }

    /// The calls of the machine.
    pub(super) fn engine(&self) -> String {
        let counters = self.mock.as_ref().expect("only the mock counts").machine().counters();
        counters.iter().map(|(operation, calls)| format!("{operation}={calls} ")).collect()
    }

    fn export(&self, words: &Words<'_>) -> &Export {
        self.exports.get(words.name(0)).expect("it was shared")
    }
}
