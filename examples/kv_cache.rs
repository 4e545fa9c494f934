//! One process owns a KV cache, and three others read it in place: the blocks that exist when they open it, and blocks that
//! are appended later. They cannot write to it, and copy the blocks of a request into a cache of their own. Runs on the mock
//! if there is no accelerator:
//!
//! ```text
//! cargo run --example kv_cache
//! ```

mod roles;

use std::io::{BufRead, stdin};

use anyhow::{Context, Result, bail, ensure};
use device_ipc::{Access, Buffer, Descriptor, Dtype, ErrorKind, Ipc, Mapping, MemoryUse, Stream, ViewMut};
use roles::{Role, TIMEOUT};

const READERS: usize = 3;
const BLOCKS: usize = 8;
/// Number of elements in a block: the keys and values of some tokens in one layer.
const BLOCK: usize = 16 * 64;

fn owner() -> Result<()> {
    let ipc = Ipc::builder().allow_simulated(true).auto()?;
    let stream = ipc.create_stream(0)?;
    let bytes = (BLOCKS * BLOCK * size_of::<f32>()) as u64;
    let cache = std::sync::Arc::new(ipc.allocate_for(0, bytes, MemoryUse::new().read_only_importers())?);
    let mut contents = vec![0f32; BLOCKS * BLOCK];
    for block in 0..BLOCKS / 2 {
        append(&cache, &mut contents, block, &stream)?;
    }
    let share = ipc
        .share(cache.clone())
        .dtype(Dtype::F32)
        .shape([BLOCKS as u64, BLOCK as u64])
        .access(Access::ReadOnly)
        .ready_on(&stream) // readers wait for the blocks on their streams
        .start()?;
    println!(
        "[owner] {BLOCKS} blocks of {BLOCK} numbers on {} of {}",
        share.descriptor().home(),
        ipc.backend().info().name
    );

    let mut readers = (1..=READERS).map(|_| Role::start("reader")).collect::<Result<Vec<_>>>()?;
    for reader in &mut readers {
        reader.send_line(&share.descriptor().to_string())?;
        reader.send_line(&(BLOCKS / 2).to_string())?;
    }
    for reader in &readers {
        reader.expect(&format!("checked {}", BLOCKS / 2))?;
    }
    for block in BLOCKS / 2..BLOCKS {
        append(&cache, &mut contents, block, &stream)?;
    }
    stream.synchronize()?; // before the readers are notified
    for reader in &mut readers {
        reader.send_line(&BLOCKS.to_string())?;
    }
    for reader in &readers {
        reader.expect(&format!("checked {BLOCKS}"))?;
    }
    println!("[owner] who has it open: {}", share.holders());
    for reader in readers {
        reader.finish()?;
    }
    share.wait_released(TIMEOUT)?;
    ensure!(cache.view::<f32, _>(&stream)?.to_vec()? == contents, "a reader has written to the cache");
    println!("[owner] all readers have ended; nothing was changed");
    Ok(())
}

/// Submits a copy of the cache with one more block; existing blocks are rewritten unchanged.
fn append(cache: &Buffer, contents: &mut [f32], block: usize, stream: &Stream) -> Result<()> {
    contents[block * BLOCK..][..BLOCK].copy_from_slice(&block_of(block));
    Ok(cache.view_mut::<f32, _>(stream)?.copy_from(contents)?)
}

fn block_of(block: usize) -> Vec<f32> {
    (0..BLOCK).map(|index| (block * BLOCK + index + 1) as f32).collect()
}

fn reader() -> Result<()> {
    let mut lines = stdin().lock().lines();
    let mut line = || lines.next().context("the owner has exited")?.context("cannot read from the owner");
    let ipc = Ipc::builder().allow_simulated(true).auto()?;
    let stream = ipc.create_stream(0)?;
    let descriptor: Descriptor = line()?.parse()?;
    let cache = ipc.open(&descriptor).on(&stream)?; // once; later blocks appear in it
    check_read_only(&cache, &stream)?;
    let own = ipc.allocate(stream.device(), 2 * (BLOCK * size_of::<f32>()) as u64)?; // the blocks of one request
    while let Ok(count) = line() {
        let count: usize = count.parse()?;
        let numbers = cache.view::<f32, _>(&stream)?.to_vec()?;
        for block in 0..count {
            ensure!(
                numbers[block * BLOCK..][..BLOCK] == block_of(block),
                "block {block} differs from the written values"
            );
        }
        let mut caches = [(own.view_mut::<f32, _>(&stream)?, cache.view(&stream)?)]; // one pair for each layer
        ViewMut::copy_blocks(&mut caches, BLOCK, &[count as u32 - 1, 0], &[0, 1])?;
        let copied = own.to_host::<f32, _>(&stream)?;
        ensure!(copied == [block_of(count - 1), block_of(0)].concat(), "the copied blocks differ");
        println!("checked {count}");
    }
    Ok(cache.release(&stream)?)
}

fn check_read_only(cache: &Mapping, stream: &Stream) -> Result<()> {
    match cache.view_mut::<f32, _>(stream) {
        Err(error) if error.kind() == ErrorKind::NotPermitted => Ok(()),
        Err(other) => Err(other.into()),
        Ok(_) => bail!("the cache is writable, but must be read-only"),
    }
}

fn main() -> Result<()> {
    match std::env::args().nth(1).as_deref() {
        None => owner(),
        Some("reader") => reader(),
        Some(other) => bail!("role {other} not found; without an argument, the program starts all roles"),
    }
}
