//! What the other end of a channel may send: its hello, and its messages.
#![no_main]

use device_ipc_core::fuzzing;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzzing::channel(bytes));
