//! The metadata that an agent has loaded of its peers, and the rules for forgetting it.
//!
//! NIXL keeps the metadata of each region until it forgets the whole peer with its connection, and refuses other metadata for
//! the same addresses, as the exporter has after it has registered them again. Forgetting the peer after each request would
//! solve that, but with UCX each new connection leaves a socket open in both processes. So a peer is forgotten only
//! where a new region overlaps a known one, after a failure, and when it has many regions or there are many peers.

use std::collections::HashMap;
use std::ffi::{CStr, CString};

use crate::metadata::RegionMetadata;

/// Maximum number of regions of a peer, and of peers, before those without requests are forgotten.
const MAX_REGIONS: usize = 1024;
const MAX_PEERS: usize = 1024;

/// The peers whose metadata is loaded.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    peers: HashMap<CString, Peer>,
}

#[derive(Debug, Default)]
struct Peer {
    /// The number of requests that are not over.
    requests: usize,
    regions: Vec<RegionMetadata>,
}

impl Peers {
    /// Returns whether this metadata is loaded.
    pub(crate) fn knows(&self, peer: &CStr, region: &RegionMetadata) -> bool {
        self.peers.get(peer).is_some_and(|peer| peer.regions.contains(region))
    }

    /// Removes the peers that have to be forgotten before these regions are loaded. A peer with requests stays.
    pub(crate) fn outdated_by(&mut self, peer: &CStr, regions: &[RegionMetadata]) -> Vec<CString> {
        let too_many = self.peers.len() >= MAX_PEERS && !self.peers.contains_key(peer);
        let outdated = |name: &CString, known: &mut Peer| {
            let conflicts = name.as_c_str() == peer
                && (known.regions.len() + regions.len() > MAX_REGIONS
                    || regions.iter().any(|region| known.conflicts_with(region)));
            known.requests == 0 && (too_many || conflicts)
        };
        self.peers.extract_if(outdated).map(|(name, _)| name).collect()
    }

    /// Records that metadata has been loaded.
    pub(crate) fn add(&mut self, peer: &CStr, region: &RegionMetadata) {
        self.peers.entry(peer.to_owned()).or_default().regions.push(region.clone());
    }

    /// Records the begin of a request.
    pub(crate) fn begin(&mut self, peer: &CStr) {
        self.peers.entry(peer.to_owned()).or_default().requests += 1;
    }

    /// Records the end of a request. Returns whether the peer has to be forgotten, because a request has failed and no other one
    /// is running.
    pub(crate) fn end(&mut self, name: &CStr, failed: bool) -> bool {
        let Some(peer) = self.peers.get_mut(name) else { return false };
        peer.requests -= 1;
        if failed {
            // NIXL forgets a peer that it has lost the connection to.
            peer.regions.clear();
        }
        let forget = peer.requests == 0 && peer.regions.is_empty();
        if forget {
            self.peers.remove(name);
        }
        forget
    }
}

impl Peer {
    /// Returns whether other metadata is loaded for bytes of this region.
    fn conflicts_with(&self, region: &RegionMetadata) -> bool {
        self.regions.iter().any(|known| known != region && overlap(known, region))
    }
}

fn overlap(one: &RegionMetadata, other: &RegionMetadata) -> bool {
    let place = |region: &RegionMetadata| (region.memory_type, region.device);
    place(one) == place(other)
        && one.address < other.address + other.len
        && other.address < one.address + one.len
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(address: u64, len: u64, key: u8) -> RegionMetadata {
        let mut region = RegionMetadata::new(0, 0, address, len);
        region.region = vec![key];
        region
    }

    #[test]
    fn peer_is_forgotten_for_a_region_that_overlaps_a_known_one() {
        let mut peers = Peers::default();
        peers.add(c"one", &region(100, 10, 1));
        peers.add(c"two", &region(100, 10, 1));
        assert!(peers.knows(c"one", &region(100, 10, 1)) && !peers.knows(c"one", &region(100, 10, 2)));
        for beside in [region(90, 10, 2), region(110, 1, 2)] {
            assert!(peers.outdated_by(c"one", &[beside]).is_empty());
        }
        peers.begin(c"one");
        assert!(peers.outdated_by(c"one", &[region(109, 1, 2)]).is_empty(), "a request is running");
        assert!(!peers.end(c"one", false));
        assert_eq!(peers.outdated_by(c"one", &[region(109, 1, 2)]), [c"one".to_owned()]);
        assert!(!peers.knows(c"one", &region(100, 10, 1)) && peers.knows(c"two", &region(100, 10, 1)));
    }

    #[test]
    fn peer_is_forgotten_after_a_failure_when_no_request_is_running() {
        let mut peers = Peers::default();
        peers.add(c"one", &region(100, 10, 1));
        peers.begin(c"one");
        peers.begin(c"one");
        assert!(!peers.end(c"one", true), "another request is running");
        assert!(!peers.knows(c"one", &region(100, 10, 1)), "NIXL may have forgotten it");
        assert!(peers.end(c"one", false));
        assert!(!peers.end(c"one", false), "it is not known any longer");
    }

    #[test]
    fn numbers_of_regions_and_peers_are_limited() {
        let mut peers = Peers::default();
        for number in 0..MAX_REGIONS as u64 {
            assert!(peers.outdated_by(c"one", &[region(number, 1, 0)]).is_empty());
            peers.add(c"one", &region(number, 1, 0));
        }
        assert_eq!(peers.outdated_by(c"one", &[region(1 << 20, 1, 0)]), [c"one".to_owned()]);
        for number in 0..MAX_PEERS {
            let name = CString::new(number.to_string()).unwrap();
            assert!(peers.outdated_by(&name, &[region(0, 1, 0)]).is_empty());
            peers.add(&name, &region(0, 1, 0));
        }
        peers.begin(c"7");
        assert_eq!(peers.outdated_by(c"new", &[region(0, 1, 0)]).len(), MAX_PEERS - 1, "all but one");
    }
}
