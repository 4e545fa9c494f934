//! What an exporter may send to an importer: a message, and a conversation.
#![no_main]

use std::cell::OnceCell;

use device_ipc_core::fuzzing::{self, Importer};

thread_local! {
    static IMPORTER: OnceCell<Importer> = const { OnceCell::new() };
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    fuzzing::reply(bytes);
    IMPORTER.with(|importer| importer.get_or_init(Importer::new).open(bytes));
});
