//! The tests of the engine NIXL, as one executable, with the unit tests of these modules.

#[allow(dead_code, unused_imports, reason = "the engine uses the rest")]
#[path = "../../src/bindings.rs"]
mod bindings;
#[allow(dead_code, unreachable_pub, unused_imports, reason = "the engine uses the rest")]
#[path = "../../src/library/mod.rs"]
mod library;
#[allow(dead_code, unused_imports, reason = "the engine uses the rest")]
#[path = "../../src/metadata.rs"]
mod metadata;
#[allow(dead_code, unused_imports, reason = "the engine uses the rest")]
#[path = "../../src/peers.rs"]
mod peers;

mod nixl;
mod pull;
mod road;
mod two_hosts;
mod unavailable;
