//! Finding libcuda, and saying what to do where it is not found.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::Path;

use device_ipc_core::Unavailable;
use libloading::Library;

use crate::api::{Api, Missing};

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
    let candidates: Vec<OsString> = match (path, env::var_os(LIBRARY_VARIABLE)) {
        (Some(path), _) => vec![path.into()],
        (None, Some(path)) if !path.is_empty() => vec![path],
        _ => NAMES.map(OsString::from).into(),
    };
    let mut detail = String::new();
    for candidate in &candidates {
        // SAFETY: initialisers of libcuda run, which is what loading it means; whoever names another library in an
        // argument or in the variable answers for its initialisers.
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
            "Install the NVIDIA driver (libcuda.so.1 comes with it, not with the CUDA toolkit, whose stub is no use); \
             in a container use nvidia-container-toolkit and start it with --gpus all; a library in another place is \
             named by {LIBRARY_VARIABLE}"
        ),
    })
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
}
