//! The binary form of a ring's descriptor, from anybody.
#![no_main]

use device_ipc_core::fuzzing;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzzing::ring(bytes));
