//! Importers that open many times, or two exports at a time.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use data_encoding::HEXLOWER;
use device_ipc_conformance::agent::{Answer, touch};
use device_ipc_conformance::check::Refusal;
use device_ipc_core::{Descriptor, Grant, Ipc, Mapping, OwnedRegion, Region, Result, counters};

use super::Agent;
use crate::DEADLINE;

/// Does the work on each of some threads, by their number.
fn on_threads(threads: usize, work: &(impl Fn(usize) -> Result<()> + Sync)) -> Result<Answer> {
    std::thread::scope(|scope| {
        let started: Vec<_> = (0..threads).map(|thread| scope.spawn(move || work(thread))).collect();
        started.into_iter().try_for_each(|thread| thread.join().expect("it does not panic"))
    })?;
    Ok(Answer::Done)
}

impl Agent {
    pub(super) fn keep_under(&mut self, export: &str, name: &str) -> Result<Answer> {
        let server = self.server();
        let export = server.exports.remove(export).expect("it is shared");
        let keeper = server.ipc.keep(name, 1, export)?;
        self.keepers.insert(name.to_owned(), keeper);
        Ok(Answer::Done)
    }

    pub(super) fn keep_next(&mut self, export: &str, name: &str, version: u64, keep_former: bool) -> Answer {
        let export = self.server().exports.remove(export).expect("it is shared");
        let former = self.keepers[name].replace(version, export);
        if keep_former {
            self.former.push(former);
        }
        Answer::Done
    }

    pub(super) fn keep_no_longer(&mut self, name: &str) -> Answer {
        let keeper = self.keepers.remove(name).expect("it is kept");
        self.former.push(keeper.into_export());
        Answer::Done
    }

    pub(super) fn open_reserved_kept(&mut self, name: String, keeper: &str) -> Result<Answer> {
        let server = self.server();
        let found = server.ipc.find(keeper, DEADLINE)?;
        if let Some(mapping) = server.mappings.get_mut(&name) {
            mapping.resume(found.open())?;
            return Ok(Answer::Done);
        }
        let mapping = found.open().reserved().at_home()?;
        server.mappings.insert(name, mapping);
        Ok(Answer::Done)
    }

    pub(super) fn follow(&mut self, name: &str, device: Option<u32>) -> Result<Answer> {
        let stream = device.map(|device| self.server().stream(device)).transpose()?;
        let mapping = self.server().mappings.get_mut(name).expect("the name of a mapping");
        let version = match stream {
            Some(stream) => mapping.follow_on(&stream)?,
            None => mapping.follow()?,
        };
        Ok(Answer::Text(version.map_or_else(|| "none".to_owned(), |version| version.to_string())))
    }

    pub(super) fn open_kept(&mut self, name: &str, threads: usize, times: usize) -> Result<Answer> {
        let ipc = &self.server().ipc;
        on_threads(threads, &|_| {
            for time in 0..times {
                let found = ipc.find(name, DEADLINE)?;
                if !time.is_multiple_of(4) {
                    drop(found.open().at_home()?);
                }
            }
            Ok(())
        })
    }

    pub(super) fn open_until_error(&mut self, descriptor: &Descriptor) -> Result<Answer> {
        let stream = self.server().stream(0)?;
        for round in 0_u64.. {
            let mapping = open(&self.server().ipc, descriptor, Duration::from_secs(5))?;
            if round.is_multiple_of(4)
                && let Err(error) = touch(&mapping, &stream)
            {
                self.server().replace_stream(stream)?;
                return Err(error);
            }
        }
        Ok(Answer::Done)
    }

