use std::io;

use super::*;

const SEARCH: LibrarySearch<'_> = LibrarySearch {
    variable: "DEVICE_IPC_TEST_LIBRARY_THAT_NOBODY_SETS",
    names: &["libfirst.so.1", "libsecond.so"],
    hint: "Install it",
};

#[test]
fn a_path_goes_before_the_variable_and_that_before_the_names() {
    let (path, variable) = (Path::new("/a/lib.so"), Some(OsString::from("/b/lib.so")));
    assert_eq!(SEARCH.candidates(Some(path), variable.clone()), ["/a/lib.so"]);
    assert_eq!(SEARCH.candidates(None, variable), ["/b/lib.so"]);
    assert_eq!(SEARCH.candidates(None, None), SEARCH.names);
    assert_eq!(SEARCH.candidates(None, Some(OsString::new())), SEARCH.names, "an empty one is none");
}

#[test]
fn the_first_name_that_loads_is_taken() {
    let only_the_second = |name: &OsStr| {
        if name == "libsecond.so" { Ok(2) } else { Err(io::Error::other("no such file")) }
    };
    assert_eq!(SEARCH.load(None, only_the_second), Ok((2, "libsecond.so".to_owned())));
}

#[test]
fn where_nothing_loads_all_names_are_told_with_the_first_reason_and_the_hint() {
    let refuse = |name: &OsStr| Err::<(), _>(io::Error::other(format!("{}: gone", name.display())));
    let error = SEARCH.load(None, refuse).unwrap_err();
    let Unavailable::LibraryNotFound { searched, detail, hint } = error else { panic!("{error:?}") };
    assert_eq!(searched, SEARCH.names);
    assert_eq!((detail.as_str(), hint.as_str()), ("libfirst.so.1: gone", "Install it"));
}

#[test]
fn the_cause_is_told_and_not_what_was_said_of_it() {
    #[derive(Debug, thiserror::Error)]
    #[error("dlopen failed")]
    struct Outer(#[source] io::Error);
    assert_eq!(cause_of(&Outer(io::Error::other("invalid ELF header"))), "invalid ELF header");
    assert_eq!(cause_of(&io::Error::other("alone")), "alone");
}

#[test]
fn the_file_of_our_own_code_is_this_program() {
    let exe = std::env::current_exe().unwrap();
    let here = the_file_of_our_own_code_is_this_program as fn() as usize;
    assert_eq!(file_of(here).as_deref(), exe.to_str());
    assert_eq!(file_of(0), None);
}
