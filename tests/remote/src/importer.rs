//! The importer's process.

#![allow(unsafe_code, reason = "forks a process that uses the library")]

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use device_ipc_core::{
    Buffer, CopyPolicy, CopyProgress, Descriptor, Dtype, Error, Ipc, Mapping, Result, RingReader, Stream,
    TensorLayout, TestClock,
};
use device_ipc_test_process::serve;

use crate::backend::{begun_transfers, bytes_arrive, hold_transfers, is_mock, on_backend, remote};
use crate::{Load, argument, contents, open_files, report, resources};

/// Copies memory as the test requests, line by line.
pub fn importer(load: Load) {
    let mut state = None;
    let mut running: Option<JoinHandle<String>> = None;
    let mut before = 0;
    let clock = TestClock::take();
    serve(|request, words| {
        let words: Vec<_> = words.split(' ').map(str::to_owned).collect();
        match request {
            "load" => match start(load, &words[0]) {
                Ok(started) => {
                    state = Some(Arc::new(started));
                    "loaded".into()
                }
                Err(reason) => reason,
            },
            // advance MS: the time of the clock's advance.
            "advance" => {
                clock.advance(Duration::from_millis(words[0].parse().expect("a number")));
                "advanced".into()
            }
            "files" => open_files().to_string(),
            "resources" => resources(),
            // Starts a request on another thread; `end` returns its answer.
            "begin" => {
                let state = Arc::clone(state.as_ref().expect("load comes first"));
                before = begun_transfers();
                running = Some(std::thread::spawn(move || state.answer(&words[0], &words[1..])));
                "begun".into()
            }
            // hold TRUE|FALSE: whether copies do not end, however fast the bytes arrive.
            "hold" => {
                hold_transfers(argument(&words.iter().map(String::as_str).collect::<Vec<_>>(), 0));
                "set".into()
            }
            // Whether the bytes of the request have begun to arrive.
            "arriving" => (begun_transfers() > before && bytes_arrive()).to_string(),
            "end" => running.take().expect("begin comes first").join().expect("no panic"),
            _ => state.as_ref().expect("load comes first").answer(request, &words),
        }
    });
}

struct Importer {
    ipc: Ipc,
    stream: Stream,
    /// The destination of the last copy to existing memory.
    last: Mutex<Weak<Buffer>>,
    readers: Mutex<HashMap<String, RingReader>>,
    /// Whether a reader was notified of the termination of its writer.
    is_writer_gone: Arc<AtomicBool>,
}

/// The bytes before and after a destination, which no copy may write.
const AROUND: usize = 4096;

/// With the argument `without`, no engine.
fn start(load: Load, words: &str) -> Result<Importer, String> {
    let builder = match words {
        "without" => Ipc::builder(),
        _ => Ipc::builder().remote(remote(load)?),
    };
    let ipc = on_backend(builder)?;
    let stream = ipc.create_stream(0).map_err(|error| report(&error))?;
    let (last, readers, is_writer_gone) = Default::default();
    Ok(Importer { ipc, stream, last, readers, is_writer_gone })
}

impl Importer {
    fn answer(&self, request: &str, words: &[String]) -> String {
        let words: Vec<_> = words.iter().map(String::as_str).collect();
        let answer = match request {
            // open POLICY SEED TIMEOUT_MS DESCRIPTOR: checks the bytes of a region.
            "open" => self.open(&words).and_then(|mapping| self.check(&mapping, argument(&words, 1))),
            // dict POLICY TENSORS TIMEOUT_MS DESCRIPTOR: checks the bytes of named tensors.
            "dict" => self.open(&words).and_then(|mapping| self.check_tensors(&mapping, argument(&words, 1))),
            // many COUNT SEED TIMEOUT_MS DESCRIPTOR: pulls repeatedly.
            "many" => (0..argument::<usize>(&words, 0)).try_fold(String::new(), |_, _| {
                let mapping = self.open(&["pulled", words[1], words[2], words[3]])?;
                self.check(&mapping, argument(&words, 1))
            }),
            // into SEED TIMEOUT_MS DESCRIPTOR: copies twice to the middle of existing memory.
            "into" => self.pull_into(&words),
            // dict-into FIRST COUNT BYTES TIMEOUT_MS DESCRIPTOR: copies some named tensors to memory of their own each.
            "dict-into" => self.pull_tensors_into(&words),
            // refused-into SHAPE NAMES TIMEOUT_MS DESCRIPTOR: copies to named tensors of one memory, which is to fail.
            "refused-into" => self.refuse(&words),
            // kept: whether the library keeps the destination of the last `into`.
            "kept" => Ok(self.last.lock().expect("no panic").upgrade().is_some().to_string()),
            // progress TIMEOUT_MS DESCRIPTOR: the number of reports, whether they rise, and the last one.
            "progress" => self.progress(&words),
            // join NAME POLICY TIMEOUT_MS DESCRIPTOR: opens a ring.
            "join" => self.join(&words),
            // read NAME COUNT TIMEOUT_MS: checks publications, and states the first one and the last error.
            "read" => Ok(self.read(&words)),
            "gone" => Ok(self.is_writer_gone.load(Ordering::SeqCst).to_string()),
            "leave" => {
                drop(self.readers.lock().expect("no panic").remove(words[0]));
                Ok("left".into())
            }
            // fork TIMEOUT_MS DESCRIPTOR: forks a child, which lives as long as this process; returns the error of its open.
            "fork" => Ok(self.fork(&words)),
            // time COUNT TIMEOUT_MS DESCRIPTOR: the median time of an open, in µs.
            "time" => self.time(&words),
            other => unreachable!("{other}"),
        };
        answer.unwrap_or_else(|error| report(&error))
    }

