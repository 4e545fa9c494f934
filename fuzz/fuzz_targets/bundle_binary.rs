//! The binary form of a bundle, from anybody.
#![no_main]

use device_ipc_core::fuzzing;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzzing::bundle(bytes));
