//! The text form of a ring's descriptor, from anybody.
#![no_main]

use device_ipc_core::fuzzing;

libfuzzer_sys::fuzz_target!(|text: &str| fuzzing::ring_text(text));
