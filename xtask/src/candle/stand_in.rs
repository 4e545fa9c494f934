//! A stand-in for nvcc, for machines that have none: it gives the files that it is asked for, empty.
//!
//! candle's build script compiles its kernels also where types are only checked. Nothing that was built this way runs.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// The options of nvcc that candle's and cudarc's build scripts use.
const SCRIPT: &str = r#"#!/bin/sh
# Stands in for nvcc where types are checked: every file that is asked for is empty.
set -eu
folder=. ptx=
while [ $# -gt 0 ]; do
    case $1 in
        --version) printf 'nvcc:\n-\n-\nCuda compilation tools, release 13.0, V13.0.0\n' ;;
        --list-gpu-code) echo sm_90 ;;
        --ptx) ptx=yes ;;
        --output-directory) folder=$2; shift ;;
        -o) : > "$2"; shift ;;
        *.cu) [ -z "$ptx" ] || { name=${1##*/}; : > "$folder/${name%.cu}.ptx"; } ;;
    esac
    shift
done
"#;

/// A folder like a toolkit's, with `bin/nvcc` and nothing else.
pub(super) fn toolkit(folder: &Path) -> Result<PathBuf> {
    let programs = folder.join("bin");
    fs::create_dir_all(&programs).with_context(|| format!("cannot make {}", programs.display()))?;
    let nvcc = programs.join("nvcc");
    // Not written anew each time: cudarc's and candle's build scripts run again when it changes.
    if fs::read_to_string(&nvcc).is_ok_and(|script| script == SCRIPT) {
        return Ok(folder.to_owned());
    }
    fs::write(&nvcc, SCRIPT).with_context(|| format!("cannot write {}", nvcc.display()))?;
    fs::set_permissions(&nvcc, fs::Permissions::from_mode(0o755))?;
    Ok(folder.to_owned())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn it_gives_the_files_that_it_is_asked_for_and_a_version() {
        let folder = tempfile::tempdir().unwrap();
        let toolkit = toolkit(&folder.path().join("toolkit")).unwrap();
        let nvcc = |arguments: &[&str]| {
            let output = Command::new(toolkit.join("bin/nvcc"))
                .args(arguments)
                .current_dir(folder.path())
                .output()
                .unwrap();
            assert!(output.status.success(), "{output:?}");
            String::from_utf8(output.stdout).unwrap()
        };
        // cudarc reads the version from the fourth line.
        assert!(nvcc(&["--version"]).lines().nth(3).unwrap().contains("release 13.0,"));
        nvcc(&["-O3", "--ptx", "--output-directory", ".", "src/fill.cu"]);
        nvcc(&["-c", "-o", "moe.o", "src/moe.cu"]);
        nvcc(&["--lib", "-o", "libmoe.a", "moe.o"]);
        for file in ["fill.ptx", "moe.o", "libmoe.a"] {
            assert!(folder.path().join(file).exists(), "{file}");
        }
        assert!(!folder.path().join("moe.ptx").exists());
    }
}
