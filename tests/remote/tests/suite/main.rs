//! The tests of copies to other hosts and of channels over TCP, as one executable.

mod channels;
mod hostile;
mod sockets;
mod two_hosts;
