//! `DEVICE_IPC_CUDA_LIBRARY` and the registration, in a separate program because the variable is process-wide.

use device_ipc_core::BACKEND_VARIABLE;
use device_ipc_core::{Backends, Unavailable};
use device_ipc_cuda::{CudaBackend, LIBRARY_VARIABLE, NAME, REGISTRATION};

#[test]
fn library_variable_overrides_the_search() {
    // SAFETY: this is the only test of the program, and it has no other thread that reads the environment.
    unsafe {
        std::env::set_var(LIBRARY_VARIABLE, "/nowhere/else/libcuda.so");
        std::env::remove_var(BACKEND_VARIABLE);
    }
    let error = CudaBackend::load().unwrap_err();
    let Unavailable::LibraryNotFound { searched, .. } = &error else { panic!("{error:?}") };
    assert_eq!(searched, &["/nowhere/else/libcuda.so"]);

    let status = Backends::none().with(REGISTRATION).available().remove(0);
    assert_eq!(status.name, NAME);
    assert_eq!(status.state.unwrap_err(), error);

    // An argument overrides the variable.
    let error = CudaBackend::load_from("/nowhere/libcuda.so").unwrap_err();
    assert!(error.to_string().contains("(looked for /nowhere/libcuda.so)"), "{error}");
}
