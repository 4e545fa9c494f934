//! Tests with a local server.

use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::net::{TcpListener, TcpStream};
use std::thread::JoinHandle;

use super::*;

/// A response to one request with this range.
type Response = Box<dyn Fn(Option<(usize, usize)>, &mut TcpStream) + Send>;

/// Starts a server that sends these responses in order.
fn server(length: usize, responses: Vec<Response>) -> (String, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/file", listener.local_addr().unwrap());
    let serving = std::thread::spawn(move || {
        for respond in responses {
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            let range = range(&stream, length);
            respond(range, &mut stream);
        }
    });
    (url, serving)
}

/// Reads a request and returns the requested range.
fn range(stream: &TcpStream, length: usize) -> Option<(usize, usize)> {
    let mut range = None;
    for line in BufReader::new(stream).lines() {
        let line = line.unwrap().to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some((start, end)) = line.strip_prefix("range: bytes=").and_then(|range| range.split_once('-'))
        {
            range = Some(match start {
                "" => (length.saturating_sub(end.parse().unwrap()), length),
                start => (start.parse().unwrap(), end.parse::<usize>().unwrap() + 1),
            });
        }
    }
    range
}

fn status(status: &'static str) -> Response {
    Box::new(move |_, stream| {
        write!(stream, "HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").unwrap();
    })
}

fn part(file: &[u8]) -> Response {
    let file = file.to_vec();
    Box::new(move |range, stream| {
        let (start, end) = range.expect("a range was requested");
        let part = &file[start..end];
        write!(
            stream,
            "HTTP/1.1 206 Partial Content\r\ncontent-length: {}\r\ncontent-range: bytes {start}-{}/{}\r\nconnection: close\r\n\r\n",
            part.len(),
            end - 1,
            file.len()
        )
        .unwrap();
        stream.write_all(part).unwrap();
    })
}

fn all(file: &[u8]) -> Response {
    let file = file.to_vec();
    Box::new(move |_, stream| {
        write!(stream, "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", file.len())
            .unwrap();
        stream.write_all(&file).unwrap();
    })
}

fn truncated(file: &[u8]) -> Response {
    let file = file.to_vec();
    Box::new(move |_, stream| {
        write!(stream, "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", file.len())
            .unwrap();
        stream.write_all(&file[..file.len() / 2]).unwrap();
    })
}

/// Creates a client without TLS, proxy and pauses.
fn downloader() -> Downloader {
    let agent = Agent::config_builder().proxy(None).timeout_global(Some(Duration::from_secs(10))).build();
    Downloader { agent: agent.into(), pauses: vec![Duration::ZERO; 2] }
}

fn file() -> Vec<u8> {
    (0..3 * BLOCK + 1000).map(|index| (index % 251) as u8).collect()
}

#[test]
fn ranges_are_downloaded_once() {
    let file = file();
    let (url, serving) = server(file.len(), vec![part(&file), part(&file)]);
    let mut remote = downloader().open(&url).unwrap();
    let mut last = [0; 1000];
    remote.seek(SeekFrom::End(-1000)).unwrap();
    remote.read_exact(&mut last).unwrap();
    assert_eq!(last, file[file.len() - 1000..]);
    assert_eq!(remote.read(&mut last).unwrap(), 0, "end of file");
    for position in [BLOCK + 1, BLOCK + 5000, 2 * BLOCK - 2] {
        let mut two = [0; 2];
        remote.seek(SeekFrom::Start(position)).unwrap();
        remote.read_exact(&mut two).unwrap();
        assert_eq!(two, file[position as usize..][..2]);
    }
    assert_eq!(remote.downloaded(), 2 * BLOCK);
    serving.join().unwrap();
}

#[test]
fn server_without_ranges_sends_the_whole_file() {
    let file = file();
    let (url, serving) = server(file.len(), vec![all(&file)]);
    let mut remote = downloader().open(&url).unwrap();
    let mut read = Vec::new();
    remote.read_to_end(&mut read).unwrap();
    assert!(read == file);
    serving.join().unwrap();
}

#[test]
fn failed_or_truncated_response_is_retried() {
    let file = file();
    let responses = vec![status("503 Service Unavailable"), truncated(&file), all(&file)];
    let (url, serving) = server(file.len(), responses);
    assert!(downloader().get(&url).unwrap() == file);
    serving.join().unwrap();
}

#[test]
fn refusal_is_not_retried() {
    let (url, serving) = server(0, vec![status("404 Not Found")]);
    let error = format!("{:#}", downloader().get(&url).unwrap_err());
    assert!(error.contains("404") && error.contains(&url), "{error}");
    serving.join().unwrap();
}

#[test]
fn unreachable_server_is_an_error() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/file", listener.local_addr().unwrap());
    drop(listener);
    let error = format!("{:#}", downloader().get(&url).unwrap_err());
    assert!(error.contains("check the internet connection") && error.contains("HTTPS_PROXY"), "{error}");
}
