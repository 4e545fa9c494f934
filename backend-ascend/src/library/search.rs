//! The search for ACL, with remedies for failures.
//!
//! Every CANN contains `libascendcl.so`; from 8.5 on the manual names `libacl_rt.so` for the same functions and calls
//! the older name deprecated ("Overview" of the ACL manual). CANN contains stubs of both names in `devlib`, and its
//! `setenv.bash` adds that folder to `LD_LIBRARY_PATH` if it finds no driver: a successful load does not prove that the
//! library works.

use std::path::Path;

use device_ipc_core::backend::Unavailable;
use device_ipc_core::backend::library::{LibrarySearch, file_of};
use libloading::Library;

use super::status::NEEDED;
use crate::bindings::Acl;
use crate::symbols::{REQUIRED, SHARING};

/// The environment variable that names the ACL library to load instead of the system's.
pub const LIBRARY_VARIABLE: &str = "DEVICE_IPC_ASCEND_LIBRARY";

/// The names to try with the dynamic linker, in order.
const NAMES: [&str; 2] = ["libascendcl.so", "libacl_rt.so"];

/// A loaded library with its functions.
pub(crate) struct Loaded {
    pub(crate) acl: Acl,
    /// The file that it was loaded from, or the requested name if the file is unknown.
    pub(crate) file: String,
}

/// Loads the library at `path`, or else the one in [`LIBRARY_VARIABLE`], or else the system's.
pub(crate) fn load(path: Option<&Path>) -> Result<Loaded, Unavailable> {
    let hint = format!(
        "Install {NEEDED}, and source its set_env.sh (/usr/local/Ascend/ascend-toolkit/set_env.sh), which adds the \
         library to LD_LIBRARY_PATH; in a container also mount the driver and the devices (docs/guide/ascend.md); set \
         {LIBRARY_VARIABLE} to a library in another place"
    );
    let search = LibrarySearch { variable: LIBRARY_VARIABLE, names: &NAMES, hint: &hint };
    // SAFETY: runs the initialisers of ACL; a caller that names another library, in an argument or in the variable, is
    // responsible for its initialisers.
    let (library, requested) = search.load(path, |name| unsafe { Library::new(name) })?;
    with_functions(library, requested)
}

fn with_functions(library: Library, requested: String) -> Result<Loaded, Unavailable> {
    for symbol in REQUIRED.iter().chain(SHARING) {
        // SAFETY: the address is neither called nor dereferenced here.
        let found = unsafe { library.get::<unsafe extern "C" fn()>(symbol.as_bytes()) };
        if found.is_err() {
            return Err(Unavailable::TooOld {
                library: requested,
                missing: (*symbol).to_owned(),
                needed: NEEDED.to_owned(),
            });
        }
    }
    // SAFETY: the library was loaded as ACL and has its functions; a caller that names another library guarantees that
    // functions of these names have these signatures. `AclLibrary` keeps it loaded for the life of the process.
    let acl = unsafe { Acl::from_library(library) };
    let file = acl.aclInit.as_ref().ok().and_then(|init| file_of(*init as usize));
    Ok(Loaded { acl, file: file.unwrap_or(requested) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn required_functions_are_listed_once() {
        let mut all = [REQUIRED, SHARING].concat();
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
    }
}
