//! Points of the protocol at which tests kill the process, to test the reaction of its peers.
//!
//! The points exist only with the feature `kill-points`, which no program needs. `DEVICE_IPC_KILL_POINT` then names a point and
//! the number of the visit at which the process kills itself: `importer:granted` or `importer:granted=3`. With the suffix
//! `!stop` the process stops itself there instead, until it is continued.

/// All points: first those of a hand-over in the order of visits, then those of rings, staging, channels
/// and copies between hosts.
#[cfg(feature = "kill-points")]
#[doc(hidden)]
pub const KILL_POINTS: &[&str] = &[
    "exporter:exported",
    "exporter:published",
    "importer:connected",
    "exporter:accepted",
    "exporter:answered-hello",
    "importer:said-hello",
    "importer:asked",
    "exporter:leased",
    "exporter:granted",
    "importer:granted",
    "importer:opened",
    "importer:mapped",
    "exporter:gave-timeline",
    "importer:took-timeline",
    "importer:releasing",
    "importer:closed",
    "importer:released",
    "exporter:released",
    "exporter:dropped",
    "exporter:retiring",
    "exporter:retired",
    "importer:replace-imported",
    "importer:replace-ready",
    "importer:replace-unmapped",
    "importer:replace-mapped",
    "listener:bound",
    "exporter:ring-joined",
    "exporter:ring-waited",
    "exporter:ring-signalled",
    "exporter:ring-published",
    "exporter:ring-closed",
    "importer:ring-joined",
    "importer:ring-taken",
    "importer:ring-releasing",
    "importer:ring-released",
    "importer:ring-left",
    "importer:staging-asked",
    "exporter:staging-begun",
    "importer:staging-begun",
    "exporter:staging-chunk",
    "importer:staging-chunk",
    "importer:staging-done",
    "connector:channel-connected",
    "acceptor:channel-accepted",
    "connector:channel-said-hello",
    "acceptor:channel-welcomed",
    "connector:channel-welcomed",
    "sender:channel-granted",
    "sender:channel-signalled",
    "sender:channel-put",
    "sender:channel-sent",
    "receiver:channel-sleeping",
    "receiver:channel-looked",
    "receiver:channel-received",
    "receiver:channel-opening",
    "receiver:channel-opened",
    "receiver:channel-discarding",
    "closer:channel-ending",
    "closer:channel-ended",
    "importer:remote-connected",
    "exporter:remote-accepted",
    "exporter:remote-proved",
    "importer:remote-proved",
    "importer:remote-asked",
    "exporter:remote-leased",
    "exporter:remote-granted",
    "importer:remote-granted",
    "importer:remote-pulling",
    "importer:remote-pulled",
    "importer:remote-released",
    "exporter:remote-released",
];

#[cfg(feature = "kill-points")]
pub(crate) fn visit(point: &'static str) {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU32, Ordering};

    static SELECTED: OnceLock<Option<(String, u32, bool)>> = OnceLock::new();
    static VISITS: AtomicU32 = AtomicU32::new(0);
    debug_assert!(KILL_POINTS.contains(&point), "{point} is not in the list");
    let selected = SELECTED.get_or_init(|| {
        let value = crate::os::environment::variable("DEVICE_IPC_KILL_POINT")?.into_string().ok()?;
        let (value, stops) = value.strip_suffix("!stop").map_or((&*value, false), |value| (value, true));
        let (name, visit) = value.split_once('=').unwrap_or((value, "1"));
        assert!(KILL_POINTS.contains(&name), "DEVICE_IPC_KILL_POINT: unknown point {name:?}");
        Some((
            name.to_owned(),
            visit.parse().expect("DEVICE_IPC_KILL_POINT: the visit must be a number"),
            stops,
        ))
    });
    if let Some((name, visit, stops)) = selected
        && name == point
        && VISITS.fetch_add(1, Ordering::Relaxed) + 1 == *visit
    {
        if *stops {
            // To this thread, which thus does not continue: another one could receive a signal of the process much later.
            #[allow(unsafe_code, reason = "no crate offers it")]
            // SAFETY: raise has no preconditions.
            unsafe {
                libc::raise(libc::SIGSTOP);
            }
            return;
        }
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        // The signal is pending for the whole process; this thread must not continue.
        loop {
            std::thread::park();
        }
    }
}

/// Marks a point of the protocol.
macro_rules! kill_point {
    ($point:literal) => {
        #[cfg(feature = "kill-points")]
        $crate::os::kill::visit($point);
    };
}

pub(crate) use kill_point;
