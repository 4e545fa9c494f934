//! A registration disappears where the linker drops its crate; these run binaries of their own to see that it does not.

use std::process::Command;

fn output(program: &str) -> String {
    let output = Command::new(program)
        .env_remove("DEVICE_IPC_BACKEND")
        .env("DEVICE_IPC_MOCK", "devices=3")
        .output()
        .expect("the program runs");
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("names are text")
}

#[test]
fn backends_are_registered_in_a_program_that_names_none() {
    assert_eq!(
        output(env!("CARGO_BIN_EXE_by-inventory")).lines().collect::<Vec<_>>(),
        ["cuda", "ascend", "mock"]
    );
}

#[test]
fn backend_registered_by_hand_is_listed() {
    let output = output(env!("CARGO_BIN_EXE_by-hand"));
    assert_eq!(output.lines().collect::<Vec<_>>(), ["mock: 3 device(s)", "took mock"]);
}
