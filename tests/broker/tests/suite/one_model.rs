//! What holds for one region holds for many named tensors.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use device_ipc_broker_tests::{Answer, agent, eventually};
use device_ipc_core::limits::{MAX_DESCRIPTOR_BYTES, MAX_NAME_BYTES};
use device_ipc_core::{
    Access, Buffer, DescriptorError, DeviceOwner as _, DevicePtr, Dtype, Error, ExposurePolicy, Ipc, Message,
    OwnedRegion, Region, TensorLayout, TensorSet,
};
use device_ipc_mock::MockBackend;

const MACHINE: &str = "devices=2";
const PATIENCE: Duration = Duration::from_secs(20);

fn ipc() -> Ipc {
    Ipc::with_backend(MockBackend::from_spec(MACHINE).expect("a machine"))
}

fn bytes(count: u64) -> TensorLayout {
    TensorLayout::contiguous(Dtype::U8, [count]).expect("a layout")
}

/// `t0` and `t1`, each on a device of its own.
fn on_two_devices(ipc: &Ipc) -> TensorSet {
    let mut tensors = ipc.tensors();
    for device in 0..2 {
        let buffer = ipc.allocate(device, 4096).expect("memory");
        tensors.owned::<(), Buffer>(format!("t{device}"), buffer, Some(bytes(4096))).expect("it fits");
    }
    tensors
}

/// No importer reads a descriptor beyond the limit.
#[test]
fn set_whose_descriptor_exceeds_the_limit_is_refused() {
    let ipc = ipc();
    let mut tensors = ipc.tensors();
    let memory = tensors.memory(ipc.allocate(0, 4096).expect("memory"));
    for number in 0..MAX_DESCRIPTOR_BYTES / MAX_NAME_BYTES {
        tensors.tensor(format!("{number:0MAX_NAME_BYTES$}"), memory, 0, bytes(1)).expect("it fits");
    }
    let refused = ipc.share_all(tensors).start().expect_err("the names alone have as many bytes");
    let found = match refused.error() {
        Error::Descriptor(DescriptorError::TooLarge { found }) => *found,
        other => panic!("{other}"),
    };
    assert!(found > MAX_DESCRIPTOR_BYTES);
}

#[test]
fn named_tensors_report_openings_and_changes() {
    let ipc = ipc();
    let mut importer = agent!(MACHINE);
    let export = ipc.share_all(on_two_devices(&ipc)).start().expect("shared");
    let changes = Arc::new(AtomicU32::new(0));
    let seen = Arc::clone(&changes);
    export.on_change(move || {
        seen.fetch_add(1, Ordering::Relaxed);
    });
    let is_released = || export.try_wait_released().expect("the importer lives");
    assert!(!is_released(), "no process has opened it");
    let early = export.wait_opened(1, Duration::ZERO).unwrap_err();
    assert!(early.to_string().contains("no process has opened the export"), "{early}");
    assert_eq!(importer.ok(&format!("open x {}", export.descriptor())), "2");
    export.wait_opened(1, PATIENCE).expect("opened on both devices");
    assert_eq!(export.holders().iter().len(), 2, "one lease for each device");
    eventually("changes", true, || changes.load(Ordering::Relaxed) > 0);
    assert!(!is_released());
    importer.ok("drop x");
    eventually("the release", true, is_released);
    export.close(PATIENCE).expect("closed");
}

#[test]
fn named_tensors_obey_the_exposure_policy() {
    let ipc = ipc();
    // Half of an allocation: a handle reaches the other half too.
    let half = || {
        let buffer = ipc.allocate(0, 8192).expect("memory");
        let range = buffer.range().slice(0, 4096).expect("it lies inside");
        let region = Region::new(ipc.backend().info().name, range);
        // SAFETY: the buffer keeps its first half allocated.
        let owner = unsafe { OwnedRegion::new(buffer, region) };
        let mut tensors = ipc.tensors();
        tensors.owned("half", owner, Some(bytes(4096))).expect("it fits");
        tensors
    };
    let allowed = ipc.share_all(half()).start().expect("shared");
    assert!(!allowed.exposure().is_exact(), "{}", allowed.exposure());
    let refused = ipc.share_all(half()).exposure(ExposurePolicy::Refuse).start().unwrap_err();
    assert!(matches!(refused.error(), Error::Exposes { region: 4096, .. }), "{refused}");
    let set = refused.into_inner();
    assert_eq!(set.len(), 1, "the set comes back");
    let copied = ipc.share_all(set).exposure(ExposurePolicy::Copy).start().expect("a copy is shared");
    assert!(copied.exposure().is_exact(), "{}", copied.exposure());
    let mut importer = agent!(MACHINE);
    assert_eq!(importer.ok(&format!("open x {}", copied.descriptor())), "1");
    assert_eq!(importer.ok("tensor-ends x half"), "0 0");
    importer.ok("drop x");
    copied.close(PATIENCE).expect("closed");
    allowed.close(PATIENCE).expect("closed");
}

