//! The tests of the backend that are specific to CUDA, as one executable: the modules are the themes.

mod capture;
mod contexts;
mod gpu;
mod hardware;
mod kinds;
mod lifetimes;
mod mps;
mod raw;
mod reserved;
mod staged;
mod timelines;
mod unavailable;
mod visible_devices;
