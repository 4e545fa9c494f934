//! Commands that run until they exit.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};

/// Runs a command until it exits, or kills it with its children after `limit`. Returns whether it succeeded, and its output
/// followed by its errors.
pub fn output_of(mut command: Command, limit: Duration) -> (bool, String) {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // In a separate process group, so that its children are killed too.
        .process_group(0)
        .spawn()
        .expect("it starts");
    let group = Pid::from_child(&child);
    let (out, err) = (child.stdout.take().expect("piped"), child.stderr.take().expect("piped"));
    let readers = [thread::spawn(move || text_of(out)), thread::spawn(move || text_of(err))];
    let status = super::wait(&mut child, limit);
    // The group may be empty.
    let _ = kill_process_group(group, Signal::KILL);
    child.wait().expect("it is reaped");
    let text = readers.map(|reader| reader.join().expect("it reads")).concat();
    (status.is_some_and(|status| status.success()), text)
}

fn text_of(mut from: impl Read) -> String {
    let mut bytes = Vec::new();
    from.read_to_end(&mut bytes).expect("it can be read");
    String::from_utf8_lossy(&bytes).into_owned()
}
