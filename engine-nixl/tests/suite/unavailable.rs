//! Errors of a NIXL that cannot be loaded. These tests need no NIXL.

use device_ipc_core::backend::Unavailable;
use device_ipc_nixl::{LIBRARY_VARIABLE, NixlEngine};

#[test]
fn missing_library_error_names_it_and_the_remedy() {
    let error = NixlEngine::load_from("/nowhere/libnixl_capi.so").unwrap_err();
    let Unavailable::LibraryNotFound { searched, detail, hint } = &error else { panic!("{error:?}") };
    assert_eq!(searched, &["/nowhere/libnixl_capi.so"]);
    assert!(detail.contains("cannot open shared object file"), "{detail}");
    for phrase in ["pip install nixl-cu13", "0.10.1", LIBRARY_VARIABLE] {
        assert!(hint.contains(phrase), "{phrase:?} is missing in {hint}");
    }
}

#[test]
fn library_without_the_c_api_error_names_the_missing_function() {
    let error = NixlEngine::load_from("libm.so.6").unwrap_err();
    let Unavailable::TooOld { library, missing, needed } = &error else { panic!("{error:?}") };
    assert_eq!((library.as_str(), missing.as_str()), ("libm.so.6", "nixl_capi_create_configured_agent"));
    assert!(needed.contains("NIXL 0.10.1"), "{needed}");
}
