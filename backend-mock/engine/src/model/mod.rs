//! Values without I/O: identifiers, configuration, errors, counted operations.

mod config;
mod counters;
mod error;
mod ids;
mod operation;
mod peers;
mod spec;

pub use config::{DeviceConfig, Lifetime, MachineConfig};
pub use counters::Counters;
pub(crate) use counters::Instrumentation;
pub use error::{EngineError, Revocation};
pub use ids::{Access, Address, BlockId, EventId, StreamId};
pub use operation::{Fault, Operation};
pub use peers::PeerMatrix;
pub use spec::ConfigError;
