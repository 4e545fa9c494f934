//! Thousands of opens. The memory of a keeper on the heap is counted in the tests of the broker.

use std::time::Instant;

use device_ipc_test_process::Census;

use super::{TIMEOUT, ipc, keep, model, open, release, unique};
use crate::support::Directory;

/// Number of opens before and after the first census.
const OPENS: u64 = 2_000;
/// Number of threads that open at the same time.
const THREADS: u64 = 8;

#[test]
fn thousands_of_opens_leave_nothing_behind() {
    let directory = Directory::new();
    let file = model(&directory, "m.safetensors", &[("w", &[1.0])]);
    let name = unique("opens");
    let keeper = keep(&[&file, "--name", &name]);
    let ipc = ipc();
    let open_often = || {
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    for index in 0..OPENS / THREADS {
                        // Every fourth process only asks.
                        if index % 4 == 0 {
                            drop(ipc.find(&name, TIMEOUT).expect("found"));
                        } else {
                            release(&ipc, open(&ipc, &name).expect("opened").1);
                        }
                    }
                });
            }
        });
    };
    open_often();
    let before = Census::of(keeper.pid());
    open_often();
    // The keeper closes the last connections when it has read from them.
    let until = Instant::now() + TIMEOUT;
    loop {
        let now = Census::of(keeper.pid());
        if !now.exceeds(&before) {
            break;
        }
        assert!(Instant::now() < until, "{before:?} has become {now:?}");
        std::thread::yield_now();
    }
    let readers = ipc.find(&name, TIMEOUT).expect("found").readers();
    assert!(readers <= 1, "{readers} readers");
}
