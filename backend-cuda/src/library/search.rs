//! The search for libcuda, with remedies for failures.

use std::path::Path;

use device_ipc_core::backend::Unavailable;
use device_ipc_core::backend::library::{LibrarySearch, file_of};
use libloading::Library;

use crate::bindings::api::{Api, Missing};

/// The environment variable that names the libcuda to load instead of the system's.
pub const LIBRARY_VARIABLE: &str = "DEVICE_IPC_CUDA_LIBRARY";

/// The names to try with the dynamic linker, in order. The plain name exists only with development files, and in the
/// toolkit's `stubs` folder.
const NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// The oldest supported driver: the first with all functions and attributes of memory pools.
pub(crate) const OLDEST_CUDA: i32 = 11_040;

/// [`OLDEST_CUDA`] as text.
pub(crate) const OLDEST_DRIVER: &str = "an NVIDIA driver of CUDA 11.4 (version 470) or newer";

/// A loaded library with its functions.
pub(crate) struct Loaded {
    pub(crate) library: Library,
    pub(crate) api: Api,
    /// The file that it was loaded from, or the requested name if the file is unknown.
    pub(crate) file: String,
}

/// Loads the library at `path`, or else the one in [`LIBRARY_VARIABLE`], or else the system's.
pub(crate) fn load(path: Option<&Path>) -> Result<Loaded, Unavailable> {
    let hint = format!(
        "Install the NVIDIA driver (it contains libcuda.so.1; the CUDA toolkit contains only a stub); in a container \
         use nvidia-container-toolkit and start it with --gpus all; set {LIBRARY_VARIABLE} to a library in another \
         place"
    );
    let search = LibrarySearch { variable: LIBRARY_VARIABLE, names: &NAMES, hint: &hint };
    // SAFETY: runs the initialisers of libcuda; a caller that names another library, in an argument or in the variable,
    // is responsible for its initialisers.
    let (library, requested) = search.load(path, |name| unsafe { Library::new(name) })?;
    with_functions(library, requested)
}

fn with_functions(library: Library, requested: String) -> Result<Loaded, Unavailable> {
    // SAFETY: the library was loaded as libcuda; a caller that names another library guarantees that functions of these
    // names have these signatures. `CudaLibrary` keeps the library loaded for the life of the process.
    match unsafe { Api::load(&library) } {
        Ok(api) => {
            let file = file_of(api.init as usize).unwrap_or(requested);
            Ok(Loaded { library, api, file })
        }
        Err(Missing { symbol, since }) => Err(Unavailable::TooOld {
            library: requested,
            missing: symbol.to_owned(),
            needed: format!("{OLDEST_DRIVER} ({symbol} arrived with CUDA {since})"),
        }),
    }
}
