//! Counters of the library's activity.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;

macro_rules! metrics {
    ($($(#[doc = $doc:literal])+ $kind:ident $name:ident;)*) => {
        /// Counts that go up, and gauges that go up and down.
        #[derive(Debug, Default)]
        pub(crate) struct Metrics {
            $(pub(crate) $name: Count,)*
        }

        /// Counters of the library's activity in this process; see [`counters`](crate::counters).
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
        #[non_exhaustive]
        pub struct Counters {
            $($(#[doc = $doc])+ pub $name: u64,)*
        }

        impl Metrics {
            pub(crate) fn read(&self) -> Counters {
                Counters { $($name: self.$name.get(),)* }
            }
        }

        impl Counters {
            /// The text format of Prometheus, version 0.0.4.
            pub fn to_prometheus(&self) -> String {
                let mut text = String::new();
                $(
                    let name = concat!("device_ipc_", stringify!($name));
                    // Writing into a string cannot fail.
                    let _ = writeln!(text, "# HELP {name}{}", concat!($($doc),+));
                    let _ = writeln!(text, concat!("# TYPE {} ", stringify!($kind)), name);
                    let _ = writeln!(text, "{name} {}", self.$name);
                )*
                text
            }
        }
    };
}

metrics! {
    /// Exports made.
    counter exports_total;
    /// Exports that importers may open, or still hold.
    gauge exports;
    /// Bytes of the regions of these exports.
    gauge exported_bytes;
    /// Leases begun by this process's broker, for other processes and for itself.
    counter leases_total;
    /// Leases held.
    gauge leases;
    /// Those of them that are idle in the import caches of other processes.
    gauge leases_idle;
    /// Leases ended while they were idle, without waiting for the importer.
    counter leases_reclaimed_total;
    /// Leases whose importers died while they used the memory; their device work may be incomplete.
    counter leases_lost_total;
    /// Opens refused by this process's broker.
    counter refusals_total;
    /// Connections refused by this process's broker: of a user that no export allows, or above a limit.
    counter connections_refused_total;
    /// Importers that were gone without notice, killed or crashed, while they used memory.
    counter importers_lost_total;
    /// Exporters that terminated while this process held leases on exports that they had not reported as dropped.
    counter exporters_lost_total;
    /// Waits for the release of an export that took longer than 5 s.
    counter still_held_total;
    /// Opens of memory of other processes.
    counter opens_total;
    /// Opens that needed neither a message nor a driver call, as the memory was open here.
    counter cache_hits_total;
    /// Leases on exports of other processes that are idle in the import cache.
    gauge imports_idle;
    /// Bytes of their allocations.
    gauge imports_idle_bytes;
    /// Requests sent to the brokers of other processes.
    counter requests_total;
    /// Calls of a driver that opened memory.
    counter driver_opens_total;
    /// Calls of a driver that closed memory.
    counter driver_closes_total;
    /// Bytes of other processes' allocations that are open here.
    gauge mapped_bytes;
    /// Copies through host memory begun for other processes.
    counter stagings_total;
    /// Chunks of such copies.
    counter staged_chunks_total;
    /// Chunks whose copy was in progress before the importer requested them.
    counter staged_chunks_ahead_total;
    /// Bytes of host memory set aside for such copies.
    gauge staging_bytes;
    /// Messages that this process's broker has received.
    counter messages_total;
    /// Jobs submitted to the worker.
    counter jobs_total;
    /// Waits of a host for a publication or a release of a ring. Streams that wait do not count.
    counter ring_host_waits_total;
    /// Messages sent to the brokers of other processes that have no answer: leases and grants that are over, and changes of
    /// leases that an exporter watches.
    counter releases_total;
}

/// One number.
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    pub(crate) fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    pub(crate) fn subtract(&self, count: u64) {
        self.0.fetch_sub(count, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests;
