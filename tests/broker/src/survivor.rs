//! The resources of a process that survives the death of its peers: unchanged.

use crate::{Census, Child, eventually, no_more_than, shared_memory_objects};

/// How often each death is tried: as often as `DEVICE_IPC_KILL_ROUNDS` says.
pub fn kill_rounds(unless_given: usize) -> usize {
    let rounds = std::env::var("DEVICE_IPC_KILL_ROUNDS").ok();
    rounds.map_or(unless_given, |rounds| rounds.parse().expect("DEVICE_IPC_KILL_ROUNDS is a number"))
}

/// The resources of the survivor before the first death.
#[derive(Debug)]
pub struct Before {
    census: Census,
    allocated: u64,
}

impl Before {
    /// Takes the resources that it has now.
    pub fn of(child: &mut Child) -> Self {
        Self { census: child.census(), allocated: child.allocated() }
    }

    /// It has what it had.
    #[track_caller]
    pub fn is_now(&self, when: &str, child: &mut Child) {
        eventually(&format!("{when}: leases"), 0, || child.counter("leases"));
        eventually(&format!("{when}: exports"), 0, || child.counter("exports"));
        eventually(&format!("{when}: bytes mapped"), 0, || child.counter("mapped_bytes"));
        eventually(&format!("{when}: bytes allocated"), self.allocated, || child.allocated());
        no_more_than(&self.census, &format!("{when}: descriptors, mappings, threads"), || child.census());
        assert_eq!(shared_memory_objects(), Vec::<String>::new(), "{when}");
    }
}
