//! The hand-over of a state dict of 1000 tensors to another process over a raw Unix socket.
//!
//! The measured time is from the start of the bundle until the receiver has every tensor and has acknowledged. The tensors
//! are in as many allocations as those of PyTorch. In 'first time', neither the allocations nor the names were shared before;
//! in 'again', both are repeated.

use std::sync::Arc;

use anyhow::{Result, ensure};
use device_ipc::{Buffer, Dtype, Export, TensorLayout};

use crate::frame::{Bench, Row, timed};
use crate::line::{Line, Subject, Target};
use crate::peer::message::Command;
use crate::peer::{Remote, Socket, keep, wait_acknowledgement};
use crate::wait::TIMEOUT;

pub(super) const ROW: Row =
    Row { name: "state-dict", title: "a state dict of 1000 tensors, handed over and acknowledged", run };

const TENSORS: usize = 1000;

/// Size of an element in bytes; the tensors are float32.
const ELEMENT_BYTES: u64 = 4;

/// The granularity of `cuMemAlloc`, and the minimum allocation of PyTorch's allocator, in bytes.
const PAGE: u64 = 2 << 20;

/// Number of repeated hand-overs in a round.
const AGAIN: usize = 5;

/// The target, as a fraction of the speed of raw opens.
const SPEED: f64 = 0.8;

/// A kind of state dict.
#[derive(Clone, Copy)]
struct Kind {
    name: &'static str,
    tensor_bytes: u64,
    /// Number of tensors in each allocation except the last.
    tensors_per_block: usize,
    block_bytes: u64,
    /// Number of allocations that contain a tensor.
    blocks: usize,
}

struct State {
    kind: Kind,
    names: Vec<String>,
    /// Number of state dicts created so far.
    dicts: usize,
    importer: Remote,
    receiver: Socket,
    /// A socket whose peer only acknowledges.
    echo: Socket,
    /// The allocations of repeated bundles.
    blocks: Vec<Arc<Buffer>>,
    /// Length of the last bundle's descriptor in bytes.
    bytes: usize,
}

fn run(bench: &Bench) -> Result<Vec<Line>> {
    bench.raw.enter(bench.device)?;
    let small = Kind::new("64 B each", 64, 1);
    let large = Kind::new("1 MiB each", 1 << 20, bench.allocations);
    let mut lines = Vec::new();
    for kind in [small, large] {
        lines.extend(measure(bench, kind)?);
    }
    Ok(lines)
}

fn measure(bench: &Bench, kind: Kind) -> Result<Vec<Line>> {
    let mut importer = bench.remote(bench.device)?;
    let mut state = State {
        kind,
        names: names(0),
        dicts: 1,
        receiver: importer.socket(&Command::ReceiveBundles { open: true })?,
        echo: importer.socket(&Command::ReceiveBundles { open: false })?,
        importer,
        blocks: Vec::new(),
        bytes: 0,
    };
    let subject = |when: &str, against: String, target, needs_hardware| {
        Subject::new(format!("{}, {when}", kind.name), against).target(target).needs_hardware(needs_hardware)
    };
    let opens = format!("{} opens, by {}", kind.blocks, bench.raw.name());
    let first = subject("first time", opens, Target::times(1.0 / SPEED), true);
    let first = bench.compare(
        first,
        &mut state,
        |state| first_time(bench, state),
        |state| raw_opens(bench, state),
    )?;
    state.blocks = blocks(bench, kind)?;
    let open = hand_over(bench, &mut state)?;
    let again = subject("again", "raw socket, the same bytes".into(), Target::None, false);
    let again = bench.compare(again, &mut state, |state| repeated(bench, state), raw_trip)?;
    keep(&state.receiver, 0)?;
    open.close(TIMEOUT)?;
    drop((state.receiver, state.echo));
    state.importer.finish()?;
    Ok(vec![first, again])
}

