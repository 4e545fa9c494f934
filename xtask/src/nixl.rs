//! `cargo xtask nixl`: tests `device-ipc-nixl` and the program with NIXL, whose libraries are downloaded from PyPI into the target directory.
//!
//! The download has 59 MB, and is made once; the unpacked libraries have 134 MB. Where it fails, as on a machine without a network,
//! the tests are skipped with the reason.

use std::env;
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

use crate::download::{Downloader, unpack};
use crate::workspace::{cargo, run as run_command, target_directory};

/// A wheel of the package `nixl-cu13`. Its libraries need no Python, and CUDA only for memory of CUDA.
struct Wheel {
    machine: &'static str,
    url: &'static str,
    sha256: &'static str,
}

const VERSION: &str = "1.5.1";

const WHEELS: [Wheel; 2] = [
    Wheel {
        machine: "x86_64",
        url: "https://files.pythonhosted.org/packages/a4/92/5cef0df46dc95dab24117cf323e3fe200b80471468552a1d2ff222000dda/nixl_cu13-1.5.1-cp311-cp311-manylinux_2_28_x86_64.whl",
        sha256: "6279834382eeabab60bfc2fe62c2363cda3bf520278bbd4a007932cc76073de5",
    },
    Wheel {
        machine: "aarch64",
        url: "https://files.pythonhosted.org/packages/57/51/82623928f67cd9915d164680556cc7aafccf294dad9300ffb560f740feba/nixl_cu13-1.5.1-cp311-cp311-manylinux_2_28_aarch64.whl",
        sha256: "8c378f132e6744e8fc5583109bc694a7b1e996bd21eeca08de8b1dbfdd9ebae7",
    },
];

/// The folders of a wheel with NIXL, its plugins, UCX, and the libraries that they need. They find each other by relative paths.
const FOLDERS: [&str; 2] = [".nixl_cu13.mesonpy.libs/", "nixl_cu13.libs/"];

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
        &["test", "--package", "device-ipc-cli", "--test", "suite", "remote::"],
    ] {
        run_command(cargo(tests).env("DEVICE_IPC_NIXL", &library))?;
    }
    Ok(())
}

/// Returns the path of the C API; downloads NIXL if necessary.
fn library() -> Result<PathBuf> {
    Ok(unpacked()?.join(FOLDERS[0]).join("libnixl_capi.so"))
}

/// The name of the archive of [`archive`] in a bundle.
pub(crate) const ARCHIVE: &str = "nixl.zip";

/// Writes the folders of libraries as a zip file, without the plugins that a test of copies over TCP does not load; downloads NIXL
/// if necessary. Returns the length in bytes.
pub(crate) fn archive(to: &Path) -> Result<u64> {
    let directory = unpacked()?;
    let mut archive = ZipWriter::new(fs::File::create(to)?);
    let options = SimpleFileOptions::default().compression_method(CompressionMethod::Deflated);
    let mut folders: Vec<_> = FOLDERS.iter().map(|folder| directory.join(folder)).collect();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if is_needed(&path) {
                let name = path.strip_prefix(&directory)?.to_str().context("a path in UTF-8")?;
                archive.start_file(name, options)?;
                io::copy(&mut fs::File::open(&path)?, &mut archive)
                    .with_context(|| format!("cannot read {}", path.display()))?;
            }
        }
    }
    Ok(archive.finish()?.metadata()?.len())
}

/// Returns whether a library belongs to NIXL itself, to its plugin UCX, or to UCX without its programs.
fn is_needed(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let is_other = |prefix: &str| name.starts_with(prefix);
    !["libaws", "libazure", "libtelemetry", "libtrace", "libucx_perftest", "libgusli"]
        .into_iter()
        .any(is_other)
        && (!is_other("libplugin_") || name == "libplugin_UCX.so")
}

/// Returns the directory with the folders of libraries; downloads NIXL if necessary.
fn unpacked() -> Result<PathBuf> {
    let machine = env::consts::ARCH;
    let wheel = WHEELS
        .iter()
        .find(|wheel| wheel.machine == machine && cfg!(all(target_os = "linux", target_env = "gnu")))
        .with_context(|| format!("there is no wheel of NIXL for this system on {machine}"))?;
    let directory = target_directory().join(format!("nixl-cu13-{VERSION}"));
    if !directory.is_dir() {
        let bytes = Downloader::new().get_verified(wheel.url, wheel.sha256)?;
        let partial = target_directory().join(format!("nixl-cu13-{VERSION}.{}", std::process::id()));
        unpack(&bytes, &partial, library_path).with_context(|| format!("cannot unpack {}", wheel.url))?;
        fs::rename(&partial, &directory).with_context(|| format!("cannot create {}", directory.display()))?;
    }
    Ok(directory)
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
        let plugin = ".nixl_cu13.mesonpy.libs/plugins/libplugin_UCX.so";
        assert_eq!(library_path(plugin), Some(plugin));
        for name in ["nixl_cu13/__init__.py", "nixl_cu13.libs/", "nixl_cu13.libs/../a", "/nixl_cu13.libs/a"] {
            assert_eq!(library_path(name), None, "{name}");
        }
    }

    #[test]
    fn archive_contains_ucx_and_no_other_plugin() {
        for needed in [
            "libnixl.so",
            "plugins/libplugin_UCX.so",
            "ucx/libuct_cuda.so.0.0.0",
            "libgrpc-5efa6dad.so.48.0.0",
        ] {
            assert!(is_needed(Path::new(needed)), "{needed}");
        }
        for other in
            ["plugins/libplugin_GDS.so", "libaws-c-s3-085fd743.so.1.0.0", "ucx/libucx_perftest_cuda.so.0.0.0"]
        {
            assert!(!is_needed(Path::new(other)), "{other}");
        }
    }
}
