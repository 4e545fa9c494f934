//! A candle tensor in two processes, on a machine with a GPU.
//!
//! cudarc is linked to libcuda here, so this program interposes the functions that free memory, and records what candle
//! frees. (device-ipc loads libcuda at run time and is not recorded.)

#[path = "../../../tests/suite/roles.rs"]
mod roles;

use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex};
use std::time::Duration;

use candle_core::backend::BackendDevice as _;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr as _};
use candle_core::{DType, Device, Storage, Tensor};
use device_ipc::{Descriptor, Ipc, Mapping, cuda};
use device_ipc_candle_example::{MappedTensor, share};
use libloading::Library;
use roles::{argument, no_cuda, role as this_role, start};

/// The addresses that were freed.
static FREED: Mutex<Vec<u64>> = Mutex::new(Vec::new());

static LIBCUDA: LazyLock<Library> = LazyLock::new(|| {
    // SAFETY: the library is already linked to this program.
    unsafe { Library::new("libcuda.so.1") }.expect("libcuda is linked to this program")
});

/// Interposes the function of the driver.
#[allow(non_snake_case, reason = "the name is the driver's")]
#[unsafe(no_mangle)]
extern "C" fn cuMemFreeAsync(address: u64, stream: *mut c_void) -> i32 {
    FREED.lock().unwrap().push(address);
    // SAFETY: the type is that of the function in cuda.h, and the arguments are the caller's.
    unsafe {
        LIBCUDA.get::<unsafe extern "C" fn(u64, *mut c_void) -> i32>("cuMemFreeAsync").unwrap()(
            address, stream,
        )
    }
}

/// Interposes the function of the driver.
#[allow(non_snake_case, reason = "the name is the driver's")]
#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(address: u64) -> i32 {
    FREED.lock().unwrap().push(address);
    // SAFETY: as above.
    unsafe { LIBCUDA.get::<unsafe extern "C" fn(u64) -> i32>("cuMemFree_v2").unwrap()(address) }
}

#[test]
fn released_tensor_is_modified_and_not_freed() {
    hand_over("release");
}

#[test]
fn dropped_tensor_is_not_freed() {
    hand_over("drop");
}

#[test]
fn half_precision_tensor_keeps_its_type() {
    hand_over("half");
}

#[test]
fn tensor_of_default_pool_is_rejected() {
    if no_cuda().is_none() {
        start(module_path!(), "reject", &[]).finish();
    }
}

fn hand_over(how: &str) {
    if let Some(reason) = no_cuda() {
        eprintln!("skipped: {reason}");
        return;
    }
    let path = std::env::temp_dir().join(format!("device-ipc-candle-{how}-{}", std::process::id()));
    let arguments = [("PATH", path.to_str().expect("a plain path")), ("HOW", how)];
    let exporter = start(module_path!(), "export", &arguments);
    exporter.line(|line| line.contains("published").then_some(()));
    start(module_path!(), "import", &arguments).finish();
    exporter.finish();
    std::fs::remove_file(&path).expect("the file is ours");
}

#[test]
#[ignore = "a role of the tests above"]
fn role() {
    match this_role().as_str() {
        "export" => export(&PathBuf::from(argument("PATH")), dtype()),
        "import" => import(&PathBuf::from(argument("PATH"))),
        "reject" => reject(),
        other => panic!("no such role: {other}"),
    }
}

fn dtype() -> DType {
    if argument("HOW") == "half" { DType::BF16 } else { DType::F32 }
}

fn export(path: &Path, dtype: DType) {
    cuda::make_pool_shareable(0).expect("a device with pools");
    let device = Device::new_cuda_with_stream(0).expect("a device");
    let whole = Tensor::arange(0f32, 8., &device).unwrap().reshape((4, 2)).unwrap().to_dtype(dtype).unwrap();
    // A part of a tensor, with an offset into its memory.
    let tensor = whole.narrow(0, 1, 3).unwrap();
    // SAFETY: no operation here replaces the storage of the tensor.
    let export = unsafe { share(&Ipc::auto().unwrap(), &tensor) }.expect("sharing the tensor");
    std::fs::write(path, export.descriptor().to_string()).expect("the file can be written");
    println!("published");
    export.wait_released(Duration::from_secs(60)).expect("the importer releases the tensor");
    assert_eq!(numbers(&whole), [0., 1., 4., 6., 8., 10., 12., 14.]);
}

