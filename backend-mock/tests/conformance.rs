//! The conformance suite on the mock, with each of its machines, and with mistakes that the suite has to find.

#[macro_use]
#[path = "support/delegate.rs"]
mod delegate;
mod mistakes;
mod restricted;

use std::process::ExitCode;
use std::sync::Arc;

use device_ipc_conformance::{Suite, visible_devices};
use device_ipc_core::backend::{DeviceIpc, Unavailable};
use device_ipc_mock::MockBackend;

use restricted::Restricted;

/// The machines: CUDA's legacy handles, file descriptors, Ascend's keys, and machines without optional features.
const VARIANTS: [(&str, &str); 11] = [
    ("default", "devices=2"),
    ("fds", "devices=2;handles=fds"),
    ("revoking", "devices=2;lifetime=revoking;generations=off"),
    ("no-peers", "devices=2;peers=none"),
    ("no-events", "devices=2;events=off"),
    ("no-timelines", "devices=2;timelines=off"),
    ("one-device", "devices=1"),
    ("slow", "devices=2;latency=2ms"),
    ("no-pinned", "devices=2;peers=none;pinned=off"),
    ("like-cuda", "devices=2;like=cuda"),
    ("like-ascend", "devices=2;like=ascend"),
];

fn main() -> ExitCode {
    let suite = Suite::new("mock").expected_skips(include_str!("expected-skips.txt"));
    // Before the others: one of them takes 20 s, in which it waits for a gate to open by itself.
    let suite = mistakes::add_to(suite);
    let suite = VARIANTS.iter().fold(suite, |suite, (name, spec)| suite.variant(name, || machine(spec)));
    suite.variant("restricted", || Ok(Restricted::new(machine("devices=2")?))).run()
}

/// Creates the machine of this description, with the devices that are visible to this process.
fn machine(spec: &str) -> Result<Arc<dyn DeviceIpc>, Unavailable> {
    let spec = match visible_devices() {
        Some(visible) => format!("{spec};visible={visible}"),
        None => spec.to_owned(),
    };
    Ok(MockBackend::from_spec(&spec)?)
}
