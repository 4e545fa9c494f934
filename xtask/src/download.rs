//! Downloads from package registries over HTTPS: whole files, and ranges of large files.

use std::fs;
use std::io::{self, Cursor, Read, Seek, SeekFrom};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use sha2::{Digest, Sha256};
use ureq::http::{Response, header};
use ureq::tls::{Certificate, RootCerts, TlsConfig};
use ureq::{Agent, Body};
use zip::ZipArchive;

/// Timeouts of a connection and of a whole response.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(240);

/// Pauses before the second, third and fourth attempt.
const PAUSES: [Duration; 3] = [Duration::from_secs(1), Duration::from_secs(3), Duration::from_secs(9)];

/// Maximum length of a file in bytes.
const LIMIT: u64 = 256 << 20;

/// Length of a range request in bytes. The headers in a wheel are adjacent.
const BLOCK: u64 = 512 << 10;

/// An HTTP client that retries failed requests.
#[derive(Clone)]
pub(crate) struct Downloader {
    agent: Agent,
    pauses: Vec<Duration>,
}

impl Downloader {
    /// Creates a client with the certificates of the machine and the proxy of the environment.
    pub(crate) fn new() -> Self {
        let tls = TlsConfig::builder().root_certs(root_certificates()).build();
        let agent = Agent::config_builder()
            .tls_config(tls)
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .timeout_global(Some(RESPONSE_TIMEOUT))
            .build();
        Self { agent: agent.into(), pauses: PAUSES.to_vec() }
    }

    /// Downloads a file.
    pub(crate) fn get(&self, url: &str) -> Result<Vec<u8>> {
        eprintln!("+ download {url}");
        self.attempt(url, || body(self.agent.get(url).call()?))
    }

    /// Downloads a file and checks its SHA-256 digest.
    pub(crate) fn get_verified(&self, url: &str, digest: &str) -> Result<Vec<u8>> {
        let bytes = self.get(url)?;
        let found = sha256(&bytes);
        ensure!(found == digest, "{url} has the SHA-256 digest {found}, expected {digest}");
        Ok(bytes)
    }

    /// Opens a file for random access. Ranges are downloaded when they are read.
    pub(crate) fn open(&self, url: &str) -> Result<RemoteFile> {
        eprintln!("+ read ranges of {url}");
        let (start, bytes, length) = self.part(url, &format!("bytes=-{BLOCK}"))?;
        let parts = vec![(start, bytes)];
        Ok(RemoteFile { downloader: self.clone(), url: url.to_owned(), length, parts, position: 0 })
    }

    /// Requests a range: returns its start, its bytes, and the length of the file. A server without support for ranges
    /// sends the whole file.
    fn part(&self, url: &str, range: &str) -> Result<(u64, Vec<u8>, u64)> {
        self.attempt(url, || {
            let response = self.agent.get(url).header(header::RANGE, range).call()?;
            if response.status() != 206 {
                let bytes = body(response)?;
                let length = bytes.len() as u64;
                return Ok((0, bytes, length));
            }
            let header = response.headers().get(header::CONTENT_RANGE);
            let header = header.and_then(|header| header.to_str().ok()).unwrap_or_default().to_owned();
            let (start, length) =
                content_range(&header).with_context(|| format!("invalid Content-Range: {header:?}"))?;
            let bytes = body(response)?;
            ensure!(
                start + bytes.len() as u64 <= length,
                "the response is longer than its Content-Range: {header}"
            );
            Ok((start, bytes, length))
        })
    }

    /// Repeats a request until it succeeds or no attempts are left.
    fn attempt<T>(&self, url: &str, mut request: impl FnMut() -> Result<T>) -> Result<T> {
        let mut pauses = self.pauses.iter();
        loop {
            let error = match request() {
                Ok(done) => return Ok(done),
                Err(error) => error,
            };
            match pauses.next() {
                Some(pause) if is_transient(&error) => {
                    eprintln!("  {error:#}; retrying in {} s: {url}", pause.as_secs());
                    std::thread::sleep(*pause);
                }
                _ => {
                    return Err(error).with_context(|| {
                        format!(
                            "cannot download {url}; check the internet connection (set HTTPS_PROXY for a proxy)"
                        )
                    });
                }
            }
        }
    }
}

