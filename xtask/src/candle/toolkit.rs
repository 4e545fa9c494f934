//! nvcc, downloaded from NVIDIA's wheels on PyPI into the target directory.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::download::{Downloader, unpack};

/// A wheel with part of the toolkit.
struct Wheel {
    url: &'static str,
    sha256: &'static str,
}

/// Version of the toolkit; its output runs with drivers of CUDA 13.0 (580) and newer.
const VERSION: &str = "13.0.88";

/// nvcc, the programs that it calls, and the headers that candle's kernels include.
const WHEELS: [Wheel; 5] = [
    Wheel {
        url: "https://files.pythonhosted.org/packages/71/8b/a546c12881fffeba927d810598987df25d74b8b241788c7db8dfc93b0173/nvidia_cuda_nvcc-13.0.88-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
        sha256: "56fe502eb77625a12f25172caa3cdddb4e4c8ba2c8c17dba44b164761b380f03",
    },
    Wheel {
        url: "https://files.pythonhosted.org/packages/2e/24/d1558f3b68b1d26e706813b1d10aa1d785e4698c425af8db8edc3dced472/nvidia_cuda_runtime-13.0.96-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
        sha256: "7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548",
    },
    Wheel {
        url: "https://files.pythonhosted.org/packages/ab/fb/0384bb2129bed6b1b39f8e44471c615ab5ab29b7e55817538a1d390d8f84/nvidia_cuda_cccl-13.0.85-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
        sha256: "e0da7ad981f3a8aff08241b5bfc1af868742a63e2762f53a5171c492ef242649",
    },
    Wheel {
        url: "https://files.pythonhosted.org/packages/05/69/a1ec4d9f0747d85964206feb47bf359f48a2d6af74c0add8abba6efe3dda/nvidia_cuda_crt-13.0.88-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
        sha256: "2c8043c7c9e02492716426e9919fc78d2c5b3b2a7a768a88e952676b08aa55a4",
    },
    Wheel {
        url: "https://files.pythonhosted.org/packages/15/b0/ee41e6d1108d959b5097163e7190c2d0f7857dea75606ce358f0275891b4/nvidia_nvvm-13.0.88-py3-none-manylinux2010_x86_64.manylinux_2_12_x86_64.whl",
        sha256: "c5f41ffeb6466944a026dfa5317d7d85355c119bbec279205d22f1869d1054e0",
    },
];

/// The directory of the toolkit in a wheel.
const PREFIX: &str = "nvidia/cu13/";

/// Returns the directory of the toolkit; downloads the toolkit if necessary.
pub(super) fn download(directory: &Path) -> Result<PathBuf> {
    ensure!(
        cfg!(all(target_arch = "x86_64", target_os = "linux")),
        "the download of nvcc is supported only for Linux on x86-64; install the CUDA toolkit and set CUDA_HOME"
    );
    let toolkit = directory.join(format!("toolkit-{VERSION}"));
    if toolkit.is_dir() {
        return Ok(toolkit);
    }
    let partial = directory.join(format!("toolkit-{VERSION}.{}", std::process::id()));
    let downloader = Downloader::new();
    for wheel in &WHEELS {
        let bytes = downloader.get_verified(wheel.url, wheel.sha256)?;
        unpack(&bytes, &partial, toolkit_path).with_context(|| format!("cannot unpack {}", wheel.url))?;
    }
    // The linker requires the unversioned name, which the wheel does not contain.
    symlink("libcudart.so.13", partial.join("lib/libcudart.so"))?;
    fs::rename(&partial, &toolkit).with_context(|| format!("cannot create {}", toolkit.display()))?;
    Ok(toolkit)
}

/// Returns the path in the toolkit if this is the name of a toolkit file.
fn toolkit_path(name: &str) -> Option<&str> {
    let path = name.strip_prefix(PREFIX).filter(|path| !path.is_empty() && !path.ends_with('/'))?;
    Path::new(path).components().all(|part| matches!(part, Component::Normal(_))).then_some(path)
}

#[cfg(test)]
mod tests {
    use std::io::{Cursor, Write as _};
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn unpack_extracts_only_toolkit_files() {
        let mut writer = zip::ZipWriter::new(Cursor::new(Vec::new()));
        for name in
            ["nvidia/cu13/bin/nvcc", "nvidia/cu13/include/cuda.h", "nvidia_cuda_nvcc.dist-info/RECORD"]
        {
            writer.start_file(name, zip::write::SimpleFileOptions::default()).unwrap();
            writer.write_all(name.as_bytes()).unwrap();
        }
        let wheel = writer.finish().unwrap().into_inner();
        let directory = tempfile::tempdir().unwrap();
        unpack(&wheel, directory.path(), toolkit_path).unwrap();
        let mode =
            |path: &str| fs::metadata(directory.path().join(path)).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode("bin/nvcc"), mode("include/cuda.h")), (0o755, 0o644));
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);
        assert_eq!(toolkit_path("nvidia/cu13/bin/../../../escaped"), None);
        assert_eq!(toolkit_path("nvidia/cu13/bin/"), None);
    }
}