fn import(path: &Path) {
    let device = Device::new_cuda_with_stream(0).expect("a device");
    let stream = device.as_cuda_device().unwrap().cuda_stream();
    let descriptor: Descriptor = std::fs::read_to_string(path).unwrap().parse().unwrap();
    let mapping: Mapping = Ipc::auto().unwrap().open(&descriptor).on(&stream).expect("opening the tensor");
    let range = mapping.range();
    let mapped = MappedTensor::new(mapping, &device).expect("creating the tensor");
    let tensor = mapped.tensor().clone();
    assert_eq!((tensor.dims(), tensor.dtype()), (&[3, 2][..], dtype()));
    assert_eq!(address(&tensor), range.ptr.get(), "the tensor has the address of the mapping");
    let reshaped = tensor.t().unwrap();

    let product = tensor.matmul(&reshaped.contiguous().unwrap()).unwrap();
    tensor.slice_set(&(&tensor * 2.).unwrap(), 0, 0).unwrap();
    if argument("HOW") == "drop" {
        drop(mapped);
    } else {
        mapped.release().expect("the lease ends");
    }

    assert_eq!(numbers(&product), [13., 23., 33., 23., 41., 59., 33., 59., 85.]);
    for remaining in [&tensor, &reshaped] {
        remaining.sum_all().expect_err("no operation");
        remaining.to_dtype(DType::F64).expect_err("no conversion");
        remaining.copy().expect_err("no copy");
        remaining.to_device(&Device::Cpu).expect_err("no reading");
        remaining.affine(2., 1.).expect_err("no arithmetic");
        remaining.zero_set().expect_err("no writing");
    }
    drop((tensor, reshaped, product));
    device.as_cuda_device().unwrap().synchronize().expect("the device is usable");
    stream.context().check_err().expect("cudarc has no deferred error");
    let freed = FREED.lock().unwrap();
    assert!(!freed.is_empty(), "frees of candle are recorded, at least of the product");
    let inside = |address: &&u64| range.ptr.get() <= **address && **address < range.ptr.get() + range.len;
    assert_eq!(freed.iter().find(inside), None, "the exporter's memory was freed");
}

fn reject() {
    let device = Device::new_cuda_with_stream(0).expect("a device");
    let tensor = Tensor::zeros(100, DType::F32, &device).unwrap();
    // SAFETY: no operation here replaces the storage of the tensor.
    let error =
        unsafe { share(&Ipc::auto().unwrap(), &tensor) }.expect_err("the default pool cannot be shared");
    assert!(error.to_string().contains("make_pool_shareable"), "{error:#}");
    let transposed = tensor.reshape((10, 10)).unwrap().t().unwrap();
    // SAFETY: as above.
    let error = unsafe { share(&Ipc::auto().unwrap(), &transposed) }.expect_err("it has gaps");
    assert!(error.to_string().contains("contiguous"), "{error:#}");
    let host = Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap();
    // SAFETY: as above.
    let error = unsafe { share(&Ipc::auto().unwrap(), &host) }.expect_err("it is not on a device");
    assert!(error.to_string().contains("CUDA device"), "{error:#}");
}

fn address(tensor: &Tensor) -> u64 {
    let (storage, _) = tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else { panic!("it is on a CUDA device") };
    match tensor.dtype() {
        DType::BF16 => address_in(storage.as_cuda_slice::<half::bf16>().unwrap()),
        _ => address_in(storage.as_cuda_slice::<f32>().unwrap()),
    }
}

fn address_in<T>(slice: &CudaSlice<T>) -> u64 {
    let (address, _guard) = slice.device_ptr(slice.stream());
    address
}

fn numbers(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_dtype(DType::F32).unwrap().to_vec1().unwrap()
}
