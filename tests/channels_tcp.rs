//! The tests of channels within one host, over TCP.

#[path = "channels.rs"]
mod channels;