    fn open(&self, words: &[&str]) -> Result<Mapping> {
        let descriptor: Descriptor = argument(words, 3);
        let open = self.ipc.open(&descriptor).timeout(Duration::from_millis(argument(words, 2)));
        open.copy(argument(words, 0)).on_device(0)
    }

    fn join(&self, words: &[&str]) -> Result<String> {
        let descriptor: Descriptor = argument(words, 3);
        let open = self.ipc.open_ring(&descriptor).timeout(Duration::from_millis(argument(words, 2)));
        let reader = open.copy(argument(words, 1)).on_device(0)?;
        let kind = if reader.is_copy() { "copied" } else { "opened" };
        let joined = format!("{kind} from {}", reader.sequence());
        let is_writer_gone = Arc::clone(&self.is_writer_gone);
        reader.on_gone(move |_| is_writer_gone.store(true, Ordering::SeqCst));
        self.readers.lock().expect("no panic").insert(words[0].to_owned(), reader);
        Ok(joined)
    }

    fn with_reader(&self, name: &str, read: impl FnOnce(&mut RingReader) -> String) -> String {
        let taken = self.readers.lock().expect("no panic").remove(name);
        let mut reader = taken.expect("it has joined");
        let answer = read(&mut reader);
        self.readers.lock().expect("no panic").insert(name.to_owned(), reader);
        answer
    }

    fn read(&self, words: &[&str]) -> String {
        let (count, timeout) = (argument::<u64>(words, 1), Duration::from_millis(argument(words, 2)));
        self.with_reader(words[0], |reader| {
            for read in 0..count {
                let slot = match reader.next(timeout) {
                    Ok(Some(slot)) => slot,
                    Ok(None) => return format!("{read} right, closed"),
                    Err(error) => return format!("{read} right, {}", report(&error)),
                };
                let sequence = slot.sequence();
                let found = slot.to_host::<u8, _>(&self.stream).expect("it is published");
                if found != contents(found.len(), sequence as u8) {
                    return format!("sequence {sequence} is wrong");
                }
                slot.release(&self.stream).map_err(|error| error.to_string()).expect("it is published");
            }
            format!("{count} right")
        })
    }

    fn check(&self, mapping: &Mapping, seed: u8) -> Result<String> {
        let found = mapping.to_host_bytes(&self.stream)?;
        let expected = contents(found.len(), seed);
        let kind = if mapping.is_copy() { "copied" } else { "opened" };
        if found == expected {
            return Ok(format!("{} B right, {kind}", found.len()));
        }
        let at = found.iter().zip(&expected).position(|(found, expected)| found != expected);
        Ok(format!("wrong from {at:?} on, {kind}"))
    }

    fn check_tensors(&self, mapping: &Mapping, count: usize) -> Result<String> {
        let mut wrong = Vec::new();
        for number in 0..count {
            let name = format!("t{number}");
            let found = mapping.get(&name)?.to_host_bytes(&self.stream)?;
            if found != contents(found.len(), number as u8) {
                wrong.push(name);
            }
        }
        Ok(format!("{} tensors, wrong: {wrong:?}", mapping.tensors().len()))
    }

    fn pull_into(&self, words: &[&str]) -> Result<String> {
        let (seed, timeout) = (argument(words, 0), Duration::from_millis(argument(words, 1)));
        let descriptor: Descriptor = argument(words, 2);
        let length = descriptor.len() as usize;
        let buffer = Arc::new(self.ipc.allocate(0, (length + 2 * AROUND) as u64)?);
        if !is_mock() {
            // New memory of the mock is zero.
            buffer.view_mut::<u8, _>(&self.stream)?.copy_from(&vec![0; length + 2 * AROUND])?;
            self.stream.synchronize()?;
        }
        *self.last.lock().expect("no panic") = Arc::downgrade(&buffer);
        let mut set = self.ipc.tensors();
        let memory = set.memory(Arc::clone(&buffer));
        let layout = TensorLayout::contiguous(Dtype::U8, [length as u64])?;
        set.tensor("any", memory, AROUND as u64, layout)?;
        for _ in 0..2 {
            let pulled = self.ipc.open(&descriptor).timeout(timeout).pull_into(set);
            set = match pulled {
                Ok(set) => set,
                Err(error) => {
                    let text = report(error.error());
                    let set = if error.into_inner().is_some() { "returned" } else { "kept" };
                    return Ok(format!("{text}; the set is {set}"));
                }
            };
        }
        let found = buffer.view::<u8, _>(&self.stream)?.to_vec()?;
        let expected = [vec![0; AROUND], contents(length, seed), vec![0; AROUND]].concat();
        let is_right = if found == expected { "right" } else { "wrong" };
        Ok(format!("{length} B {is_right}"))
    }

