//! A candle model with the weights of a keeper in another process: on the mock, and in place on a machine with a GPU.

#[path = "../../../tests/suite/roles.rs"]
mod roles;

use std::time::Duration;

use candle_core::{DType, Device, Module as _, Tensor};
use candle_nn::linear;
use device_ipc::{Dtype, Export, Ipc, Mapping, TensorLayout};
use device_ipc_candle_example::Weights;
use device_ipc_test_process::Process;
use roles::{argument, role as this_role, start};

const WEIGHT: [f32; 6] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
const BIAS: [f32; 2] = [0.5, -0.5];

/// A process that keeps the weights under a name of its own.
fn keeper(backend: &str) -> (Process, String) {
    let name = format!("candle-{backend}-{}-{:?}", std::process::id(), std::thread::current().id());
    let name = name.replace(['(', ')'], "");
    let keeper = start(module_path!(), "keep", &[("BACKEND", backend), ("NAME", &name)]);
    keeper.line(|line| (line == "kept").then_some(()));
    (keeper, format!("keeper:{name}"))
}

#[test]
#[ignore = "a role of the tests above"]
fn role() {
    assert_eq!(this_role(), "keep");
    let ipc = Ipc::named(&argument("BACKEND")).expect("the backend is available");
    let export = export(&ipc);
    let _keeper = ipc.keep(&argument("NAME"), 1, export).expect("the name is free");
    println!("kept");
    loop {
        std::thread::park();
    }
}

fn export(ipc: &Ipc) -> Export {
    let stream = ipc.create_stream(0).expect("a stream");
    let mut tensors = ipc.tensors();
    let mut add = |name: &str, bytes: &[u8], layout: TensorLayout| {
        let memory = ipc.allocate(0, bytes.len() as u64).expect("memory");
        memory.view_mut::<u8, _>(&stream).expect("bytes").copy_from(bytes).expect("a copy");
        tensors.owned(name, memory, Some(layout)).expect("it fits");
    };
    let bytes = |numbers: &[f32]| numbers.iter().flat_map(|number| number.to_ne_bytes()).collect::<Vec<u8>>();
    let layout = |dtype, shape: &[u64]| TensorLayout::contiguous(dtype, shape).expect("a layout");
    add("head.weight", &bytes(&WEIGHT), layout(Dtype::F32, &[2, 3]));
    add("head.bias", &bytes(&BIAS), layout(Dtype::F32, &[2]));
    let transposed = TensorLayout::strided(Dtype::F32, [3, 2], [1, 3]).expect("a layout");
    add("transposed", &bytes(&WEIGHT), transposed);
    add("short", &[1_u16, 0xffff].map(u16::to_ne_bytes).concat(), layout(Dtype::U16, &[2]));
    add("half", &half::bf16::from_f32(1.5).to_ne_bytes(), layout(Dtype::BF16, &[1]));
    add("float8", &[0x38, 0xc0], layout(Dtype::F8_E4M3FN, &[2]));
    add("flag", &[1], layout(Dtype::BOOL, &[1]));
    ipc.share_all(tensors).ready_on(&stream).start().expect("shared")
}

/// The weights of a keeper on the mock, for candle's CPU.
fn on_cpu(name: &str) -> Weights {
    let ipc = Ipc::named("mock").expect("the mock");
    let mapping = ipc
        .find(name, Duration::from_secs(30))
        .expect("the keeper answers")
        .open()
        .at_home()
        .expect("opened");
    Weights::new(&ipc, mapping, &Device::Cpu).expect("the weights are usable")
}

fn numbers(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_dtype(DType::F32).unwrap().to_vec1().unwrap()
}

#[test]
fn model_on_cpu_outlives_the_weights() {
    let (_keeper, name) = keeper("mock");
    let weights = on_cpu(&name);
    let variables = weights.var_builder(DType::F32);
    let model = linear(3, 2, variables.pp("head")).unwrap();
    // Copies of candle, which need neither the mapping nor the keeper.
    drop(weights);
    let input = Tensor::new(&[[1f32, 1., 1.]], &Device::Cpu).unwrap();
    assert_eq!(numbers(&model.forward(&input).unwrap()), [6.5, 14.5]);
    let error = linear(3, 2, variables.pp("head")).unwrap_err().to_string();
    assert!(error.contains("the weights have been dropped"), "{error}");
    assert!(!variables.contains_tensor("head.weight"));
}

