//! libclang, which bindgen loads at run time: the library of the machine, or one downloaded from PyPI.

use std::env;
use std::fs;
use std::io::{Cursor, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::download::Downloader;
use crate::workspace::target_directory;

/// A wheel of the package `libclang`: the library, which depends only on the GNU C library.
struct Wheel {
    machine: &'static str,
    url: &'static str,
    sha256: &'static str,
}

const VERSION: &str = "18.1.1";

const WHEELS: [Wheel; 2] = [
    Wheel {
        machine: "x86_64",
        url: "https://files.pythonhosted.org/packages/1d/fc/716c1e62e512ef1c160e7984a73a5fc7df45166f2ff3f254e71c58076f7c/libclang-18.1.1-py2.py3-none-manylinux2010_x86_64.whl",
        sha256: "c533091d8a3bbf7460a00cb6c1a71da93bffe148f172c7d03b1c31fbf8aa2a0b",
    },
    Wheel {
        machine: "aarch64",
        url: "https://files.pythonhosted.org/packages/3c/3d/f0ac1150280d8d20d059608cf2d5ff61b7c3b7f7bcf9c0f425ab92df769a/libclang-18.1.1-py2.py3-none-manylinux2014_aarch64.whl",
        sha256: "54dda940a4a0491a9d1532bf071ea3ef26e6dbaf03b5000ed94dd7174e8f9592",
    },
];

/// The variable that contains the path of libclang: a directory or a file.
const VARIABLE: &str = "LIBCLANG_PATH";

/// Loads libclang for this thread. If the machine has none, downloads one and restarts this program with the variable set; in
/// that case it does not return.
pub(crate) fn provide() -> Result<()> {
    let Err(error) = clang_sys::load() else { return Ok(()) };
    if let Some(path) = env::var_os(VARIABLE) {
        bail!("cannot load libclang from {VARIABLE}={path:?}: {error}; correct or unset the variable");
    }
    let library = download()?;
    let program = env::current_exe().context("cannot find the path of this program")?;
    let failure = Command::new(program).args(env::args_os().skip(1)).env(VARIABLE, &library).exec();
    Err(failure).context("cannot restart this program with libclang")
}

/// Returns the library in the target directory; downloads it if necessary.
fn download() -> Result<PathBuf> {
    let wheel = wheel(env::consts::ARCH)?;
    let directory = target_directory().join(format!("libclang-{VERSION}"));
    let library = directory.join("libclang.so");
    if library.exists() {
        return Ok(library);
    }
    let bytes =
        Downloader::new().get_verified(wheel.url, wheel.sha256).context("cannot download libclang")?;
    fs::create_dir_all(&directory)?;
    unpack(bytes, &library)?;
    Ok(library)
}

fn wheel(machine: &str) -> Result<&'static Wheel> {
    let known = cfg!(all(target_os = "linux", target_env = "gnu"));
    WHEELS.iter().filter(|_| known).find(|wheel| wheel.machine == machine).with_context(|| {
        format!("no download of libclang for {machine}; install it (Debian: libclang1), or set {VARIABLE}")
    })
}

/// Extracts the library from a wheel; the file is created atomically.
fn unpack(wheel: Vec<u8>, library: &Path) -> Result<()> {
    let mut archive = zip::ZipArchive::new(Cursor::new(wheel))?;
    let name = format!("libclang-{VERSION}.data/platlib/clang/native/libclang.so");
    let mut content = Vec::new();
    archive.by_name(&name)?.read_to_end(&mut content)?;
    let partial = library.with_extension(format!("so.{}", std::process::id()));
    fs::write(&partial, content)?;
    fs::rename(&partial, library)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsupported_machine_error_names_the_package() {
        let error = wheel("riscv64").err().unwrap().to_string();
        assert!(error.contains("libclang1") && error.contains(VARIABLE), "{error}");
    }
}
