//! Errors of an unavailable CUDA. These tests need no GPU, and must not find one.

use device_ipc_core::backend::{BACKEND_VARIABLE, Backends, Unavailable};
use device_ipc_cuda::{CudaBackend, LIBRARY_VARIABLE, NAME, REGISTRATION};
use device_ipc_test_process::{Process, answer, command_of_test};

#[test]
fn missing_library_error_names_it_and_the_remedy() {
    let error = CudaBackend::load_from("/nowhere/libcuda.so.1").unwrap_err();
    let Unavailable::LibraryNotFound { searched, detail, hint } = &error else { panic!("{error:?}") };
    assert_eq!(searched, &["/nowhere/libcuda.so.1"]);
    assert!(detail.contains("cannot open shared object file"), "{detail}");
    assert!(hint.contains("Install the NVIDIA driver") && hint.contains("--gpus all"), "{hint}");
    assert!(
        error.to_string().starts_with("library not found (looked for /nowhere/libcuda.so.1): "),
        "{error}"
    );
}

#[test]
fn invalid_library_error_contains_the_linker_message() {
    let file = std::env::temp_dir().join(format!("device-ipc-no-library-{}", std::process::id()));
    std::fs::write(&file, [b'x'; 4096]).unwrap();
    let error = CudaBackend::load_from(&file).unwrap_err();
    std::fs::remove_file(&file).unwrap();
    let Unavailable::LibraryNotFound { detail, .. } = &error else { panic!("{error:?}") };
    assert!(detail.contains("invalid ELF header") || detail.contains("file too short"), "{detail}");
}

#[test]
fn library_without_functions_is_too_old() {
    let error = CudaBackend::load_from("libm.so.6").unwrap_err();
    let Unavailable::TooOld { library, missing, needed } = &error else { panic!("{error:?}") };
    assert_eq!((library.as_str(), missing.as_str()), ("libm.so.6", "cuInit"));
    assert!(needed.contains("CUDA 11.4") && needed.contains("470"), "{needed}");
    assert!(error.to_string().contains("libm.so.6 is too old: it lacks cuInit"), "{error}");
}

#[test]
fn library_variable_overrides_the_search() {
    let test = concat!(module_path!(), "::process_with_library_variable");
    let mut command = command_of_test(test);
    command.env(LIBRARY_VARIABLE, "/nowhere/else/libcuda.so").env_remove(BACKEND_VARIABLE);
    let process = Process::start(test, &mut command);
    assert_eq!(process.receive(), "checked");
    process.finish();
}

#[test]
#[ignore = "a process of the test above"]
fn process_with_library_variable() {
    let error = CudaBackend::load().unwrap_err();
    let Unavailable::LibraryNotFound { searched, .. } = &error else { panic!("{error:?}") };
    assert_eq!(searched, &["/nowhere/else/libcuda.so"]);

    let status = Backends::none().with(REGISTRATION).available().remove(0);
    assert_eq!(status.name, NAME);
    assert_eq!(status.state.unwrap_err(), error);

    // An argument overrides the variable.
    let error = CudaBackend::load_from("/nowhere/libcuda.so").unwrap_err();
    assert!(error.to_string().contains("(looked for /nowhere/libcuda.so)"), "{error}");
    answer("checked");
}
