//! Copies of a shared library in which symbols are hidden.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;

use device_ipc_sim_support::{defined_symbols, hide_symbols};
use libloading::Library;

/// Builds a library with three functions, of which the first calls the second.
fn build(folder: &Path) -> PathBuf {
    let (source, library) = (folder.join("three.c"), folder.join("libthree.so"));
    let text = "int second(void) { return 2; }\nint first(void) { return 1 + second(); }\nint third(void) { return 3; }\n";
    std::fs::write(&source, text).expect("written");
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-Wl,-Bsymbolic"])
        .arg(&source)
        .arg("-o")
        .arg(&library)
        .status()
        .expect("cc, which also links Rust programs, can be run");
    assert!(status.success());
    library
}

/// Returns the result of a function of a library; `None` if it is not found.
fn call(library: &Path, name: &str) -> Option<i32> {
    // SAFETY: a library of this test, whose loading runs no code, and whose functions take nothing and return an
    // int.
    unsafe {
        let library = Library::new(library).expect("it can be loaded");
        library.get::<unsafe extern "C" fn() -> i32>(name).ok().map(|function| function())
    }
}

#[test]
fn hidden_symbols_are_not_found_and_others_work() {
    let directory = tempfile::tempdir().expect("a directory");
    let library = build(directory.path());
    let copy = directory.path().join("copy.so");
    hide_symbols(&library, &["second", "third"], &copy).expect("a copy");
    assert_eq!(call(&copy, "first"), Some(3));
    assert_eq!((call(&copy, "second"), call(&copy, "third")), (None, None));
    assert_eq!((call(&library, "second"), call(&library, "third")), (Some(2), Some(3)));
    let has = |library: &Path, name: &str| {
        let defined = defined_symbols(library).expect("its symbols");
        defined.iter().any(|symbol| symbol == name)
    };
    assert!(has(&library, "second") && !has(&copy, "second") && has(&copy, "first"));
    // Again, over the first copy.
    hide_symbols(&library, &[], &copy).expect("a copy");
    assert_eq!(call(&copy, "second"), Some(2));
}

#[test]
fn undefined_names_and_other_files_are_rejected() {
    let directory = tempfile::tempdir().expect("a directory");
    let library = build(directory.path());
    let copy = directory.path().join("copy.so");
    let refused =
        |library: &Path, name: &str| hide_symbols(library, &[name], &copy).expect_err("refused").kind();
    assert_eq!(refused(&library, "fourth"), ErrorKind::NotFound);
    // Used by the library, but not defined in it.
    assert_eq!(refused(&library, "__cxa_finalize"), ErrorKind::NotFound);
    // A file without a magic number, and headers: a part of one, and one whose sections are said to lie at the end of all.
    let mut header = vec![0_u8; 64];
    header[..6].copy_from_slice(&[0x7f, b'E', b'L', b'F', 2, 1]);
    header[0x28..0x30].copy_from_slice(&u64::MAX.to_le_bytes());
    header[0x3a] = 64;
    header[0x3c] = 9;
    for bytes in [&b""[..], b"#!/bin/sh", &header[..20], &header] {
        let file = directory.path().join("invalid.so");
        std::fs::write(&file, bytes).expect("written");
        assert_eq!(refused(&file, "first"), ErrorKind::InvalidData);
    }
    assert_eq!(refused(&directory.path().join("none.so"), "first"), ErrorKind::NotFound);
    assert!(!copy.exists());
}
