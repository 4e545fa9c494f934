//! `Debug` of the public types is short enough for a log line, and shows no handle and no token.

use std::fmt::Debug;
use std::time::Duration;

use device_ipc::mock::MockBackend;
use device_ipc::{Error, Ipc, Message};

const TIMEOUT: Duration = Duration::from_secs(30);

#[track_caller]
fn is_short(value: &dyn Debug) {
    let text = format!("{value:?}");
    assert!(text.len() <= 1280, "{} bytes: {text}", text.len());
}

#[test]
fn debug_text_of_public_types_is_short() -> Result<(), Error> {
    let ipc = Ipc::with_backend(MockBackend::from_spec("devices=2").expect("a valid machine"));
    let stream = ipc.create_stream(0)?;
    is_short(&ipc);
    is_short(&stream);
    let buffer = ipc.allocate(0, 80)?;
    is_short(&buffer);
    is_short(&buffer.view::<f32, _>(&stream)?);
    let export = ipc.share(buffer).ready_on(&stream).start()?;
    is_short(&export);
    is_short(&ipc.open(export.descriptor()));
    let mapping = ipc.open(export.descriptor()).at_home()?;
    is_short(&mapping);
    is_short(&mapping.timeline()?);
    is_short(&export.holders());
    drop(mapping);

    let mut ring = ipc.ring(ipc.allocate(0, 2048)?).slots(2).start()?;
    let mut reader = ipc.open_ring(ring.descriptor()).on(&stream)?;
    is_short(&ring);
    is_short(&reader);
    let slot = ring.write(&stream)?;
    is_short(&slot);
    slot.publish()?;
    let slot = reader.next(TIMEOUT)?.expect("a publication");
    is_short(&slot);
    slot.release(&stream)?;

    let listener = ipc.listen("debug-text").start()?;
    is_short(&listener);
    is_short(&ipc.connect("debug-text"));
    let client = std::thread::spawn({
        let ipc = ipc.clone();
        move || ipc.connect("debug-text").start()
    });
    let channel = listener.accept(TIMEOUT)?;
    let client = client.join().expect("the client does not panic")?;
    is_short(&channel);
    let message = Message::new().bytes(vec![0; 4096]).export(&export);
    is_short(&message);
    client.send(message, TIMEOUT)?;
    let received = channel.receive(TIMEOUT)?;
    is_short(&received);
    is_short(&received.exports()[0]);
    let (sender, receiver) = channel.split();
    is_short(&sender);
    is_short(&receiver);
    Ok(())
}
