//! What a user reads where CUDA cannot be used. None of these needs a GPU, and none may find one.

use device_ipc_core::Unavailable;
use device_ipc_cuda::CudaBackend;

#[test]
fn a_library_that_is_not_there_is_named_with_the_remedy() {
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
fn a_file_that_is_no_library_says_what_the_linker_found() {
    let file = std::env::temp_dir().join(format!("device-ipc-no-library-{}", std::process::id()));
    std::fs::write(&file, [b'x'; 4096]).unwrap();
    let error = CudaBackend::load_from(&file).unwrap_err();
    std::fs::remove_file(&file).unwrap();
    let Unavailable::LibraryNotFound { detail, .. } = &error else { panic!("{error:?}") };
    assert!(detail.contains("invalid ELF header") || detail.contains("file too short"), "{detail}");
}

#[test]
fn a_library_without_the_functions_is_too_old_and_the_first_that_is_missing_is_named() {
    let error = CudaBackend::load_from("libm.so.6").unwrap_err();
    let Unavailable::TooOld { library, missing, needed } = &error else { panic!("{error:?}") };
    assert_eq!((library.as_str(), missing.as_str()), ("libm.so.6", "cuInit"));
    assert!(needed.contains("CUDA 11.4") && needed.contains("470"), "{needed}");
    assert!(error.to_string().contains("libm.so.6 is too old: it lacks cuInit"), "{error}");
}
