//! The counter pages of one exporter, and the timelines of its leases in them.

use std::collections::HashMap;
use std::sync::Arc;

use crate::backend::DeviceIpc;
use crate::model::error::{Error, Result};
use crate::model::lease::LeaseId;
use crate::sharing::timeline::{
    Endpoint, Poison, SLOTS, Side, TIMELINE_END, Termination, Timeline, TimelineSlot, WordPage,
};
use crate::transport::socket::ReceivedFds;
use crate::wire::protocol::{PageId, Request};

/// The counter pages of one exporter.
#[derive(Default)]
pub(super) struct LinkPages {
    pages: HashMap<PageId, Arc<WordPage>>,
    /// The timelines of leases that have not been released.
    timelines: HashMap<LeaseId, Arc<Endpoint>>,
    /// Timelines of leases that were released while a thread was submitting to them.
    late: Vec<(LeaseId, Arc<Endpoint>)>,
}

impl LinkPages {
    /// Returns the timeline of a lease: the known one, or a new one at the place that the exporter names.
    pub(super) fn timeline(
        &mut self,
        lease: LeaseId,
        place: (PageId, u32, u64),
        fds: ReceivedFds,
        backend: &Arc<dyn DeviceIpc>,
        exporter_pid: u32,
    ) -> Result<Timeline> {
        let place = self.place(place, fds)?;
        if let Some(known) = self.timelines.get(&lease) {
            let is_same = Arc::ptr_eq(&known.place().page, &place.page)
                && (known.place().slot, known.place().base) == (place.slot, place.base);
            let same = is_same.then(|| Timeline::of(Arc::clone(known)));
            return same.ok_or_else(|| Error::Protocol("it gave a lease words twice".into()));
        }
        let timeline = Timeline::new(place, Side::Importer, Arc::clone(backend), exporter_pid);
        self.timelines.insert(lease, Arc::clone(timeline.endpoint()));
        Ok(timeline)
    }

    /// Finds or maps the page that an exporter names.
    fn place(&mut self, (page, slot, base): (PageId, u32, u64), fds: ReceivedFds) -> Result<TimelineSlot> {
        if slot >= SLOTS || base >= TIMELINE_END {
            return Err(Error::Protocol(format!(
                "slot {slot} of {SLOTS} with base {base}: a counter page has no such place"
            )));
        }
        if let Some(known) = self.pages.get(&page) {
            return Ok(TimelineSlot { page: Arc::clone(known), slot, base });
        }
        let file = fds.take_first();
        let file = file.ok_or_else(|| {
            let what = "receiving a page of timeline words (this process may have no file descriptors left; raise its \
                        limit, ulimit -n)";
            Error::io(what, rustix::io::Errno::MFILE)
        })?;
        let opened = WordPage::open(file)?;
        self.pages.insert(page, Arc::clone(&opened));
        Ok(TimelineSlot { page: opened, slot, base })
    }

    /// Ends the timeline of a lease. Returns the request that releases the lease and its words.
    pub(super) fn release(&mut self, lease: LeaseId) -> Request {
        let mut late = Vec::new();
        self.late.retain(|(lease, endpoint)| match endpoint.report() {
            Some(words) => {
                late.push((*lease, words));
                false
            }
            None => true,
        });
        let words = match self.timelines.remove(&lease) {
            None => Some(Default::default()),
            Some(endpoint) => {
                endpoint.end(Termination::Released);
                let words = endpoint.report();
                if words.is_none() {
                    self.late.push((lease, endpoint));
                }
                words
            }
        };
        self.keep_one_unused_page();
        Request::Release { lease, words, late }
    }

    /// Keeps one unused page for the next lease: the registration of a page with devices takes a driver call.
    fn keep_one_unused_page(&mut self) {
        if self.pages.len() > 1 {
            let mut kept = false;
            self.pages.retain(|_, page| Arc::strong_count(page) > 1 || !std::mem::replace(&mut kept, true));
        }
    }

    /// Ends all timelines of an exporter that has terminated; words that its device may still write go to `poison_again`.
    pub(super) fn poison(self, poison_again: impl Fn(Poison)) {
        for endpoint in
            self.timelines.into_values().chain(self.late.into_iter().map(|(_, endpoint)| endpoint))
        {
            endpoint.end(Termination::Died);
            if endpoint.needs_poison() {
                poison_again(Poison::Timeline(endpoint));
            }
        }
        for page in self.pages.into_values().filter(|page| page.is_awaited()) {
            page.poison(Side::Importer);
            poison_again(Poison::Page(page, Side::Importer));
        }
    }
}
