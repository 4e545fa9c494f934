use std::io;

use super::*;

const SEARCH: LibrarySearch<'_> = LibrarySearch {
    variable: "DEVICE_IPC_TEST_LIBRARY_NEVER_SET",
    names: &["libfirst.so.1", "libsecond.so"],
    hint: "Install it",
};

#[test]
fn candidates_are_path_then_variable_then_names() {
    let (path, variable) = (Path::new("/a/lib.so"), Some(OsString::from("/b/lib.so")));
    assert_eq!(SEARCH.candidates(Some(path), variable.clone()), ["/a/lib.so"]);
    assert_eq!(SEARCH.candidates(None, variable), ["/b/lib.so"]);
    assert_eq!(SEARCH.candidates(None, None), SEARCH.names);
    assert_eq!(SEARCH.candidates(None, Some(OsString::new())), SEARCH.names, "an empty variable is ignored");
}

#[test]
fn load_returns_first_name_that_loads() {
    let only_the_second = |name: &OsStr| {
        if name == "libsecond.so" { Ok(2) } else { Err(io::Error::other("no such file")) }
    };
    assert_eq!(SEARCH.load(None, only_the_second), Ok((2, "libsecond.so".to_owned())));
}

#[test]
fn failed_load_reports_names_first_reason_and_hint() {
    let refuse = |name: &OsStr| Err::<(), _>(io::Error::other(format!("{}: gone", name.display())));
    let error = SEARCH.load(None, refuse).unwrap_err();
    let Unavailable::LibraryNotFound { searched, detail, hint } = error else { panic!("{error:?}") };
    assert_eq!(searched, SEARCH.names);
    assert_eq!((detail.as_str(), hint.as_str()), ("libfirst.so.1: gone", "Install it"));
}

#[test]
fn cause_of_error_is_its_source() {
    #[derive(Debug, thiserror::Error)]
    #[error("dlopen failed")]
    struct OuterError(#[source] io::Error);
    assert_eq!(cause_of(&OuterError(io::Error::other("invalid ELF header"))), "invalid ELF header");
    assert_eq!(cause_of(&io::Error::other("alone")), "alone");
}

#[test]
fn file_of_own_code_is_the_executable() {
    let exe = std::env::current_exe().unwrap();
    let here = file_of_own_code_is_the_executable as fn() as usize;
    assert_eq!(file_of(here).as_deref(), exe.to_str());
    assert_eq!(file_of(0), None);
}