#[test]
fn named_tensors_in_borrowed_memory_are_checked_for_staleness() {
    let ipc = ipc();
    let (kept, borrowed) = (ipc.allocate(0, 4096).expect("memory"), ipc.allocate(0, 4096).expect("memory"));
    let mut tensors = ipc.tensors();
    tensors.owned::<(), Buffer>("kept", kept, Some(bytes(4096))).expect("it fits");
    // SAFETY: the mock survives that the promise is broken below, which is what is tested.
    let memory = unsafe { tensors.memory_borrowed(borrowed.region()) };
    tensors.tensor("borrowed", memory, 0, bytes(4096)).expect("it fits");
    let export = ipc.share_all(tensors).start().expect("shared");
    let mut importer = agent!(MACHINE);
    assert_eq!(importer.ok(&format!("open x {}", export.descriptor())), "2");
    importer.ok("drop x");
    drop(borrowed);
    let Answer::Failed(failure) = agent!(MACHINE).ask(&format!("open x {}", export.descriptor())) else {
        panic!("the borrowed memory is gone");
    };
    let told = format!("{} {}", failure.kind, failure.text);
    assert!(told.contains("freed by its owner"), "{told}");
}

#[test]
fn further_tensors_of_an_owner_are_kept_until_the_release() {
    let ipc = ipc();
    let block = Arc::new(ipc.allocate(0, 4096).expect("memory"));
    let (backend, whole) = (block.region().backend, block.range());
    let share = |offset: u64, last: [u64; 1]| {
        let mut tensors = ipc.tensors();
        let half = Region::new(backend, whole.slice(0, 1024).expect("a part"));
        // SAFETY: the reference keeps the whole block.
        let first = tensors.memory(unsafe { OwnedRegion::new(Arc::clone(&block), half) });
        tensors.tensor("first", first, 0, bytes(1024)).expect("it fits");
        for (name, offset, shape) in [("second", offset, [1024]), ("third", offset + 1024, last)] {
            let place = (whole.device, DevicePtr::new(whole.ptr.get() + offset));
            // SAFETY: as above.
            let added = unsafe { tensors.further_tensor(name, place, Dtype::U8, &shape, &[1]) };
            added.expect("a tensor of its own");
        }
        ipc.share_all(tensors).start().expect("shared")
    };
    let mut importer = agent!(MACHINE);
    // The second set is that of before; the others have another place, and another shape.
    for (offset, last) in [(1024, [1024]), (1024, [1024]), (2048, [1024]), (2048, [512])] {
        let export = share(offset, last);
        let descriptor = export.descriptor();
        assert_eq!(descriptor.allocations(), 1);
        let sizes: Vec<_> = descriptor.tensors().map(|(_, layout)| layout.shape().to_vec()).collect();
        assert_eq!(sizes, [vec![1024], vec![1024], last.to_vec()]);
        assert_eq!(importer.ok(&format!("open x {descriptor}")), "3");
        let opened = ipc.open(descriptor).timeout(PATIENCE).at_home().expect("opened");
        let third = opened.get("third").expect("there").range();
        assert_eq!((third.ptr.get() - whole.ptr.get(), third.len), (offset + 1024, last[0]));
        drop((export, opened));
        assert_eq!(Arc::strong_count(&block), 2, "the importer has it");
        importer.ok("drop x");
        eventually("references to the block", 1, || Arc::strong_count(&block));
    }
}

