//! Descriptors, tables of tensors and grants, in binary and as text, from any process.
#![no_main]

use device_ipc_core::fuzzing;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzzing::descriptor(bytes));
