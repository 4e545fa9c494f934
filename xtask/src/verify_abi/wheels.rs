//! The vendor's headers, out of wheels that PyPI keeps. They stay in the target folder.
//!
//! A wheel is a zip file: what a header needs is its end, which lists all, and the part with the headers. So the tens
//! of MiB of libraries beside them are not fetched.

use std::fs;
use std::io::Read;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, ensure};
use zip::ZipArchive;

use crate::download::{Downloader, sha256};
use crate::workspace::target_directory;

/// A wheel of torch-npu, and what is in it.
pub(crate) struct Wheel {
    /// Of torch-npu, which carries the headers of the CANN that it was built for.
    pub(crate) version: &'static str,
    url: &'static str,
    /// Of the headers and their names, as [`digest`] says.
    headers_sha256: &'static str,
}

/// The older generation: what it lacks has to be optional. Its copy of the headers is shortened, so that the CANN of
/// its time may have more; to call that optional costs nothing.
pub(crate) const OLDER: Wheel = Wheel {
    version: "2.9.0",
    url: "https://files.pythonhosted.org/packages/66/79/d169a3b085c07d967053c629f26559dc7d757bbb2fe11f3ab38cea90a20e/torch_npu-2.9.0-cp310-cp310-manylinux_2_28_aarch64.whl",
    headers_sha256: "23c4eba4824078c1d45fc6323a3b54541256918fc9a40c14c62e1dcb532adbe1",
};

/// The newer generation, which has everything that we declare.
pub(crate) const NEWER: Wheel = Wheel {
    version: "2.14.0",
    url: "https://files.pythonhosted.org/packages/55/3e/20905da0aeaf658c68cd8a7b07070ed76b4c22574883ae588b4b97973378/torch_npu-2.14.0-cp310-cp310-manylinux_2_28_aarch64.whl",
    headers_sha256: "43f750262e094892980f1607a02c4e1a56456784e29933ff905038bb74b5541c",
};

/// Where the headers lie in a wheel.
const PREFIX: &str = "torch_npu/include/third_party/acl/inc/";

/// Folders in there that ACL's headers include from.
const FOLDERS: [&str; 2] = ["acl/", "ge/"];

/// How long all headers of a wheel may be together.
const LIMIT: u64 = 8 << 20;

/// The folder to include from, fetched if it is not there yet.
pub(crate) fn headers(wheel: &Wheel) -> Result<PathBuf> {
    let folder = target_directory().join("verify-abi").join(format!("torch-npu-{}", wheel.version));
    if read_folder(&folder).is_ok_and(|headers| digest(&headers) == wheel.headers_sha256) {
        return Ok(folder);
    }
    let headers =
        fetch(wheel).with_context(|| format!("taking the headers out of torch-npu {}", wheel.version))?;
    let found = digest(&headers);
    ensure!(
        found == wheel.headers_sha256,
        "the headers in {} have the digest {found}, not {}: not those that were chosen",
        wheel.url,
        wheel.headers_sha256
    );
    write_folder(&folder, &headers)?;
    Ok(folder)
}

/// A file's path below the folder, with `/`, and its content.
type Header = (String, Vec<u8>);

fn fetch(wheel: &Wheel) -> Result<Vec<Header>> {
    let mut archive = ZipArchive::new(Downloader::new().open(wheel.url)?)?;
    let headers = unpack(&mut archive)?;
    eprintln!("  {} headers, {} KiB fetched", headers.len(), archive.into_inner().fetched() / 1024);
    Ok(headers)
}

/// The headers in a wheel, in the order of their names.
fn unpack<R: Read + std::io::Seek>(archive: &mut ZipArchive<R>) -> Result<Vec<Header>> {
    // The names stand at the end of the file; to ask for an entry reads the place where it lies.
    let names = archive.file_names().map(|name| Ok(name?.into_owned()));
    let mut names = names.collect::<Result<Vec<_>>>()?;
    names.sort();
    let mut headers = Vec::new();
    let mut left = LIMIT;
    for name in &names {
        let Some(path) = wanted(name) else { continue };
        let mut content = Vec::new();
        archive.by_name(name)?.take(left).read_to_end(&mut content)?;
        left -= content.len() as u64;
        ensure!(left > 0, "the headers are longer than {LIMIT} bytes together");
        headers.push((path.to_owned(), content));
    }
    ensure!(!headers.is_empty(), "there is no header below {PREFIX}");
    Ok(headers)
}

/// The path below the folder, if this is one of the headers.
fn wanted(name: &str) -> Option<&str> {
    let path = name.strip_prefix(PREFIX)?;
    let plain = Path::new(path).components().all(|part| matches!(part, Component::Normal(_)));
    let header = path.ends_with(".h") && FOLDERS.iter().any(|folder| path.starts_with(folder));
    (plain && header).then_some(path)
}

/// A digest of names and contents, in the order of the names.
fn digest(headers: &[Header]) -> String {
    let lines =
        headers.iter().map(|(name, content)| format!("{}  {name}\n", sha256(content))).collect::<String>();
    sha256(lines.as_bytes())
}

fn read_folder(folder: &Path) -> Result<Vec<Header>> {
    let mut headers = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(next)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let name =
                    path.strip_prefix(folder)?.to_str().context("a name that is not UTF-8")?.to_owned();
                headers.push((name, fs::read(&path)?));
            }
        }
    }
    headers.sort();
    Ok(headers)
}

/// Writes the headers; what lay in the folder before is gone. It appears when it is whole.
fn write_folder(folder: &Path, headers: &[Header]) -> Result<()> {
    let name = folder.file_name().context("the folder has a name")?.to_string_lossy();
    let partial = folder.with_file_name(format!("{name}.{}", std::process::id()));
    for (name, content) in headers {
        let path = partial.join(name);
        fs::create_dir_all(path.parent().context("a header has a folder")?)?;
        fs::write(&path, content).with_context(|| format!("writing {}", path.display()))?;
    }
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    fs::rename(&partial, folder).with_context(|| format!("making {}", folder.display()))
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
    fn headers_and_nothing_else_come_out_of_a_wheel() {
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
    fn the_digest_sees_a_changed_header_and_a_missing_one() {
        let header = |name: &str, content: &str| (name.to_owned(), content.as_bytes().to_vec());
        let both = [header("acl/a.h", "1"), header("acl/b.h", "2")];
        assert_ne!(digest(&both), digest(&both[..1]));
        assert_ne!(digest(&both), digest(&[header("acl/a.h", "1"), header("acl/b.h", "3")]));
        assert_ne!(digest(&both), digest(&[header("acl/a.h", "1"), header("acl/c.h", "2")]));
    }

    #[test]
    fn headers_are_read_as_they_were_written() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("headers");
        let header = |name: &str, content: &str| (name.to_owned(), content.as_bytes().to_vec());
        let headers = vec![header("acl/a.h", "1"), header("acl/more/b.h", "2"), header("ge/c.h", "3")];
        write_folder(&folder, &[header("acl/old.h", "0")]).unwrap();
        write_folder(&folder, &headers).unwrap();
        assert_eq!(read_folder(&folder).unwrap(), headers);
    }
}
