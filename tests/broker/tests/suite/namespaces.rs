//! Containers: processes that share neither `/dev/shm` nor process ids.
//!
//! On the simulated CUDA driver, which keeps events in `/dev/shm` and takes two processes with the same id for one, as the
//! real one does.

use device_ipc_broker_tests::{
    CUDA, Child, PINNING, agent, can_start_through, eventually, hand_over_late_bytes, take_timelines,
};

/// A process whose `/dev/shm` is its own. Not in a user namespace as well: the simulated machine's memory is reached by way
/// of `/proc/PID/fd`, which the kernel keeps from processes of another one.
const OWN_SHM: &[&str] = &["unshare", "-m", "sh", "-c", "mount -t tmpfs none /dev/shm && exec \"$0\" \"$@\""];

/// A process that is the first of its own pid namespace.
const OWN_PIDS: &[&str] = &["unshare", "-rpf", "--mount-proc", "--kill-child"];

/// The CUDA backend's kind of handle that travels as a file descriptor.
const VIRTUAL_MEMORY: u16 = device_ipc_cuda::VIRTUAL_MEMORY.0;

fn late_bytes(exporter: &mut Child, importer: &mut Child, place: &str) {
    // Neither waits for what a first use of the device takes.
    importer.ok("allocate warm 4096");
    importer.ok("fill warm 0");
    importer.ok("sync");
    hand_over_late_bytes(exporter, importer, place);
}

#[test]
fn ready_bytes_need_no_shared_dev_shm() {
    if !can_start_through(OWN_SHM) {
        return;
    }
    for place in ["home", "stream:0"] {
        let (mut exporter, mut importer) = (agent!(CUDA), agent!(CUDA, through: OWN_SHM));
        late_bytes(&mut exporter, &mut importer, place);
    }
}

#[test]
fn timelines_need_no_shared_dev_shm() {
    if !can_start_through(OWN_SHM) {
        return;
    }
    for machine in [PINNING, CUDA] {
        let (mut exporter, mut importer) = (agent!(machine), agent!(machine, through: OWN_SHM));
        take_timelines(&mut exporter, &mut importer);
        importer.ok("rounds x 50 first=0");
        exporter.ok("rounds x 50 first=1");
        exporter.ok("wait-now x 50 20000");
        assert_eq!(exporter.ok("float x"), "100");
    }
}

#[test]
fn equal_pids_share_memory_that_travels_as_a_descriptor() {
    if !can_start_through(OWN_PIDS) {
        return;
    }
    let (mut exporter, mut importer) = (agent!(CUDA, through: OWN_PIDS), agent!(CUDA, through: OWN_PIDS));
    for child in [&mut exporter, &mut importer] {
        let identity = child.ok("identity");
        assert!(identity.contains(" pid: 1,"), "{identity}");
    }
    // The driver takes the importer for the exporter.
    let legacy = exporter.share("legacy 4096 kind=1");
    let text = importer.fails(&format!("open legacy {legacy}"), "Vendor");
    assert!(text.contains("process id") && text.contains("allocate"), "{text}");
    eventually("the lease is given back", 0, || exporter.holders("legacy"));
    // A descriptor knows no process ids; and in such a namespace our own allocations are of that kind.
    for kind in [format!("kind={VIRTUAL_MEMORY}"), String::new()] {
        let descriptor = exporter.share(&format!("x 4096 {kind}"));
        importer.ok(&format!("open x {descriptor}"));
        importer.ok("touch x");
        importer.ok("drop x");
        exporter.ok("wait-released x 10000");
        exporter.ok("close x 10000");
    }
}