/// Returns the certificates of the machine, which may include those of an organisation; Mozilla's if it has none.
fn root_certificates() -> RootCerts {
    let found = rustls_native_certs::load_native_certs().certs;
    let found =
        found.iter().map(|certificate| Certificate::from_der(certificate).to_owned()).collect::<Vec<_>>();
    if found.is_empty() { RootCerts::WebPki } else { RootCerts::new_with_certs(&found) }
}

/// A file on a server with random access.
pub(crate) struct RemoteFile {
    downloader: Downloader,
    url: String,
    length: u64,
    /// Start and bytes of each downloaded range.
    parts: Vec<(u64, Vec<u8>)>,
    position: u64,
}

impl RemoteFile {
    /// Returns the number of bytes downloaded.
    pub(crate) fn downloaded(&self) -> u64 {
        self.parts.iter().map(|(_, bytes)| bytes.len() as u64).sum()
    }

    /// Returns the downloaded bytes from the position to the end of their range.
    fn buffered(&self) -> Option<&[u8]> {
        self.parts.iter().find_map(|(start, bytes)| {
            let offset = usize::try_from(self.position.checked_sub(*start)?).ok()?;
            bytes.get(offset..).filter(|rest| !rest.is_empty())
        })
    }
}

impl Read for RemoteFile {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() || self.position >= self.length {
            return Ok(0);
        }
        if self.buffered().is_none() {
            let start = self.position / BLOCK * BLOCK;
            let end = (start + BLOCK).min(self.length) - 1;
            let (start, bytes, length) = self
                .downloader
                .part(&self.url, &format!("bytes={start}-{end}"))
                .map_err(|error| io::Error::other(format!("{error:#}")))?;
            if length != self.length {
                return Err(io::Error::other(format!("{} was modified during the download", self.url)));
            }
            self.parts.push((start, bytes));
        }
        let rest = self.buffered().ok_or(io::ErrorKind::UnexpectedEof)?;
        let count = rest.len().min(buffer.len());
        buffer[..count].copy_from_slice(&rest[..count]);
        self.position += count as u64;
        Ok(count)
    }
}

impl Seek for RemoteFile {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let (from, by) = match to {
            SeekFrom::Start(position) => (position, 0),
            SeekFrom::End(by) => (self.length, by),
            SeekFrom::Current(by) => (self.position, by),
        };
        self.position = from.checked_add_signed(by).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.position)
    }
}

/// Returns the SHA-256 digest of bytes in hexadecimal.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Unpacks the files of a wheel for which `path_of` returns a path. Files in a folder `bin` are executable.
pub(crate) fn unpack(wheel: &[u8], to: &Path, path_of: impl Fn(&str) -> Option<&str>) -> Result<()> {
    let mut archive = ZipArchive::new(Cursor::new(wheel))?;
    for index in 0..archive.len() {
        let mut file = archive.by_index(index)?;
        let name = file.name()?.into_owned();
        let Some(path) = path_of(&name) else { continue };
        let path = to.join(path);
        fs::create_dir_all(path.parent().context("the path has a parent directory")?)?;
        io::copy(&mut file, &mut fs::File::create(&path)?)
            .with_context(|| format!("cannot write {}", path.display()))?;
        // Wheels do not always mark executable files.
        let is_program = path.parent().is_some_and(|directory| directory.ends_with("bin"));
        fs::set_permissions(&path, fs::Permissions::from_mode(if is_program { 0o755 } else { 0o644 }))?;
    }
    Ok(())
}

fn body(mut response: Response<Body>) -> Result<Vec<u8>> {
    Ok(response.body_mut().with_config().limit(LIMIT).read_to_vec()?)
}

/// Returns whether a repeated request may succeed: after an overload or a broken connection, not after a refusal.
fn is_transient(error: &anyhow::Error) -> bool {
    match error.downcast_ref::<ureq::Error>() {
        Some(ureq::Error::StatusCode(status)) => *status >= 500 || matches!(status, 408 | 429),
        Some(ureq::Error::BadUri(_) | ureq::Error::BodyExceedsLimit(_)) => false,
        _ => true,
    }
}

/// Parses start and total length from `bytes 10-19/100`.
fn content_range(text: &str) -> Option<(u64, u64)> {
    let (range, length) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (start, _) = range.split_once('-')?;
    Some((start.parse().ok()?, length.parse().ok()?))
}

#[cfg(test)]
mod tests;
