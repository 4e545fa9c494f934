//! The search for NIXL's C API, with remedies for failures.
//!
//! NIXL is usually installed as a Python wheel, which no search path of the dynamic linker contains. Its libraries lie
//! in a folder beside the package: `site-packages/.nixl_cu12.mesonpy.libs`.

use std::env::consts::ARCH;
use std::fs;
use std::mem;
use std::path::{Path, PathBuf};

use device_ipc_core::backend::library::{LibrarySearch, file_of};
use device_ipc_core::backend::{Unavailable, environment};
use libloading::Library;

use super::NixlLibrary;
use crate::bindings::Api;

/// The environment variable that names the library `libnixl_capi.so` to load instead of an installed one.
pub const LIBRARY_VARIABLE: &str = "DEVICE_IPC_NIXL";

/// The file name of the C API.
const LIBRARY: &str = "libnixl_capi.so";

/// The name of the missing software, for the error.
const NEEDED: &str = "NIXL 0.10.1 or later (pip install nixl-cu13; with CUDA 12: nixl-cu12)";

/// Loads the library at `path`, or else the one in [`LIBRARY_VARIABLE`], or else an installed one.
pub(super) fn load(path: Option<&Path>) -> Result<NixlLibrary, Unavailable> {
    let found = installed();
    let names: Vec<&str> = found.iter().map(String::as_str).collect();
    let hint = format!("Install {NEEDED}, or set {LIBRARY_VARIABLE} to the path of {LIBRARY}");
    let search = LibrarySearch { variable: LIBRARY_VARIABLE, names: &names, hint: &hint };
    // SAFETY: runs the initialisers of NIXL; a caller that names another library, in an argument or in the variable, is
    // responsible for its initialisers.
    let (library, requested) = search.load(path, |name| unsafe { Library::new(name) })?;
    let api = Api::of(&library).map_err(|missing| Unavailable::TooOld {
        library: requested.clone(),
        missing: missing.to_owned(),
        needed: NEEDED.to_owned(),
    })?;
    let file = file_of(api.create_configured_agent as usize).unwrap_or(requested);
    // Never unloaded: NIXL and UCX run threads and have handlers that run at exit.
    mem::forget(library);
    Ok(NixlLibrary { api, file })
}

/// Returns the candidates, in the order of the crate's documentation.
fn installed() -> Vec<String> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mut found = loaded(&maps);
    for packages in packages_of(&maps) {
        found.extend(wheels(&packages));
    }
    for variable in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        let prefix = environment::variable(variable).filter(|prefix| !prefix.is_empty());
        for packages in prefix.into_iter().flat_map(|prefix| packages_in(Path::new(&prefix))) {
            found.extend(wheels(&packages));
        }
    }
    let mut found: Vec<String> =
        found.into_iter().filter_map(|path| path.into_os_string().into_string().ok()).collect();
    found.push(LIBRARY.to_owned());
    for prefix in ["/opt/nvidia/nvda_nixl", "/usr/local/nixl"] {
        found.push(format!("{prefix}/lib/{ARCH}-linux-gnu/{LIBRARY}"));
        found.push(format!("{prefix}/lib64/{LIBRARY}"));
    }
    found
}

/// Returns the files that are mapped into this process, from `/proc/self/maps`.
fn mapped(maps: &str) -> impl Iterator<Item = &Path> {
    maps.lines().filter_map(|line| line.find('/').map(|at| Path::new(&line[at..])))
}

/// Returns the C API beside a loaded `libnixl.so`: two copies of NIXL in one process would have two sets of plugins.
fn loaded(maps: &str) -> Vec<PathBuf> {
    let library = |path: &&Path| path.file_name().is_some_and(|name| name == "libnixl.so" || name == LIBRARY);
    let mut found: Vec<PathBuf> =
        mapped(maps).filter(library).map(|path| path.with_file_name(LIBRARY)).collect();
    found.dedup();
    found
}

