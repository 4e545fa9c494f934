//! What no file tells is tried: a tensor goes to a second process, which changes it in place.
//!
//! The demonstration runs in processes of its own, so that a vendor's library that crashes or hangs ends nothing but
//! them.

use std::fmt;
use std::time::Duration;

use super::finding::Finding;
use super::libraries::Library;
use super::second;

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
        let (backend, count) = (library.name, usable.peers.len());
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
    pub(super) fn make(&self, time: Duration) -> Finding {
        let check = "round trip";
        match self.run(time) {
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
        let (from, to) = (self.from.to_string(), self.to.to_string());
        let arguments = ["demo", "--json", "--backend", self.backend, "--from", &from, "--to", &to];
        second::run(&arguments, time).map(drop)
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
}
