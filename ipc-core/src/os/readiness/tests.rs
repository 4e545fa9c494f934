use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::*;

fn is_readable(readiness: &Readiness) -> bool {
    let mut fds = [PollFd::new(readiness, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
}

#[test]
fn readiness_is_set_until_it_is_cleared() {
    let readiness = Readiness::new().unwrap();
    assert!(!is_readable(&readiness), "a new one is not readable");
    readiness.clear();
    for _ in 0..3 {
        readiness.set();
    }
    assert!(is_readable(&readiness) && is_readable(&readiness), "polling does not clear it");
    readiness.clear();
    assert!(!is_readable(&readiness), "one clear undoes all sets");
}
