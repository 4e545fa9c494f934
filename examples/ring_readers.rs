//! A trainer publishes versions of its weights to readers that it does not control: one joins late, one crashes while it reads a
//! slot, one hangs. The trainer never waits for a process that is gone, names the one that hangs, and dismisses it; the readers
//! that run correctly receive every version. Runs on the mock if there is no accelerator:
//!
//! ```text
//! cargo run --example ring_readers
//! ```

mod roles;

use std::io::{BufRead, stdin};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use device_ipc::{Descriptor, Error, Ipc, Ring, RingReader, Stream};
use roles::{Role, TIMEOUT};

const ELEMENTS: usize = 1024;
const SLOTS: u32 = 2;

/// The time after which the trainer dismisses a reader that has not released its slot.
const PATIENCE: Duration = Duration::from_secs(2);

fn trainer() -> Result<()> {
    let ipc = Ipc::builder().allow_simulated(true).auto()?;
    let stream = ipc.create_stream(0)?;
    let bytes = (ELEMENTS * size_of::<f32>()) as u64 * u64::from(SLOTS);
    let mut ring = ipc.ring(ipc.allocate(0, bytes)?).slots(SLOTS).start()?;

    let [early, crashes, hangs] = [start("reader", &ring)?, start("crashes", &ring)?, start("hangs", &ring)?];
    println!("[trainer] {} readers", ring.readers());

    publish(&mut ring, &stream)?;
    crashes.expect("crashes while it reads version 0")?;
    hangs.expect("reads version 0 for ever")?;
    for _ in 1..4 {
        publish(&mut ring, &stream)?; // waits for the reader that hangs, once
    }
    ensure!(ring.readers() == 1, "one of three readers is left, not {}", ring.readers());
    hangs.expect("was dismissed")?;

    let late = start("reader", &ring)?;
    for _ in 4..8 {
        publish(&mut ring, &stream)?;
    }
    ring.close(TIMEOUT)?; // the readers' loops end; waits until they have left
    early.expect("read 8 versions")?;
    late.expect("read 4 versions")?;
    for reader in [early, late, hangs] {
        reader.finish()?;
    }
    Ok(())
}

/// Starts a reader and waits until it has opened the ring.
fn start(role: &str, ring: &Ring) -> Result<Role> {
    let mut reader = Role::start(role)?;
    reader.send_line(&ring.descriptor().to_string())?;
    reader.expect(&format!("joined before version {}", ring.sequence()))?;
    Ok(reader)
}

/// Publishes the next version, after dismissing readers that do not release the slot in time.
fn publish(ring: &mut Ring, stream: &Stream) -> Result<()> {
    if let Err(error) = ring.wait_writable(PATIENCE) {
        ensure!(matches!(error, Error::Timeout { .. }), error);
        println!("[trainer] {error}"); // names process, program and sequence of each
        for reader in ring.readers_behind() {
            ring.dismiss(reader.lease);
        }
    }
    let mut slot = ring.write(stream)?;
    let weights = vec![slot.sequence() as f32; ELEMENTS];
    slot.view_mut(stream)?.copy_from(&weights)?;
    Ok(slot.publish()?)
}

fn join() -> Result<(Stream, RingReader)> {
    let mut line = String::new();
    stdin().lock().read_line(&mut line).context("cannot read the descriptor of the ring")?;
    let descriptor: Descriptor = line.trim().parse()?;
    let ipc = Ipc::builder().allow_simulated(true).auto()?;
    let stream = ipc.create_stream(0)?;
    let reader = ipc.open_ring(&descriptor).on(&stream)?;
    println!("joined before version {}", reader.sequence());
    Ok((stream, reader))
}

/// Reads every version until the trainer closes the ring.
fn reader() -> Result<()> {
    let (stream, mut reader) = join()?;
    let mut versions = 0;
    while let Some(slot) = reader.next(TIMEOUT)? {
        let weights: Vec<f32> = slot.view(&stream)?.to_vec()?;
        ensure!(weights == [slot.sequence() as f32; ELEMENTS], "version {} is torn", slot.sequence());
        slot.release(&stream)?;
        versions += 1;
    }
    println!("read {versions} versions");
    Ok(())
}

fn crashes() -> Result<()> {
    let (stream, mut reader) = join()?;
    let slot = reader.next(TIMEOUT)?.context("the ring was closed")?;
    let _weights = slot.view::<f32, _>(&stream)?;
    println!("crashes while it reads version {}", slot.sequence());
    std::process::abort();
}

fn hangs() -> Result<()> {
    let (stream, mut reader) = join()?;
    let slot = reader.next(TIMEOUT)?.context("the ring was closed")?;
    println!("reads version {} for ever", slot.sequence());
    while slot.check().is_ok() {
        std::thread::sleep(Duration::from_millis(10));
    }
    // The weights may have been overwritten meanwhile.
    match slot.release(&stream).map_err(Error::from) {
        Err(Error::DismissedFromRing { .. }) => println!("was dismissed"),
        other => bail!("expected to be dismissed: {other:?}"),
    }
    Ok(())
}

fn main() -> Result<()> {
    match std::env::args().nth(1).as_deref() {
        None => trainer(),
        Some("reader") => reader(),
        Some("crashes") => crashes(),
        Some("hangs") => hangs(),
        Some(other) => bail!("role {other} not found; without an argument, the program starts all roles"),
    }
}
