//! Against a server of our own, on this machine.

use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::net::{TcpListener, TcpStream};
use std::thread::JoinHandle;

use super::*;

/// Answers one request: the line with the range is what it gets.
type Answer = Box<dyn Fn(Option<(usize, usize)>, &mut TcpStream) + Send>;

/// Answers as many requests as there are answers, in this order.
fn server(length: usize, answers: Vec<Answer>) -> (String, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/file", listener.local_addr().unwrap());
    let serving = std::thread::spawn(move || {
        for answer in answers {
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            let range = range(&stream, length);
            answer(range, &mut stream);
        }
    });
    (url, serving)
}

/// Reads a request, and says which bytes it asks for.
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

fn status(status: &'static str) -> Answer {
    Box::new(move |_, stream| {
        write!(stream, "HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").unwrap();
    })
}

fn part(file: &[u8]) -> Answer {
    let file = file.to_vec();
    Box::new(move |range, stream| {
        let (start, end) = range.expect("a range was asked for");
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

fn all(file: &[u8]) -> Answer {
    let file = file.to_vec();
    Box::new(move |_, stream| {
        write!(stream, "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", file.len())
            .unwrap();
        stream.write_all(&file).unwrap();
    })
}

fn broken_off(file: &[u8]) -> Answer {
    let file = file.to_vec();
    Box::new(move |_, stream| {
        write!(stream, "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", file.len())
            .unwrap();
        stream.write_all(&file[..file.len() / 2]).unwrap();
    })
}

/// As the real one, in clear text, without a proxy, and with less patience.
fn downloader() -> Downloader {
    let agent = Agent::config_builder().proxy(None).timeout_global(Some(Duration::from_secs(10))).build();
    Downloader { agent: agent.into(), pauses: vec![Duration::ZERO; 2] }
}

fn file() -> Vec<u8> {
    (0..3 * BLOCK + 1000).map(|index| (index % 251) as u8).collect()
}

#[test]
fn what_is_read_of_a_file_is_fetched_in_blocks_and_once() {
    let file = file();
    let (url, serving) = server(file.len(), vec![part(&file), part(&file)]);
    let mut remote = downloader().open(&url).unwrap();
    let mut last = [0; 1000];
    remote.seek(SeekFrom::End(-1000)).unwrap();
    remote.read_exact(&mut last).unwrap();
    assert_eq!(last, file[file.len() - 1000..]);
    assert_eq!(remote.read(&mut last).unwrap(), 0, "the file ends here");
    for position in [BLOCK + 1, BLOCK + 5000, 2 * BLOCK - 2] {
        let mut two = [0; 2];
        remote.seek(SeekFrom::Start(position)).unwrap();
        remote.read_exact(&mut two).unwrap();
        assert_eq!(two, file[position as usize..][..2]);
    }
    assert_eq!(remote.fetched(), 2 * BLOCK);
    serving.join().unwrap();
}

#[test]
fn a_server_without_ranges_is_asked_once_for_all() {
    let file = file();
    let (url, serving) = server(file.len(), vec![all(&file)]);
    let mut remote = downloader().open(&url).unwrap();
    let mut read = Vec::new();
    remote.read_to_end(&mut read).unwrap();
    assert!(read == file);
    serving.join().unwrap();
}

#[test]
fn an_answer_that_fails_or_breaks_off_is_asked_for_again() {
    let file = file();
    let answers = vec![status("503 Service Unavailable"), broken_off(&file), all(&file)];
    let (url, serving) = server(file.len(), answers);
    assert!(downloader().get(&url).unwrap() == file);
    serving.join().unwrap();
}

#[test]
fn a_refusal_is_final() {
    let (url, serving) = server(0, vec![status("404 Not Found")]);
    let error = format!("{:#}", downloader().get(&url).unwrap_err());
    assert!(error.contains("404") && error.contains(&url), "{error}");
    serving.join().unwrap();
}

#[test]
fn without_a_network_the_error_says_what_is_needed() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/file", listener.local_addr().unwrap());
    drop(listener);
    let error = format!("{:#}", downloader().get(&url).unwrap_err());
    assert!(error.contains("needs a way to the internet") && error.contains("HTTPS_PROXY"), "{error}");
}
