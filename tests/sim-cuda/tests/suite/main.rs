//! The tests of the simulated driver, as one executable, with the tests of the facade and of the backend that `on_simulator` runs.

mod configuration;
mod counts;
#[path = "../../../suite/cuda_elements.rs"]
mod cuda_elements;
#[path = "../../../suite/cuda_hand_over.rs"]
mod cuda_hand_over;
#[path = "../../../suite/cuda_owner_drops.rs"]
mod cuda_owner_drops;
#[path = "../../../../backend-cuda/tests/suite/gpu.rs"]
mod gpu;
#[path = "../../../../backend-cuda/tests/suite/hardware.rs"]
mod hardware;
#[path = "../../../../backend-cuda/tests/suite/kinds/mod.rs"]
mod kinds;
#[path = "../../../../backend-cuda/tests/suite/lifetimes.rs"]
mod lifetimes;
mod on_simulator;
mod probes;
#[path = "../../../../backend-cuda/tests/suite/reserved.rs"]
mod reserved;
#[path = "../../../suite/roles.rs"]
mod roles;
mod support;
mod threads;
#[path = "../../../../backend-cuda/tests/suite/visible_devices.rs"]
mod visible_devices;
