//! The bytes of a peer over TCP: its part of the handshake, and its messages.
#![no_main]

use device_ipc_tcp::fuzzing;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzzing::tcp(bytes));
