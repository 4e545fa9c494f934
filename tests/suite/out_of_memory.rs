//! Allocations while the library's worker has yet to free memory of this process, on a mock whose device has room for little more than
//! one allocation.

use std::sync::mpsc::{Receiver, channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::roles::{role as this_role, start_with};
use device_ipc::{Buffer, CopyPolicy, DeviceOwner, Error, Ipc, OwnedRegion, Result};
use device_ipc_core::TestClock;

const BYTES: u64 = 1 << 20;
const ROUNDS: usize = 200;

/// Runs a role on a device of this size.
fn run(role: &str, memory: &str) {
    let machine = format!("devices=1;memory={memory}");
    let environment = [("DEVICE_IPC_BACKEND", "mock".into()), ("DEVICE_IPC_MOCK", machine.into())];
    start_with(module_path!(), role, &environment).finish();
}

#[test]
fn allocation_waits_until_dropped_exports_are_freed() {
    run("exports", "1MiB");
}

#[test]
fn allocation_waits_until_copies_are_released_by_their_stream() {
    run("copies", "2MiB");
}

#[test]
fn allocation_fails_if_the_worker_waits_for_its_caller() {
    run("blocked", "1MiB");
}

fn exports(ipc: &Ipc) -> Result<()> {
    for _ in 0..ROUNDS {
        drop(ipc.share(ipc.allocate(0, BYTES)?).start()?);
    }
    Ok(())
}

fn copies(ipc: &Ipc) -> Result<()> {
    let export = ipc.share(ipc.allocate(0, BYTES)?).start()?;
    let stream = ipc.create_stream(0)?;
    for _ in 0..ROUNDS {
        let copy = ipc.open(export.descriptor()).copy(CopyPolicy::Staged).on(&stream)?;
        assert!(copy.is_copy());
        copy.release(&stream)?;
    }
    Ok(())
}

/// Memory whose owner waits on the worker until it may be freed.
struct Late {
    _memory: Buffer,
    may_end: Mutex<Receiver<()>>,
}

impl Drop for Late {
    fn drop(&mut self) {
        let may_end = self.may_end.get_mut().unwrap_or_else(PoisonError::into_inner);
        may_end.recv().expect("the test ends the wait");
    }
}

fn blocked(ipc: &Ipc) -> Result<()> {
    let (end, may_end) = channel();
    let memory = ipc.allocate(0, BYTES)?;
    let region = memory.region();
    let late = Late { _memory: memory, may_end: Mutex::new(may_end) };
    // SAFETY: the value keeps the memory.
    drop(ipc.share(unsafe { OwnedRegion::new(late, region) }).start()?);
    // The time for which an allocation waits for the worker.
    let limit = Duration::from_secs(1);
    TestClock::take().skip_wait(limit..limit + Duration::from_nanos(1));
    let error = ipc.allocate(0, BYTES).expect_err("the memory has not been freed");
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    end.send(()).expect("the worker waits");
    ipc.allocate(0, BYTES).map(drop)
}

#[test]
#[ignore = "a role of the tests above"]
fn role() {
    let ipc = Ipc::named("mock").expect("the mock needs no device");
    let run = match &*this_role() {
        "exports" => exports,
        "copies" => copies,
        "blocked" => blocked,
        other => panic!("no role: {other}"),
    };
    run(&ipc).expect("there is memory for each round");
}
