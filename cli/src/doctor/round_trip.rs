//! What no file tells is tried: a tensor goes to a second process, which changes it in place.
//!
//! The demonstration runs in processes of its own, so that a vendor's library that crashes or hangs ends nothing but
//! them.

use std::fmt;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};

use super::finding::Finding;
use super::libraries::Library;

/// How long one may take; the first context on a device can take seconds.
const TIME: Duration = Duration::from_secs(90);

/// More than anybody reads of a program that says too much.
const MAX_OUTPUT_BYTES: u64 = 64 * 1024;

/// One tensor, there and back.
pub(super) struct Trip {
    backend: &'static str,
    from: usize,
    to: usize,
}

impl fmt::Display for Trip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: device {} to device {}", self.backend, self.from, self.to)
    }
}

/// On each device, and from each to its next neighbour that reaches it. On the mock where nothing else is usable, or where it
/// was asked for.
pub(super) fn trips(libraries: &[Library], wanted: Option<&str>) -> Vec<Trip> {
    let accelerated = libraries.iter().any(|library| library.usable().is_some() && !library.is_simulated());
    let mut trips = Vec::new();
    for library in libraries {
        let Some(usable) = library.usable() else { continue };
        if library.is_simulated() && accelerated && wanted.is_none() {
            continue;
        }
        let (backend, count) = (library.name, usable.devices.len());
        for from in 0..count {
            trips.push(Trip { backend, from, to: from });
            let to = (from + 1) % count;
            // The receiver's device has to reach the sender's.
            if to != from && usable.peers[to][from] {
                trips.push(Trip { backend, from, to });
            }
        }
    }
    trips
}

impl Trip {
    pub(super) fn make(&self) -> Finding {
        let check = "round trip";
        match self.run(TIME) {
            Ok(()) => Finding::ok(check, format!("{self}: a second process changed the tensor in place")),
            Err(why) => {
                let again = format!(
                    "device-ipc demo --backend {} --from {} --to {}",
                    self.backend, self.from, self.to
                );
                let change = if why.contains("DEVICE_UNAVAILABLE") {
                    format!("nvidia-smi -c DEFAULT, where the compute mode is exclusive; then: {again}")
                } else {
                    format!("do what the reason says; then: {again}")
                };
                Finding::problem(check, format!("{self}: {why}"), change)
            }
        }
    }

    fn run(&self, time: Duration) -> Result<(), String> {
        let program =
            std::env::current_exe().map_err(|error| format!("this program was not found: {error}"))?;
        let (from, to) = (self.from.to_string(), self.to.to_string());
        let mut command = Command::new(program);
        command.args(["demo", "--json", "--backend", self.backend, "--from", &from, "--to", &to]);
        finish(command, time)
    }
}

/// Runs a program and whatever it starts, kills them when the time is over, and gives what it says where it fails.
fn finish(mut command: Command, time: Duration) -> Result<(), String> {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).process_group(0);
    let mut child =
        command.spawn().map_err(|error| format!("a second process could not be started: {error}"))?;
    let stderr = child.stderr.take().expect("piped");
    let (send, said) = channel();
    // Its end closes the pipe, and that is what is waited for.
    std::thread::spawn(move || {
        let mut text = Vec::new();
        let _ = stderr.take(MAX_OUTPUT_BYTES).read_to_end(&mut text);
        let _ = send.send(String::from_utf8_lossy(&text).trim().to_owned());
    });
    let Ok(said) = said.recv_timeout(time) else {
        kill(&mut child);
        return Err(format!("it did not end within {} s", time.as_secs()));
    };
    // Somebody who wrote too much, or closed its output, is not waited for.
    kill_group(&child);
    let status = child.wait().map_err(|error| format!("its end could not be awaited: {error}"))?;
    match status.success() {
        true => Ok(()),
        false if said.is_empty() => Err(format!("it failed without a word ({status})")),
        false => Err(said),
    }
}

fn kill(child: &mut Child) {
    kill_group(child);
    let _ = child.wait();
}

fn kill_group(child: &Child) {
    if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process_group(group, Signal::KILL);
    }
}

#[cfg(test)]
mod tests {
    use super::super::libraries::tests::with_peers;
    use super::*;

    fn listed(libraries: &[Library], wanted: Option<&str>) -> Vec<(&'static str, usize, usize)> {
        trips(libraries, wanted).iter().map(|trip| (trip.backend, trip.from, trip.to)).collect()
    }

    #[test]
    fn each_device_is_tried_and_each_neighbour_that_can_be_reached() {
        let cuda = || with_peers("cuda", vec![vec![true, true], vec![false, true]]);
        let mock = || with_peers("mock", vec![vec![true]]);
        assert_eq!(listed(&[cuda()], None), [("cuda", 0, 0), ("cuda", 1, 1), ("cuda", 1, 0)]);
        assert_eq!(listed(&[cuda(), mock()], None).len(), 3);
        assert_eq!(listed(&[mock()], None), [("mock", 0, 0)]);
        assert_eq!(listed(&[mock()], Some("mock")), [("mock", 0, 0)]);
    }

    fn shell(script: &str, time: Duration) -> Result<(), String> {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        finish(command, time)
    }

    #[test]
    fn a_second_process_is_heard_out_or_killed_with_all_it_started() {
        let long = Duration::from_secs(20);
        assert_eq!(shell("exit 0", long), Ok(()));
        assert_eq!(shell("echo 'error: no' >&2; exit 1", long), Err("error: no".into()));
        assert!(shell("exit 3", long).unwrap_err().contains("without a word"));
        let killed = shell("sleep 60 & sleep 60", Duration::from_millis(50)).unwrap_err();
        assert!(killed.contains("did not end"), "{killed}");
    }
}
