//! libcuda as `cuda.h` declares it: functions, structures and constants. Calls nothing.

pub(crate) mod api;
pub(crate) mod layout;
