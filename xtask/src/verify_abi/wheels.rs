//! The vendor's headers, downloaded from wheels on PyPI into the target directory.
//!
//! A wheel is a zip file. Only its central directory and the range with the headers are downloaded, not the tens of MiB of
//! libraries.

use std::fs;
use std::io::Read;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, ensure};
use zip::ZipArchive;

use crate::download::{Downloader, sha256};
use crate::workspace::target_directory;

/// A wheel of torch-npu with the headers of the CANN that it was built for.
pub(crate) struct Wheel {
    /// Version of torch-npu.
    pub(crate) version: &'static str,
    url: &'static str,
    /// [`digest`] of the headers.
    headers_sha256: &'static str,
}

/// The older generation: functions that it lacks must be optional. The wheel contains only part of the headers, so the CANN of
/// that time may have more functions.
pub(crate) const OLDER: Wheel = Wheel {
    version: "2.9.0",
    url: "https://files.pythonhosted.org/packages/66/79/d169a3b085c07d967053c629f26559dc7d757bbb2fe11f3ab38cea90a20e/torch_npu-2.9.0-cp310-cp310-manylinux_2_28_aarch64.whl",
    headers_sha256: "23c4eba4824078c1d45fc6323a3b54541256918fc9a40c14c62e1dcb532adbe1",
};

/// The newer generation, which has all functions that we declare.
pub(crate) const NEWER: Wheel = Wheel {
    version: "2.14.0",
    url: "https://files.pythonhosted.org/packages/55/3e/20905da0aeaf658c68cd8a7b07070ed76b4c22574883ae588b4b97973378/torch_npu-2.14.0-cp310-cp310-manylinux_2_28_aarch64.whl",
    headers_sha256: "43f750262e094892980f1607a02c4e1a56456784e29933ff905038bb74b5541c",
};

/// The directory of the headers in a wheel.
const PREFIX: &str = "torch_npu/include/third_party/acl/inc/";

/// Subdirectories that the headers of ACL include from.
const DIRECTORIES: [&str; 2] = ["acl/", "ge/"];

/// Maximum total length of the headers of a wheel, in bytes.
const LIMIT: u64 = 8 << 20;

/// Returns the include directory; downloads the headers if necessary.
pub(crate) fn headers(wheel: &Wheel) -> Result<PathBuf> {
    let directory = target_directory().join("verify-abi").join(format!("torch-npu-{}", wheel.version));
    if read_directory(&directory).is_ok_and(|headers| digest(&headers) == wheel.headers_sha256) {
        return Ok(directory);
    }
    let headers = download(wheel)
        .with_context(|| format!("cannot extract the headers from torch-npu {}", wheel.version))?;
    let found = digest(&headers);
    ensure!(
        found == wheel.headers_sha256,
        "the headers in {} have the digest {found}, expected {}",
        wheel.url,
        wheel.headers_sha256
    );
    write_directory(&directory, &headers)?;
    Ok(directory)
}

/// The relative path of a file, with `/`, and its contents.
type Header = (String, Vec<u8>);

fn download(wheel: &Wheel) -> Result<Vec<Header>> {
    let mut archive = ZipArchive::new(Downloader::new().open(wheel.url)?)?;
    let headers = unpack(&mut archive)?;
    eprintln!("  {} headers, {} KiB downloaded", headers.len(), archive.into_inner().downloaded() / 1024);
    Ok(headers)
}

/// Returns the headers in a wheel, sorted by name.
fn unpack<R: Read + std::io::Seek>(archive: &mut ZipArchive<R>) -> Result<Vec<Header>> {
    // The names are in the central directory; opening an entry reads its range.
    let names = archive.file_names().map(|name| Ok(name?.into_owned()));
    let mut names = names.collect::<Result<Vec<_>>>()?;
    names.sort();
    let mut headers = Vec::new();
    let mut left = LIMIT;
    for name in &names {
        let Some(path) = header_path(name) else { continue };
        let mut content = Vec::new();
        archive.by_name(name)?.take(left).read_to_end(&mut content)?;
        left -= content.len() as u64;
        ensure!(left > 0, "the headers exceed the limit of {LIMIT} B");
        headers.push((path.to_owned(), content));
    }
    ensure!(!headers.is_empty(), "no headers found below {PREFIX}");
    Ok(headers)
}

