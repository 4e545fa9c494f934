//! A stub of nvcc for machines without the toolkit, which creates empty output files.
//!
//! candle's build script compiles its kernels even for a type check. Programs built with the stub cannot run.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// The options of nvcc that candle's and cudarc's build scripts use.
const SCRIPT: &str = r#"#!/bin/sh
# A stub of nvcc for type checks: every output file is empty.
set -eu
directory=. ptx=
while [ $# -gt 0 ]; do
    case $1 in
        --version) printf 'nvcc:\n-\n-\nCuda compilation tools, release 13.0, V13.0.0\n' ;;
        --list-gpu-code) echo sm_90 ;;
        --ptx) ptx=yes ;;
        --output-directory) directory=$2; shift ;;
        -o) : > "$2"; shift ;;
        *.cu) [ -z "$ptx" ] || { name=${1##*/}; : > "$directory/${name%.cu}.ptx"; } ;;
    esac
    shift
done
"#;

/// Creates a toolkit directory that contains only `bin/nvcc`.
pub(super) fn toolkit(directory: &Path) -> Result<PathBuf> {
    let programs = directory.join("bin");
    fs::create_dir_all(&programs).with_context(|| format!("cannot create {}", programs.display()))?;
    let nvcc = programs.join("nvcc");
    // Not rewritten if equal, because a change makes the build scripts of cudarc and candle run again.
    if fs::read_to_string(&nvcc).is_ok_and(|script| script == SCRIPT) {
        return Ok(directory.to_owned());
    }
    fs::write(&nvcc, SCRIPT).with_context(|| format!("cannot write {}", nvcc.display()))?;
    fs::set_permissions(&nvcc, fs::Permissions::from_mode(0o755))?;
    Ok(directory.to_owned())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn stub_creates_empty_files_and_prints_a_version() {
        let directory = tempfile::tempdir().unwrap();
        let toolkit = toolkit(&directory.path().join("toolkit")).unwrap();
        let nvcc = |arguments: &[&str]| {
            let output = Command::new(toolkit.join("bin/nvcc"))
                .args(arguments)
                .current_dir(directory.path())
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
            assert!(directory.path().join(file).exists(), "{file}");
        }
        assert!(!directory.path().join("moe.ptx").exists());
    }
}
