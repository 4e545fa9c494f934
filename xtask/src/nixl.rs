//! `cargo xtask nixl`: tests `device-ipc-nixl` and the program with NIXL, whose libraries are downloaded from PyPI into the target directory.
//!
//! The download has 69 MB, and is made once; the unpacked libraries have 128 MB. Where it fails, as on a machine without a network,
//! the tests are skipped with the reason.

use std::env;
use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result};

use crate::download::{Downloader, unpack};
use crate::workspace::{cargo, run as run_command, target_directory};

/// A wheel of the package `nixl-cu12`. Its libraries need no Python.
struct Wheel {
    machine: &'static str,
    url: &'static str,
    sha256: &'static str,
}

const VERSION: &str = "1.5.1";

const WHEELS: [Wheel; 2] = [
    Wheel {
        machine: "x86_64",
        url: "https://files.pythonhosted.org/packages/02/86/07c679b00ff0ae890b1ddce1e05028d08828703d7a2d7578414b34de9553/nixl_cu12-1.5.1-cp311-cp311-manylinux_2_28_x86_64.whl",
        sha256: "341d0dfa499f941c054614252f1d8047d1380e33f29c87707372ff5ec7d3779a",
    },
    Wheel {
        machine: "aarch64",
        url: "https://files.pythonhosted.org/packages/da/0e/055ac34ce6a2ab51fac3b642259e6cd9aea4ea717eb11abb6c7deb00ca75/nixl_cu12-1.5.1-cp311-cp311-manylinux_2_28_aarch64.whl",
        sha256: "aced5529cc9781f8be1ee22e451c852630455460c1812b06cc863b05d797f2db",
    },
];

/// The folders of a wheel with NIXL, its plugins, UCX, and the libraries that they need. They find each other by relative paths.
const FOLDERS: [&str; 2] = [".nixl_cu12.mesonpy.libs/", "nixl_cu12.libs/"];

pub(crate) fn run() -> Result<()> {
    let library = match library() {
        Ok(library) => library,
        Err(error) => {
            eprintln!("skipped: NIXL cannot be downloaded\n  {error:#}");
            return Ok(());
        }
    };
    for tests in [
        &["test", "--package", "device-ipc-nixl"][..],
        &["test", "--package", "device-ipc-cli", "--test", "remote"],
    ] {
        run_command(cargo(tests).env("DEVICE_IPC_NIXL", &library))?;
    }
    Ok(())
}

/// Returns the path of the C API; downloads NIXL if necessary.
fn library() -> Result<PathBuf> {
    let machine = env::consts::ARCH;
    let wheel = WHEELS
        .iter()
        .find(|wheel| wheel.machine == machine && cfg!(all(target_os = "linux", target_env = "gnu")))
        .with_context(|| format!("there is no wheel of NIXL for this system on {machine}"))?;
    let directory = target_directory().join(format!("nixl-{VERSION}"));
    if !directory.is_dir() {
        let bytes = Downloader::new().get_verified(wheel.url, wheel.sha256)?;
        let partial = target_directory().join(format!("nixl-{VERSION}.{}", std::process::id()));
        unpack(&bytes, &partial, library_path).with_context(|| format!("cannot unpack {}", wheel.url))?;
        fs::rename(&partial, &directory).with_context(|| format!("cannot create {}", directory.display()))?;
    }
    Ok(directory.join(FOLDERS[0]).join("libnixl_capi.so"))
}

/// Returns the path if this is the name of a file in one of the folders.
fn library_path(name: &str) -> Option<&str> {
    let plain = Path::new(name).components().all(|part| matches!(part, Component::Normal(_)));
    let wanted = FOLDERS.iter().any(|folder| name.starts_with(folder)) && !name.ends_with('/');
    (plain && wanted).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_in_the_folders_of_libraries_are_unpacked() {
        let plugin = ".nixl_cu12.mesonpy.libs/plugins/libplugin_UCX.so";
        assert_eq!(library_path(plugin), Some(plugin));
        for name in ["nixl_cu12/__init__.py", "nixl_cu12.libs/", "nixl_cu12.libs/../a", "/nixl_cu12.libs/a"] {
            assert_eq!(library_path(name), None, "{name}");
        }
    }
}
