//! Reports of ended grants to the exporters' brokers.

use std::sync::Arc;

use super::ImportTable;
use crate::os::process::ProcessIdentity;
use crate::sharing::Runtime;
use crate::sharing::import::link::Link;

/// Maximum number of grants in one message to an exporter.
const MAX_GRANTS: usize = 1024;

impl ImportTable {
    /// Lets the worker report ended grants to an exporter, if there are any.
    pub(crate) fn give_back_soon(&'static self, runtime: &Runtime, exporter: &ProcessIdentity) {
        if !self.ended.has_any_of(exporter) {
            return;
        }
        let exporter = *exporter;
        runtime.worker.submit(move || {
            // Without a connection the exporter has terminated.
            self.give_back(&exporter, None);
        });
    }

    /// Reports ended grants to their exporter over all its connections, and over `link`: a process may have several brokers, and those
    /// that do not know a grant ignore it.
    pub(super) fn give_back(&self, exporter: &ProcessIdentity, link: Option<&Arc<Link>>) {
        if !self.ended.has_any_of(exporter) {
            return;
        }
        let mut links = self.known_links(exporter);
        links.extend(link.filter(|link| !links.iter().any(|known| Arc::ptr_eq(known, link))).cloned());
        if links.is_empty() {
            return;
        }
        // A packet takes more of them, and there are rarely so many.
        for some in self.ended.take_all_of(exporter).chunks(MAX_GRANTS) {
            links.iter().for_each(|link| link.end_grants(some.to_vec()));
        }
    }
}