    pub(super) fn share_parts(&mut self, name: &str, count: u64, ready_on: Option<u32>) -> Result<Answer> {
        const PART: u64 = 256;
        let server = self.server();
        let buffer = Arc::new(server.ipc.allocate(0, count * PART)?);
        let stream = ready_on.map(|device| server.stream(device)).transpose()?;
        let backend = server.ipc.backend().info().name;
        let mut descriptors = String::new();
        for part in 0..count {
            let range = buffer.range().slice(part * PART, PART).expect("it is in the buffer");
            // SAFETY: the buffer keeps it allocated.
            let owned = unsafe { OwnedRegion::new(Arc::clone(&buffer), Region::new(backend, range)) };
            let builder = server.ipc.share(owned).lease_ahead();
            let export = match &stream {
                Some(stream) => builder.ready_on(stream).start()?,
                None => builder.start()?,
            };
            let _ = write!(descriptors, "{} ", export.descriptor());
            server.exports.insert(format!("{name}{part}"), export);
        }
        Ok(Answer::Text(descriptors))
    }

    pub(super) fn grant(&mut self, name: &str, limit: Duration) -> Result<Answer> {
        let grant = self.server().exports[name].grant(limit)?;
        Ok(Answer::Text(HEXLOWER.encode(&grant.to_bytes())))
    }

    pub(super) fn grant_of(&mut self, name: &str, limit: Duration) -> Result<Answer> {
        let grant = self.server().mappings[name].grant(limit)?;
        Ok(Answer::Text(HEXLOWER.encode(&grant.to_bytes())))
    }

    pub(super) fn open_by(&mut self, name: String, descriptor: &Descriptor, grant: &str) -> Result<Answer> {
        let grant = decoded(grant)?;
        let mapping = self.server().ipc.open(descriptor).grant(&grant)?.at_home()?;
        self.server().mappings.insert(name, mapping);
        Ok(Answer::Done)
    }

    pub(super) fn replace_by(&mut self, name: &str, descriptor: &Descriptor, grant: &str) -> Result<Answer> {
        let grant = decoded(grant)?;
        let server = self.server();
        let next = server.ipc.open(descriptor).grant(&grant)?;
        let mapping = server.mappings.get_mut(name).expect("the name of a mapping");
        if mapping.is_suspended() {
            mapping.resume(next)?
        } else {
            mapping.replace(next)?
        }
        Ok(Answer::Done)
    }

    pub(super) fn peek(&mut self, name: String, descriptor: &Descriptor) -> Result<Answer> {
        let mapping = self.server().ipc.open(descriptor).at_home()?;
        let address = mapping.range().ptr.get() as *const f32;
        // SAFETY: memory of the mock is memory of the host, mapped in this process as long as the lease lasts.
        let first = unsafe { address.read_volatile() };
        self.server().mappings.insert(name, mapping);
        Ok(Answer::Text(first.to_string()))
    }

    pub(super) fn two_opens(
        &mut self,
        (one, one_timeout): (&Descriptor, Duration),
        (other, other_timeout): (&Descriptor, Duration),
    ) -> Answer {
        let ipc = &self.server().ipc;
        let timed = |descriptor: &Descriptor, timeout: Duration| {
            let begin = Instant::now();
            let result = open(ipc, descriptor, timeout).map(drop);
            let name = result.map_or_else(|error| Refusal::from(error).kind, |()| "Opened".to_owned());
            format!("{name} {}", begin.elapsed().as_millis())
        };
        let (one, other) = std::thread::scope(|scope| {
            let asked = counters().requests_total;
            let one = scope.spawn(|| timed(one, one_timeout));
            while counters().requests_total == asked && !one.is_finished() {
                std::thread::yield_now();
            }
            let other = timed(other, other_timeout);
            (one.join().expect("it does not panic"), other)
        });
        Answer::Text(format!("{one} {other}"))
    }
}

pub(super) fn give_back(grant: &str) -> Result<Answer> {
    decoded(grant)?.give_back();
    Ok(Answer::Done)
}

fn decoded(grant: &str) -> Result<Grant> {
    Grant::from_bytes(&HEXLOWER.decode(grant.as_bytes()).expect("the test sends hex"))
}

pub(super) fn open(ipc: &Ipc, descriptor: &Descriptor, timeout: Duration) -> Result<Mapping> {
    ipc.open(descriptor).timeout(timeout).at_home()
}