/// Returns the relative path if this is the name of a header.
fn header_path(name: &str) -> Option<&str> {
    let path = name.strip_prefix(PREFIX)?;
    let plain = Path::new(path).components().all(|part| matches!(part, Component::Normal(_)));
    let header = path.ends_with(".h") && DIRECTORIES.iter().any(|directory| path.starts_with(directory));
    (plain && header).then_some(path)
}

/// Returns a digest of names and contents, sorted by name.
fn digest(headers: &[Header]) -> String {
    let lines =
        headers.iter().map(|(name, content)| format!("{}  {name}\n", sha256(content))).collect::<String>();
    sha256(lines.as_bytes())
}

fn read_directory(directory: &Path) -> Result<Vec<Header>> {
    let mut headers = Vec::new();
    let mut directorys = vec![directory.to_owned()];
    while let Some(next) = directorys.pop() {
        for entry in fs::read_dir(next)? {
            let path = entry?.path();
            if path.is_dir() {
                directorys.push(path);
            } else {
                let name =
                    path.strip_prefix(directory)?.to_str().context("a file name is not UTF-8")?.to_owned();
                headers.push((name, fs::read(&path)?));
            }
        }
    }
    headers.sort();
    Ok(headers)
}

/// Replaces the directory atomically with one that contains the headers.
fn write_directory(directory: &Path, headers: &[Header]) -> Result<()> {
    let name = directory.file_name().context("the directory has a name")?.to_string_lossy();
    let partial = directory.with_file_name(format!("{name}.{}", std::process::id()));
    for (name, content) in headers {
        let path = partial.join(name);
        fs::create_dir_all(path.parent().context("a header has a directory")?)?;
        fs::write(&path, content).with_context(|| format!("cannot write {}", path.display()))?;
    }
    if directory.exists() {
        fs::remove_dir_all(directory)?;
    }
    fs::rename(&partial, directory).with_context(|| format!("cannot create {}", directory.display()))
}

#[cfg(test)]
mod tests {
    use std::io::{Cursor, Write};

    use super::*;

    fn archive(files: &[(&str, &str)]) -> ZipArchive<Cursor<Vec<u8>>> {
        let mut writer = zip::ZipWriter::new(Cursor::new(Vec::new()));
        for (name, content) in files {
            writer.start_file(*name, zip::write::SimpleFileOptions::default()).unwrap();
            writer.write_all(content.as_bytes()).unwrap();
        }
        ZipArchive::new(writer.finish().unwrap()).unwrap()
    }

    #[test]
    fn unpack_extracts_only_headers() {
        let names = [
            "torch_npu/include/third_party/acl/inc/acl/error_codes/rt_error_codes.h",
            "torch_npu/include/third_party/acl/inc/acl/acl.h",
            "torch_npu/include/third_party/acl/inc/acl/libs/libascendcl.so",
            "torch_npu/include/third_party/acl/inc/acl/../../../../../escaped.h",
            "torch_npu/include/third_party/hccl/inc/hccl.h",
            "torch_npu/lib/libtorch_npu.so",
        ];
        let headers = unpack(&mut archive(&names.map(|name| (name, name)))).unwrap();
        let found = headers.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>();
        assert_eq!(found, ["acl/acl.h", "acl/error_codes/rt_error_codes.h"]);
        assert_eq!(headers[0].1, names[1].as_bytes());
        assert!(unpack(&mut archive(&[("torch_npu/lib/libtorch_npu.so", "")])).is_err());
    }

    #[test]
    fn digest_detects_changed_and_missing_headers() {
        let header = |name: &str, content: &str| (name.to_owned(), content.as_bytes().to_vec());
        let both = [header("acl/a.h", "1"), header("acl/b.h", "2")];
        assert_ne!(digest(&both), digest(&both[..1]));
        assert_ne!(digest(&both), digest(&[header("acl/a.h", "1"), header("acl/b.h", "3")]));
        assert_ne!(digest(&both), digest(&[header("acl/a.h", "1"), header("acl/c.h", "2")]));
    }

    #[test]
    fn written_headers_are_read_back() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path().join("headers");
        let header = |name: &str, content: &str| (name.to_owned(), content.as_bytes().to_vec());
        let headers = vec![header("acl/a.h", "1"), header("acl/more/b.h", "2"), header("ge/c.h", "3")];
        write_directory(&directory, &[header("acl/old.h", "0")]).unwrap();
        write_directory(&directory, &headers).unwrap();
        assert_eq!(read_directory(&directory).unwrap(), headers);
    }
}