#[test]
fn mapping_gives_one_tensor_or_many_by_the_same_calls() {
    let ipc = ipc();
    let export = ipc.share_all(on_two_devices(&ipc)).access(Access::ReadWrite).start().expect("shared");
    let named = ipc.open(export.descriptor()).timeout(PATIENCE).at_home().expect("opened");
    assert_eq!(named.tensors().map(|(name, _)| name.to_owned()).collect::<Vec<_>>(), ["t0", "t1"]);
    assert_eq!(named.get("t1").expect("there").range().len, 4096);
    assert_eq!(named.devices().len(), 2);
    assert!(named.is_at_home() && !named.is_copy() && !named.is_empty());
    assert!(named.tensor().unwrap_err().to_string().contains("Mapping::get"));
    assert!(matches!(named.get("t2"), Err(Error::NoSuchTensor { .. })));
    let timeline = named.timeline().expect("named tensors have one");
    assert_eq!(export.timelines(1, PATIENCE).expect("it was asked for").len(), 1);
    drop(timeline);
    let stream = ipc.create_stream(1).expect("a stream");
    named.release(&stream).expect("released");

    let one = ipc.share(ipc.allocate(0, 64).expect("memory")).dtype(Dtype::U8).start().expect("shared");
    let mapping = ipc.open(one.descriptor()).at_home().expect("opened");
    assert_eq!(
        mapping.tensors().map(|(name, tensor)| (name.to_owned(), tensor.range())).collect::<Vec<_>>(),
        [(String::new(), mapping.range())]
    );
    assert_eq!(mapping.get("").expect("there").range(), mapping.tensor().expect("there").range());
    assert!(matches!(mapping.get("t0"), Err(Error::NoSuchTensor { .. })));
    drop(mapping);
    one.close(PATIENCE).expect("closed");
    export.close(PATIENCE).expect("closed");
}

#[test]
fn options_for_one_region_are_refused_for_named_tensors() {
    let ipc = ipc();
    let refused = ipc.share_all(on_two_devices(&ipc)).shape([4_u64]).start().unwrap_err();
    assert!(refused.to_string().contains("each has a layout of its own"), "{refused}");
    let empty =
        ipc.share_all(refused.into_inner()).ready_on(&ipc.create_stream(0).expect("a stream")).start();
    empty.expect("the set is intact").close(PATIENCE).expect("closed");
    let none = ipc.share_all(ipc.tensors()).start().unwrap_err();
    assert!(none.to_string().contains("at least one tensor"), "{none}");
}

#[test]
fn ready_on_again_for_the_same_device_replaces_the_stream() {
    let ipc = ipc();
    let [idle, writing, reading] = [0; 3].map(|device| ipc.create_stream(device).expect("a stream"));
    let buffer = Arc::new(ipc.allocate(0, 4096).expect("memory"));
    let gate = writing.gate().expect("closed");
    buffer.view_mut::<f32, _>(&writing).expect("a view").copy_from(&[7.0; 1024]).expect("submitted");
    let export = ipc.share(Arc::clone(&buffer)).dtype(Dtype::F32).ready_on(&idle).ready_on(&writing).start();
    let export = export.expect("shared");
    let mapping = ipc.open(export.descriptor()).on(&reading).expect("opened");
    gate.open();
    let bytes: Vec<f32> =
        mapping.tensor().expect("one").view(&reading).expect("a view").to_vec().expect("read");
    assert!(bytes.iter().all(|value| *value == 7.0), "the second stream has written: {:?}", &bytes[..4]);
    drop(mapping);
    export.close(PATIENCE).expect("closed");
}

#[test]
fn exports_of_a_message_keep_their_order() {
    let ipc = ipc();
    let named = ipc.share_all(on_two_devices(&ipc)).start().expect("shared");
    let one = ipc.share(ipc.allocate(0, 64).expect("memory")).dtype(Dtype::U8).start().expect("shared");
    let name = format!("device-ipc-order-{}", std::process::id());
    let listener = ipc.listen(&name).start().expect("listening");
    let accepting = std::thread::spawn(move || listener.accept(PATIENCE));
    let sender = ipc.connect(&name).start().expect("connected");
    let receiver = accepting.join().expect("no panic").expect("accepted");
    sender.send(Message::new().export(&named).export(&one), PATIENCE).expect("sent");
    let received = receiver.receive(PATIENCE).expect("received");
    let are_named: Vec<_> = received.exports().iter().map(|export| export.descriptor().is_named()).collect();
    assert_eq!(are_named, [true, false]);
}
