//! The vendor's rules that the backend follows, one test for each, on the simulator, which enforces them.
//! `docs/internals/ascend-rules.md` lists their sources.
//!
//! Errors of an unavailable Ascend and the visible devices are tested here too. Each test runs in a separate process, on a
//! machine that it describes.

mod cards;
mod contexts;
mod devices;
mod diagnostics;
mod events;
mod exports;
mod importer;
mod keys;
mod library;
mod lifetimes;
mod lists;
mod memory;
mod owners;
mod shareable;
#[path = "../support/mod.rs"]
mod support;
mod timelines;
mod unavailable;
mod visible_devices;