#[test]
fn tensors_are_converted_as_from_a_file() {
    let (_keeper, name) = keeper("mock");
    let weights = on_cpu(&name);
    let variables = weights.var_builder(DType::F16);
    let weight = variables.get((2, 3), "head.weight").unwrap();
    assert_eq!((weight.dtype(), numbers(&weight)), (DType::F16, WEIGHT.to_vec()));
    let original = variables.get_with_hints_dtype(2, "head.bias", Default::default(), DType::F32).unwrap();
    assert_eq!((original.dtype(), numbers(&original)), (DType::F32, BIAS.to_vec()));
    // Gathered in row-major order.
    assert_eq!(numbers(&variables.get((3, 2), "transposed").unwrap()), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
    assert_eq!(numbers(&variables.get(1, "half").unwrap()), [1.5]);
    assert_eq!(numbers(&variables.get(2, "float8").unwrap()), [1.0, -2.0]);
    let short = variables.get_with_hints_dtype(2, "short", Default::default(), DType::U32).unwrap();
    assert_eq!(short.to_vec1::<u32>().unwrap(), [1, 0xffff]);
}

#[test]
fn wrong_name_shape_or_type_is_an_error() {
    let (_keeper, name) = keeper("mock");
    let weights = on_cpu(&name);
    let variables = weights.var_builder(DType::F32);
    assert!(variables.contains_tensor("head.weight") && !variables.contains_tensor("head"));
    let missing = variables.get(1, "tail.weight").unwrap_err().to_string();
    assert!(missing.contains("cannot find tensor tail.weight"), "{missing}");
    let shape = variables.get((3, 2), "head.weight").unwrap_err().to_string();
    assert!(shape.contains("shape mismatch for head.weight"), "{shape}");
    let unsupported = variables.get(1, "flag").unwrap_err().to_string();
    assert!(unsupported.contains("flag") && unsupported.contains("not supported by candle"), "{unsupported}");
}

#[test]
fn weights_of_any_descriptor_load_and_a_drop_ends_the_lease() {
    let ipc = Ipc::named("mock").expect("the mock");
    let export = export(&ipc);
    let mapping: Mapping = ipc.open(export.descriptor()).at_home().expect("opened");
    let weights = Weights::new(&ipc, mapping, &Device::Cpu).unwrap();
    assert_eq!(numbers(&weights.var_builder(DType::F32).get(2, "head.bias").unwrap()), BIAS);
    assert!(export.wait_released(Duration::ZERO).is_err(), "the mapping has a lease");
    drop(weights);
    export.wait_released(Duration::from_secs(30)).expect("the lease has ended");
}

#[cfg(feature = "cuda")]
#[test]
fn model_on_a_gpu_has_the_memory_of_the_keeper() {
    if let Some(reason) = roles::no_cuda() {
        eprintln!("skipped: {reason}");
        return;
    }
    let (_keeper, name) = keeper("cuda");
    let device = Device::new_cuda_with_stream(0).expect("a device");
    let stream = device.as_cuda_device().unwrap().cuda_stream();
    let ipc = Ipc::named("cuda").expect("CUDA");
    let mapping = ipc
        .find(&name, Duration::from_secs(30))
        .expect("the keeper answers")
        .open()
        .on(&stream)
        .expect("opened");
    let address = mapping.get("head.weight").unwrap().range().ptr.get();
    let weights = Weights::new(&ipc, mapping, &device).unwrap();
    let variables = weights.var_builder(DType::F32);
    let weight = variables.get((2, 3), "head.weight").unwrap();
    assert_eq!(address_of(&weight), address, "the tensor is the mapped memory");
    let again = variables.get((2, 3), "head.weight").unwrap();
    assert_eq!(address_of(&again), address);
    assert_eq!(numbers(&variables.get((3, 2), "transposed").unwrap()), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
    let model = linear(3, 2, variables.pp("head")).unwrap();
    let input = Tensor::new(&[[1f32, 1., 1.]], &device).unwrap();
    let output = model.forward(&input).unwrap();
    assert_eq!(numbers(&output), [6.5, 14.5]);
    let converted = weights.var_builder(DType::BF16).get((2, 3), "head.weight").unwrap();
    drop(weights);
    weight.sum_all().expect_err("the memory has been given back");
    again.copy().expect_err("the memory has been given back");
    assert_eq!(numbers(&converted), WEIGHT, "a conversion is candle's memory");
    drop((weight, again, model, converted));
    device.synchronize().expect("the device is usable");
}

#[cfg(feature = "cuda")]
fn address_of(tensor: &Tensor) -> u64 {
    use candle_core::Storage;
    use candle_core::cuda_backend::cudarc::driver::DevicePtr as _;

    let (storage, _) = tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else { panic!("it is on a CUDA device") };
    let slice = storage.as_cuda_slice::<f32>().unwrap();
    let (address, _guard) = slice.device_ptr(slice.stream());
    address
}
