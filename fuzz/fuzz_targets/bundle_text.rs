//! The text form of a bundle, from anybody.
#![no_main]

use device_ipc_core::fuzzing;

libfuzzer_sys::fuzz_target!(|text: &str| fuzzing::bundle_text(text));
