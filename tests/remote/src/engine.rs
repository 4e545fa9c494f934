//! A transfer engine of sockets, for tests of everything around an engine.
//!
//! Like UCX over TCP, the exporter's process answers each read on a thread of its own, and a suspended exporter does not. Unlike
//! UCX, it refuses to read memory that is not registered.

#![allow(unsafe_code, reason = "reads and writes registered memory by its address")]

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use device_ipc_core::backend::engine::{
    MemorySpace, PullRequest, RegisteredMemory, Transfer, TransferEngine, TransferMemory,
};
use device_ipc_core::backend::{BackendInfo, VendorError, VendorStatus};
use device_ipc_core::{Error, Result};

/// The registered bytes of this process.
static REGISTERED: AtomicU64 = AtomicU64::new(0);

/// The engine. Its process listens at its own address.
#[derive(Debug)]
pub(crate) struct SocketEngine {
    info: BackendInfo,
    address: SocketAddr,
    /// The registered ranges.
    memory: Arc<Mutex<Vec<TransferMemory>>>,
}

/// Starts an engine of sockets with this name, for [`processes!`](crate::processes).
pub fn socket_engine(name: &'static str) -> std::result::Result<Arc<dyn TransferEngine>, String> {
    SocketEngine::start(name).map(|engine| Arc::new(engine) as _).map_err(|error| error.to_string())
}

impl SocketEngine {
    /// Starts an engine of this name.
    fn start(name: &'static str) -> io::Result<Self> {
        let listener = TcpListener::bind((crate::own_address(), 0))?;
        let address = listener.local_addr()?;
        let memory = Arc::<Mutex<Vec<TransferMemory>>>::default();
        let served = Arc::clone(&memory);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let served = Arc::clone(&served);
                thread::spawn(move || answer(stream, &served));
            }
        });
        Ok(Self { info: BackendInfo::new(name, "1", None), address, memory })
    }

    /// Sets the time that this process takes at least for each MiB.
    pub(crate) fn set_pace(pace: Duration) {
        PACE.store(pace.as_millis() as u64, Ordering::Relaxed);
    }

    /// Returns the number of registered bytes of this process.
    pub(crate) fn registered() -> u64 {
        REGISTERED.load(Ordering::SeqCst)
    }
}

/// The most bytes that are read at a time, while the registration is locked.
const STEP: u64 = 1 << 20;

/// The time in ms that a step takes at least, so that a test can do something while many bytes are read.
static PACE: AtomicU64 = AtomicU64::new(4);

/// Answers reads: address and length, as 8 bytes each.
fn answer(mut stream: TcpStream, memory: &Mutex<Vec<TransferMemory>>) -> io::Result<()> {
    loop {
        let (mut address, mut len) = ([0; 8], [0; 8]);
        stream.read_exact(&mut address)?;
        stream.read_exact(&mut len)?;
        let (mut address, mut len) = (u64::from_le_bytes(address), u64::from_le_bytes(len));
        while len > 0 {
            let step = len.min(STEP);
            let bytes = {
                let memory = memory.lock().expect("no panic");
                let is_registered = |known: &TransferMemory| {
                    address >= known.address && address + step <= known.address + known.len
                };
                if !memory.iter().any(is_registered) {
                    return Err(io::ErrorKind::PermissionDenied.into());
                }
                // SAFETY: registered memory is readable, and stays so while the list is locked. Nothing writes it.
                unsafe { std::slice::from_raw_parts(address as *const u8, step as usize) }.to_vec()
            };
            stream.write_all(&bytes)?;
            address += step;
            len -= step;
            if len > 0 {
                thread::sleep(Duration::from_millis(PACE.load(Ordering::Relaxed)));
            }
        }
    }
}

impl TransferEngine for SocketEngine {
    fn info(&self) -> &BackendInfo {
        &self.info
    }

    fn supports(&self, space: MemorySpace) -> bool {
        space == MemorySpace::Host
    }

