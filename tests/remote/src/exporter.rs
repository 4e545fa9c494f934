//! The exporter's process.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use device_ipc_core::backend::Gate;
use device_ipc_core::{Dtype, Export, HolderPolicy, Ipc, Result, Ring, Stream, TensorLayout, TestClock};
use device_ipc_test_process::serve;

use crate::backend::{fail_registration, on_backend, remote};
use crate::engine::SocketEngine;
use crate::{Load, argument, contents, open_files, own_address, report, resources};

/// The element offset of named tensors, which no copy may ignore.
const ELEMENT_OFFSET: usize = 8;

/// Shares memory as the test requests, line by line.
pub fn exporter(load: Load) {
    let mut state = None;
    let clock = TestClock::take();
    serve(|request, words| {
        let words: Vec<_> = words.split(' ').collect();
        match request {
            "load" => match start(load, &words) {
                Ok(started) => format!("loaded at {:?}", state.insert(started).address),
                Err(reason) => reason,
            },
            // advance MS: the time of the clock's advance.
            "advance" => {
                clock.advance(Duration::from_millis(argument(&words, 0)));
                "advanced".into()
            }
            "files" => open_files().to_string(),
            "resources" => resources(),
            "registered" => SocketEngine::registered().to_string(),
            "fail-registration" => {
                fail_registration();
                "set".into()
            }
            // pace MS: the time that the engine of sockets takes for each MiB from now on.
            "pace" => {
                SocketEngine::set_pace(Duration::from_millis(argument(&words, 0)));
                "set".into()
            }
            _ => {
                let state = state.as_mut().expect("load comes first");
                state.answer(request, &words).unwrap_or_else(|error| report(&error))
            }
        }
    });
}

struct Exporter {
    ipc: Ipc,
    address: Option<SocketAddr>,
    stream: Stream,
    gate: Option<Gate>,
    exports: HashMap<String, Export>,
    rings: HashMap<String, Ring>,
}

/// Listens, or does not with the argument `deaf`.
fn start(load: Load, words: &[&str]) -> Result<Exporter, String> {
    let mut remote = remote(load)?;
    if words != ["deaf"] {
        remote = remote.listen(&own_address()).map_err(|error| report(&error))?;
    }
    let address = remote.address();
    let ipc = on_backend(Ipc::builder().remote(remote))?;
    let stream = ipc.create_stream(0).map_err(|error| report(&error))?;
    Ok(Exporter { ipc, address, stream, gate: None, exports: HashMap::new(), rings: HashMap::new() })
}

