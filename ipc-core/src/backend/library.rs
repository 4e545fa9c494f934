//! Finding a vendor's dynamic library when the program runs.
//!
//! Why here: every backend of hardware looks in the same order, and says the same where there is nothing. Loading itself
//! (the library's initialisers run) is the backend's, which brings the function and answers for it; so nothing that
//! loads libraries is needed here.

use std::error::Error;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::Path;

use crate::backend::select::Unavailable;
use crate::os::environment;

/// Where a backend looks for its vendor's library.
#[derive(Debug, Clone, Copy)]
pub struct LibrarySearch<'a> {
    /// The environment variable that names the library to load instead of the system's.
    pub variable: &'a str,
    /// The names that the dynamic linker is asked for, one after the other.
    pub names: &'a [&'a str],
    /// What to do where none of them is found.
    pub hint: &'a str,
}

impl LibrarySearch<'_> {
    /// Loads the library at `path`, else the one that the variable names, else the first of the names that loads. Gives
    /// it with the name by which it was asked for.
    ///
    /// # Errors
    /// [`Unavailable::LibraryNotFound`], with all that was tried and the reason why the first of it did not load.
    pub fn load<L, E: Error>(
        &self,
        path: Option<&Path>,
        mut load: impl FnMut(&OsStr) -> Result<L, E>,
    ) -> Result<(L, String), Unavailable> {
        let candidates = self.candidates(path, environment::variable(self.variable));
        let name = |candidate: &OsString| candidate.to_string_lossy().into_owned();
        let mut detail = None;
        for candidate in &candidates {
            match load(candidate) {
                Ok(library) => return Ok((library, name(candidate))),
                Err(error) => _ = detail.get_or_insert_with(|| cause_of(&error)),
            }
        }
        Err(Unavailable::LibraryNotFound {
            searched: candidates.iter().map(name).collect(),
            detail: detail.unwrap_or_default(),
            hint: self.hint.to_owned(),
        })
    }

    fn candidates(&self, path: Option<&Path>, variable: Option<OsString>) -> Vec<OsString> {
        match (path, variable) {
            (Some(path), _) => vec![path.into()],
            (None, Some(path)) if !path.is_empty() => vec![path],
            _ => self.names.iter().map(OsString::from).collect(),
        }
    }
}

/// What lies behind an error, in its own words: those of the dynamic linker, to which whoever called it adds nothing.
pub fn cause_of(error: &dyn Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

/// The file that the code at `address` was mapped from: the name that was asked for does not tell which of several
/// installed libraries the dynamic linker took.
pub fn file_of(address: usize) -> Option<String> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    maps.lines().find_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let start = usize::from_str_radix(start, 16).ok()?;
        let end = usize::from_str_radix(end, 16).ok()?;
        if !(start..end).contains(&address) {
            return None;
        }
        let path = rest.find('/')?;
        Some(rest[path..].to_owned())
    })
}

#[cfg(test)]
mod tests {
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
}
