//! Which points of the protocol a test visits.

use device_ipc_core::KILL_POINTS;

/// Prefixes of the names of related kill points, after the role. Each family has a test file of its own.
const FAMILIES: [&str; 5] = ["ring-", "staging-", "channel-", "remote-", "replace-"];

/// The points of a side, or of all where it is `""`, that are of this family, or of none where that is `""`.
pub fn kill_points(side: &str, family: &str) -> Vec<&'static str> {
    let wanted = |point: &&str| {
        let (whose, name) = point.split_once(':').expect("the side stands first");
        let found = FAMILIES.into_iter().find(|family| name.starts_with(family)).unwrap_or("");
        (side.is_empty() || whose == side) && found == family
    };
    let points: Vec<_> = KILL_POINTS.iter().copied().filter(wanted).collect();
    assert!(points.len() > 1, "the points are listed by their side and their family");
    points
}
