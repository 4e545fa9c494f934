//! Conversations of an importer with an exporter that sends arbitrary messages.
#![no_main]

use std::cell::OnceCell;

use device_ipc_core::fuzzing::Importer;

thread_local! {
    static IMPORTER: OnceCell<Importer> = const { OnceCell::new() };
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    IMPORTER.with(|importer| importer.get_or_init(Importer::new).open(bytes));
});
