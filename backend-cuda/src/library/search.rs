//! Finding libcuda, and saying what to do where it is not found.

use std::path::Path;

use device_ipc_core::Unavailable;
use device_ipc_core::backend::library::{LibrarySearch, file_of};
use libloading::Library;

use crate::bindings::api::{Api, Missing};

/// The environment variable that names the libcuda to load instead of the system's.
pub const LIBRARY_VARIABLE: &str = "DEVICE_IPC_CUDA_LIBRARY";

/// The names that the dynamic linker is asked for. The plain name exists where development files are installed only,
/// and in the toolkit's `stubs` folder.
const NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// The oldest driver that is supported: memory pools and the attributes that tell them are whole from here on.
pub(crate) const OLDEST_CUDA: i32 = 11_040;

/// [`OLDEST_CUDA`] in words.
pub(crate) const OLDEST_DRIVER: &str = "an NVIDIA driver of CUDA 11.4 (version 470) or newer";

/// libcuda with its functions.
pub(crate) struct Loaded {
    pub(crate) library: Library,
    pub(crate) api: Api,
    /// The file it was loaded from, or the name that was asked for.
    pub(crate) file: String,
}

/// Loads the library at `path`, else the one that [`LIBRARY_VARIABLE`] names, else the system's.
pub(crate) fn load(path: Option<&Path>) -> Result<Loaded, Unavailable> {
    let hint = format!(
        "Install the NVIDIA driver (libcuda.so.1 comes with it, not with the CUDA toolkit, whose stub is no use); \
         in a container use nvidia-container-toolkit and start it with --gpus all; a library in another place is \
         named by {LIBRARY_VARIABLE}"
    );
    let search = LibrarySearch { variable: LIBRARY_VARIABLE, names: &NAMES, hint: &hint };
    // SAFETY: initialisers of libcuda run, which is what loading it means; whoever names another library in an argument or
    // in the variable answers for its initialisers.
    let (library, asked) = search.load(path, |name| unsafe { Library::new(name) })?;
    with_functions(library, asked)
}

fn with_functions(library: Library, asked: String) -> Result<Loaded, Unavailable> {
    // SAFETY: the library was loaded as libcuda; one that only happens to have functions of these names is excluded
    // by whoever named it. `Driver` keeps the library loaded for the life of the process.
    match unsafe { Api::load(&library) } {
        Ok(api) => {
            let file = file_of(api.init as usize).unwrap_or(asked);
            Ok(Loaded { library, api, file })
        }
        Err(Missing { symbol, since }) => Err(Unavailable::TooOld {
            library: asked,
            missing: symbol.to_owned(),
            needed: format!("{OLDEST_DRIVER} ({symbol} came with CUDA {since})"),
        }),
    }
}
