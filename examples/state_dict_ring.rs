//! A trainer publishes versions of its weights to two readers through a ring: memory that is shared once and then re-used.
//! A slot is overwritten only after both readers' streams have released it. Runs on the mock if there is no
//! accelerator:
//!
//! ```text
//! cargo run --example state_dict_ring
//! ```

mod roles;

use std::io::{BufRead, Read, stdin};

use anyhow::{Context, Result, bail, ensure};
use device_ipc::{Descriptor, Dtype, Ipc, RingReadSlot, Stream, TensorLayout, TensorTable};
use roles::{Role, TIMEOUT};

const READERS: usize = 2;
const SLOTS: u32 = 2;
const VERSIONS: u64 = 6;
const LAYERS: [(&str, [u64; 2]); 4] =
    [("embed", [64, 32]), ("layer.0", [32, 32]), ("layer.1", [32, 32]), ("head", [32, 10])];

fn trainer() -> Result<()> {
    let ipc = Ipc::builder().allow_simulated(true).auto()?;
    let stream = ipc.create_stream(0)?;
    let table = packed()?;
    let bytes = table.region_bytes().next_multiple_of(256) * u64::from(SLOTS);
    let mut ring = ipc.ring(ipc.allocate(0, bytes)?).slots(SLOTS).start()?;
    let mut readers = (0..READERS).map(|_| Role::start("reader")).collect::<Result<Vec<_>>>()?;
    for reader in &mut readers {
        reader.send_line(&ring.descriptor().to_string())?;
        reader.send_bytes(&table.to_bytes())?;
        reader.close_input();
    }
    ring.wait_readers(READERS, TIMEOUT)?;
    println!("[trainer] {} tensors, {SLOTS} slots, {} readers", table.len(), ring.readers());

    for version in 0..VERSIONS {
        let slot = ring.write(&stream)?; // the stream waits for the readers of the previous publication in the slot
        for (name, _, layout) in table.iter() {
            let numbers = weights(name, version, layout.span_bytes() as usize / size_of::<f32>());
            slot.tensor(&table, name)?.view_mut::<f32, _>(&stream)?.copy_from(&numbers)?;
        }
        slot.publish()?;
    }
    ring.close(TIMEOUT)?; // the readers' loops end; waits until they have left
    for reader in readers {
        reader.finish()?;
    }
    println!("[trainer] {VERSIONS} versions were published, and both readers have checked them all");
    Ok(())
}

/// Returns the placement of the tensors in a slot.
fn packed() -> Result<TensorTable> {
    let layers =
        LAYERS.into_iter().map(|(name, shape)| Ok((name, TensorLayout::contiguous(Dtype::F32, shape)?)));
    Ok(TensorTable::packed(256, layers.collect::<Result<Vec<_>>>()?)?)
}

/// Returns the elements of a tensor: a number that encodes the tensor and the version.
fn weights(name: &str, version: u64, count: usize) -> Vec<f32> {
    let index = LAYERS.iter().position(|(layer, _)| *layer == name).unwrap_or(LAYERS.len());
    vec![(version * 100 + index as u64) as f32; count]
}

fn reader() -> Result<()> {
    let mut line = String::new();
    let mut input = stdin().lock();
    input.read_line(&mut line).context("cannot read the descriptor of the ring")?;
    let mut bytes = Vec::new();
    input.read_to_end(&mut bytes).context("cannot read the tensor table")?;
    let (descriptor, table): (Descriptor, _) = (line.trim().parse()?, TensorTable::from_bytes(&bytes)?);

    let ipc = Ipc::builder().allow_simulated(true).auto()?;
    let stream = ipc.create_stream(0)?;
    let mut reader = ipc.open_ring(&descriptor).timeout(TIMEOUT).on(&stream)?;
    let mut version = 0;
    while let Some(slot) = reader.next(TIMEOUT)? {
        check(&slot, &table, version, &stream)?;
        slot.release(&stream)?; // takes effect when the stream reaches this point
        version += 1;
    }
    ensure!(version == VERSIONS, "received {version} versions instead of {VERSIONS}");
    println!("checked {VERSIONS} versions of {} tensors", LAYERS.len());
    Ok(())
}

fn check(slot: &RingReadSlot, table: &TensorTable, version: u64, stream: &Stream) -> Result<()> {
    ensure!(slot.sequence() == version, "received version {} instead of {version}", slot.sequence());
    for (name, _) in LAYERS {
        let elements = slot.tensor(table, name)?.view::<f32, _>(stream)?.to_vec()?;
        ensure!(
            elements == weights(name, version, elements.len()),
            "{name} of version {version} contains {:?}, …",
            &elements[..4]
        );
    }
    Ok(())
}

fn main() -> Result<()> {
    match std::env::args().nth(1).as_deref() {
        None => trainer(),
        Some("reader") => reader(),
        Some(other) => bail!("role {other} not found; without an argument, the program starts all roles"),
    }
}
