//! The process at one end of a channel.

use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use device_ipc_core::{
    Channel, ChannelSender, CopyPolicy, Ipc, Key, Listener, Message, Received, Result, Stream, counters,
};
use device_ipc_test_process::serve;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::backend::{on_backend, remote};
use crate::{LONG, Load, argument, contents, open_files, report, resources};

/// Listens, connects, sends and receives as the test requests, line by line.
pub fn channel_end(load: Load) {
    let mut state = None;
    let mut running: Option<JoinHandle<String>> = None;
    serve(|request, words| {
        let words: Vec<_> = words.split(' ').map(str::to_owned).collect();
        match request {
            "load" => match start(load) {
                Ok(started) => {
                    state = Some(Arc::new(started));
                    "loaded".into()
                }
                Err(reason) => reason,
            },
            "files" => open_files().to_string(),
            "resources" => resources(),
            "exports" => counters().exports.to_string(),
            // Starts a request on another thread; `end` returns its answer.
            "begin" => {
                let state = Arc::clone(state.as_ref().expect("load comes first"));
                running = Some(std::thread::spawn(move || state.answer(&words[0], &words[1..])));
                "begun".into()
            }
            "end" => running.take().expect("begin comes first").join().expect("no panic"),
            _ => state.as_ref().expect("load comes first").answer(request, &words),
        }
    });
}

/// Returns the size of a message by its number: mostly small, some in memory files, and some of several parts.
fn size_of_message(number: usize) -> usize {
    match number {
        _ if number % 2500 == 2499 => 4 << 20,
        _ if number % 100 == 99 => (64 << 10) + number,
        _ if number % 10 == 9 => 500 + number,
        _ => number % 64,
    }
}

struct ChannelEnd {
    ipc: Ipc,
    stream: Stream,
    listener: Mutex<Option<Listener>>,
    channel: Mutex<Option<Arc<Channel>>>,
    /// The sender and its channel, after the receiver has been dropped.
    sender: Mutex<Option<ChannelSender>>,
    received: Mutex<Option<Received>>,
}

fn start(load: Load) -> Result<ChannelEnd, String> {
    let remote = remote(load)?.listen("127.0.0.1").map_err(|error| report(&error))?;
    let ipc = on_backend(Ipc::builder().remote(remote))?;
    let stream = ipc.create_stream(0).map_err(|error| report(&error))?;
    let (listener, channel, sender, received) = Default::default();
    Ok(ChannelEnd { ipc, stream, listener, channel, sender, received })
}

impl ChannelEnd {
    fn answer(&self, request: &str, words: &[String]) -> String {
        let words: Vec<_> = words.iter().map(String::as_str).collect();
        self.try_answer(request, &words).unwrap_or_else(|error| report(&error))
    }

    fn channel(&self) -> Arc<Channel> {
        Arc::clone(self.channel.lock().unwrap().as_ref().expect("it is connected"))
    }

