//! The search for a vendor's dynamic library at run time.
//!
//! All hardware backends search in the same order and report the same error. The backend passes the function that loads a
//! library and is responsible for its safety (loading runs the library's initialisers), so core needs no crate for that.

use std::error::Error;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::Path;

use crate::backend::select::Unavailable;
use crate::os::environment;

/// The search path of a vendor's library.
#[derive(Debug, Clone, Copy)]
pub struct LibrarySearch<'a> {
    /// The environment variable that overrides the library to load.
    pub variable: &'a str,
    /// The names to pass to the dynamic linker, in order.
    pub names: &'a [&'a str],
    /// The advice to the user if no library is found.
    pub hint: &'a str,
}

impl LibrarySearch<'_> {
    /// Loads the library and returns it with the name that was passed to the dynamic linker.
    ///
    /// Loads `path` if there is one, otherwise the library that the environment variable names, otherwise the first of the
    /// names that loads.
    ///
    /// # Errors
    ///
    /// [`Unavailable::LibraryNotFound`] with all names tried and the loader's error for the first of them.
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

/// Returns the text of an error's source (the message of the dynamic linker), or of the error itself if it has no source.
pub fn cause_of(error: &dyn Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

/// Returns the file that the code at `address` was mapped from.
///
/// The name passed to the dynamic linker does not identify the file if several libraries are installed.
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
