//! An exporter with correct messages and arbitrary pages: counter pages, drop counts and copies of any size, sealed or not,
//! that change while they are read. The importer is the whole library: it opens, takes timelines, opens a ring, and copies.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::pwrite;
use rustix::net::{SocketFlags, accept_with, bind, listen};

use crate::backend::{DeviceIpc, HandleBytes, HandleKind};
use crate::control::{close_unused, counters, set_cache_limits};
use crate::model::address::Generation;
use crate::model::lease::LeaseId;
use crate::os::clock;
use crate::os::process::ProcessIdentity;
use crate::sharing::Ipc;
use crate::sharing::host_pages::GRANULE;
use crate::sharing::import::{CacheLimits, CopyPolicy};
use crate::transport::socket;
use crate::wire::descriptor::{
    BackendName, DescribedExtent, DescribedRegion, Descriptor, Memory, PartRegions,
};
use crate::wire::examples::plain_descriptor;
use crate::wire::protocol::{
    AllocationId, OpenedExport, PROTOCOL_VERSION, PageId, Reply, Request, WireHandle, decode, encode,
};
use crate::wire::ring::RingSlots;
use crate::wire::{BrokerAddress, Token};

/// The importer's action, by the first byte of an input.
pub(super) const TIMELINE: u8 = 1;
pub(super) const RING: u8 = 2;
pub(super) const COPY: u8 = 4;

/// Timeout of the importer's waits for counters.
const PATIENCE: Duration = Duration::from_millis(10);

/// Timeout of the importer's requests, which are always answered.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The sizes of a counter page and its slots, and the offsets of the words (`docs/spec/protocol.md`).
const WORD_PAGE: u64 = 65536;
const SLOT: usize = 256;
const WORDS: [usize; 5] = [0, 64, 128, 192, 200];

/// A handle of another process for one of its allocations, which can be opened.
#[derive(Clone, Debug)]
pub struct ForeignHandle {
    /// The kind of the handle.
    pub kind: u16,
    /// The vendor's bytes.
    pub bytes: Vec<u8>,
    /// The size of the allocation in bytes.
    pub size: u64,
    /// The allocation's generation, or 0.
    pub generation: u64,
}

/// An importing process, and its exporter.
#[derive(Debug)]
pub struct HostileExporter {
    ipc: Ipc,
    memory: Descriptor,
    ring: Descriptor,
    script: Arc<Mutex<Vec<u8>>>,
}

