//! Elements of the crates half and float8, and booleans, between two processes on the mock.

use std::fmt::Debug;

use super::roles::{argument, role as this_role, start};
use device_ipc::float8::{F8E4M3, F8E5M2};
use device_ipc::half::{bf16, f16};
use device_ipc::mock::MockBackend;
use device_ipc::{Bool, Descriptor, Element, Error, Export, Ipc, Stream};

fn mock() -> (Ipc, Stream) {
    let ipc = Ipc::with_backend(MockBackend::from_spec("devices=1").expect("a valid specification"));
    let stream = ipc.create_stream(0).expect("a stream");
    (ipc, stream)
}

/// Six elements, of which the importer sees a transposed tensor, and changes the last.
fn handed_over<T: Element + PartialEq + Debug>(role: &str, elements: [T; 6]) {
    let (ipc, stream) = mock();
    let memory = std::sync::Arc::new(ipc.allocate(0, size_of::<[T; 6]>() as u64).expect("memory"));
    memory.view_mut(&stream).expect("a view").copy_from(&elements).expect("a copy");
    let builder = ipc.share(memory.clone()).dtype(T::DTYPE).shape([2, 3]).strides([1, 2]);
    let export: Export = builder.ready_on(&stream).start().map_err(Error::from).expect("an export");
    let line = export.descriptor().to_string();
    start(module_path!(), role, &[("LINE", line.as_str())]).finish();
    let [a, b, c, d, e, _] = elements;
    assert_eq!(memory.to_host::<T, _>(&stream).expect("a copy"), [a, b, c, d, e, a]);
}

fn receive<T: Element + PartialEq + Debug>(elements: [T; 6]) {
    let (ipc, stream) = mock();
    let descriptor: Descriptor = argument("LINE").parse().expect("a descriptor");
    let mapping = ipc.open(&descriptor).on(&stream).expect("a mapping");
    let [a, b, c, d, e, f] = elements;
    assert_eq!(mapping.to_host::<T, _>(&stream).expect("a copy"), [a, c, e, b, d, f]);
    let refused = mapping.to_host::<f32, _>(&stream).expect_err("another type").to_string();
    assert!(refused.contains(&T::DTYPE.to_string()) && refused.contains("float32"), "{refused}");
    let refused = mapping.view::<T, _>(&stream).expect_err("it has gaps").to_string();
    assert!(refused.contains("to_host"), "{refused}");
    let mut bytes = mapping.to_host_bytes(&stream).expect("a copy");
    let first = bytes[..size_of::<T>()].to_vec();
    bytes = mapping.view_bytes(&stream).and_then(|view| view.to_vec()).expect("a copy");
    let last = bytes.len() - first.len();
    bytes[last..].copy_from_slice(&first);
    mapping.view_bytes_mut(&stream).expect("a view").copy_from(&bytes).expect("a copy");
    mapping.release(&stream).map_err(Error::from).expect("a release");
    stream.synchronize().expect("the work is done");
}

const NUMBERS: [f32; 6] = [1.0, -0.5, 2.0, 448.0, 0.0, 24.0];

#[test]
fn halves_and_fp8_are_handed_over_between_processes() {
    handed_over("f16", NUMBERS.map(f16::from_f32));
    handed_over("bf16", NUMBERS.map(bf16::from_f32));
    handed_over("e4m3", NUMBERS.map(F8E4M3::from_f32));
    handed_over("e5m2", NUMBERS.map(F8E5M2::from_f32));
}

#[test]
fn booleans_are_handed_over_between_processes() {
    handed_over("bool", [true, false, false, true, true, false].map(Bool::from));
}

#[test]
#[ignore = "a role of the tests above"]
fn role() {
    match this_role().as_str() {
        "f16" => receive(NUMBERS.map(f16::from_f32)),
        "bf16" => receive(NUMBERS.map(bf16::from_f32)),
        "e4m3" => receive(NUMBERS.map(F8E4M3::from_f32)),
        "e5m2" => receive(NUMBERS.map(F8E5M2::from_f32)),
        _ => receive([true, false, false, true, true, false].map(Bool::from)),
    }
}
