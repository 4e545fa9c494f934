//! Mappings at addresses that they keep: suspended, resumed, and replaced by other exports. The case's own process opens the
//! memory; agents export it.

mod ends;
mod exchange;
mod ranges;

use device_ipc_core::backend::{HandleKind, HandleKindInfo};
use device_ipc_core::{Descriptor, DevicePtr, Mapping, Stream};

use crate::agent::{Agent, Answer, Command, SharedTensor, TensorSharing};
use crate::check::{equal, that};
use crate::flows::{SOON, pattern};
use crate::{Context, Outcome, Stop, skip};

pub use ends::*;
pub use exchange::*;
pub use ranges::*;

const LEN: usize = 100_003;

/// Runs a case for each usable kind whose memory can be mapped at any address; skips if there is none.
fn for_each_remappable(context: &Context, mut case: impl FnMut(&HandleKindInfo) -> Outcome) -> Outcome {
    let kinds: Vec<_> = context.usable_kinds()?.into_iter().filter(|kind| kind.remappable).collect();
    if kinds.is_empty() {
        return skip("no kind of handle can be mapped at addresses that the importer keeps");
    }
    kinds.iter().try_for_each(|kind| {
        case(kind).map_err(|stop| match stop {
            Stop::Failed(what) => Stop::Failed(format!("{} handles: {what}", kind.name)),
            skipped => skipped,
        })
    })
}

/// Exports bytes of which every kind's allocation holds more than they are.
fn version(exporter: &mut Agent, kind: HandleKind, name: &str, seed: usize) -> Result<(Descriptor, Vec<u8>), Stop> {
    let bytes = pattern(LEN + seed)[seed..].to_vec();
    Ok((exporter.export_as(kind, name, &bytes)?, bytes))
}

fn open(context: &Context, descriptor: &Descriptor) -> Result<(Mapping, Stream), Stop> {
    let ipc = context.ipc();
    let stream = ipc.create_stream(0)?;
    Ok((ipc.open(descriptor).reserved().on(&stream)?, stream))
}

#[track_caller]
fn is_at(mapping: &Mapping, address: DevicePtr, when: &str) -> Outcome {
    equal(mapping.range().ptr, address, format!("the address {when}"))
}

#[track_caller]
fn is_released(exporter: &mut Agent, name: &str) -> Outcome {
    exporter.must(&Command::WaitReleased { name: name.into(), timeout: SOON }).map(drop)
}

/// This process has not opened the export.
#[track_caller]
fn is_not_held(exporter: &mut Agent, name: &str) -> Outcome {
    let holders = match exporter.must(&Command::Holders { name: name.into() })? {
        Answer::Text(text) => text,
        other => other.to_string(),
    };
    that(!holders.contains(&std::process::id().to_string()), format!("{name} was opened: {holders}"))
}

fn bundle(exporter: &mut Agent, kind: HandleKind, name: &str, seed: usize) -> Result<(Descriptor, Vec<Vec<u8>>), Stop> {
    let mut contents = Vec::new();
    for memory in 0..3 {
        let bytes = pattern(4096 + seed + memory)[seed + memory..].to_vec();
        let (of, len) = (format!("{name}{memory}"), bytes.len() as u64);
        exporter.must(&Command::Allocate { name: of, len, device: 0, kind: Some(kind.0), bytes: Some(bytes.clone()) })?;
        contents.push(bytes);
    }
    // Two tensors in the last memory.
    let places = [(0, 0, 4096), (1, 0, 4096), (2, 0, 1024), (2, 1024, 3072)];
    let tensors = places.iter().enumerate().map(|(index, (memory, offset, len))| SharedTensor {
        name: format!("t{index}"),
        memory: *memory,
        offset: *offset,
        dtype: "uint8".into(),
        shape: vec![*len],
    });
    let memories = (0..3).map(|memory| (format!("{name}{memory}"), None)).collect();
    let sharing = TensorSharing { memories, tensors: tensors.collect(), ..Default::default() };
    Ok((exporter.get(&Command::ShareTensors { name: name.into(), sharing })?, contents))
}
