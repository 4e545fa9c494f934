//! The other side of a test: does what it is told, a line at a time, and answers `ok …` or `err VARIANT …`.
//!
//! What it is not asked for comes as `event …`.

mod bundles;
mod callbacks;
mod channels;
mod exports;
mod forked;
mod hostile;
mod imports;
mod process;
mod rings;
mod staged;
mod timelines;

use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use device_ipc_ascend::AscendBackend;
use device_ipc_core::{
    AllowList, Buffer, BundleExport, BundleMapping, Descriptor, DeviceIpc, DeviceOrdinal, Error, Export, Ipc,
    Mapping, Result, Stream, Timeline, Unavailable,
};
use device_ipc_cuda::CudaBackend;
use device_ipc_mock::MockBackend;
use rustix::process::Signal;

use crate::raw::Connection;
use crate::{ASCEND, CUDA};

/// The argument of an agent that an agent's `exec` runs.
const RUN_AGAIN: &str = "again";

/// What an agent has.
#[derive(Default)]
struct Agent {
    ipc: Option<Ipc>,
    backend: Option<Arc<dyn DeviceIpc>>,
    /// The same, where it is the mock.
    mock: Option<Arc<MockBackend>>,
    stream: Option<Stream>,
    buffers: HashMap<String, Arc<Buffer>>,
    exports: HashMap<String, Export>,
    mappings: HashMap<String, Mapping>,
    timelines: HashMap<String, Timeline>,
    /// Let owners' drops go on.
    gates: HashMap<String, Sender<()>>,
    connections: Vec<Connection>,
    swarm: Vec<rustix::process::Pid>,
    /// What is kept open for others that were sent away.
    descriptors: Vec<std::os::fd::OwnedFd>,
    sockets_before_connect: Vec<String>,
    rings: rings::Rings,
    channels: channels::Channels,
    bundles: HashMap<String, BundleExport>,
    open_bundles: HashMap<String, BundleMapping>,
}

/// A command's words: the names first, then `key=value`.
struct Words<'a> {
    names: Vec<&'a str>,
    settings: HashMap<&'a str, &'a str>,
}

/// Serves until its input ends.
pub fn run() {
    // Killed with the test that started it, also where the test itself is killed.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).expect("a signal");
    let mut agent = Agent::default();
    if std::env::args().nth(1).as_deref() == Some(RUN_AGAIN) {
        say("ok");
    }
    for line in std::io::stdin().lock().lines() {
        let Ok(line) = line else { return };
        let answer = agent.answer(&line);
        say(&match answer {
            Ok(text) => format!("ok {text}"),
            Err(error) => format!("err {} {}", variant(&error), error.to_string().replace('\n', " ")),
        });
    }
}

/// Writes a line at once.
fn say(line: &str) {
    let mut stdout = std::io::stdout().lock();
    let _ = stdout.write_all(format!("{line}\n").as_bytes());
    let _ = stdout.flush();
}

/// The name of the error's variant.
fn variant(error: &Error) -> String {
    let debug = format!("{error:?}");
    let end = debug.find(|c: char| !c.is_alphanumeric()).unwrap_or(debug.len());
    debug[..end].to_owned()
}

