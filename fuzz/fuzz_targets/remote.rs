//! Messages of copies between hosts, in both directions.
#![no_main]

use device_ipc_core::fuzzing;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzzing::remote(bytes));
