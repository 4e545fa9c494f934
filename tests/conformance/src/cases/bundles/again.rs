//! A state dict that is handed over repeatedly: a new bundle each time, of the same tensors.

use device_ipc_core::{Descriptor, Mapping, Error, Stream, counters};

use super::errors::{altered, first_in_the_second_region};
use super::{nothing_stays_open, tensor, three_tensors};
use crate::agent::{Agent, TensorSharing, SharedTensor, Command};
use crate::check::{equal, refused, same, that};
use crate::flows::{pattern, tensor_bytes};
use crate::{Context, Outcome, Stop, fail};

/// Has the agent share a further bundle: `t0` to `t2`, each in one of these buffers of 4096 bytes.
#[track_caller]
fn share_again(agent: &mut Agent, name: &str, of: [&str; 3]) -> Result<Descriptor, Stop> {
    let memories = of.iter().map(|memory| ((*memory).to_owned(), None)).collect();
    let tensors = (0..3).map(|index| tensor(format!("t{index}"), index, 0, "uint8", &[4096])).collect();
    let sharing = TensorSharing { memories, tensors, ..Default::default() };
    agent.get(&Command::ShareTensors { name: name.into(), sharing })
}

const SAME: [&str; 3] = ["m0", "m1", "m2"];

/// The tensors have the bytes of the pattern from `begin` on, one further for each.
#[track_caller]
fn has_the_pattern(mapping: &Mapping, stream: &Stream, begin: usize) -> Outcome {
    for index in 0..3 {
        let found = tensor_bytes(&mapping.get(&format!("t{index}"))?, stream)?;
        let first = begin + index;
        same(&found, &pattern(4096 + first)[first..], format!("the bytes of tensor {index}"))?;
    }
    Ok(())
}

/// A new bundle of open memory costs a request and no call of the driver, also after the earlier bundles have ended; and each
/// of them alone keeps the memory open.
pub fn handed_over_again(context: &Context) -> Outcome {
    let (mut exporter, first) = three_tensors(context)?;
    let ipc = context.ipc();
    let stream = ipc.create_stream(0)?;
    let mut mapping = ipc.open(&first).on(&stream)?;
    let opened = counters().driver_opens_total;
    let mut former = "b".to_owned();
    for round in 1..=4 {
        let name = format!("again {round}");
        let descriptor = share_again(&mut exporter, &name, SAME)?;
        that(descriptor.exports().ne(first.exports()), "it is an export of its own")?;
        let requests = counters().requests_total;
        let next = ipc.open(&descriptor).on(&stream)?;
        equal(counters().requests_total - requests, 1, format!("requests in round {round}"))?;
        equal(counters().driver_opens_total, opened, format!("driver's opens until round {round}"))?;
        std::mem::replace(&mut mapping, next).release(&stream)?;
        exporter.must(&Command::Drop { names: vec![std::mem::replace(&mut former, name)] })?;
        equal(counters().driver_closes_total, 0, format!("driver's closes until round {round}"))?;
        has_the_pattern(&mapping, &stream, 0)?;
    }
    mapping.release(&stream)?;
    exporter.must(&Command::Drop { names: vec![former] })?;
    nothing_stays_open()
}

/// What only looks like memory that is open is opened: other allocations of the same sizes, the same ones in another order,
/// and the same ones on another device.
pub fn what_looks_the_same_is_told_apart(context: &Context) -> Outcome {
    let (mut exporter, first) = three_tensors(context)?;
    for index in 0..3 {
        exporter.allocate(&format!("n{index}"), 0, &pattern(4196 + index)[100 + index..])?;
    }
    let ipc = context.ipc();
    let stream = ipc.create_stream(0)?;
    let mapping = ipc.open(&first).on(&stream)?;
    let other = share_again(&mut exporter, "other", ["n0", "n1", "n2"])?;
    let others = ipc.open(&other).on(&stream)?;
    has_the_pattern(&others, &stream, 100)?;
    has_the_pattern(&mapping, &stream, 0)?;
    // Their places in the bundle follow their addresses, whatever buffer has them.
    let turned = share_again(&mut exporter, "turned", ["m2", "m1", "m0"])?;
    let opened = counters().driver_opens_total;
    let turned = ipc.open(&turned).on(&stream)?;
    equal(counters().driver_opens_total, opened, "driver's opens of memory that is open")?;
    for (name, from) in [("t0", 2), ("t1", 1), ("t2", 0)] {
        let found = tensor_bytes(&turned.get(name)?, &stream)?;
        same(&found, &pattern(4096 + from)[from..], format!("the bytes of {name} where it is another one's place"))?;
    }
    let mixed = share_again(&mut exporter, "mixed", ["m0", "n1", "m2"])?;
    let mixed = ipc.open(&mixed).on(&stream)?;
    same(&tensor_bytes(&mixed.get("t1")?, &stream)?, &pattern(4197)[101..], "the one that is another")?;
    same(&tensor_bytes(&mixed.get("t2")?, &stream)?, &pattern(4098)[2..], "one that is the same")?;
    let again = share_again(&mut exporter, "again", SAME)?;
    if let Ok([_, away]) = context.two_peers() {
        let stream = ipc.create_stream(away.ordinal)?;
        let opened = counters().driver_opens_total;
        let away = ipc.open(&again).on(&stream)?;
        that(counters().driver_opens_total > opened, "the driver should open the memory on the other device")?;
        has_the_pattern(&away, &stream, 0)?;
    }
    drop((mapping, others, turned, mixed));
    for name in ["b", "other", "turned", "mixed", "again"] {
        exporter.must(&Command::Drop { names: vec![name.into()] })?;
    }
    nothing_stays_open()
}