impl Agent {
    fn answer(&mut self, line: &str) -> Result<String> {
        let mut words = line.split_whitespace();
        let command = words.next().unwrap_or_default();
        let words = Words::of(words);
        match command {
            "nothing" => Ok(String::new()),
            "ipc" => self.make_ipc(&words),
            "alloc" => self.allocate(&words),
            "free" => self.free(&words),
            "share" => self.share(&words),
            "share-many" => self.share_many(&words),
            "share-again" => self.share_again(&words),
            "unblock" => self.unblock(&words),
            "holders" => self.holders(&words),
            "wait-released" => self.wait_released(&words),
            "close" => self.close(&words),
            "open" => self.open(&words),
            "open-with-stream" => self.open_with_stream(&words),
            "touch" => self.touch(&words),
            "last-float" => self.last_float(&words),
            "on-gone" => self.on_gone(&words),
            "wait-in" => self.wait_in_callback(&words),
            "release" => self.release(&words),
            "drop" => self.drop_guard(&words),
            "descriptor" => self.descriptor_of(&words),
            "timeline" => self.take_timeline(&words),
            "timelines" => self.take_timelines(&words),
            "signal" => self.signal(&words),
            "signal-now" => self.signal_now(&words),
            "wait" => self.wait(&words),
            "wait-now" => self.wait_now(&words),
            "check" => self.check_timeline(&words),
            "has-timelines" => Ok(self.backend().capabilities(DeviceOrdinal::new(0))?.timelines.to_string()),
            "forget-timelines" => self.forget_timelines(),
            "delay" => self.delay(&words),
            "scribble" => Ok(process::scribble(&words)),
            "rounds" => self.rounds(&words),
            "warm-up" => self.warm_up(),
            "first-float" => self.first_float(&words),
            "clear" => self.clear(&words),
            "threads" => self.threads(&words),
            "open-until-error" => self.open_until_error(&words),
            "two-opens" => self.two_opens(&words),
            "cache" => set_cache(&words),
            "close-unused" => device_ipc_core::close_unused(words.time(0)).map(|()| String::new()),
            "close-mappings-of" => close_mappings_of(&words),
            "shutdown" => device_ipc_core::shutdown(words.time(0)).map(|()| String::new()),
            "list" => process::list(&words),
            "counters" => Ok(process::counters()),
            "engine" => Ok(self.engine()),
            "allocated" => self.allocated(),
            "sync" => self.stream()?.synchronize().map(|()| String::new()),
            "become" => Ok(process::become_user(&words)),
            "leave-network" => Ok(process::leave_network()),
            "identity" => Ok(format!("{:?}", device_ipc_core::ProcessIdentity::current()?)),
            "connect-many" => self.connect_many(&words),
            "disconnect" => self.disconnect(),
            "swarm" => self.swarm(&words),
            "end-swarm" => self.end_swarm(),
            "share-by-second-copy" => Ok(crate::second::share_by_second_copy()),
            "fork" => self.fork(),
            "limit-threads" => Ok(process::limit_threads(&words)),
            "limit-descriptors" => Ok(process::limit_descriptors(&words)),
            "copy" => self.copy(&words),
            "copy-limits" => staged::limits(&words),
            "share-borrowed" => self.share_borrowed(&words),
            "pattern" => self.pattern(&words),
            "sum" => self.sum(&words),
            "ring" => self.ring(&words),
            "ring-readers" => self.ring_readers(&words),
            "ring-count" => self.ring_count(),
            "ring-publish" => self.ring_publish(&words),
            "ring-publish-now" => self.ring_publish_now(&words),
            "ring-write" => self.ring_write(),
            "ring-writable" => self.ring_writable(&words),
            "ring-behind" => self.ring_behind(),
            "ring-dismiss" => self.ring_dismiss(&words),
            "ring-close" => self.ring_close(&words),
            "ring-join" => self.ring_join(&words),
            "ring-next" => self.ring_next(),
            "ring-release" => self.ring_release(),
            "ring-release-elsewhere" => self.ring_release_elsewhere(),
            "ring-view" => self.ring_view(),
            "ring-check" => self.ring_check(),
            "ring-reader-check" => self.ring_reader_check(),
            "ring-consume" => self.ring_consume(),
            "ring-drop-slots" => self.ring_drop_slots(),
            "ring-leave" => self.ring_leave(),
            "ring-read" => self.ring_read(&words),
            "ring-forget" => self.ring_forget(),
            "listen" => self.listen(&words),
            "unlisten" => self.unlisten(&words),
            "accept" => self.accept(&words),
            "connect" => self.connect(&words),
            "send" => self.send_message(&words),
            "receive" => self.receive(&words),
            "open-received" => self.open_received(&words),
            "discard" => self.discard(&words),
            "close-channel" => self.close_channel(&words),
            "drop-channel" => self.drop_channel(&words),
            "channel-on-gone" => self.channel_on_gone(&words),
            "squat" => self.squat(&words),
            "squatted" => self.squatted(),
            "share-bundle" => self.share_bundle(&words),
            "open-bundle" => self.open_bundle(&words),
            "fill-tensor" => self.fill_tensor(&words),
            "ends-of-tensor" => self.ends_of_tensor(&words),
            "drop-bundle" => self.drop_bundle(&words),
            "close-bundle" => self.close_bundle(&words),
            "open-received-bundle" => self.open_received_bundle(&words),
            "exec" => process::run_again(),
            "drop-capabilities" => Ok(process::drop_capabilities()),
            "opened-by" => self.opened_by(&words),
            "deny" => Ok(hostile::deny(&words)),
            "linger" => self.linger(&words),
            "converse" => self.converse(&words),
            "remember-sockets" => self.remember_sockets(),
            "flood-channel" => self.flood_channel(&words),
            "on-change" => self.on_change(&words),
            "alarms" => self.alarms(&words),
            "timed-list" => hostile::timed_list(&words),
            "fork-and-exit" => Ok(hostile::fork_and_exit()),
            "exit" => std::process::exit(0),
            other => panic!("the agent knows no {other:?}"),
        }
    }

