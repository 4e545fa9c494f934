//! The vendor's rules that the backend keeps, one test for each, on the simulator, which refuses whoever breaks them.
//! `docs/internals/ascend-rules.md` says where the vendor states them.
//!
//! Each test runs in a process of its own, on a machine that it describes.

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
