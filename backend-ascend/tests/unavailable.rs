//! What a user reads where Ascend cannot be used. None of these needs an NPU, and none may find one.

mod support;

use device_ipc_ascend::{
    ALLOCATION_VARIABLE, AscendBackend, LIBRARY_VARIABLE, LoadOptions, VALIDATION_VARIABLE,
};
use device_ipc_core::Unavailable;
use device_ipc_sim_ascendcl::{Cann, VISIBLE_VARIABLE};
use support::Scene;

fn refusal() -> (Unavailable, String) {
    let error = AscendBackend::load().map(drop).unwrap_err();
    let text = error.to_string();
    (error, text)
}

#[test]
fn a_library_that_is_not_there_is_named_with_the_remedy() {
    let error = AscendBackend::load_from("/nowhere/libascendcl.so").unwrap_err();
    let Unavailable::LibraryNotFound { searched, detail, hint } = &error else { panic!("{error:?}") };
    assert_eq!(searched, &["/nowhere/libascendcl.so"]);
    assert!(detail.contains("cannot open shared object file"), "{detail}");
    for phrase in ["8.3.RC1", "25.3.RC1", "set_env.sh", "docs/guide/ascend.md", LIBRARY_VARIABLE] {
        assert!(hint.contains(phrase), "{phrase:?} is missing in {hint}");
    }
}

#[test]
fn both_names_are_looked_for() {
    Scene::on("both_names_are_looked_for", "").environment(&[(LIBRARY_VARIABLE, "")]).play(
        |_| {
            let (error, _) = refusal();
            let Unavailable::LibraryNotFound { searched, .. } = &error else { panic!("{error:?}") };
            assert_eq!(searched, &["libascendcl.so", "libacl_rt.so"]);
        },
        &[],
    );
}

#[test]
fn a_file_that_is_no_library_says_what_the_linker_found() {
    let file = std::env::temp_dir().join(format!("device-ipc-no-acl-{}", std::process::id()));
    std::fs::write(&file, [b'x'; 4096]).unwrap();
    let error = AscendBackend::load_from(&file).unwrap_err();
    std::fs::remove_file(&file).unwrap();
    let Unavailable::LibraryNotFound { detail, .. } = &error else { panic!("{error:?}") };
    assert!(detail.contains("invalid ELF header") || detail.contains("file too short"), "{detail}");
}

#[test]
fn a_library_without_the_functions_is_too_old_and_the_first_that_is_missing_is_named() {
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
fn cann_before_8_3_is_too_old_and_the_versions_that_are_needed_are_named() {
    Scene::on("cann_before_8_3_is_too_old_and_the_versions_that_are_needed_are_named", "devices=1")
        .cann(Cann::V8_1)
        .play(
            |_| {
                let (error, text) = refusal();
                let Unavailable::TooOld { missing, .. } = &error else { panic!("{error:?}") };
                assert_eq!(missing, "aclrtIpcMemGetExportKey");
                assert!(text.contains("CANN 8.3.RC1") && text.contains("25.3.RC1"), "{text}");
            },
            &[],
        );
}

#[test]
fn the_stub_library_is_told_apart_and_asked_nothing_more() {
    Scene::on("the_stub_library_is_told_apart_and_asked_nothing_more", "stub").play(
        |scene| {
            let (error, text) = refusal();
            assert!(matches!(error, Unavailable::StubLibrary { .. }), "{error:?}");
            for phrase in ["stub library", "devlib", "/usr/local/Ascend/driver"] {
                assert!(text.contains(phrase), "{phrase:?} is missing in {text}");
            }
            // It prints a line on the standard output for each call.
            let said = scene.output_of("loader");
            assert_eq!(said.matches("stub library cannot be used").count(), 1, "{said}");
        },
        &[("loader", |_| drop(refusal()))],
    );
}

#[test]
fn a_machine_without_a_driver_says_what_to_look_at() {
    Scene::on("a_machine_without_a_driver_says_what_to_look_at", "no-driver").play(
        |_| {
            let (error, text) = refusal();
            assert!(matches!(error, Unavailable::Failed { .. } | Unavailable::NoDevice { .. }), "{error:?}");
            for phrase in ["aclrtGetDeviceCount", "npu-smi info", "/dev/davinci"] {
                assert!(text.contains(phrase), "{phrase:?} is missing in {text}");
            }
        },
        &[],
    );
}

#[test]
fn devices_that_are_all_hidden_are_no_devices_and_the_variable_is_named() {
    Scene::on("devices_that_are_all_hidden_are_no_devices_and_the_variable_is_named", "devices=2")
        .environment(&[(VISIBLE_VARIABLE, "7")])
        .play(
            |_| {
                let (error, text) = refusal();
                assert!(matches!(error, Unavailable::NoDevice { .. }), "{error:?}");
                assert!(text.contains(VISIBLE_VARIABLE) && text.contains("\"7\""), "{text}");
            },
            &[],
        );
}

#[test]
fn a_choice_that_there_is_not_is_refused_with_those_there_are() {
    for variable in [VALIDATION_VARIABLE, ALLOCATION_VARIABLE] {
        let machine = if variable == VALIDATION_VARIABLE { "devices=1" } else { "devices=2" };
        let environment: &[(&str, &str)] = if variable == VALIDATION_VARIABLE {
            &[(VALIDATION_VARIABLE, "maybe")]
        } else {
            &[(ALLOCATION_VARIABLE, "maybe")]
        };
        Scene::on("a_choice_that_there_is_not_is_refused_with_those_there_are", machine)
            .environment(environment)
            .play(
                |scene| {
                    let (error, text) = refusal();
                    assert!(matches!(error, Unavailable::Failed { .. }), "{error:?}");
                    let (variable, _) = scene.environment[0];
                    assert!(text.contains(variable) && text.contains("\"maybe\""), "{text}");
                    assert!(text.contains("set it to"), "{text}");
                },
                &[],
            );
    }
}

#[test]
fn a_chip_without_a_uuid_needs_the_cann_that_tells_its_physical_id() {
    Scene::on("a_chip_without_a_uuid_needs_the_cann_that_tells_its_physical_id", "soc=310p;devices=1")
        .cann(Cann::V8_3)
        .play(
            |_| {
                let (error, text) = refusal();
                assert!(matches!(error, Unavailable::TooOld { .. }), "{error:?}");
                assert!(text.contains("aclrtGetPhyDevIdByLogicDevId") && text.contains("CANN 8.5"), "{text}");
            },
            &[],
        );
}

#[test]
fn cann_8_3_works_where_the_chip_has_a_uuid() {
    Scene::on("cann_8_3_works_where_the_chip_has_a_uuid", "soc=910b;devices=1").cann(Cann::V8_3).play(
        |_| {
            let backend = LoadOptions::new().load().expect("CANN 8.3 is enough");
            let version = &device_ipc_core::DeviceIpc::info(&*backend).version;
            assert!(version.contains("ACL 1.15"), "{version}");
        },
        &[],
    );
}
