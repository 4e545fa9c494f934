//! The conformance suite of device-ipc: what a backend must do, as cases that run it.
//!
//! The mock, the vendor simulators and real hardware run the same cases; so does a third-party backend.
//! A case that passes on the mock alone has proved little, and one that cannot run says why: skips are part of the
//! result, and a checked-in list says which ones a backend is allowed.
//!
//! # Run it for your backend
//!
//! Put a test target without the standard harness into your crate:
//!
//! ```toml
//! [dev-dependencies]
//! device-ipc-conformance = "0.1"
//!
//! [[test]]
//! name = "conformance"
//! harness = false
//! ```
//!
//! and give the [`Suite`] what makes your backend, in one or more variants (a machine without peer access, another kind
//! of handle):
//!
//! ```no_run
//! # use std::sync::Arc;
//! # use device_ipc_core::backend::{DeviceIpc, Unavailable};
//! # fn load() -> Result<Arc<dyn DeviceIpc>, Unavailable> {
//! #     Err(Unavailable::NoDevice { detail: String::new() })
//! # }
//! fn main() -> std::process::ExitCode {
//!     device_ipc_conformance::Suite::new("mine")
//!         .variant("default", || load())
//!         .expected_skips("*/kinds::read_only_is_kept: can be mapped read-only")
//!         .run()
//! }
//! ```
//!
//! `cargo test --test conformance` then runs every case of every variant, each in a fresh process with a deadline. After
//! `--` come `--list`, `--variant NAME`, `--skip PART`, `--test-threads N` and parts of the names of cases; `--help` lists all
//! options, and unknown ones are errors.
//!
//! - Where the backend is [`Unavailable`](device_ipc_core::backend::Unavailable), the suite says so and passes: not every machine
//!   has the hardware. `DEVICE_IPC_CONFORMANCE_REQUIRE=1` makes that a failure.
//! - `DEVICE_IPC_CONFORMANCE_DEADLINE` is the time that a case may take, in seconds; 60 unless set.
//! - The text given to [`Suite::expected_skips`] lists what may be skipped. A skip that is not listed fails the run, and
//!   so does a listed case that ran. A run prints the lines for the skips that are not listed, ready to be pasted.
//! - Cases of a hidden device start processes with the backend's
//!   [`visible_devices_variable`](device_ipc_core::backend::DeviceIpc::visible_devices_variable) set; a backend that reads its
//!   devices from elsewhere asks [`visible_devices`].
//!
//! # Write a case
//!
//! A case is a function over a [`Context`] that returns an [`Outcome`]; its documentation says what it proves and why
//! that matters. `?` turns an error of the library into a failure with the place where it happened, and the functions
//! of [`check`] say what was expected.
//!
//! ```
//! use device_ipc_conformance::{Context, Outcome, check};
//!
//! /// A stream runs on the device that it was created for.
//! pub fn a_stream_knows_its_device(context: &Context) -> Outcome {
//!     let stream = context.ipc().create_stream(0)?;
//!     check::equal(stream.device().get(), 0, "the device of a stream that was created for device 0")
//! }
//! ```
//!
//! Add it to a list of [`cases`], or to your own run with [`Suite::case`]. Where a second process takes part there are
//! two ways:
//!
//! - [`Context::agent`]: a process that carries out commands ([`agent::Agent`]): it shares, opens, reads, writes, blocks streams,
//!   releases and dies. The whole case then stands in one function. Most are written like this.
//! - [`Context::peer`]: a process that runs a second function of the case, a *role* ([`Case::role`]). The two talk in
//!   lines ([`Peer::send_line`], [`Context::receive_line`]).
//!
//! Functions that call the library, the backend or the system return their errors as they are; only other errors are
//! described.
//!
//! Nothing sleeps: what has to happen later is put behind a gate in a device's stream ([`gate::Gate`]), and what has to be
//! waited for has a deadline. "This did not wait for the device" is shown by a gate that is closed meanwhile.
#![deny(unsafe_code)]

pub mod agent;
mod arguments;
pub mod bare;
mod case;
pub mod cases;
pub mod check;
mod context;
mod expected;
pub mod flows;
pub mod gate;
mod outcome;
mod process;
mod runner;
mod suite;
pub mod unchecked;
pub mod usage;
pub mod wire;

pub use case::{Body, Case};
pub use context::{Context, PATIENCE, visible_devices};
pub use outcome::{Outcome, Stop, fail, skip};
pub use process::{Lines, Peer, ReceiveError};
pub use suite::Suite;