/// Open memory hides neither a wrong generation of an allocation nor a wrong token.
pub fn stale_although_the_memory_is_open(context: &Context) -> Outcome {
    let (mut exporter, first) = three_tensors(context)?;
    let ipc = context.ipc();
    let mapping = ipc.open(&first).at_home()?;
    let again = share_again(&mut exporter, "again", SAME)?;
    // The number of the second region's allocation, and the token of the only part.
    let stale = altered(&again, |bytes, parts| bytes[parts + 50 + 20 + 4 + 8] ^= 1)?;
    let Err(error) = ipc.open(&stale).at_home() else {
        return fail("an allocation of another number should be refused");
    };
    that(matches!(error.innermost(), Error::StaleGeneration(_)), format!("the cause is a stale allocation: {error}"))?;
    let second = first_in_the_second_region(&again, "t1")?;
    refused(Err::<(), _>(error), "a stale allocation", "InBundle", &[&format!("{second:?}")])?;
    let guessed = altered(&again, |bytes, parts| bytes[parts + 8] ^= 1)?;
    refused(ipc.open(&guessed).at_home(), "a wrong token", "InBundle", &["token"])?;
    exporter.must(&Command::Drop { names: vec!["again".into()] })?;
    refused(ipc.open(&again).at_home(), "a bundle that was dropped", "InBundle", &["dropped"])?;
    drop(mapping);
    exporter.must(&Command::Drop { names: vec!["b".into()] })?;
    nothing_stays_open()
}

/// Who puts other tensors in than the last time gets a bundle of those, whichever of them differs, and the receiver reads it
/// so.
pub fn every_difference_from_the_last_time_counts(context: &Context) -> Outcome {
    let (mut exporter, _first) = three_tensors(context)?;
    let usual = || -> Vec<SharedTensor> {
        (0..3).map(|index| tensor(format!("t{index}"), index, 0, "uint8", &[4096])).collect()
    };
    type Change = fn(&mut Vec<SharedTensor>);
    let changes: [(&str, Change); 10] = [
        ("nothing", |_| {}),
        ("the first name", |tensors| tensors[0].name = "T0".into()),
        ("the last name", |tensors| tensors[2].name = "t3".into()),
        ("a shape", |tensors| tensors[1].shape = vec![64, 64]),
        ("a size", |tensors| tensors[1].shape = vec![4095]),
        ("a type", |tensors| (tensors[1].dtype, tensors[1].shape) = ("float32".into(), vec![1024])),
        ("a place", |tensors| (tensors[2].offset, tensors[2].shape) = (96, vec![4000])),
        ("a memory", |tensors| tensors[2].memory = 1),
        ("one tensor fewer", |tensors| drop(tensors.pop())),
        ("one tensor more", |tensors| tensors.push(tensor("t3", 0, 1, "uint8", &[1]))),
    ];
    let ipc = context.ipc();
    let stream = ipc.create_stream(0)?;
    for (round, (what, change)) in changes.into_iter().enumerate() {
        for (kind, tensors) in [("changed", true), ("usual", false)].map(|(kind, changed)| {
            let mut tensors = usual();
            if changed {
                change(&mut tensors);
            }
            (kind, tensors)
        }) {
            let memories = SAME.map(|memory| (memory.to_owned(), None)).into();
            let sharing = TensorSharing { memories, tensors: tensors.clone(), ..Default::default() };
            let name = format!("{kind} {round}");
            let descriptor: Descriptor = exporter.get(&Command::ShareTensors { name, sharing })?;
            let mapping = ipc.open(&descriptor).on(&stream)?;
            equal(mapping.tensors().len(), tensors.len(), format!("tensors, {kind}: {what}"))?;
            for (given, (name, found)) in tensors.iter().zip(mapping.tensors()) {
                equal(name, given.name.as_str(), format!("a name, {kind}: {what}"))?;
                equal(found.shape(), given.shape.as_slice(), format!("a shape, {kind}: {what}"))?;
                equal(found.dtype().to_string(), given.dtype.clone(), format!("a type, {kind}: {what}"))?;
                let (begin, bytes) = (given.memory + given.offset as usize, found.range().len as usize);
                let expected = pattern(4096 + given.memory);
                let found = tensor_bytes(&mapping.get(name)?, &stream)?;
                same(&found, &expected[begin..begin + bytes], format!("the bytes of {name}, {kind}: {what}"))?;
            }
        }
    }
    Ok(())
}
