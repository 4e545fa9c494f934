//! Common steps of cases: memory with known contents, shared.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use device_ipc_core::backend::{HandleKind, HandleKindInfo};
use device_ipc_core::{Buffer, Counters, Dtype, Export, Ipc, Mapping, Region, Stream, Tensor, counters};

use crate::check;
use crate::context::Context;
use crate::outcome::{Outcome, Stop};

/// The time limit for the end of a lease that is not delayed.
pub const SOON: Duration = Duration::from_secs(20);

/// The initial value of the memory of a case.
pub const OLD: f32 = 1.0;

/// A buffer on a device, with a stream to work on it.
#[derive(Debug)]
pub struct Memory {
    /// The library.
    pub ipc: Ipc,
    /// The bytes.
    pub buffer: Arc<Buffer>,
    /// A stream of the same device.
    pub stream: Stream,
}

impl Memory {
    /// Allocates these bytes on a device, writes them and waits for that.
    pub fn with_bytes(context: &Context, device: u32, bytes: &[u8]) -> Result<Self, Stop> {
        let ipc = context.ipc();
        let buffer = ipc.allocate(device, bytes.len() as u64)?;
        Self::written(ipc, buffer, bytes)
    }

    /// The same in memory for handles of a kind, on device 0.
    pub fn of_kind(context: &Context, kind: HandleKind, bytes: &[u8]) -> Result<Self, Stop> {
        let ipc = context.ipc();
        let buffer = ipc.allocate_for(0, bytes.len() as u64, kind)?;
        Self::written(ipc, buffer, bytes)
    }

    fn written(ipc: Ipc, buffer: Buffer, bytes: &[u8]) -> Result<Self, Stop> {
        let stream = ipc.create_stream(buffer.range().device)?;
        buffer.view_mut::<u8, _>(&stream)?.copy_from(bytes)?;
        stream.synchronize()?;
        Ok(Self { ipc, buffer: Arc::new(buffer), stream })
    }

    /// Allocates `count` floats of the value [`OLD`] on device 0.
    pub fn with_floats(context: &Context, count: usize) -> Result<Self, Stop> {
        let memory = Self::with_bytes(context, 0, &float_bytes(&vec![OLD; count]))?;
        // The kernel is loaded now: a driver may do that behind work which waits for what this process has yet to do.
        memory.add(0.0)?;
        memory.stream.synchronize()?;
        Ok(memory)
    }

    /// Shares all of it, without a tensor's layout.
    pub fn share(&self) -> Result<Export, Stop> {
        Ok(self.ipc.share(Arc::clone(&self.buffer)).start()?)
    }

    /// Its region, for an owner that keeps the buffer.
    pub fn buffer_region(&self, context: &Context) -> Region {
        Region::new(context.backend().info().name, self.buffer.range()).with_allocation(self.buffer.range())
    }

    /// Shares a part of it.
    pub fn share_part(&self, offset: u64, len: u64) -> Result<Export, Stop> {
        Ok(self.ipc.share(self.buffer.slice(offset, len)?).start()?)
    }

    /// The bytes, as this process reads them through its own address.
    pub fn bytes(&self) -> Result<Vec<u8>, Stop> {
        Ok(self.buffer.view::<u8, _>(&self.stream)?.to_vec()?)
    }

    /// The floats, as this process reads them through its own address.
    pub fn floats(&self) -> Result<Vec<f32>, Stop> {
        Ok(self.buffer.view::<f32, _>(&self.stream)?.to_vec()?)
    }

    /// Submits adding to every float.
    pub fn add(&self, value: f32) -> Result<(), Stop> {
        Ok(self.buffer.view_mut::<f32, _>(&self.stream)?.add(value)?)
    }
}

/// An owner of memory that reports its drop.
#[derive(Debug)]
pub struct Witness {
    _memory: Arc<Buffer>,
    dropped: Sender<()>,
}

impl Witness {
    /// Returns an owner that keeps the buffer, and the receiver of its drop.
    pub fn of(memory: &Memory) -> (Self, Receiver<()>) {
        let (dropped, receiver) = channel();
        (Self { _memory: Arc::clone(&memory.buffer), dropped }, receiver)
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        // The case may be over.
        let _ = self.dropped.send(());
    }
}

/// Waits until something is true: the library works on threads of its own.
///
/// # Errors
///
/// [`Stop::Failed`] where it does not become true soon, and what asking for it says.
#[track_caller]
pub fn happens_soon(what: &str, mut happened: impl FnMut() -> Result<bool, Stop>) -> Outcome {
    let until = Instant::now() + SOON;
    while !happened()? {
        check::that(Instant::now() < until, format!("{what} should happen soon, and did not"))?;
        std::thread::yield_now();
    }
    Ok(())
}

