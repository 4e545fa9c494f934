//! Ten thousand opens.

use super::{ipc, keep, model, open, release, unique};
use crate::support::Directory;

/// Number of opens before the first measurement.
const FIRST: u64 = 5_000;
/// Number of opens before the last measurement.
const ALL: u64 = 10_000;
/// Number of threads that open at the same time.
const THREADS: u64 = 8;
/// Growth of resident memory in bytes that noise explains: less than 200 B for each open.
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
    let open_often = |opens: u64| {
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    for index in 0..opens / THREADS {
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
    };
    open_often(FIRST);
    let first = resources(keeper.pid());
    open_often(ALL - FIRST);
    let ((files, memory), (files_now, memory_now)) = (first, resources(keeper.pid()));
    assert!(files_now <= files + 8, "{files_now} files are open, {files} were");
    assert!(memory_now <= memory + NOISE, "{memory_now} B are resident, {memory} B were");
    let readers = ipc.find(&name).start().expect("found").readers();
    assert!(readers <= 1, "{readers} readers");
}