    unsafe fn register(&self, memory: TransferMemory) -> Result<Box<dyn RegisteredMemory>> {
        self.memory.lock().expect("no panic").push(memory);
        REGISTERED.fetch_add(memory.len, Ordering::SeqCst);
        let metadata = format!("{} {} {}", self.address, memory.address, memory.len).into_bytes();
        Ok(Box::new(Registered { metadata, memory, all: Arc::clone(&self.memory) }))
    }

    unsafe fn pull(&self, request: &PullRequest<'_>) -> Result<Box<dyn Transfer>> {
        let sources = request.sources.iter().map(|metadata| Source::decode(metadata));
        let sources = sources.collect::<Result<Vec<_>>>()?;
        let mut reads = Vec::new();
        for piece in request.pieces {
            let source = &sources[piece.source];
            if piece.source_offset.checked_add(piece.len).is_none_or(|end| end > source.len) {
                return Err(Error::InvalidRegion("a piece exceeds its region".into()));
            }
            let destination = request.destination_of(piece)?;
            reads.push((source.address + piece.source_offset, destination.address, piece.len));
        }
        let (state, arrived) = (Arc::<Mutex<Option<_>>>::default(), Arc::<AtomicU64>::default());
        let (address, ended, counted) = (sources[0].server, Arc::clone(&state), Arc::clone(&arrived));
        thread::spawn(move || {
            let read = TcpStream::connect(address).and_then(|stream| read_all(stream, &reads, &counted));
            *ended.lock().expect("no panic") =
                Some(read.map_err(|error: io::Error| error.raw_os_error().unwrap_or(-1)));
        });
        Ok(Box::new(Reading { state, arrived }))
    }
}

fn read_all(mut stream: TcpStream, reads: &[(u64, u64, u64)], arrived: &AtomicU64) -> io::Result<()> {
    for (source, destination, len) in reads {
        stream.write_all(&[source.to_le_bytes(), len.to_le_bytes()].concat())?;
        // SAFETY: the destination is allocated and accessed by nothing else until the end is reported.
        let bytes = unsafe { std::slice::from_raw_parts_mut(*destination as *mut u8, *len as usize) };
        for bytes in bytes.chunks_mut(STEP as usize) {
            stream.read_exact(bytes)?;
            arrived.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        }
    }
    Ok(())
}

struct Source {
    server: SocketAddr,
    address: u64,
    len: u64,
}

impl Source {
    fn decode(metadata: &[u8]) -> Result<Self> {
        let parse = || {
            let mut words = str::from_utf8(metadata).ok()?.split(' ');
            let server = words.next()?.parse().ok()?;
            Some(Self { server, address: words.next()?.parse().ok()?, len: words.next()?.parse().ok()? })
        };
        parse().ok_or_else(|| Error::Protocol("invalid metadata".into()))
    }
}

#[derive(Debug)]
struct Registered {
    metadata: Vec<u8>,
    memory: TransferMemory,
    all: Arc<Mutex<Vec<TransferMemory>>>,
}

impl RegisteredMemory for Registered {
    fn metadata(&self) -> &[u8] {
        &self.metadata
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let mut all = self.all.lock().expect("no panic");
        let at = all.iter().position(|memory| *memory == self.memory).expect("it is registered");
        all.swap_remove(at);
        REGISTERED.fetch_sub(self.memory.len, Ordering::SeqCst);
    }
}

#[derive(Debug)]
struct Reading {
    state: Arc<Mutex<Option<Result<(), i32>>>>,
    arrived: Arc<AtomicU64>,
}

impl Transfer for Reading {
    fn is_finished(&self) -> Result<bool> {
        match *self.state.lock().expect("no panic") {
            None => Ok(false),
            Some(Ok(())) => Ok(true),
            Some(Err(code)) => Err(VendorError::new("socket", "read", VendorStatus(code), "failed").into()),
        }
    }
    fn arrived_bytes(&self) -> u64 {
        self.arrived.load(Ordering::Relaxed)
    }
}
