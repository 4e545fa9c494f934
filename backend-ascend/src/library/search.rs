//! Finding ACL, and saying what to do where it is not found.
//!
//! `libascendcl.so` is in every CANN; from 8.5 on the manual names `libacl_rt.so` for the same functions and calls the
//! older name deprecated ("Overview" of the ACL manual). CANN ships stubs of both names in `devlib`, and its
//! `setenv.bash` puts that folder into `LD_LIBRARY_PATH` where it finds no driver: that a library loads proves nothing.

use std::path::Path;

use device_ipc_core::Unavailable;
use device_ipc_core::backend::library::{LibrarySearch, cause_of, file_of};
use libloading::Library;

use super::status::NEEDED;
use crate::bindings::Acl;
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
    let hint = format!(
        "Install {NEEDED}, and source its set_env.sh (/usr/local/Ascend/ascend-toolkit/set_env.sh), which puts the \
         library into LD_LIBRARY_PATH; in a container mount the driver and the devices too (docs/guide/ascend.md); a \
         library in another place is named by {LIBRARY_VARIABLE}"
    );
    let search = LibrarySearch { variable: LIBRARY_VARIABLE, names: &NAMES, hint: &hint };
    // SAFETY: initialisers of ACL run, which is what loading it means; whoever names another library in an argument or in
    // the variable answers for its initialisers.
    let (library, asked) = search.load(path, |name| unsafe { Library::new(name) })?;
    with_functions(library, asked)
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
        Err(error) => Err(Unavailable::Failed { detail: cause_of(&error) }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_function_is_listed_twice() {
        let mut all = [REQUIRED, SHARING].concat();
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
    }
}
