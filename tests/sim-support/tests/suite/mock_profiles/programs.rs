//! The programs, each of which prints its outcome.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use device_ipc::backend::HandleKindInfo;
use device_ipc::{
    Access, Buffer, Dtype, Error, Export, ExposurePolicy, HolderPolicy, Ipc, MemoryUse, Message, Stream,
    TensorLayout,
};

use super::peer::{Peer, outcome, variant};

/// How long a program waits for the other process.
const PATIENCE: Duration = Duration::from_secs(20);
const PAGE: u64 = 2 << 20;

fn record(program: &str, outcome: impl AsRef<str>) {
    println!("\noutcome\t{program}\t{}", outcome.as_ref());
}

#[test]
#[ignore = "a role of the tests"]
fn role() {
    let ipc = Ipc::builder().allow_simulated(true).auto().expect("the backend that the variables select");
    let stream = ipc.create_stream(0).expect("a stream");
    let mut peer = Peer::start(None);
    properties(&ipc);
    uses(&ipc, &mut peer);
    for kind in ipc.backend().handle_kinds() {
        let mut programs = Programs { ipc: &ipc, stream: &stream, peer: &mut peer, kind };
        programs.allocations();
        if programs.buffer(4096).is_ok() {
            programs.accesses();
            programs.placements();
            programs.regions();
            programs.exposures();
            programs.patterns();
            programs.ends();
        }
    }
    println!("\nend");
}

/// The properties of devices and kinds.
fn properties(ipc: &Ipc) {
    for kind in ipc.backend().handle_kinds() {
        record(&format!("kind {}", kind.kind.0), format!("{kind:?}"));
    }
    let names: Vec<_> = ipc.backend().handle_kinds().iter().map(|kind| kind.name).collect();
    record("kinds in their order", names.join(", "));
    for device in ipc.devices().expect("devices") {
        let capabilities = ipc.backend().capabilities(device.ordinal);
        record(&format!("capabilities of device {}", device.ordinal), format!("{capabilities:?}"));
    }
}

/// Memory that is allocated by its use, and shared so.
fn uses(ipc: &Ipc, peer: &mut Peer) {
    let uses = [
        ("any", MemoryUse::new()),
        ("read-only", MemoryUse::new().read_only_importers()),
        ("isolated", MemoryUse::new().isolated()),
        ("pid namespaces", MemoryUse::new().across_pid_namespaces()),
        ("outlives", MemoryUse::new().outlives_exporter()),
        ("isolated and outlives", MemoryUse::new().isolated().outlives_exporter()),
        ("read-only and pid namespaces", MemoryUse::new().read_only_importers().across_pid_namespaces()),
    ];
    for (name, wanted) in uses {
        for access in [Access::ReadWrite, Access::ReadOnly] {
            let shared = ipc
                .allocate_for(0, 4096, wanted)
                .and_then(|memory| Ok(ipc.share(memory).access(access).start()?));
            let opened = shared.as_ref().map(|export| {
                let text = export.descriptor().to_string();
                let opened = peer.ask(&["open", "m", "home", "-", "never", &text]);
                let read = peer.ask(&["read", "m"]);
                peer.ask(&["drop", "m"]);
                format!("{opened}, {read}")
            });
            record(&format!("memory for the use {name}, shared {access}"), opened.unwrap_or_else(variant));
        }
    }
}

struct Programs<'a> {
    ipc: &'a Ipc,
    stream: &'a Stream,
    peer: &'a mut Peer,
    kind: HandleKindInfo,
}

