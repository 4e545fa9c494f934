//! What the registrations of the backends state for Python frameworks: the names of their devices, and their types in DLPack.
//!
//! Nothing else here knows a vendor. Protocols of frameworks for the devices of one vendor (`__cuda_array_interface__`, PyTorch's memory
//! pools) apply to the backend with that vendor's type in DLPack.

use std::sync::OnceLock;

use device_ipc::backend::{Backends, Registration};
use pyo3::prelude::*;

use crate::dlpack;
use crate::session::host_backend;

/// Returns the registered backends.
pub(crate) fn backends() -> &'static Backends {
    static REGISTERED: OnceLock<Backends> = OnceLock::new();
    REGISTERED.get_or_init(Backends::registered)
}

fn registrations() -> &'static [Registration] {
    backends().registrations()
}

fn registration(backend: &str) -> Option<&'static Registration> {
    registrations().iter().find(|one| one.name() == backend)
}

/// Returns the type in DLPack of the memory of a backend.
pub(crate) fn dlpack_type(backend: &str) -> Option<i32> {
    registration(backend)?.dlpack_device_type()
}

/// Returns the frameworks' name of the devices of a backend.
pub(crate) fn kind(backend: &str) -> &str {
    registration(backend).map_or(backend, |one| one.device_kind())
}

/// Returns whether the memory of a backend is memory of the host to frameworks.
pub(crate) fn is_host(backend: &str) -> bool {
    dlpack_type(backend) == Some(dlpack::CPU)
}

/// Returns the backend of this name, or whose devices frameworks have this name for.
pub(crate) fn named(name: &str) -> Option<&'static str> {
    if name == "cpu" {
        return of_dlpack_type(dlpack::CPU);
    }
    let is_named = |one: &&Registration| one.device_kind() == name || one.name() == name;
    registrations().iter().find(is_named).map(Registration::name)
}

/// Returns the backend whose memory has this type in DLPack. Of several whose memory is that of the host, it is the one in use.
pub(crate) fn of_dlpack_type(number: i32) -> Option<&'static str> {
    let first = || {
        registrations().iter().find(|one| one.dlpack_device_type() == Some(number)).map(Registration::name)
    };
    if number == dlpack::CPU { host_backend().or_else(first) } else { first() }
}

/// Returns the frameworks' names of the devices of all backends, each with this text behind it, in quotes.
pub(crate) fn device_names(behind: &str) -> String {
    let names: Vec<_> = kinds().map(|kind| format!("\"{kind}{behind}\"")).collect();
    names.join(", ")
}

/// Returns the frameworks' names of the devices of all backends, those of the backend with the highest priority first.
pub(crate) fn kinds() -> impl Iterator<Item = &'static str> {
    registrations().iter().map(Registration::device_kind)
}

/// Returns each backend's name, the frameworks' name of its devices, and their type in DLPack.
#[pyfunction]
pub(crate) fn _backends() -> Vec<(&'static str, &'static str, Option<i32>)> {
    let properties = |one: &Registration| (one.name(), one.device_kind(), one.dlpack_device_type());
    registrations().iter().map(properties).collect()
}
