//! The resources of a process that survives the death of its peers: unchanged.

use crate::{Census, Child, no_more_than, settle, shared_memory_objects};

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
    /// Takes the resources that it has once it is idle.
    pub fn of(child: &mut Child) -> Self {
        settle([child]);
        Self { census: child.census(), allocated: child.allocated() }
    }

    /// It has what it had.
    #[track_caller]
    pub fn is_now(&self, when: &str, child: &mut Child) {
        no_more_than(&self.census, &format!("{when}: descriptors, mappings, threads"), child);
        let counts = ["leases", "exports", "mapped_bytes"].map(|name| child.counter(name));
        assert_eq!(counts, [0; 3], "{when}: leases, exports, bytes mapped");
        assert_eq!(child.allocated(), self.allocated, "{when}: bytes allocated");
        assert_eq!(shared_memory_objects(), Vec::<String>::new(), "{when}");
    }
}
