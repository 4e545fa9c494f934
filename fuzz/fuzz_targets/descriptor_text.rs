//! The text form of a descriptor, from anybody.
#![no_main]

use device_ipc_core::fuzzing;

libfuzzer_sys::fuzz_target!(|text: &str| fuzzing::descriptor_text(text));
