//! Calls that wait, made in the library's callbacks.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use device_ipc_conformance::Lines;
use device_ipc_conformance::agent::{Answer, Server};
use device_ipc_conformance::check::Refusal;
use device_ipc_core::{
    Channel, Dtype, Error, Export, Ipc, Listener, Mapping, Result, Ring, RingReader, TensorLayout,
    close_unused, shutdown,
};

use super::Agent;
use crate::DEADLINE;

/// One of each thing that can be waited for.
struct Waits {
    closed: Export,
    waited: Export,
    bundle: Export,
    ring: Ring,
    reader: RingReader,
    mapping: Mapping,
    listener: Listener,
    channels: [Channel; 2],
}

impl Waits {
    fn new(ipc: &Ipc) -> Result<Self> {
        let share = || ipc.share(ipc.allocate(0, 4096)?).start().map_err(Error::from);
        let waited: Export = share()?;
        let mut bundle = ipc.tensors();
        let layout = TensorLayout::contiguous(Dtype::U8, [4096])?;
        bundle.owned("x", ipc.allocate(0, 4096)?, Some(layout))?;
        let ring = ipc.ring(ipc.allocate(0, 4096)?).start()?;
        let name = format!("waits-{}", std::process::id());
        let listener = ipc.listen(&name).start()?;
        let connecting = ipc.clone();
        let connected = std::thread::spawn(move || connecting.connect(&name).start());
        let accepted = listener.accept(Duration::from_secs(10))?;
        Ok(Self {
            closed: share()?,
            mapping: ipc.open(waited.descriptor()).at_home()?,
            waited,
            bundle: ipc.share_all(bundle).start().map_err(Error::from)?,
            reader: ipc.open_ring(ring.descriptor()).at_home()?,
            ring,
            listener,
            channels: [accepted, connected.join().expect("it connects")?],
        })
    }

    /// Makes every call that waits and reports each result.
    fn make(self, time: Duration, lines: &Lines) {
        let Self { closed, waited, bundle, ring, mut reader, mapping, listener, channels: [one, other] } =
            self;
        let began = Instant::now();
        let said = |call: &str, result: Result<()>| {
            let outcome = result.map_or_else(|error| Refusal::from(error).kind, |()| "Done".into());
            Server::event(lines, &format!("waited {call} {outcome}"));
        };
        said("wait_opened", waited.wait_opened(2, time));
        said("timelines", waited.timelines(1, time).map(drop));
        said("wait_released", waited.wait_released(time));
        said("bundle.wait_released", bundle.wait_released(time));
        said("bundle.close", bundle.close(time).map_err(Into::into));
        said("wait_readers", ring.wait_readers(2, time));
        said("ring.next", reader.next(time).map(drop));
        said("ring.close", ring.close(time));
        if let Ok(timeline) = mapping.timeline() {
            said("wait_now", timeline.wait_now(1, time));
        }
        said("accept", listener.accept(time).map(drop));
        said("receive", one.receive(time).map(drop));
        one.send(device_ipc_core::Message::new().bytes(b"x".as_slice()), time).expect("it does not wait");
        said("channel.close", one.close(time));
        said("export.close", closed.close(time).map_err(Into::into));
        said("close_unused", close_unused(time));
        said("shutdown", shutdown(time));
        // A wait of no time only polls.
        said("look", waited.wait_released(Duration::ZERO));
        drop(other);
        Server::event(lines, &format!("all-waited {}", began.elapsed() < time));
    }
}

impl Agent {
    pub(super) fn hold_worker(&mut self, name: &str) -> Answer {
        let (hold, held) = channel::<()>();
        let lines = Arc::clone(&self.lines);
        self.server().mappings[name].on_dropped(move || {
            Server::event(&lines, "worker-held");
            // Ends with the drop of the other end.
            let _ = held.recv_timeout(DEADLINE);
        });
        self.worker_hold = Some(hold);
        Answer::Done
    }

    pub(super) fn wait_in_callback(&mut self, name: &str, time: Duration) -> Result<Answer> {
        let lines = Arc::clone(&self.lines);
        let server = self.server();
        let waits = Waits::new(&server.ipc)?;
        if let Some(mapping) = server.mappings.get(name) {
            mapping.on_gone(move |_| waits.make(time, &lines));
        } else {
            let waits = std::sync::Mutex::new(Some(waits));
            server.exports[name].on_change(move || {
                if let Some(waits) = waits.lock().expect("no thread panics").take() {
                    waits.make(time, &lines);
                }
            });
        }
        Ok(Answer::Done)
    }
}