    fn make_ipc(&mut self, words: &Words<'_>) -> Result<String> {
        if let Some(machine) = words.setting("machine") {
            let loaded = self.load(machine);
            loaded.unwrap_or_else(|error| panic!("{machine}: {error}"));
            self.stream = None;
        }
        let mut allow = AllowList::own_user();
        if let Some(uid) = words.setting("allow-uid") {
            allow = allow.user(uid.parse().expect("a number"));
        }
        if let Some(gid) = words.setting("allow-gid") {
            allow = allow.group(gid.parse().expect("a number"));
        }
        let mut builder = Ipc::builder().allow(allow);
        if let Some(directory) = words.setting("directory") {
            builder = builder.socket_directory(directory);
        }
        self.ipc = Some(builder.with_backend(Arc::clone(self.backend())));
        Ok(String::new())
    }

    fn ipc(&self) -> &Ipc {
        self.ipc.as_ref().expect("`ipc` comes first")
    }

    /// The backend of a vendor on its simulator, or the mock on a machine that the text describes.
    fn load(&mut self, machine: &str) -> std::result::Result<(), Unavailable> {
        self.mock = None;
        self.backend = Some(match machine {
            CUDA => CudaBackend::load()?,
            ASCEND => AscendBackend::load()?,
            described => {
                let mock = MockBackend::from_spec(described)?;
                self.mock = Some(Arc::clone(&mock));
                mock
            }
        });
        Ok(())
    }

    fn backend(&self) -> &Arc<dyn DeviceIpc> {
        self.backend.as_ref().expect("`ipc machine=…` comes first")
    }

    fn stream(&mut self) -> Result<Stream> {
        if let Some(stream) = &self.stream {
            return Ok(stream.clone());
        }
        let stream = self.ipc().create_stream(0)?;
        Ok(self.stream.insert(stream).clone())
    }
}

fn set_cache(words: &Words<'_>) -> Result<String> {
    let limits = device_ipc_core::CacheLimits { mappings: words.number(0), bytes: words.number(1) as u64 };
    device_ipc_core::set_cache_limits(limits)?;
    Ok(String::new())
}

fn close_mappings_of(words: &Words<'_>) -> Result<String> {
    let descriptor = words.descriptor(0)?;
    // SAFETY: the agent does what it is told, and tests tell it to use the memory only through checked views.
    let closed = unsafe { device_ipc_core::close_mappings_of(descriptor.exporter())? };
    Ok(closed.to_string())
}

impl<'a> Words<'a> {
    fn of(words: impl Iterator<Item = &'a str>) -> Self {
        let mut all = Self { names: Vec::new(), settings: HashMap::new() };
        for word in words {
            match word.split_once('=') {
                Some((key, value)) => drop(all.settings.insert(key, value)),
                None => all.names.push(word),
            }
        }
        all
    }

    fn name(&self, index: usize) -> &'a str {
        self.names.get(index).unwrap_or_else(|| panic!("word {index} is missing"))
    }

    fn number(&self, index: usize) -> usize {
        self.name(index).parse().expect("a number")
    }

    /// Milliseconds.
    fn time(&self, index: usize) -> Duration {
        Duration::from_millis(self.number(index) as u64)
    }

    fn descriptor(&self, index: usize) -> Result<Descriptor> {
        self.name(index).parse()
    }

    fn setting(&self, key: &str) -> Option<&'a str> {
        self.settings.get(key).copied()
    }

    fn number_of(&self, key: &str) -> Option<u64> {
        self.setting(key).map(|value| value.parse().expect("a number"))
    }
}
