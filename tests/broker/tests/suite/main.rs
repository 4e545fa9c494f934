//! The tests of the broker, as one executable: the modules are the themes.
//!
//! `DEVICE_IPC_KILL_ROUNDS` is the number of rounds at each kill point.

#[macro_use]
#[path = "../../../../backend-mock/tests/support/delegate.rs"]
mod delegate;

mod ahead;
mod bundles;
mod channels;
mod following;
mod fork;
mod further_handles;
mod grants;
mod hostile;
mod hostile_counters;
mod hostile_files;
mod hostile_identity;
mod impostors;
mod kill;
mod lifetimes;
mod many_handles;
mod namespaces;
mod observe;
mod one_model;
mod recycling;
mod reserved;
mod rings;
mod security_page;
mod staged;
mod stale;
mod stopped_processes;
mod threads;
mod timelines;