    fn pull_tensors_into(&self, words: &[&str]) -> Result<String> {
        let (first, count) = (argument::<usize>(words, 0), argument::<usize>(words, 1));
        let (bytes, timeout) = (argument::<u64>(words, 2), Duration::from_millis(argument(words, 3)));
        let descriptor: Descriptor = argument(words, 4);
        let mut set = self.ipc.tensors();
        let mut buffers = Vec::new();
        for number in first..first + count {
            let buffer = Arc::new(self.ipc.allocate(0, bytes + AROUND as u64)?);
            let layout = TensorLayout::contiguous(Dtype::U8, [bytes])?.with_element_offset(AROUND as u64)?;
            set.owned(format!("t{number}"), Arc::clone(&buffer), Some(layout))?;
            buffers.push((number, buffer));
        }
        let last = Cell::new((0, 0));
        let report = |progress: CopyProgress| last.set((progress.copied_bytes, progress.total_bytes));
        self.ipc.open(&descriptor).timeout(timeout).on_progress(&report).pull_into(set)?;
        let mut wrong = Vec::new();
        for (number, buffer) in buffers {
            let found = buffer.view::<u8, _>(&self.stream)?.to_vec()?;
            if found[AROUND..] != contents(bytes as usize, number as u8) {
                wrong.push(number);
            }
        }
        let (copied, total) = last.get();
        Ok(format!("{count} tensors, wrong: {wrong:?}, {copied} of {total} B"))
    }

    fn refuse(&self, words: &[&str]) -> Result<String> {
        let (bytes, descriptor) = (argument::<u64>(words, 0), argument::<Descriptor>(words, 3));
        let mut set = self.ipc.tensors();
        let memory = set.memory(self.ipc.allocate(0, bytes)?);
        for name in words[1].split(',') {
            set.tensor(name, memory, 0, TensorLayout::contiguous(Dtype::U8, [bytes])?)?;
        }
        let timeout = Duration::from_millis(argument(words, 2));
        let refused = self.ipc.open(&descriptor).timeout(timeout).pull_into(set).expect_err("it is invalid");
        let error = report(refused.error());
        assert!(refused.into_inner().is_some(), "nothing was copied: {error}");
        Ok(error)
    }

    fn progress(&self, words: &[&str]) -> Result<String> {
        let (timeout, descriptor) =
            (Duration::from_millis(argument(words, 0)), argument::<Descriptor>(words, 1));
        let reports = Mutex::new(Vec::new());
        let report = |progress: CopyProgress| reports.lock().expect("no panic").push(progress);
        self.ipc
            .open(&descriptor)
            .timeout(timeout)
            .copy(CopyPolicy::Pulled)
            .on_progress(&report)
            .on_device(0)?;
        let reports = reports.into_inner().expect("no panic");
        let last = reports.last().ok_or_else(|| Error::Protocol("no report".into()))?;
        let rises = reports.windows(2).all(|two| two[0].copied_bytes < two[1].copied_bytes);
        Ok(format!("{} {rises} {} of {}", reports.len(), last.copied_bytes, last.total_bytes))
    }

    fn fork(&self, words: &[&str]) -> String {
        let (done, report_done) = rustix::pipe::pipe().expect("a pipe");
        // SAFETY: the child calls nothing that takes a lock of another thread: that the library returns before it does is tested.
        match unsafe { libc::fork() } {
            0 => {
                let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
                let opened = self.open(&["pulled", "0", words[0], words[1]]);
                let text = opened.map_or_else(|error| report(&error), |_| "opened".into());
                let _ = rustix::io::write(&report_done, text.as_bytes());
                loop {
                    // SAFETY: a plain system call.
                    unsafe { libc::pause() };
                }
            }
            pid => {
                assert!(pid > 0, "{}", std::io::Error::last_os_error());
                let mut text = [0; 4096];
                let length = rustix::io::read(&done, &mut text).expect("the child reports");
                String::from_utf8_lossy(&text[..length]).into_owned()
            }
        }
    }

    fn time(&self, words: &[&str]) -> Result<String> {
        let mut times = Vec::new();
        for _ in 0..argument::<usize>(words, 0) {
            let begun = Instant::now();
            let mapping = self.open(&["pulled", "0", words[1], words[2]])?;
            times.push(begun.elapsed());
            drop(mapping);
        }
        times.sort_unstable();
        Ok(times[times.len() / 2].as_micros().to_string())
    }
}