impl Kind {
    fn new(name: &'static str, tensor_bytes: u64, allocations: usize) -> Self {
        let tensors_per_block = TENSORS.div_ceil(allocations);
        Self {
            name,
            tensor_bytes,
            tensors_per_block,
            block_bytes: (tensors_per_block as u64 * tensor_bytes).next_multiple_of(PAGE),
            blocks: TENSORS.div_ceil(tensors_per_block),
        }
    }
}

fn names(dict: usize) -> Vec<String> {
    (0..TENSORS).map(|index| format!("layer.{index}.weight.{dict}")).collect()
}

fn blocks(bench: &Bench, kind: Kind) -> Result<Vec<Arc<Buffer>>> {
    let one = |_| Ok(Arc::new(bench.ipc.allocate(bench.device, kind.block_bytes)?));
    (0..kind.blocks).map(one).collect()
}

/// Creates a bundle of the tensors in the blocks, and hands it over to the receiver.
fn hand_over(bench: &Bench, state: &mut State) -> Result<Export> {
    let kind = state.kind;
    let mut bundle = bench.ipc.tensors();
    for (names, block) in state.names.chunks(kind.tensors_per_block).zip(&state.blocks) {
        let memory = bundle.memory(Arc::clone(block));
        for (index, name) in names.iter().enumerate() {
            let layout = TensorLayout::contiguous(Dtype::F32, [kind.tensor_bytes / ELEMENT_BYTES])?;
            bundle.tensor(name, memory, index as u64 * kind.tensor_bytes, layout)?;
        }
    }
    let export = bench.ipc.share_all(bundle).start()?;
    let bytes = export.descriptor().to_bytes();
    state.receiver.send_in_pieces(&bytes)?;
    let opened = wait_acknowledgement(&state.receiver)?;
    ensure!(opened as usize == TENSORS, "the receiver opened {opened} tensors instead of {TENSORS}");
    state.bytes = bytes.len();
    Ok(export)
}

fn first_time(bench: &Bench, state: &mut State) -> Result<f64> {
    state.blocks = blocks(bench, state.kind)?;
    state.names = names(state.dicts);
    state.dicts += 1;
    let mut export = None;
    let took = timed(1, |_| {
        export = Some(hand_over(bench, state)?);
        Ok(())
    })?;
    keep(&state.receiver, 0)?;
    if let Some(export) = export {
        export.close(TIMEOUT)?;
    }
    state.blocks.clear();
    Ok(took)
}

/// Measures repeated hand-overs; the receiver keeps the first bundle, and with it the allocations.
fn repeated(bench: &Bench, state: &mut State) -> Result<f64> {
    let mut exports = Vec::with_capacity(AGAIN);
    let took = timed(AGAIN, |_| {
        exports.push(hand_over(bench, state)?);
        Ok(())
    })?;
    keep(&state.receiver, 1)?;
    exports.into_iter().try_for_each(|export| export.close(TIMEOUT))?;
    Ok(took)
}

/// Measures raw opens of as many new allocations.
fn raw_opens(bench: &Bench, state: &mut State) -> Result<Option<f64>> {
    let (count, bytes) = (state.kind.blocks, state.kind.block_bytes);
    let handles = bench.raw_handles(&mut state.importer, count, bytes)?;
    let mut mappings = Vec::with_capacity(count);
    let took = timed(1, |_| {
        for handle in &handles {
            mappings.push(bench.raw.open(handle, bench.device)?);
        }
        Ok(())
    })?;
    mappings.into_iter().try_for_each(|mapping| bench.raw.close(mapping))?;
    state.importer.execute(&Command::FreeRaw)?;
    Ok(Some(took))
}

fn raw_trip(state: &mut State) -> Result<Option<f64>> {
    let bytes = vec![0; state.bytes];
    let trip = |_| {
        state.echo.send_in_pieces(&bytes)?;
        wait_acknowledgement(&state.echo).map(|_| ())
    };
    timed(AGAIN, trip).map(Some)
}
