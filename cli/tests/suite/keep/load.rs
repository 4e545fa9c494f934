//! Ten thousand opens and more.

use super::{ipc, keep, model, open, release, unique};
use crate::support::Directory;

/// Number of opens between two measurements.
const OPENS: u64 = 5_000;
/// Number of measurements at most. The memory of the allocator for a further thread grows once, that of a leak with every open.
const MEASUREMENTS: usize = 6;
/// Number of threads that open at the same time.
const THREADS: u64 = 8;
/// Growth of resident memory in bytes between two measurements that noise explains: about 200 B for each open.
const NOISE: u64 = 1 << 20;

/// Returns the number of open files of a process, and the bytes of its resident memory that belong to no file: pages of the program
/// and its libraries come and go with the memory of the machine.
fn resources(pid: u32) -> (usize, u64) {
    let files = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("the process runs").count();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("the process runs");
    let kib = |field: &str| -> Option<u64> {
        let line = status.lines().find_map(|line| line.strip_prefix(field))?;
        line.trim().strip_suffix(" kB")?.parse().ok()
    };
    let memory = kib("RssAnon:").zip(kib("RssShmem:")).expect("a kernel that states both");
    (files, (memory.0 + memory.1) * 1024)
}

#[test]
fn ten_thousand_opens_leave_nothing_behind() {
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
                            drop(ipc.find(&name).start().expect("found"));
                        } else {
                            release(&ipc, open(&ipc, &name).expect("opened").1);
                        }
                    }
                });
            }
        });
        resources(keeper.pid())
    };
    let mut measured = vec![open_often()];
    let is_steady = |measured: &[(usize, u64)]| {
        let kept = |pair: &[(usize, u64)]| pair[1].0 <= pair[0].0 + 8 && pair[1].1 <= pair[0].1 + NOISE;
        measured.windows(2).any(kept)
    };
    while !is_steady(&measured) {
        assert!(measured.len() < MEASUREMENTS, "files and bytes of memory grow: {measured:?}");
        measured.push(open_often());
    }
    let readers = ipc.find(&name).start().expect("found").readers();
    assert!(readers <= 1, "{readers} readers");
}
