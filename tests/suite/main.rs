//! The tests of the facade, as one executable: the modules are the themes.

use device_ipc_test_process::CountingHeap;

#[global_allocator]
static ALLOCATOR: CountingHeap = CountingHeap;

mod accessors;
mod changes;
mod channels;
/// The same tests, over TCP.
#[allow(clippy::duplicate_mod, reason = "the name of the module selects the network")]
#[path = "channels.rs"]
mod channels_tcp;
mod claims;
mod counts;
mod cuda_elements;
mod cuda_hand_over;
mod cuda_nvrtc;
mod cuda_owner_drops;
mod cuda_raw_handle;
mod debug_text;
mod descriptors;
mod elements;
mod examples;
mod exit;
mod out_of_memory;
mod parameter_server;
mod roles;
mod send_sync;
mod snippets;
mod take_over;