/// Waits until the export has no holder: a message returns the lease of an open that failed.
///
/// # Errors
///
/// [`Stop::Failed`] with the holders, where that does not happen soon.
#[track_caller]
pub fn nobody_holds(share: &Export, after: &str) -> Outcome {
    let until = Instant::now() + SOON;
    loop {
        let holders = share.holders();
        if holders.iter().len() == 0 {
            return Ok(());
        }
        check::that(Instant::now() < until, format!("the export is held after {after}: {holders}"))?;
        std::thread::yield_now();
    }
}

/// Bytes of which neighbours differ, and no two parts are equal.
pub fn pattern(len: usize) -> Vec<u8> {
    (0..len as u32).map(|index| (index.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

/// Floats as a device holds them.
pub fn float_bytes(floats: &[f32]) -> Vec<u8> {
    floats.iter().flat_map(|float| float.to_ne_bytes()).collect()
}

/// The bytes of a mapping of this process.
pub fn bytes_of(mapping: &Mapping, stream: &Stream) -> Result<Vec<u8>, Stop> {
    Ok(mapping.view::<u8, _>(stream)?.to_vec()?)
}

/// The bytes of a tensor of bytes or floats.
///
/// # Errors
///
/// The library's.
///
/// # Panics
///
/// For a tensor of another type.
pub fn tensor_bytes(tensor: &Tensor<'_>, stream: &Stream) -> device_ipc_core::Result<Vec<u8>> {
    match tensor.dtype() {
        Dtype::U8 => tensor.view::<u8, _>(stream)?.to_vec(),
        Dtype::F32 => Ok(float_bytes(&tensor.view::<f32, _>(stream)?.to_vec()?)),
        other => panic!("cases make tensors of bytes and floats, not of {other}"),
    }
}

/// Waits until the library's counters satisfy a condition; the library works on threads of its own.
///
/// # Errors
///
/// [`Stop::Failed`] with the counters if they do not in time.
#[track_caller]
pub fn until(what: &str, done: impl Fn(Counters) -> bool) -> Outcome {
    let end = Instant::now() + SOON;
    while !done(counters()) {
        let text = format!("{what} should happen soon; the counters are {:?}", counters());
        check::that(Instant::now() < end, text)?;
        std::thread::yield_now();
    }
    Ok(())
}

/// Runs a case for each usable kind of handle; a failure names the kind.
///
/// # Errors
///
/// The first failure of the case.
pub fn for_each_kind(context: &Context, mut case: impl FnMut(&HandleKindInfo) -> Outcome) -> Outcome {
    for kind in context.usable_kinds()? {
        case(&kind).map_err(|stop| match stop {
            Stop::Failed(what) => Stop::Failed(format!("{} handles: {what}", kind.name)),
            skipped => skipped,
        })?;
    }
    Ok(())
}

/// Waits for a stream whose wait ends by an event such as the death of a peer. Waits on another thread, as a stream that
/// never resumes would keep the case from reporting that.
///
/// # Errors
///
/// The stream's error, or [`Stop::Failed`] if it does not resume in time.
#[track_caller]
pub fn stream_resumes(stream: &Stream, when: &str) -> Outcome {
    const LIMIT: Duration = Duration::from_secs(10);
    let (done, result) = channel();
    let waiting = stream.clone();
    std::thread::spawn(move || {
        // A case that has failed no longer receives.
        let _ = done.send(waiting.synchronize());
    });
    match result.recv_timeout(LIMIT) {
        Ok(synchronized) => Ok(synchronized?),
        Err(_) => {
            Err(Stop::failed(format!("the stream should resume when {when}, and did not in {LIMIT:?}")))
        }
    }
}

/// Asserts that rounds of a hand-over of `bytes` leave the free memory as it was.
///
/// # Errors
///
/// The error of a round, or [`Stop::Failed`] with the bytes that are lost each time.
pub fn memory_stays_free(
    bytes: usize,
    free: impl Fn() -> Result<u64, Stop>,
    mut round: impl FnMut() -> Outcome,
) -> Outcome {
    round()?;
    // Other processes may use the device meanwhile, and allocate much more; but not every time. A leak would be four
    // buffers each time.
    let mut lost = 0;
    for _ in 0..10 {
        let before = free()?;
        for _ in 0..4 {
            round()?;
        }
        lost = before.saturating_sub(free()?);
        if lost < 3 * bytes as u64 {
            return Ok(());
        }
    }
    Err(Stop::failed(format!(
        "{lost} bytes are lost after four rounds of {bytes} bytes, and so they were nine times before: DeviceIpc::close, \
         DeviceIpc::unexport or DeviceMemory::free keeps the memory"
    )))
}
