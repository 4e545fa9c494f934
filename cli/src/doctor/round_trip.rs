//! Round trips: a child process opens a tensor and modifies it in place.
//!
//! Each round trip runs `device-ipc demo` in a child process, because a vendor library may crash or hang.

use std::fmt;
use std::time::Duration;

use super::libraries::Library;
use super::process;
use device_ipc::backend::{Finding, Symptom};

/// A round trip of one tensor between two devices.
pub(super) struct RoundTrip<'a> {
    library: &'a Library,
    from: usize,
    to: usize,
}

impl fmt::Display for RoundTrip<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: device {} to device {}", self.library.name(), self.from, self.to)
    }
}

/// Returns the round trips to make: on each device, and from each device to the next one that can access its memory. A simulated
/// backend is included if no other backend is available or it is selected.
pub(super) fn round_trips<'a>(libraries: &'a [Library], selected: Option<&str>) -> Vec<RoundTrip<'a>> {
    let accelerated =
        libraries.iter().any(|library| library.available().is_some() && !library.is_simulated());
    let mut trips = Vec::new();
    for library in libraries {
        let Some(available) = library.available() else { continue };
        if library.is_simulated() && accelerated && selected.is_none() {
            continue;
        }
        let count = available.peers.len();
        for from in 0..count {
            trips.push(RoundTrip { library, from, to: from });
            let to = (from + 1) % count;
            // The receiver's device must have access to the sender's.
            if to != from && available.peers[to][from] {
                trips.push(RoundTrip { library, from, to });
            }
        }
    }
    trips
}

impl RoundTrip<'_> {
    /// Makes the round trip.
    pub(super) fn run(&self, timeout: Duration) -> Finding {
        let check = "round trip";
        match self.demo(timeout) {
            Ok(()) => Finding::ok(check, format!("{self}: a child process modified the tensor in place")),
            Err(why) => {
                let command = format!(
                    "device-ipc demo --backend {} --from {} --to {}",
                    self.library.name(),
                    self.from,
                    self.to
                );
                let change = self
                    .library
                    .with_remedy("fix the reported cause", Symptom::RoundTripFails { error: &why });
                let change = format!("{change}; then: {command}");
                Finding::problem(check, format!("{self}: {why}"), change)
            }
        }
    }

    fn demo(&self, timeout: Duration) -> Result<(), String> {
        let (from, to) = (self.from.to_string(), self.to.to_string());
        let arguments = ["demo", "--json", "--backend", self.library.name(), "--from", &from, "--to", &to];
        process::run(&arguments, timeout).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::super::libraries::tests::with_peers;
    use super::*;

    fn listed(libraries: &[Library], selected: Option<&str>) -> Vec<(&'static str, usize, usize)> {
        round_trips(libraries, selected)
            .iter()
            .map(|trip| (trip.library.name(), trip.from, trip.to))
            .collect()
    }

    #[test]
    fn round_trips_cover_each_device_and_reachable_neighbour() {
        let cuda = || with_peers("cuda", vec![vec![true, true], vec![false, true]]);
        let mock = || with_peers("mock", vec![vec![true]]);
        assert_eq!(listed(&[cuda()], None), [("cuda", 0, 0), ("cuda", 1, 1), ("cuda", 1, 0)]);
        assert_eq!(listed(&[cuda(), mock()], None).len(), 3);
        assert_eq!(listed(&[mock()], None), [("mock", 0, 0)]);
        assert_eq!(listed(&[mock()], Some("mock")), [("mock", 0, 0)]);
    }
}