impl Exporter {
    fn answer(&mut self, request: &str, words: &[&str]) -> Result<String> {
        let name = words[0].to_owned();
        Ok(match request {
            // share NAME LENGTH SEED [blocked]: bytes in the middle of an allocation, ready when the gate is opened.
            "share" => {
                let (length, seed) = (argument::<usize>(words, 1), argument(words, 2));
                let around = 4096;
                let buffer = Arc::new(self.ipc.allocate(0, (length + 2 * around) as u64)?);
                let bytes = [vec![0xee; around], contents(length, seed), vec![0xee; around]].concat();
                let mut owned = Arc::clone(&buffer);
                drop(buffer);
                let writable = Arc::get_mut(&mut owned).expect("the only reference");
                if words.len() > 3 {
                    self.gate = Some(self.stream.gate()?);
                }
                writable.view_mut::<u8, _>(&self.stream)?.copy_from(&bytes)?;
                if self.gate.is_none() {
                    // Short timeouts of importers begin after this.
                    self.stream.synchronize()?;
                }
                let part = owned.slice(around as u64, length as u64)?;
                let share = self.ipc.share(part).ready_on(&self.stream);
                self.keep(name, share.start()?)
            }
            "open-gate" => {
                self.gate = None;
                "opened".into()
            }
            // dict NAME TENSORS BYTES: tensors in ten allocations, each with the seed of its number and an element offset.
            "dict" => {
                let (tensors, bytes) = (argument::<usize>(words, 1), argument::<usize>(words, 2));
                let each = tensors.div_ceil(10);
                let stride = (ELEMENT_OFFSET + bytes).next_multiple_of(512);
                let mut set = self.ipc.tensors();
                for first in (0..tensors).step_by(each) {
                    let buffer = self.ipc.allocate(0, (each * stride) as u64)?;
                    let members = first..(first + each).min(tensors);
                    let mut all = vec![0xee; each * stride];
                    for (index, tensor) in members.clone().enumerate() {
                        let start = index * stride + ELEMENT_OFFSET;
                        all[start..][..bytes].copy_from_slice(&contents(bytes, tensor as u8));
                    }
                    buffer.view_mut::<u8, _>(&self.stream)?.copy_from(&all)?;
                    let memory = set.memory(buffer);
                    for (index, tensor) in members.enumerate() {
                        let layout = TensorLayout::contiguous(Dtype::U8, [bytes as u64])?;
                        let layout = layout.with_element_offset(ELEMENT_OFFSET as u64)?;
                        set.tensor(format!("t{tensor}"), memory, (index * stride) as u64, layout)?;
                    }
                }
                self.keep(name, self.ipc.share_all(set).ready_on(&self.stream).start()?)
            }
            // ring NAME SLOTS SLOT_BYTES
            "ring" => {
                let (slots, bytes) = (argument::<u32>(words, 1), argument::<u64>(words, 2));
                let memory = self.ipc.allocate(0, u64::from(slots) * bytes)?;
                let ring = self.ipc.ring(memory).slots(slots).start()?;
                let descriptor = ring.descriptor().to_string();
                self.rings.insert(name, ring);
                descriptor
            }
            // publish NAME COUNT TIMEOUT_MS: each slot has the seed of its sequence.
            "publish" => {
                let ring = self.rings.get_mut(&name).expect("there is a ring");
                let (count, timeout) = (argument::<u64>(words, 1), Duration::from_millis(argument(words, 2)));
                for published in 0..count {
                    if let Err(error) = ring.wait_writable(timeout) {
                        return Ok(format!("{published} published, {}", report(&error)));
                    }
                    let mut slot = ring.write(&self.stream)?;
                    let bytes = contents(slot.range().len as usize, slot.sequence() as u8);
                    slot.view_mut::<u8, _>(&self.stream)?.copy_from(&bytes)?;
                    slot.publish()?;
                }
                format!("{count} published")
            }
            "connections" => self.connections(),
            "readers" => self.rings[&name].readers().to_string(),
            "dismiss" => {
                let ring = &self.rings[&name];
                let behind = ring.readers_behind();
                behind.iter().filter(|reader| ring.dismiss(reader.lease)).count().to_string()
            }
            "close-ring" => {
                let ring = self.rings.remove(&name).expect("there is a ring");
                match ring.close(Duration::from_millis(argument(words, 1))) {
                    Ok(()) => "closed".into(),
                    Err(error) => report(&error),
                }
            }
            "holders" => {
                let holders = match self.rings.get(&name) {
                    Some(ring) => ring.holders(),
                    None => self.exports[&name].holders(),
                };
                holders
                    .iter()
                    .map(|holder| format!("{} {}", holder.pid, holder.program))
                    .collect::<Vec<_>>()
                    .join(", ")
            }
            "drop" => {
                drop(self.exports.remove(&name));
                "dropped".into()
            }
            // close NAME TIMEOUT_MS, and also `free`, which frees the memory although others hold it
            "close" | "free" => {
                let policy = if request == "free" { HolderPolicy::FreeAnyway } else { HolderPolicy::Keep };
                let export = self.exports.remove(&name).expect("it is shared");
                match export.close_with(Duration::from_millis(argument(words, 1)), policy) {
                    Ok(()) => "closed".into(),
                    Err(error) => report(error.error()),
                }
            }
            other => unreachable!("{other}"),
        })
    }

    /// Returns the ports of the importers that are connected.
    fn connections(&self) -> String {
        const ESTABLISHED: &str = "01";
        let own = self.address.expect("it listens");
        let SocketAddr::V4(own) = own else { panic!("an IPv4 address") };
        // In the order of the bytes in memory.
        let own = format!("{:08X}:{:04X}", u32::from_ne_bytes(own.ip().octets()), own.port());
        let table = std::fs::read_to_string("/proc/self/net/tcp").expect("the system has TCP");
        let mut ports = Vec::new();
        for line in table.lines() {
            let fields: Vec<_> = line.split_whitespace().collect();
            if fields[1] == own && fields[3] == ESTABLISHED {
                ports.push(fields[2].rsplit(':').next().expect("a port").to_owned());
            }
        }
        ports.sort_unstable();
        // The table may change while it is read.
        ports.dedup();
        ports.join(" ")
    }

    fn keep(&mut self, name: String, export: Export) -> String {
        let descriptor = export.descriptor().to_string();
        self.exports.insert(name, export);
        descriptor
    }
}