/// Returns the folders of Python packages that this process has loaded libraries from.
fn packages_of(maps: &str) -> Vec<PathBuf> {
    let is_packages = |path: &&Path| {
        path.file_name().is_some_and(|name| name == "site-packages" || name == "dist-packages")
    };
    let mut found: Vec<PathBuf> =
        mapped(maps).filter_map(|path| path.ancestors().find(is_packages)).map(Path::to_owned).collect();
    found.sort();
    found.dedup();
    found
}

/// Returns the folders of Python packages in a virtual environment.
fn packages_in(prefix: &Path) -> Vec<PathBuf> {
    let folders = fs::read_dir(prefix.join("lib")).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> =
        folders.map(|folder| folder.path().join("site-packages")).filter(|path| path.is_dir()).collect();
    found.sort();
    found
}

/// Returns the C API of the wheels in a folder of Python packages, of the older CUDA first.
fn wheels(packages: &Path) -> Vec<PathBuf> {
    let folders = fs::read_dir(packages).into_iter().flatten().flatten();
    let of_nixl = |name: &str| name.starts_with(".nixl") && name.ends_with(".mesonpy.libs");
    let mut found: Vec<PathBuf> = folders
        .filter(|folder| folder.file_name().to_str().is_some_and(of_nixl))
        .map(|folder| folder.path().join(LIBRARY))
        .filter(|path| path.is_file())
        .collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
7f0000000000-7f0000001000 r-xp 00000000 08:01 1  /venv/lib/python3.12/site-packages/numpy/_core/a.so
7f0000001000-7f0000002000 r-xp 00000000 08:01 2  /venv/lib/python3.12/site-packages/torch/lib/b.so
7f0000002000-7f0000003000 rw-p 00000000 00:00 0  [heap]
7f0000003000-7f0000004000 r-xp 00000000 08:01 3  /packages/.nixl_cu12.mesonpy.libs/libnixl.so
7f0000004000-7f0000005000 rw-p 00000000 08:01 3  /packages/.nixl_cu12.mesonpy.libs/libnixl.so
";

    #[test]
    fn loaded_nixl_is_found_in_the_memory_map() {
        assert_eq!(loaded(MAPS), [PathBuf::from("/packages/.nixl_cu12.mesonpy.libs/libnixl_capi.so")]);
        assert_eq!(packages_of(MAPS), [PathBuf::from("/venv/lib/python3.12/site-packages")]);
        assert!(loaded("").is_empty() && packages_of("").is_empty());
    }

    #[test]
    fn wheels_of_an_environment_are_found_in_order() {
        let prefix = tempfile::tempdir().unwrap();
        let packages = prefix.path().join("lib/python3.12/site-packages");
        for folder in [".nixl_cu13.mesonpy.libs", ".nixl_cu12.mesonpy.libs", ".other.mesonpy.libs"] {
            fs::create_dir_all(packages.join(folder)).unwrap();
            fs::write(packages.join(folder).join(LIBRARY), "").unwrap();
        }
        fs::create_dir(packages.join(".nixl_empty.mesonpy.libs")).unwrap();
        assert_eq!(packages_in(prefix.path()), [packages.as_path()]);
        let expected = [".nixl_cu12.mesonpy.libs", ".nixl_cu13.mesonpy.libs"]
            .map(|folder| packages.join(folder).join(LIBRARY));
        assert_eq!(wheels(&packages), expected);
        assert!(packages_in(Path::new("/nowhere")).is_empty() && wheels(Path::new("/nowhere")).is_empty());
    }

    #[test]
    fn linker_search_path_precedes_the_fixed_folders() {
        let found = installed();
        let at = found.iter().position(|name| name == LIBRARY).unwrap();
        assert_eq!(found.len() - at, 5, "{found:?}");
        assert!(found.last().unwrap().starts_with("/usr/local/nixl/"), "{found:?}");
    }
}
