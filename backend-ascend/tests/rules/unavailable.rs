//! Errors of an unavailable Ascend. These tests need no NPU, and must not find one.

use super::support::scene;
use device_ipc_ascend::{
    ALLOCATION_VARIABLE, AscendBackend, LIBRARY_VARIABLE, LoadOptions, VALIDATION_VARIABLE,
};
use device_ipc_core::backend::Unavailable;
use device_ipc_sim_ascendcl::{Cann, VISIBLE_VARIABLE};

fn refusal() -> (Unavailable, String) {
    let error = AscendBackend::load().map(drop).unwrap_err();
    let text = error.to_string();
    (error, text)
}

#[test]
fn missing_library_error_names_it_and_the_remedy() {
    let error = AscendBackend::load_from("/nowhere/libascendcl.so").unwrap_err();
    let Unavailable::LibraryNotFound { searched, detail, hint } = &error else { panic!("{error:?}") };
    assert_eq!(searched, &["/nowhere/libascendcl.so"]);
    assert!(detail.contains("cannot open shared object file"), "{detail}");
    for phrase in ["8.3.RC1", "25.3.RC1", "set_env.sh", "docs/guide/ascend.md", LIBRARY_VARIABLE] {
        assert!(hint.contains(phrase), "{phrase:?} is missing in {hint}");
    }
}

#[test]
fn both_library_names_are_searched() {
    scene!("").environment(&[(LIBRARY_VARIABLE, "")]).play(&[], |_| {
        let (error, _) = refusal();
        let Unavailable::LibraryNotFound { searched, .. } = &error else { panic!("{error:?}") };
        assert_eq!(searched, &["libascendcl.so", "libacl_rt.so"]);
    });
}

#[test]
fn invalid_library_error_contains_the_linker_message() {
    let file = std::env::temp_dir().join(format!("device-ipc-no-acl-{}", std::process::id()));
    std::fs::write(&file, [b'x'; 4096]).unwrap();
    let error = AscendBackend::load_from(&file).unwrap_err();
    std::fs::remove_file(&file).unwrap();
    let Unavailable::LibraryNotFound { detail, .. } = &error else { panic!("{error:?}") };
    assert!(detail.contains("invalid ELF header") || detail.contains("file too short"), "{detail}");
}

#[test]
fn library_without_functions_is_too_old() {
    let error = AscendBackend::load_from("libm.so.6").unwrap_err();
    let Unavailable::TooOld { library, missing, .. } = &error else { panic!("{error:?}") };
    assert_eq!((library.as_str(), missing.as_str()), ("libm.so.6", "aclInit"));
    let text = error.to_string();
    assert!(
        text.contains("libm.so.6 is too old: it lacks aclInit") && text.contains("CANN 8.3.RC1"),
        "{text}"
    );
}

#[test]
fn cann_before_8_3_is_too_old_and_error_names_requirements() {
    scene!("devices=1").cann(Cann::V8_1).play(&[], |_| {
        let (error, text) = refusal();
        let Unavailable::TooOld { missing, .. } = &error else { panic!("{error:?}") };
        assert_eq!(missing, "aclrtIpcMemGetExportKey");
        assert!(text.contains("CANN 8.3.RC1") && text.contains("25.3.RC1"), "{text}");
    });
}

#[test]
fn stub_library_is_detected_by_its_first_call() {
    scene!("stub").play(&[("loader", || drop(refusal()))], |scene| {
        let (error, text) = refusal();
        assert!(matches!(error, Unavailable::StubLibrary { .. }), "{error:?}");
        for phrase in ["stub library", "devlib", "/usr/local/Ascend/driver"] {
            assert!(text.contains(phrase), "{phrase:?} is missing in {text}");
        }
        // The stub prints a line on the standard output for each call.
        let said = scene.output_of("loader");
        assert_eq!(said.matches("stub library cannot be used").count(), 1, "{said}");
    });
}

#[test]
fn missing_driver_error_lists_checks() {
    scene!("no-driver").play(&[], |_| {
        let (error, text) = refusal();
        assert!(matches!(error, Unavailable::Failed { .. } | Unavailable::NoDevice { .. }), "{error:?}");
        for phrase in ["aclrtGetDeviceCount", "npu-smi info", "/dev/davinci"] {
            assert!(text.contains(phrase), "{phrase:?} is missing in {text}");
        }
    });
}

#[test]
fn hidden_devices_error_names_the_variable() {
    scene!("devices=2").environment(&[(VISIBLE_VARIABLE, "7")]).play(&[], |_| {
        let (error, text) = refusal();
        assert!(matches!(error, Unavailable::NoDevice { .. }), "{error:?}");
        assert!(text.contains(VISIBLE_VARIABLE) && text.contains("\"7\""), "{text}");
    });
}

#[test]
fn invalid_option_error_lists_valid_values() {
    for variable in [VALIDATION_VARIABLE, ALLOCATION_VARIABLE] {
        let machine = if variable == VALIDATION_VARIABLE { "devices=1" } else { "devices=2" };
        let environment: &[(&str, &str)] = if variable == VALIDATION_VARIABLE {
            &[(VALIDATION_VARIABLE, "maybe")]
        } else {
            &[(ALLOCATION_VARIABLE, "maybe")]
        };
        scene!(machine).environment(environment).play(&[], |scene| {
            let (error, text) = refusal();
            assert!(matches!(error, Unavailable::Failed { .. }), "{error:?}");
            let (variable, _) = scene.environment[0];
            assert!(text.contains(variable) && text.contains("\"maybe\""), "{text}");
            assert!(text.contains("set it to"), "{text}");
        });
    }
}

#[test]
fn chip_without_uuid_requires_cann_8_5() {
    scene!("soc=310p;devices=1").cann(Cann::V8_3).play(&[], |_| {
        let (error, text) = refusal();
        assert!(matches!(error, Unavailable::TooOld { .. }), "{error:?}");
        assert!(text.contains("aclrtGetPhyDevIdByLogicDevId") && text.contains("CANN 8.5"), "{text}");
    });
}

#[test]
fn chip_with_uuid_works_with_cann_8_3() {
    scene!("soc=910b;devices=1").cann(Cann::V8_3).play(&[], |_| {
        let backend = LoadOptions::new().load().expect("CANN 8.3 is enough");
        let version = &device_ipc_core::backend::DeviceIpc::info(&*backend).version;
        assert!(version.contains("ACL 1.15"), "{version}");
    });
}
