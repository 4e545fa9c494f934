//! Finding ACL, and saying what to do where it is not found.
//!
//! `libascendcl.so` is in every CANN; from 8.5 on the manual names `libacl_rt.so` for the same functions and calls the
//! older name deprecated ("Overview" of the ACL manual). CANN ships stubs of both names in `devlib`, and its
//! `setenv.bash` puts that folder into `LD_LIBRARY_PATH` where it finds no driver: that a library loads proves nothing.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::Path;

use device_ipc_core::Unavailable;
use libloading::Library;

use crate::bindings::Acl;
use crate::status::NEEDED;
use crate::symbols::{REQUIRED, SHARING};

/// The environment variable that names the ACL library to load instead of the system's.
pub const LIBRARY_VARIABLE: &str = "DEVICE_IPC_ASCEND_LIBRARY";

/// The names that the dynamic linker is asked for, one after the other.
const NAMES: [&str; 2] = ["libascendcl.so", "libacl_rt.so"];

/// ACL with its functions.
pub(crate) struct Loaded {
    pub(crate) acl: Acl,
    /// The file it was loaded from, or the name that was asked for.
    pub(crate) file: String,
}

/// Loads the library at `path`, else the one that [`LIBRARY_VARIABLE`] names, else the system's.
pub(crate) fn load(path: Option<&Path>) -> Result<Loaded, Unavailable> {
    let candidates: Vec<OsString> = match (path, env::var_os(LIBRARY_VARIABLE)) {
        (Some(path), _) => vec![path.into()],
        (None, Some(path)) if !path.is_empty() => vec![path],
        _ => NAMES.map(OsString::from).into(),
    };
    let mut detail = String::new();
    for candidate in &candidates {
        // SAFETY: initialisers of ACL run, which is what loading it means; whoever names another library in an argument
        // or in the variable answers for its initialisers.
        match unsafe { Library::new(candidate) } {
            Ok(library) => return with_functions(library, candidate.to_string_lossy().into_owned()),
            Err(error) if detail.is_empty() => detail = reason(&error),
            Err(_) => {}
        }
    }
    Err(Unavailable::LibraryNotFound {
        searched: candidates.iter().map(|one| one.to_string_lossy().into_owned()).collect(),
        detail,
        hint: format!(
            "Install {NEEDED}, and source its set_env.sh (/usr/local/Ascend/ascend-toolkit/set_env.sh), which puts the \
             library into LD_LIBRARY_PATH; in a container mount the driver and the devices too (docs/ascend.md); a \
             library in another place is named by {LIBRARY_VARIABLE}"
        ),
    })
}

fn with_functions(library: Library, asked: String) -> Result<Loaded, Unavailable> {
    for symbol in REQUIRED.iter().chain(SHARING) {
        // SAFETY: the address is neither called nor followed here.
        let found = unsafe { library.get::<unsafe extern "C" fn()>(symbol.as_bytes()) };
        if found.is_err() {
            return Err(Unavailable::TooOld {
                library: asked,
                missing: (*symbol).to_owned(),
                needed: NEEDED.to_owned(),
            });
        }
    }
    // SAFETY: the library was loaded as ACL and has its functions; one that only happens to have functions of these
    // names is excluded by whoever named it. `Driver` keeps it loaded for the life of the process.
    match unsafe { Acl::from_library(library) } {
        Ok(acl) => {
            let file = acl.aclInit.as_ref().ok().and_then(|init| file_of(*init as usize));
            Ok(Loaded { acl, file: file.unwrap_or(asked) })
        }
        Err(error) => Err(Unavailable::Failed { detail: reason(&error) }),
    }
}

/// The dynamic linker's own words; libloading's own add nothing to them.
fn reason(error: &libloading::Error) -> String {
    use std::error::Error as _;
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

/// The file that the code at `address` was mapped from: the name that was asked for does not tell which of several
/// installed libraries the dynamic linker took.
fn file_of(address: usize) -> Option<String> {
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
    use super::*;

    #[test]
    fn the_file_of_our_own_code_is_this_program() {
        let exe = env::current_exe().unwrap();
        let here = the_file_of_our_own_code_is_this_program as fn() as usize;
        assert_eq!(file_of(here).as_deref(), exe.to_str());
        assert_eq!(file_of(0), None);
    }

    #[test]
    fn no_function_is_listed_twice() {
        let mut all = [REQUIRED, SHARING].concat();
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
    }
}
