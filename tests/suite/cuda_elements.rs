//! Elements of the crates half and float8 in cudarc's slices, between two processes, where there is a GPU.

use super::roles::{argument, no_cuda, start};
use cudarc::driver::CudaContext;
use device_ipc::float8::F8E4M3;
use device_ipc::half::bf16;
use device_ipc::{Bool, Descriptor, Dtype, Error, Ipc, cuda};

const NUMBERS: [f32; 6] = [1.0, -0.5, 2.0, 448.0, 0.0, 24.0];

#[test]
fn cudarc_slices_of_halves_and_fp8_are_read_by_another_process() {
    if let Some(reason) = no_cuda() {
        eprintln!("skipped: {reason}");
        return;
    }
    cuda::make_pool_shareable(0).expect("a pool with file descriptors");
    let stream = CudaContext::new(0).expect("a context").default_stream();
    let ipc = Ipc::auto().expect("CUDA");
    let halves = stream.clone_htod(&NUMBERS.map(bf16::from_f32)).expect("a slice");
    let halves = ipc.share(halves).shape([2, 3]).strides([1, 2]).ready_on(&stream).start();
    let halves = halves.map_err(Error::from).expect("an export");
    assert_eq!(halves.descriptor().layout().map(|layout| layout.dtype()), Some(Dtype::BF16));
    let eighths = stream.clone_htod(&NUMBERS.map(F8E4M3::from_f32)).expect("a slice");
    let eighths = ipc.share(eighths).ready_on(&stream).start().map_err(Error::from).expect("an export");
    let flags = stream.clone_htod(&[1u8, 0, 7]).expect("a slice");
    let flags = ipc.share(flags).dtype(Dtype::BOOL).ready_on(&stream).start();
    let flags = flags.map_err(Error::from).expect("an export");
    let lines = [&halves, &eighths, &flags].map(|export| export.descriptor().to_string());
    let arguments =
        [("HALVES", lines[0].as_str()), ("EIGHTHS", lines[1].as_str()), ("FLAGS", lines[2].as_str())];
    start(module_path!(), "read", &arguments).finish();
}

#[test]
fn buffer_has_views_for_a_stream_of_cudarc() {
    if let Some(reason) = no_cuda() {
        eprintln!("skipped: {reason}");
        return;
    }
    let stream = CudaContext::new(0).expect("a context").default_stream();
    let buffer = Ipc::auto().expect("CUDA").allocate(0, 24).expect("a buffer");
    stream.memcpy_htod(&NUMBERS, &mut buffer.view_mut(&stream).expect("a view")).expect("a copy");
    let view = buffer.view::<f32, _>(&stream).expect("a view");
    assert_eq!(stream.clone_dtoh(&view).expect("a copy"), NUMBERS);
}

#[test]
#[ignore = "a role of the first test"]
fn role() {
    let stream = CudaContext::new(0).expect("a context").default_stream();
    let ipc = Ipc::auto().expect("CUDA");
    let open = |name: &str| {
        let descriptor: Descriptor = argument(name).parse().expect("a descriptor");
        ipc.open(&descriptor).on(&stream).expect("a mapping")
    };
    let [a, b, c, d, e, f] = NUMBERS.map(bf16::from_f32);
    let halves = open("HALVES");
    assert_eq!(halves.to_host::<bf16, _>(&stream).expect("a copy"), [a, c, e, b, d, f]);
    let bytes = halves.view_bytes(&stream).and_then(|view| view.to_vec()).expect("the bytes");
    let expected: Vec<u8> = [a, b, c, d, e, f].iter().flat_map(|half| half.to_ne_bytes()).collect();
    assert_eq!(bytes, expected);
    // A view of cudarc, for its kernels and copies.
    let eighths = open("EIGHTHS");
    let view = eighths.view::<F8E4M3, _>(&stream).expect("a view");
    assert_eq!(view.to_vec().expect("a copy"), NUMBERS.map(F8E4M3::from_f32));
    assert_eq!(stream.clone_dtoh(&view).expect("a copy"), NUMBERS.map(F8E4M3::from_f32));
    // Elements that are no `DeviceRepr` of cudarc.
    let flags = open("FLAGS").view::<Bool, _>(&stream).and_then(|view| view.to_vec()).expect("a copy");
    assert_eq!(flags, [true, false, true].map(Bool::from));
}
