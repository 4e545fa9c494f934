//! Accessors and conversions of the public types, which the other suites do not call.

use std::os::fd::{AsFd as _, AsRawFd as _};
use std::thread;
use std::time::Duration;

use device_ipc::mock::MockBackend;
use device_ipc::{
    Access, Channel, CopyPolicy, DeviceMap, DeviceName, Dtype, Error, Ipc, Message, TensorLayout,
    TrySendError,
};

const TIMEOUT: Duration = Duration::from_secs(30);

fn ipc() -> Ipc {
    Ipc::with_backend(MockBackend::from_spec("devices=2").expect("a valid machine"))
}

fn channels(ipc: &Ipc, name: &str, messages: u64) -> [Channel; 2] {
    let name = format!("accessors-{}-{name}", std::process::id());
    let listener = ipc.listen(&name).max_messages_in_flight(messages).start().expect("the name is new");
    assert_eq!((listener.name(), listener.as_raw_fd()), (&*name, listener.as_fd().as_raw_fd()));
    thread::scope(|scope| {
        let accepting = scope.spawn(|| listener.accept(TIMEOUT).expect("one connects"));
        let connected = ipc.connect(&name).timeout(TIMEOUT).start().expect("it listens");
        [accepting.join().expect("no panic"), connected]
    })
}

#[test]
fn descriptors_are_equal_by_number_and_by_reference() {
    let ipc = ipc();
    let export = ipc.share(ipc.allocate(0, 4096).expect("memory")).start().expect("shared");
    let changes = export.changes();
    assert_eq!(export.as_raw_fd(), export.as_fd().as_raw_fd());
    assert_eq!(changes.as_raw_fd(), changes.as_fd().as_raw_fd());
    assert_ne!(changes.as_raw_fd(), export.as_raw_fd());
}

#[test]
fn access_and_layout_are_those_of_the_export() {
    let ipc = ipc();
    let layout = TensorLayout::contiguous(Dtype::F32, [16]).expect("a layout");
    for access in [Access::ReadOnly, Access::ReadWrite] {
        let memory = ipc.allocate(0, 4096).expect("memory");
        let export = ipc.share(memory).access(access).dtype(Dtype::F32).start().expect("shared");
        let mapping = ipc.open(export.descriptor()).access(access).at_home().expect("open");
        assert_eq!(mapping.access(), access);
        assert_eq!(mapping.tensor().expect("it has a layout").access(), access);
        assert!(export.descriptor().network_addresses().is_empty());
    }
    let stream = ipc.create_stream(0).expect("a stream");
    let mut ring =
        ipc.ring(ipc.allocate(0, 512).expect("memory")).layout(layout.clone()).start().expect("a ring");
    let mut reader = ipc.open_ring(ring.descriptor()).at_home().expect("a reader");
    assert_eq!((reader.layout(), reader.access()), (Some(&layout), ring.descriptor().access()));
    let plain = ipc.ring(ipc.allocate(0, 512).expect("memory")).start().expect("a ring");
    assert_eq!(ipc.open_ring(plain.descriptor()).at_home().expect("a reader").layout(), None);
    let mut slot = ring.write(&stream).expect("a slot");
    slot.view_mut::<u8, _>(&stream).expect("a view").fill_bytes(7).expect("filled");
    slot.publish().expect("published");
    let slot = reader.next(TIMEOUT).expect("it is open").expect("it is published");
    let bytes = slot.view_bytes(&stream).and_then(|view| view.to_vec()).expect("copied");
    assert!(!bytes.is_empty() && bytes.iter().all(|byte| *byte == 7), "{bytes:?}");
}

#[test]
fn reply_is_refused_while_the_channel_is_full() {
    let ipc = ipc();
    let [far, near] = channels(&ipc, "reply", 1);
    let export = ipc.share(ipc.allocate(1, 4096).expect("memory")).start().expect("shared");
    let home = export.descriptor().home();
    near.send(Message::new().bytes(b"question").export(export), TIMEOUT).expect("there is room");
    let received = far.receive(TIMEOUT).expect("a message");
    assert_eq!(received.exports()[0].home(), home);
    let answer = |bytes| received.try_reply(Message::new().bytes(bytes));
    answer(b"one").expect("there is room");
    let Err(TrySendError::Full(message)) = answer(b"two") else { panic!("the channel is full") };
    assert_eq!(message.payload(), b"two");
    assert_eq!(near.receive(TIMEOUT).expect("a message").bytes(), b"one");
    answer(b"two").expect("there is room again");
    drop(far);
    assert_eq!(near.receive(TIMEOUT).expect("a message").bytes(), b"two");
    let closed = Error::from(near.try_send(Message::new()).expect_err("the peer has closed"));
    assert!(matches!(closed, Error::ChannelClosed { .. }), "{closed}");
}

#[test]
fn device_map_names_devices_by_their_identity() {
    let ipc = ipc();
    let devices = ipc.devices().expect("two devices");
    let export = ipc.share(ipc.allocate(0, 4096).expect("memory")).start().expect("shared");
    let open = |to: DeviceName| {
        let map = DeviceMap::new().insert(devices[0].identity, to).expect("a pair");
        let open = ipc.open(export.descriptor()).copy(CopyPolicy::StagedIfNeeded);
        open.on_mapped_devices(&map).map(|mapping| mapping.device())
    };
    for device in devices {
        assert_eq!(open(device.identity.into()).expect("the device is visible"), device.ordinal);
    }
    let other = Ipc::with_backend(MockBackend::from_spec("devices=3").expect("a valid machine"));
    let unknown = other.devices().expect("three devices")[2].identity;
    let refused = open(unknown.into());
    assert!(
        matches!(&refused, Err(Error::InvalidDeviceMap(why)) if why.contains(&unknown.to_string())),
        "{refused:?}"
    );
}

#[test]
fn tensor_that_cannot_be_read_only_is_named() {
    // Not `like=cuda`, whose preferred kind can be read-only in a container.
    let ipc = Ipc::with_backend(MockBackend::from_spec("like=ascend").expect("a valid machine"));
    let layout = TensorLayout::contiguous(Dtype::F32, [16]).expect("a layout");
    let [one, other] = [(); 2].map(|()| ipc.allocate(0, 64).expect("memory"));
    // The driver is asked in the order of the addresses.
    let expected = if one.range().ptr < other.range().ptr { "one" } else { "other" };
    let set = [("one", one, layout.clone()), ("other", other, layout)];
    let set = ipc.share_named(set).expect("names that differ");
    let refused = Error::from(set.access(Access::ReadOnly).start().map(drop).expect_err("of this kind"));
    let Error::InBundle { tensor, cause } = &refused else { panic!("{refused}") };
    assert!(tensor == expected && matches!(**cause, Error::Unsupported { .. }), "{refused}");
}
