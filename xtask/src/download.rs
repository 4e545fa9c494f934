//! Files of package registries, by HTTPS: whole ones, and the parts of big ones that somebody reads.

use std::io::{self, Read, Seek, SeekFrom};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use sha2::{Digest, Sha256};
use ureq::http::{Response, header};
use ureq::tls::{Certificate, RootCerts, TlsConfig};
use ureq::{Agent, Body};

/// How long to wait for a connection, and for a whole answer.
const CONNECT: Duration = Duration::from_secs(20);
const ANSWER: Duration = Duration::from_secs(240);

/// How long to wait before the second attempt, the third and the fourth.
const PAUSES: [Duration; 3] = [Duration::from_secs(1), Duration::from_secs(3), Duration::from_secs(9)];

/// The longest file that is taken.
const LIMIT: u64 = 256 << 20;

/// How much of a file one request asks for. The headers in a wheel lie side by side.
const BLOCK: u64 = 512 << 10;

/// Asks servers for files, and asks again where an answer does not come.
#[derive(Clone)]
pub(crate) struct Downloader {
    agent: Agent,
    pauses: Vec<Duration>,
}

impl Downloader {
    /// With the machine's certificates, and with the proxy that the environment names.
    pub(crate) fn new() -> Self {
        let tls = TlsConfig::builder().root_certs(root_certificates()).build();
        let agent = Agent::config_builder()
            .tls_config(tls)
            .timeout_connect(Some(CONNECT))
            .timeout_global(Some(ANSWER))
            .build();
        Self { agent: agent.into(), pauses: PAUSES.to_vec() }
    }

    /// The whole file.
    pub(crate) fn get(&self, url: &str) -> Result<Vec<u8>> {
        eprintln!("+ fetch {url}");
        self.attempt(url, || body(self.agent.get(url).call()?))
    }

    /// The file for reading at any place. What is read is fetched, in blocks.
    pub(crate) fn open(&self, url: &str) -> Result<Remote> {
        eprintln!("+ read parts of {url}");
        let (start, bytes, length) = self.part(url, &format!("bytes=-{BLOCK}"))?;
        let parts = vec![(start, bytes)];
        Ok(Remote { downloader: self.clone(), url: url.to_owned(), length, parts, position: 0 })
    }

    /// A range of the file: where it begins, its bytes, and the length of the whole. A server that knows no ranges
    /// sends all.
    fn part(&self, url: &str, range: &str) -> Result<(u64, Vec<u8>, u64)> {
        self.attempt(url, || {
            let response = self.agent.get(url).header(header::RANGE, range).call()?;
            if response.status() != 206 {
                let bytes = body(response)?;
                let length = bytes.len() as u64;
                return Ok((0, bytes, length));
            }
            let said = response.headers().get(header::CONTENT_RANGE);
            let said = said.and_then(|said| said.to_str().ok()).unwrap_or_default().to_owned();
            let (start, length) =
                content_range(&said).with_context(|| format!("not a Content-Range: {said:?}"))?;
            let bytes = body(response)?;
            ensure!(start + bytes.len() as u64 <= length, "more bytes than the server said: {said}");
            Ok((start, bytes, length))
        })
    }

    /// Does it until it succeeds, or until it has been tried often enough.
    fn attempt<T>(&self, url: &str, mut request: impl FnMut() -> Result<T>) -> Result<T> {
        let mut pauses = self.pauses.iter();
        loop {
            let error = match request() {
                Ok(done) => return Ok(done),
                Err(error) => error,
            };
            match pauses.next() {
                Some(pause) if worth_repeating(&error) => {
                    eprintln!("  {error:#}; again in {} s: {url}", pause.as_secs());
                    std::thread::sleep(*pause);
                }
                _ => {
                    return Err(error).with_context(|| {
                        format!(
                            "cannot fetch {url}; it needs a way to the internet (HTTPS_PROXY names a proxy)"
                        )
                    });
                }
            }
        }
    }
}

/// Those of the machine, to which an organisation's own may belong; Mozilla's where it has none.
fn root_certificates() -> RootCerts {
    let found = rustls_native_certs::load_native_certs().certs;
    let found =
        found.iter().map(|certificate| Certificate::from_der(certificate).to_owned()).collect::<Vec<_>>();
    if found.is_empty() { RootCerts::WebPki } else { RootCerts::new_with_certs(&found) }
}

/// A file on a server.
pub(crate) struct Remote {
    downloader: Downloader,
    url: String,
    length: u64,
    /// Where each begins, and its bytes.
    parts: Vec<(u64, Vec<u8>)>,
    position: u64,
}

impl Remote {
    /// How many bytes have been fetched.
    pub(crate) fn fetched(&self) -> u64 {
        self.parts.iter().map(|(_, bytes)| bytes.len() as u64).sum()
    }

    /// What has been fetched, from the position to the end of its part.
    fn here(&self) -> Option<&[u8]> {
        self.parts.iter().find_map(|(start, bytes)| {
            let offset = usize::try_from(self.position.checked_sub(*start)?).ok()?;
            bytes.get(offset..).filter(|rest| !rest.is_empty())
        })
    }
}

impl Read for Remote {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() || self.position >= self.length {
            return Ok(0);
        }
        if self.here().is_none() {
            let start = self.position / BLOCK * BLOCK;
            let end = (start + BLOCK).min(self.length) - 1;
            let (start, bytes, length) = self
                .downloader
                .part(&self.url, &format!("bytes={start}-{end}"))
                .map_err(|error| io::Error::other(format!("{error:#}")))?;
            if length != self.length {
                return Err(io::Error::other(format!("{} changed while it was read", self.url)));
            }
            self.parts.push((start, bytes));
        }
        let rest = self.here().ok_or(io::ErrorKind::UnexpectedEof)?;
        let count = rest.len().min(buffer.len());
        buffer[..count].copy_from_slice(&rest[..count]);
        self.position += count as u64;
        Ok(count)
    }
}

impl Seek for Remote {
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

/// A digest of bytes, as hexadecimal digits.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn body(mut response: Response<Body>) -> Result<Vec<u8>> {
    Ok(response.body_mut().with_config().limit(LIMIT).read_to_vec()?)
}

/// A server that refuses will refuse again; one that is overloaded, or a line that broke, may come back.
fn worth_repeating(error: &anyhow::Error) -> bool {
    match error.downcast_ref::<ureq::Error>() {
        Some(ureq::Error::StatusCode(status)) => *status >= 500 || matches!(status, 408 | 429),
        Some(ureq::Error::BadUri(_) | ureq::Error::BodyExceedsLimit(_)) => false,
        _ => true,
    }
}

/// Where the part begins and how long the whole is: `bytes 10-19/100`.
fn content_range(text: &str) -> Option<(u64, u64)> {
    let (range, length) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (start, _) = range.split_once('-')?;
    Some((start.parse().ok()?, length.parse().ok()?))
}

#[cfg(test)]
mod tests;
