//! Notifications of changes of an export's holders, by descriptors for event loops.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use super::roles::start;
use device_ipc::mock::MockBackend;
use device_ipc::{Descriptor, Error, Export, Ipc, Mapping};
use device_ipc_test_process::serve;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

const TIMEOUT: Duration = Duration::from_secs(30);
const MIB: u64 = 1 << 20;

pub(crate) fn ipc() -> Ipc {
    Ipc::with_backend(MockBackend::from_spec("devices=1").expect("a valid machine"))
}

/// Returns whether a descriptor becomes readable within the time.
pub(crate) fn is_readable(source: &impl AsFd, within: Duration) -> bool {
    let mut fds = [PollFd::new(source, PollFlags::IN)];
    let timeout = Timespec::try_from(within).expect("a short time");
    poll(&mut fds, Some(&timeout)).expect("poll succeeds") > 0
}

pub(crate) fn is_readable_now(source: &impl AsFd) -> bool {
    is_readable(source, Duration::ZERO)
}

pub(crate) fn wait(what: &str, holds: impl Fn() -> bool) {
    let until = Instant::now() + TIMEOUT;
    while !holds() {
        assert!(Instant::now() < until, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub(crate) fn tensor(ipc: &Ipc, bytes: u64) -> Export {
    ipc.share(ipc.allocate(0, bytes).expect("memory")).start().expect("it can be shared")
}

/// Not a test: the importer that a test starts.
#[test]
#[ignore = "started by the tests"]
fn role() {
    let ipc = ipc();
    let mut mapping: Option<Mapping> = None;
    serve(|command, argument| {
        mapping = match command {
            "open" => {
                let descriptor: Descriptor = argument.parse().expect("a descriptor");
                Some(ipc.open(&descriptor).at_home().expect("it is shared"))
            }
            "drop" => None,
            other => panic!("unknown command {other:?}"),
        };
        "done".to_owned()
    });
}

#[test]
fn exports_descriptor_is_readable_after_a_change_of_holders() {
    let (ipc, mut peer) = (ipc(), start(module_path!(), "importer", &[]));
    let export = tensor(&ipc, MIB);
    assert!(is_readable_now(&export), "its state has not been read");
    assert!(!export.try_wait_released().expect("it lives") && !is_readable_now(&export));
    assert_eq!(peer.ask(&format!("open {}", export.descriptor())), "done");
    assert!(is_readable(&export, TIMEOUT));
    assert!(!export.try_wait_released().expect("it lives") && export.holders().iter().len() == 1);
    assert!(!is_readable_now(&export));
    assert_eq!(peer.ask("drop"), "done");
    // The last change is the release.
    while !export.try_wait_released().expect("it lives") {
        assert!(is_readable(&export, TIMEOUT));
    }
    // The death of an importer too.
    assert_eq!(peer.ask(&format!("open {}", export.descriptor())), "done");
    wait("the lease is known", || !export.try_wait_released().expect("it lives"));
    peer.kill();
    loop {
        match export.try_wait_released() {
            Ok(released) => assert!(!released && is_readable(&export, TIMEOUT)),
            Err(error) => break assert!(matches!(error, Error::HolderDied { .. }), "{error}"),
        }
    }
}

#[test]
fn changes_of_one_waiter_are_left_by_the_others() {
    let (ipc, mut peer) = (ipc(), start(module_path!(), "importer", &[]));
    let export = tensor(&ipc, MIB);
    let (first, second) = (export.changes(), export.changes());
    first.clear();
    second.clear();
    assert!(!is_readable_now(&first) && !is_readable_now(&second));
    assert_eq!(peer.ask(&format!("open {}", export.descriptor())), "done");
    assert!(is_readable(&first, TIMEOUT));
    first.clear();
    assert_eq!(export.holders().iter().len(), 1);
    assert!(!is_readable_now(&first) && is_readable_now(&second));
    drop(second);
    assert_eq!(peer.ask("drop"), "done");
    while !export.try_wait_released().expect("it lives") {
        assert!(is_readable(&first, TIMEOUT));
        first.clear();
    }
    first.clear();
    export.close(TIMEOUT).expect("no process holds it");
    assert!(is_readable(&first, TIMEOUT), "the export has ended");
}

#[test]
fn changes_of_a_ring_report_its_readers() {
    let ipc = ipc();
    let ring = ipc.ring(ipc.allocate(0, 512).expect("memory")).start().expect("a ring");
    let changes = ring.changes();
    changes.clear();
    let reader = ipc.open_ring(ring.descriptor()).at_home().expect("a reader");
    assert!(is_readable(&changes, TIMEOUT) && ring.readers() == 1);
    drop(reader);
}