impl HostileExporter {
    /// Starts the exporter's thread. The handle is valid as long as the process that created it runs.
    ///
    /// # Panics
    ///
    /// If this process cannot create a socket or thread, or the handle is too small for a ring.
    pub fn new(backend: Arc<dyn DeviceIpc>, handle: ForeignHandle) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("fuzzing-pages-{}-{number}", std::process::id());
        let broker = BrokerAddress::Abstract(name.into_bytes().into());
        let listener = socket::new_socket().expect("this process may have a socket");
        bind(&listener, &broker.to_socket_address().expect("the name is short")).expect("the name is new");
        listen(&listener, 8).expect("the socket is bound");
        let ipc = Ipc::with_backend(backend);
        let own = ProcessIdentity::current().expect("this process has an identity");
        // Of another pid namespace, so that it is not identified as this process.
        let exporter = ProcessIdentity { pid_namespace: own.pid_namespace ^ 1, pid: 4711, ..own };
        let extents = vec![DescribedExtent { size: handle.size, generation: handle.generation }];
        let home = ipc.devices().expect("the machine has devices")[0].identity;
        let name = BackendName::new(ipc.backend().info().name).expect("a descriptor holds it");
        let memory = plain_descriptor().with(|contents| {
            (contents.backend, contents.exporter, contents.broker) = (name, exporter, broker);
            (contents.parts[0].home, contents.parts[0].regions) = (home, PartRegions::One(extents));
            contents.memory = Memory::Region(DescribedRegion { offset: 0, len: handle.size, layout: None });
        });
        let slots = RingSlots::new(4, memory.len() / 4, memory.len()).expect("four slots lie in it");
        let ring = memory.with(|contents| contents.ring = Some(slots));
        // Nothing of one input is kept for the next.
        set_cache_limits(CacheLimits { mappings: 0, bytes: 0 }).expect("no fork");
        let script = Arc::new(Mutex::new(Vec::new()));
        let scripts = Arc::clone(&script);
        std::thread::spawn(move || {
            loop {
                let long = clock::now() + Duration::from_secs(3600);
                if !socket::wait_until(listener.as_fd(), PollFlags::IN, long).expect("it can be waited for") {
                    continue;
                }
                let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
                let Ok(connection) = accept_with(&listener, flags) else { continue };
                let (scripts, handle) = (Arc::clone(&scripts), handle.clone());
                std::thread::spawn(move || {
                    Served { connection, exporter, handle, leases: 0, scripts }.serve();
                });
            }
        });
        Self { ipc, memory, ring, script }
    }

    /// Opens, reads a ring or copies, while the exporter's pages have the contents of the input.
    ///
    /// # Panics
    ///
    /// If resources are left behind.
    pub fn run(&self, input: &[u8]) {
        let [mode, script @ ..] = input else { return };
        *self.script.lock().unwrap_or_else(PoisonError::into_inner) = script.to_vec();
        if mode & TIMELINE != 0 {
            self.take_timeline();
        }
        if mode & RING != 0 {
            self.join();
        }
        if mode & COPY != 0 {
            let _ = self.ipc.open(&self.memory).timeout(TIMEOUT).copy(CopyPolicy::Staged).on_device(0);
        }
        close_unused(TIMEOUT).expect("nothing hangs");
        // Work of streams ends a little later.
        let until = clock::now() + TIMEOUT;
        while counters().mapped_bytes > 0 {
            assert!(clock::now() < until, "memory of the exporter stays mapped");
            clock::sleep(Duration::from_millis(1));
        }
    }

    fn take_timeline(&self) {
        let Ok(mapping) = self.ipc.open(&self.memory).timeout(TIMEOUT).at_home() else { return };
        let Ok(timeline) = mapping.timeline() else { return };
        let _ = (timeline.check(), timeline.wait_now(3, PATIENCE), timeline.signal_now(3));
        let Ok(stream) = self.ipc.create_stream(0) else { return };
        // No stream waits for a word here: the exporter can write it back after the end, which only waits would show.
        let _ = timeline.signal(7, &stream);
        let _ = timeline.value();
        drop((timeline, mapping));
        stream.synchronize().expect("what it was told to do is done");
    }

    /// Slots are not taken: their release would make streams wait for the exporter's words.
    fn join(&self) {
        let Ok(reader) = self.ipc.open_ring(&self.ring).timeout(TIMEOUT).at_home() else { return };
        let _ = (reader.sequence(), reader.device(), reader.access());
    }
}

/// One connection of the exporter.
struct Served {
    connection: OwnedFd,
    exporter: ProcessIdentity,
    handle: ForeignHandle,
    leases: u64,
    scripts: Arc<Mutex<Vec<u8>>>,
}

/// Choices from the bytes of an input, repeated.
struct Choices {
    script: Vec<u8>,
    at: usize,
}

impl Choices {
    fn byte(&mut self) -> u8 {
        let byte = self.script.get(self.at % self.script.len().max(1)).copied().unwrap_or(0);
        self.at += 1;
        byte
    }

    fn long(&mut self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }

    /// Returns the usual value mostly, and sometimes any.
    fn mostly(&mut self, usual: u64) -> u64 {
        match self.byte() {
            0xf0.. => self.long(),
            0xe0..0xf0 => usual.wrapping_add(1),
            _ => usual,
        }
    }

    /// Creates a memory file, usually of this size and sealed, with words of the input in its slots.
    fn page(&mut self, usual: u64) -> OwnedFd {
        let file = memfd_create("device-ipc-fuzzing", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
        let file = file.expect("this process may have a memory file");
        let size = self.mostly(usual).min(4 << 20);
        ftruncate(&file, size).expect("the file is new");
        self.write(&file, size);
        if self.byte() < 0xf0 {
            let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
            fcntl_add_seals(&file, seals).expect("the file may be sealed");
        }
        file
    }

    fn write(&mut self, file: &OwnedFd, size: u64) {
        let mut bytes = vec![0; usize::try_from(size).expect("it is small")];
        for slot in bytes.chunks_exact_mut(SLOT) {
            for at in WORDS {
                // Small counters are more likely to be meaningful.
                let word = if self.byte() < 0xc0 { u64::from(self.byte()) } else { self.long() };
                slot[at..at + 8].copy_from_slice(&word.to_le_bytes());
            }
        }
        let _ = pwrite(file, &bytes, 0);
    }
}

impl Served {
    fn serve(mut self) {
        let mut buffer = Vec::new();
        loop {
            let long = clock::now() + Duration::from_secs(3600);
            if !socket::wait_until(self.connection.as_fd(), PollFlags::IN, long).unwrap_or(false) {
                return;
            }
            let Ok(Some(packet)) = socket::receive(self.connection.as_fd(), &mut buffer) else { return };
            let Ok(request) = decode::<Request>(&packet.bytes) else { return };
            let script = self.scripts.lock().unwrap_or_else(PoisonError::into_inner).clone();
            self.answer(request, &mut Choices { script, at: 0 });
        }
    }

