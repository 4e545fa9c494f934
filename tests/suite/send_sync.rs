//! The main types can be sent to and shared by threads; this file compiles only if they can.

use device_ipc::{
    Buffer, Channel, Descriptor, DeviceMap, Error, Export, Ipc, Listener, Mapping, Received,
    RecoverableError, Ring, RingReader, Stream, TensorSet, TensorTable, Timeline,
};

fn send_sync<T: Send + Sync>() {}
fn send<T: Send>() {}

#[test]
fn main_types_are_send_and_sync() {
    send_sync::<Ipc>();
    send_sync::<Descriptor>();
    send_sync::<Export>();
    send_sync::<Mapping>();
    send_sync::<Timeline>();
    send_sync::<Buffer>();
    send_sync::<Stream>();
    send_sync::<DeviceMap>();
    send_sync::<TensorTable>();
    send_sync::<Channel>();
    send_sync::<Listener>();
    send_sync::<Received>();
    send_sync::<Error>();
    // Also if the value cannot be shared.
    send_sync::<RecoverableError<std::cell::Cell<u8>>>();
    send_sync::<Ring>();
    send_sync::<RingReader>();
    send::<TensorSet>();
}