    fn try_answer(&self, request: &str, words: &[&str]) -> Result<String> {
        let time = |at| Duration::from_millis(argument(words, at));
        Ok(match request {
            // listen KEY [ADDRESS]
            "listen" => {
                let address = words.get(1).unwrap_or(&"127.0.0.1:0");
                let listener = self
                    .ipc
                    .listen_tcp(address, &Key::new(words[0].as_bytes()).expect("a long key"))
                    .start()?;
                let address = listener.address();
                *self.listener.lock().unwrap() = Some(listener);
                address
            }
            // accept TIMEOUT_MS
            "accept" => {
                let channel = self.listener.lock().unwrap().as_ref().expect("it listens").accept(time(0))?;
                let program = channel.program().to_owned();
                *self.channel.lock().unwrap() = Some(Arc::new(channel));
                program
            }
            // connect ADDRESS KEY TIMEOUT_MS
            "connect" => {
                let key = Key::new(words[1].as_bytes()).expect("a long key");
                let channel = self.ipc.connect_tcp(words[0], &key).timeout(time(2)).start()?;
                let program = channel.program().to_owned();
                *self.channel.lock().unwrap() = Some(Arc::new(channel));
                program
            }
            "send" => {
                self.channel().send(Message::new().bytes(words[0].as_bytes()), time(1))?;
                "sent".into()
            }
            // numbered COUNT TIMEOUT_MS: sends messages of different sizes.
            "numbered" => {
                let channel = self.channel();
                for number in 0..argument::<usize>(words, 0) {
                    let bytes = contents(size_of_message(number), number as u8);
                    channel.send(Message::new().bytes(bytes), time(1))?;
                }
                "sent".into()
            }
            // check COUNT: receives these messages.
            "check" => {
                let channel = self.channel();
                for number in 0..argument::<usize>(words, 0) {
                    let received = channel.receive(LONG)?;
                    if received.bytes() != contents(size_of_message(number), number as u8) {
                        return Ok(format!("message {number} is wrong"));
                    }
                }
                "right".into()
            }
            // export LENGTH SEED [late]: sends memory that a stream writes, if late while it sends, and drops the export.
            "export" => {
                let (length, seed) = (argument::<usize>(words, 0), argument(words, 1));
                let buffer = self.ipc.allocate(0, length as u64)?;
                if words.len() > 2 {
                    let gate = self.stream.gate()?;
                    // Meanwhile this thread sends, which waits for the stream.
                    thread::spawn(move || {
                        thread::sleep(Duration::from_millis(20));
                        gate.open();
                    });
                }
                buffer.view_mut::<u8, _>(&self.stream)?.copy_from(&contents(length, seed))?;
                let export = self.ipc.share(buffer).start()?;
                let message = Message::new().bytes(b"export").export(export).ready_on(&self.stream);
                self.channel().send(message, LONG)?;
                "sent".into()
            }
            // exports COUNT: sends as many messages with an export.
            "exports-many" => {
                for number in 0..argument::<usize>(words, 0) {
                    let export = self.ipc.share(self.ipc.allocate(0, 256)?).start()?;
                    let message = Message::new().bytes(number.to_string().into_bytes()).export(export);
                    self.channel().send(message, LONG)?;
                }
                "sent".into()
            }
            // receive-many COUNT: receives as many, and copies each tenth export.
            "receive-many" => {
                let channel = self.channel();
                for number in 0..argument::<usize>(words, 0) {
                    let received = channel.receive(LONG)?;
                    assert_eq!(received.bytes(), number.to_string().as_bytes());
                    if number % 10 == 0 {
                        received.exports()[0].open().copy(CopyPolicy::Pulled).on_device(0)?;
                    }
                }
                "right".into()
            }
            // receive TIMEOUT_MS: keeps the message.
            "receive" => {
                let received = self.channel().receive(time(0))?;
                let text = String::from_utf8_lossy(received.bytes()).into_owned();
                *self.received.lock().unwrap() = Some(received);
                text
            }
            // poll TIMEOUT_MS: waits for the descriptor, and then for no message.
            "poll" => {
                let channel = self.channel();
                let timeout = Timespec::try_from(time(0)).expect("a short time");
                let mut files = [PollFd::from_borrowed_fd(channel.as_fd(), PollFlags::IN)];
                let polled = poll(&mut files, Some(&timeout)).expect("poll succeeds");
                match channel.try_receive()? {
                    Some(received) => String::from_utf8_lossy(received.bytes()).into_owned(),
                    None => format!("no message, {polled} readable"),
                }
            }
            // open POLICY SEED: opens the export of the message.
            "open" => {
                let received = self.received.lock().unwrap();
                let export = &received.as_ref().expect("receive comes first").exports()[0];
                let open = export.open().timeout(LONG).copy(argument(words, 0));
                let mapping = open.on(&self.stream)?;
                let found = mapping.to_host_bytes(&self.stream)?;
                let kind = if mapping.is_copy() { "copied" } else { "opened" };
                let is_right = found == contents(found.len(), argument(words, 1));
                format!("{} B {}, {kind}", found.len(), if is_right { "right" } else { "wrong" })
            }
            "discard" => {
                *self.received.lock().unwrap() = None;
                "discarded".into()
            }
            "reply" => {
                let received = self.received.lock().unwrap();
                let received = received.as_ref().expect("receive comes first");
                received.reply(Message::new().bytes(words[0].as_bytes()), LONG)?;
                "replied".into()
            }
            // close TIMEOUT_MS
            "close" => {
                self.channel().close(time(0))?;
                "closed".into()
            }
            "drop" => {
                *self.channel.lock().unwrap() = None;
                "dropped".into()
            }
            // deafen: drops the receiving direction.
            "deafen" => {
                let channel = self.channel.lock().unwrap().take().and_then(Arc::into_inner);
                let (sender, receiver) = channel.expect("no call is in progress").split();
                *self.sender.lock().unwrap() = Some(sender);
                drop(receiver);
                "deaf".into()
            }
            "send-half" => {
                let sender = self.sender.lock().unwrap();
                let message = Message::new().bytes(words[0].as_bytes());
                sender.as_ref().expect("deafen comes first").send(message, LONG)?;
                "sent".into()
            }
            // exit COUNT: sends as many numbered messages, drops the channel, and exits at once.
            "exit" => {
                self.try_answer("numbered", &[words[0], "60000"])?;
                *self.channel.lock().unwrap() = None;
                std::process::exit(0);
            }
            other => unreachable!("{other}"),
        })
    }
}