    fn answer(&mut self, request: Request, choices: &mut Choices) {
        match request {
            Request::Hello { .. } => {
                let page = choices.page(4096);
                let states = choices.page(4 * GRANULE as u64);
                self.send(
                    &Reply::Hello { protocol: PROTOCOL_VERSION, exporter: self.exporter },
                    &[page.as_fd(), states.as_fd()],
                );
                // Other states while the importer reads them.
                choices.write(&states, 4096);
            }
            Request::Open { request, .. } => {
                self.leases += 1;
                let handle = WireHandle {
                    allocation: AllocationId(1),
                    kind: HandleKind(self.handle.kind),
                    bytes: HandleBytes::new(self.handle.bytes.clone()),
                    fds: 0,
                    size: self.handle.size,
                    generation: (self.handle.generation != 0).then_some(Generation(self.handle.generation)),
                };
                let grant = OpenedExport {
                    request,
                    lease: LeaseId(self.leases),
                    handles: vec![handle],
                    ready: None,
                    keep: choices.byte() & 1 != 0,
                    confirm: choices.byte() & 1 != 0,
                    like: false,
                    slot: Some(u32::from(choices.byte())),
                    ahead: Vec::new(),
                };
                self.send(&Reply::Opened(grant), &[]);
            }
            Request::Confirm { request, .. } => self.send(&Reply::Confirmed { request }, &[]),
            Request::Timeline { request, .. } => {
                let slot = u32::from(choices.byte()) + if choices.byte() >= 0xf0 { 255 } else { 0 };
                let page = PageId(u32::from(choices.byte() & 3));
                let file = choices.page(WORD_PAGE);
                self.send(&Reply::Timeline { request, page, slot, base: 0 }, &[file.as_fd()]);
                // Other words while the importer reads them.
                choices.write(&file, WORD_PAGE);
            }
            Request::Stage { request, .. } => {
                self.leases += 1;
                let chunk_bytes = choices.mostly(65536);
                let bytes = choices.mostly(self.handle.size);
                let file = choices.page(2 * 65536);
                let lease = LeaseId(self.leases);
                self.send(&Reply::Staging { request, lease, chunk_bytes, bytes }, &[file.as_fd()]);
                choices.write(&file, 65536);
            }
            Request::StageNext { request, chunk, .. } => {
                let (chunk, bytes) = (choices.mostly(chunk), choices.mostly(self.handle.size.min(65536)));
                self.send(&Reply::Staged { request, chunk, bytes }, &[]);
            }
            Request::Grant { request, .. } => {
                self.send(&Reply::Granted { request, token: Token::from_bytes([7; 16]) }, &[]);
            }
            Request::Claims { request, .. } => {
                let file = choices.page(4 * 65536);
                self.send(&Reply::Claims { request, importer: 3 }, &[file.as_fd()]);
            }
            Request::List { .. }
            | Request::Release { .. }
            | Request::EndGrants { .. }
            | Request::LeaseChanged { .. }
            | Request::Exit => {}
        }
    }

    /// An importer that rejected the reply has closed the connection.
    fn send(&self, reply: &Reply, fds: &[BorrowedFd<'_>]) {
        let bytes = encode(reply).expect("it is short");
        let _ = socket::send(self.connection.as_fd(), &bytes, fds);
    }
}

/// Returns the seeds: a first byte, and choices that produce correct pages, with and without publications.
pub fn seeds() -> Vec<super::Seed> {
    let with = |mode: u8, choices: &[u8]| [&[mode], choices].concat();
    vec![
        ("timeline", with(TIMELINE, &[0; 16])),
        ("timeline-that-moves", with(TIMELINE, &[1, 5, 0, 9, 0, 3])),
        ("timeline-that-has-ended", with(TIMELINE, &[0, 0, 0, 0, 0xc0, 0, 0, 0, 0, 0, 0, 0, 0x40])),
        ("ring-without-publications", with(RING, &[0, 1, 0, 0])),
        ("ring-with-publications", with(RING, &[0, 1, 0, 7, 0, 2, 0, 1, 0, 9])),
        ("ring-of-anything", with(RING, &[0xc1, 0xff, 3, 0x80, 7, 0xd0, 2])),
        ("copy", with(COPY, &[0; 16])),
        ("copy-of-anything", with(COPY, &[0xf1, 7, 0, 0xe1, 0x90, 1])),
        ("everything", with(TIMELINE | RING | COPY, &[0, 2, 1, 0, 8, 0, 1])),
    ]
}
