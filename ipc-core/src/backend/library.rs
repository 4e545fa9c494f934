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
mod tests;