impl Programs<'_> {
    fn record(&self, program: &str, outcome: impl AsRef<str>) {
        record(&format!("{}: {program}", self.kind.name), outcome);
    }

    fn buffer(&self, bytes: u64) -> Result<Buffer, Error> {
        let memory = self.ipc.allocate_for(0, bytes, self.kind.kind)?;
        memory.view_mut::<u8, _>(self.stream)?.fill_bytes(5)?;
        self.stream.synchronize()?;
        Ok(memory)
    }

    fn export(&self, bytes: u64) -> Export {
        self.ipc.share(self.buffer(bytes).expect("memory")).start().map_err(Error::from).expect("an export")
    }

    /// Has the peer open the export, read it and release it; returns the three outcomes.
    fn opened(&mut self, export: &Export, place: &str, access: &str, copy: &str) -> String {
        let text = export.descriptor().to_string();
        let opened = self.peer.ask(&["open", "m", place, access, copy, &text]);
        let read = self.peer.ask(&["read", "m"]);
        let released = self.peer.ask(&["release", "m"]);
        format!("{opened}, {read}, {released}")
    }

    fn allocations(&mut self) {
        for bytes in [0, 1, 4096, PAGE, PAGE + 1, u64::MAX / 2, u64::MAX] {
            self.record(&format!("allocate {bytes} B"), outcome(self.buffer(bytes)));
        }
        let beyond = self.ipc.allocate_for(7, 4096, self.kind.kind);
        self.record("allocate on no device", outcome(beyond));
        for (name, wanted) in [
            ("read-only", MemoryUse::from(self.kind.kind).read_only_importers()),
            ("isolated", MemoryUse::from(self.kind.kind).isolated()),
            ("outlives", MemoryUse::from(self.kind.kind).outlives_exporter()),
        ] {
            self.record(&format!("allocate {name}"), outcome(self.ipc.allocate_for(0, 4096, wanted)));
        }
    }

    /// Shared with each access, opened with each access, and as a copy.
    fn accesses(&mut self) {
        for shared in [Access::ReadWrite, Access::ReadOnly] {
            let memory = self.buffer(4096).expect("memory");
            let export = self.ipc.share(memory).access(shared).start().map_err(Error::from);
            let export = match export {
                Ok(export) => export,
                Err(error) => {
                    self.record(&format!("share {shared}"), variant(&error));
                    continue;
                }
            };
            for access in ["-", "ro", "rw"] {
                for copy in ["never", "staged-if-needed", "staged"] {
                    let text = export.descriptor().to_string();
                    let opened = self.peer.ask(&["open", "m", "home", access, copy, &text]);
                    let written = self.peer.ask(&["write", "m"]);
                    let timeline = self.peer.ask(&["timeline", "m"]);
                    self.peer.ask(&["release", "m"]);
                    self.record(
                        &format!("shared {shared}, opened {access}, copied {copy}"),
                        format!("{opened}, write {written}, timeline {timeline}"),
                    );
                }
            }
            let closed = export.close(PATIENCE);
            self.record(&format!("shared {shared}, closed"), outcome(closed));
        }
    }

    /// Opened on each device, twice, on two devices, and by processes that do not see the home device.
    fn placements(&mut self) {
        let export = self.export(4096);
        for place in ["home", "device 0", "device 1", "stream 0"] {
            for copy in ["never", "staged"] {
                let opened = self.opened(&export, place, "-", copy);
                self.record(&format!("opened on {place}, copied {copy}"), opened);
            }
        }
        let text = export.descriptor().to_string();
        for (first, second) in [("home", "home"), ("home", "device 1"), ("device 1", "home")] {
            let mut outcomes = Vec::new();
            for (name, place) in [("first", first), ("second", second)] {
                outcomes.push(self.peer.ask(&["open", name, place, "-", "never", &text]));
            }
            for name in ["first", "second"] {
                outcomes.push(self.peer.ask(&["read", name]));
                outcomes.push(self.peer.ask(&["drop", name]));
            }
            self.record(&format!("opened on {first} and on {second} at once"), outcomes.join(", "));
        }
        let own = self.ipc.open(export.descriptor()).on(self.stream);
        let read = own.and_then(|own| own.to_host::<u8, _>(self.stream)).map(|bytes| bytes.len());
        self.record("opened in the own process", outcome(read));
        let (variable, value) = match self.ipc.backend().info().name {
            "cuda" => ("CUDA_VISIBLE_DEVICES", "1".to_owned()),
            "ascend" => ("ASCEND_RT_VISIBLE_DEVICES", "1".to_owned()),
            _ => {
                let machine = std::env::var("DEVICE_IPC_MOCK").expect("set by the test");
                ("DEVICE_IPC_MOCK", format!("{machine};visible=1"))
            }
        };
        let mut hidden = Peer::start(Some((variable, &value)));
        for (place, copy) in [("home", "never"), ("device 0", "never"), ("device 0", "staged-if-needed")] {
            let opened = hidden.ask(&["open", "m", place, "-", copy, &text]);
            self.record(&format!("home hidden, opened on {place}, copied {copy}"), opened);
        }
    }

    /// Parts of an allocation, layouts that do not fit, and memory without bytes.
    fn regions(&mut self) {
        let memory = Arc::new(self.buffer(PAGE).expect("memory"));
        for (offset, len) in [(0, 4096), (4096, 8192), (1000, 24), (PAGE - 1, 1)] {
            let part = memory.slice(offset, len).expect("a slice");
            match self.ipc.share(part).start().map_err(Error::from) {
                Ok(export) => {
                    let opened = self.opened(&export, "home", "-", "never");
                    self.record(&format!("{len} B at {offset}"), opened);
                }
                Err(error) => self.record(&format!("{len} B at {offset}"), variant(&error)),
            }
        }
        for (dtype, offset) in [(Dtype::F32, 2), (Dtype::F64, 4), (Dtype::COMPLEX128, 8), (Dtype::BF16, 2)] {
            let part = memory.slice(offset, 64).expect("a slice");
            self.record(
                &format!("{dtype} at {offset} B"),
                outcome(self.ipc.share(part).dtype(dtype).start()),
            );
        }
        for (name, empty) in [
            ("part", Arc::new(memory.slice(64, 0).expect("a slice"))),
            ("buffer", Arc::new(Arc::new(self.buffer(0).expect("no memory")).slice(0, 0).expect("a slice"))),
        ] {
            for access in [Access::ReadWrite, Access::ReadOnly] {
                let shared =
                    self.ipc.share(empty.clone()).dtype(Dtype::F32).shape([0, 3]).access(access).start();
                let result = match shared.map_err(Error::from) {
                    Ok(export) => self.opened(&export, "stream 0", "-", "never"),
                    Err(error) => variant(&error),
                };
                self.record(&format!("an empty tensor of an empty {name}, shared {access}"), result);
            }
        }
        let copy = self.ipc.share_copy(&*memory, self.stream).and_then(|builder| Ok(builder.start()?));
        let result = match &copy {
            Ok(export) => self.opened(export, "home", "-", "never"),
            Err(error) => variant(error),
        };
        self.record("a copy is shared", result);
    }

    /// What importers reach, and the policies.
    fn exposures(&mut self) {
        for bytes in [4096, PAGE, PAGE + 1] {
            let memory = Arc::new(self.buffer(bytes).expect("memory"));
            let whole = self.ipc.share(Arc::clone(&memory)).start().map_err(Error::from).expect("an export");
            self.record(&format!("exposure of {bytes} B"), format!("{:?}", whole.exposure()));
            for policy in [ExposurePolicy::Allow, ExposurePolicy::Refuse, ExposurePolicy::Copy] {
                for (name, len) in [("all", bytes), ("half", bytes / 2)] {
                    let part = memory.slice(0, len).expect("a slice");
                    let result = match self.ipc.share(part).exposure(policy).start().map_err(Error::from) {
                        Ok(export) => {
                            let exposure = export.exposure();
                            let opened = self.opened(&export, "home", "-", "never");
                            format!("{opened}, {exposure:?}")
                        }
                        Err(error) => variant(&error),
                    };
                    self.record(&format!("{policy:?} for {name} of {bytes} B"), result);
                }
            }
        }
    }

    /// Rings, bundles and channels.
    fn patterns(&mut self) {
        let layout = TensorLayout::contiguous(Dtype::U8, [16]).expect("a layout");
        for access in [Access::ReadWrite, Access::ReadOnly] {
            let mut set = self.ipc.tensors();
            let added = set.owned("a", self.buffer(4096).expect("memory"), Some(layout.clone())).map(drop);
            added.map_err(Error::from).expect("a tensor");
            let other = self.ipc.allocate_for(1, 4096, self.kind.kind).expect("memory");
            set.owned("b", other, Some(layout.clone())).map(drop).map_err(Error::from).expect("a tensor");
            let result = match self.ipc.share_all(set).access(access).start().map_err(Error::from) {
                Ok(export) => {
                    let text = export.descriptor().to_string();
                    let home = self.peer.ask(&["open", "m", "device 0", "-", "never", &text]);
                    let read = self.peer.ask(&["tensors", "m"]);
                    self.peer.ask(&["drop", "m"]);
                    format!("{home}, {}", read.split(", b").next().unwrap_or_default())
                }
                Err(error) => variant(&error),
            };
            self.record(&format!("a bundle of two devices, shared {access}"), result);

            let memory = self.buffer(8192).expect("memory");
            let ring = self.ipc.ring(memory).slots(2).access(access).start().map_err(Error::from);
            let result = match ring {
                Ok(mut ring) => {
                    let joined = self.peer.ask(&["ring", &ring.descriptor().to_string()]);
                    if joined == "ok" {
                        let mut slot = ring.write(self.stream).expect("a slot");
                        slot.view_mut::<u8, _>(self.stream).expect("a view").fill_bytes(3).expect("a fill");
                        slot.publish().expect("a publication");
                        self.peer.answer()
                    } else {
                        joined
                    }
                }
                Err(error) => variant(&error),
            };
            self.record(&format!("a ring, shared {access}"), result);
        }
        let name = format!("mock-profiles-{}-{}", std::process::id(), self.kind.kind.0);
        let listener = self.ipc.listen(&name).start().expect("a listener");
        self.peer.send(&["receive", &name]);
        let channel = listener.accept(PATIENCE).expect("the peer connects");
        let memory = self.buffer(4096).expect("memory");
        let export =
            self.ipc.share(memory).ready_on(self.stream).start().map_err(Error::from).expect("an export");
        let sent = channel.send(Message::new().export(&export), PATIENCE);
        let received = self.peer.answer();
        self.record("a message", format!("{}, {received}", outcome(sent)));
    }

    /// The end of the export, of the memory, and of the exporter under an open mapping.
    fn ends(&mut self) {
        let export = self.export(4096);
        let text = export.descriptor().to_string();
        self.peer.ask(&["open", "m", "home", "-", "never", &text]);
        let freed = export.close_with(Duration::from_millis(50), HolderPolicy::FreeAnyway);
        // The memory is freed on another thread, before or after this.
        self.peer.ask(&["read", "m"]);
        self.peer.ask(&["drop", "m"]);
        self.record("freed under an importer", outcome(freed));
        self.peer.ask(&["close-unused"]);
        let again = self.peer.ask(&["open", "m", "home", "-", "never", &text]);
        self.record("opened after the end of the export", again);

        let mut exporter = Peer::start(None);
        let text = exporter.ask(&["export", &self.kind.kind.0.to_string()]);
        let descriptor = text.parse().expect("a descriptor");
        let mapping = self.ipc.open(&descriptor).on(self.stream).expect("a mapping");
        self.record("exported by the peer", outcome(mapping.to_host::<u8, _>(self.stream)));
        let (gone, is_gone) = channel();
        mapping.on_gone(move |error| {
            let _ = gone.send(variant(error));
        });
        exporter.kill();
        let notice = is_gone.recv_timeout(PATIENCE).expect("a notification");
        self.record("the exporter is killed", notice);
        self.record("read after the exporter's death", outcome(mapping.to_host::<u8, _>(self.stream)));
        drop(mapping);
        let again = self.ipc.open(&descriptor).on(self.stream).map(drop);
        self.record("opened after the exporter's death", outcome(again));
    }
}
