#![allow(unsafe_code, reason = "implements the vendor boundary")]

use std::collections::HashSet;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::*;
use crate::backend::stream::BorrowedStream;
use crate::backend::{
    Access, BackendInfo, Capabilities, DeviceEvent, DeviceIpc, DeviceMemory, DeviceTimelines, Exported,
    HandleKind, HandleKindInfo, Opened, ReceivedHandle,
};
use crate::model::address::{DevicePtr, DeviceRange, Extent};
use crate::model::device::{DeviceInfo, DeviceOrdinal};
use crate::sharing::timeline::{ENDED, READY, Side, Termination, Timeline, Word};

/// A driver without memory, whose streams do nothing.
#[derive(Default)]
struct NoDriver {
    /// Runs when a page is registered.
    on_register: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    submitted_waits: AtomicU32,
}

impl std::fmt::Debug for NoDriver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("NoDriver")
    }
}

impl DeviceTimelines for NoDriver {
    unsafe fn register(&self, _: DeviceOrdinal, pages: NonNull<u8>, _: usize) -> Result<DevicePtr> {
        if let Some(hook) = self.on_register.lock().unwrap().take() {
            hook();
        }
        Ok(DevicePtr::new(pages.addr().get() as u64))
    }

    unsafe fn unregister(&self, _: DeviceOrdinal, _: NonNull<u8>) -> Result<()> {
        Ok(())
    }

    unsafe fn write_value(&self, _: DevicePtr, _: u64, _: BorrowedStream<'_>) -> Result<()> {
        unreachable!()
    }

    unsafe fn wait_value(&self, _: DevicePtr, _: u64, _: BorrowedStream<'_>) -> Result<()> {
        self.submitted_waits.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

impl DeviceIpc for NoDriver {
    fn info(&self) -> &BackendInfo {
        unreachable!()
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        unreachable!()
    }

    fn visible_devices_variable(&self) -> &'static str {
        unreachable!()
    }

    fn peer_access(&self, _: DeviceOrdinal, _: DeviceOrdinal) -> Result<bool> {
        unreachable!()
    }

    fn capabilities(&self, _: DeviceOrdinal) -> Result<Capabilities> {
        Ok(Capabilities::NONE.with_timelines(true))
    }

    fn timelines(&self) -> Option<&dyn DeviceTimelines> {
        Some(self)
    }

    fn handle_kinds(&self) -> Vec<HandleKindInfo> {
        unreachable!()
    }

    fn extents_of(&self, _: DeviceRange, _: Option<DeviceRange>) -> Result<Vec<Extent>> {
        unreachable!()
    }

    fn export(&self, _: &Extent, _: Option<HandleKind>) -> Result<Exported> {
        unreachable!()
    }

    fn unexport(&self, _: Exported) -> Result<()> {
        unreachable!()
    }

    fn open(&self, _: Vec<ReceivedHandle>, _: DeviceOrdinal, _: Access) -> Result<Opened> {
        unreachable!()
    }

    fn close(&self, _: Opened) -> Result<()> {
        unreachable!()
    }

    fn create_event(&self, _: DeviceOrdinal) -> Result<Box<dyn DeviceEvent>> {
        unreachable!()
    }

    fn open_event(&self, _: &[u8], _: DeviceOrdinal) -> Result<Box<dyn DeviceEvent>> {
        unreachable!()
    }

    fn synchronize_device(&self, _: DeviceOrdinal) -> Result<()> {
        Ok(())
    }

    fn memory(&self) -> &dyn DeviceMemory {
        unreachable!()
    }
}

/// The slots of one peer.
struct Fixture {
    slots: Slots<u32>,
    next: u32,
}

impl Fixture {
    fn new() -> Self {
        Self { slots: Slots::new(true), next: 0 }
    }

    /// The exporter's and the importer's part of a new timeline, with its key.
    fn begin(&mut self) -> (u32, Timeline, Timeline) {
        let place = self.slots.take().unwrap();
        let side = |side| Timeline::new(place.clone(), side, Arc::<NoDriver>::default(), 7);
        let (exporter, importer) = (side(Side::Exporter), side(Side::Importer));
        self.next += 1;
        self.slots.note(self.next, exporter.endpoint());
        (self.next, exporter, importer)
    }

    /// As the lease's release by the importer does it.
    fn release(&mut self, (key, exporter, importer): &(u32, Timeline, Timeline)) {
        importer.endpoint().end(Termination::Released);
        self.slots.returned(*key, importer.endpoint().report().unwrap());
        exporter.endpoint().end(Termination::Released);
        self.slots.give_back(*key);
    }
}

fn at(timeline: &Timeline) -> (usize, u32) {
    let place = timeline.endpoint().place();
    (Arc::as_ptr(&place.page) as usize, place.slot)
}

#[test]
fn slots_in_use_are_distinct_over_page_boundaries() {
    let mut fixture = Fixture::new();
    let timelines: Vec<_> = (0..2 * SLOTS + 1).map(|_| fixture.begin()).collect();
    let places: HashSet<_> = timelines.iter().map(|(_, timeline, _)| at(timeline)).collect();
    assert_eq!(places.len(), timelines.len());
    assert_eq!(fixture.slots.pages.len(), 3);
    let numbers: HashSet<_> =
        timelines.iter().map(|(key, ..)| fixture.slots.page_of(*key).unwrap().0).collect();
    assert_eq!(numbers, HashSet::from([0, 1, 2]));
}

#[test]
fn slot_returned_by_both_sides_is_reused_with_fresh_counters() {
    let mut fixture = Fixture::new();
    let mut places = HashSet::new();
    for _ in 0..3 * SLOTS {
        let pair = fixture.begin();
        let (_, exporter, importer) = &pair;
        places.insert(at(exporter));
        assert_eq!((exporter.value().unwrap(), importer.value().unwrap()), (0, 0));
        exporter.signal_now(5).unwrap();
        importer.signal_now(TIMELINE_END - 1).unwrap();
        assert_eq!((exporter.value().unwrap(), importer.value().unwrap()), (TIMELINE_END - 1, 5));
        fixture.release(&pair);
    }
    assert_eq!(places.len(), 1, "one timeline at a time needs one slot");
    assert!(fixture.slots.in_use.is_empty() && fixture.slots.unsettled.is_empty());
}

#[test]
fn empty_pages_are_dropped_and_their_numbers_are_not_reused() {
    let mut fixture = Fixture::new();
    let pairs: Vec<_> = (0..3 * SLOTS).map(|_| fixture.begin()).collect();
    pairs.iter().for_each(|pair| fixture.release(pair));
    assert_eq!(fixture.slots.pages.len(), 1);
    let pairs: Vec<_> = (0..2 * SLOTS).map(|_| fixture.begin()).collect();
    let last = fixture.slots.page_of(pairs.last().unwrap().0).unwrap().0;
    assert_eq!(last, 3);
}

#[test]
fn slot_that_is_not_returned_is_not_reused() {
    let mut fixture = Fixture::new();
    let first = fixture.begin();
    first.1.endpoint().end(Termination::Released);
    fixture.slots.give_back(first.0);
    assert_ne!(at(&fixture.begin().1), at(&first.1));
}

#[test]
fn slot_with_a_signal_on_its_way_is_reused_once_it_has_arrived() {
    for from_exporter in [true, false] {
        let mut fixture = Fixture::new();
        let pair = fixture.begin();
        let (_, exporter, importer) = &pair;
        let (late, word) = match from_exporter {
            true => (exporter, Word::FromExporter),
            false => (importer, Word::FromImporter),
        };
        // As a stream does that has yet to reach the write.
        late.endpoint().take_value(9).unwrap();
        fixture.release(&pair);
        assert_ne!(at(&fixture.begin().1), at(exporter), "from the exporter: {from_exporter}");
        let place = exporter.endpoint().place();
        place.page.word(place.slot, word).store(place.base + 9, Ordering::Release);
        let next = fixture.begin();
        assert_eq!(at(&next.1), at(exporter), "from the exporter: {from_exporter}");
        assert_eq!((next.1.value().unwrap(), next.2.value().unwrap()), (0, 0));
    }
}

#[test]
fn signal_that_arrives_between_two_poisons_is_not_lost() {
    let mut fixture = Fixture::new();
    let pair = fixture.begin();
    let (_, exporter, importer) = &pair;
    importer.endpoint().take_value(9).unwrap();
    fixture.release(&pair);
    let place = exporter.endpoint().place();
    place.page.word(place.slot, Word::FromImporter).store(place.base + 9, Ordering::Release);
    exporter.endpoint().poison();
    assert_eq!(at(&fixture.begin().1), at(exporter));
}

#[test]
fn wait_for_a_value_signalled_before_the_end_succeeds() {
    let mut fixture = Fixture::new();
    let old = fixture.begin();
    old.2.signal_now(5).unwrap();
    fixture.release(&old);
    let new = fixture.begin();
    assert_eq!(at(&new.1), at(&old.1));
    new.2.signal_now(7).unwrap();
    old.1.wait_now(5, Duration::ZERO).unwrap();
    assert!(matches!(old.1.wait_now(6, Duration::ZERO), Err(Error::LeaseEnded { pid: 7 })));
    // The end of a counter is not a value.
    let place = new.1.endpoint().place();
    place.page.word(place.slot, Word::FromImporter).store(ENDED, Ordering::Release);
    new.1.endpoint().end(Termination::Died);
    assert!(matches!(new.1.wait_now(7, Duration::ZERO), Err(Error::ImporterGone { pid: 7 })));
}

/// A stream that reaches its wait after the slot has a new lease must not wait for that lease's counter.
#[test]
fn wait_of_an_earlier_life_is_satisfied_in_every_later_one() {
    let mut fixture = Fixture::new();
    let mut waits = Vec::new();
    for awaited in [1000, 3, 70_000] {
        let pair = fixture.begin();
        let place = pair.1.endpoint().place();
        for word in [Word::Ready, Word::FromExporter, Word::FromImporter] {
            let now = place.page.word(place.slot, word).load(Ordering::Acquire);
            assert!(waits.iter().all(|wait| now >= *wait), "{word:?} is {now}, not {waits:?}");
            assert_eq!(now, place.base);
        }
        pair.2.endpoint().awaited.fetch_max(awaited, Ordering::AcqRel);
        waits.push(place.base + awaited);
        fixture.release(&pair);
        let ended = place.page.word(place.slot, Word::FromExporter).load(Ordering::Acquire);
        assert_eq!(ended, ENDED, "between two lives every wait is satisfied");
    }
}

#[test]
fn slot_worn_out_by_large_values_is_not_reused() {
    let mut fixture = Fixture::new();
    for _ in 0..2 {
        let pair = fixture.begin();
        pair.1.endpoint().awaited.fetch_max(TIMELINE_END - 1, Ordering::AcqRel);
        assert!(pair.1.endpoint().place().base < TIMELINE_END);
        fixture.release(&pair);
    }
    assert_eq!(at(&fixture.begin().1).1, 1);
}

#[test]
fn thread_in_the_middle_of_an_operation_keeps_the_slot() {
    let mut fixture = Fixture::new();
    let pair = fixture.begin();
    let operation = pair.1.endpoint().enter().unwrap();
    fixture.release(&pair);
    assert_ne!(at(&fixture.begin().1), at(&pair.1));
    drop(operation);
    assert_eq!(at(&fixture.begin().1), at(&pair.1));
}

/// The poller poisons the words of a terminated peer repeatedly only if a stream waits for them: a signal that its device still
/// writes would make the stream wait for ever.
#[test]
fn wait_that_the_end_of_the_timeline_precedes_is_not_submitted() {
    let wait = |word: Word, was_ready: bool| {
        let driver = Arc::<NoDriver>::default();
        let mut slots = Slots::<u32>::new(true);
        let backend = Arc::clone(&driver) as Arc<dyn DeviceIpc>;
        let importer = Timeline::new(slots.take().unwrap(), Side::Importer, backend, 7);
        let endpoint = Arc::clone(importer.endpoint());
        if was_ready {
            endpoint.store(Word::Ready, READY);
        }
        *driver.on_register.lock().unwrap() = Some(Box::new(move || {
            endpoint.end(Termination::Died);
            assert!(!endpoint.needs_poison(), "no stream waits yet");
        }));
        // SAFETY: the backend uses no stream.
        let stream = unsafe { BorrowedStream::from_raw("test", DeviceOrdinal::new(0), 0) };
        let _operation = importer.endpoint().enter().unwrap();
        let waited = importer.endpoint().wait_on(word, 1, stream);
        (waited, driver.submitted_waits.load(Ordering::Relaxed))
    };
    for (word, was_ready) in [(Word::FromExporter, false), (Word::FromExporter, true), (Word::Ready, false)] {
        let (waited, submitted) = wait(word, was_ready);
        assert!(matches!(waited, Err(Error::ExporterGone { pid: 7 })), "{word:?}: {waited:?}");
        assert_eq!(submitted, 0);
    }
    let (waited, submitted) = wait(Word::Ready, true);
    assert!(waited.is_ok() && submitted == 1, "bytes that were ready stay ready: {waited:?}");
}

#[test]
fn timeline_of_an_earlier_life_touches_no_word() {
    let mut fixture = Fixture::new();
    let old = fixture.begin();
    fixture.release(&old);
    let new = fixture.begin();
    assert_eq!(at(&new.1), at(&old.1));
    new.1.signal_now(1).unwrap();
    old.1.endpoint().poison();
    old.2.endpoint().poison();
    old.1.store_total(3);
    old.1.store_dismissed();
    assert!(old.1.finish_if_arrived(0, None));
    assert!(old.1.signal_now(2).is_err() && old.2.signal_now(2).is_err());
    assert!(old.1.value().is_err() && old.1.endpoint().report().is_none());
    assert_eq!((new.2.value().unwrap(), new.1.value().unwrap()), (1, 0));
    assert_eq!((new.2.total(), new.2.start()), (None, crate::sharing::timeline::RingStart::None));
    // A second return of the old slot is none of the new lease's.
    fixture.slots.returned(old.0, Returned::default());
    fixture.slots.give_back(old.0);
    assert_ne!(at(&fixture.begin().1), at(&new.1));
}

#[test]
fn importer_that_returns_nothing_exhausts_its_own_slots_alone() {
    let mut fixture = Fixture::new();
    fixture.slots.most_pages = 2;
    let most = 2 * SLOTS;
    let pairs: Vec<_> = (0..most).map(|_| fixture.begin()).collect();
    let error = fixture.slots.take().unwrap_err();
    assert!(matches!(&error, Error::QuotaExceeded(why) if why.contains("512")), "{error}");
    Fixture::new().begin();
    fixture.release(&pairs[1]);
    assert_eq!(at(&fixture.begin().1), at(&pairs[1].1));
}

#[test]
fn pages_of_a_peer_leave_descriptors_to_others() {
    let pages = [Some(64), Some(1024), Some(1 << 20), None].map(pages_within);
    assert_eq!(pages, [2, 16, MAX_PAGES, MAX_PAGES]);
}

#[test]
fn all_returned_slots_are_looked_at_when_none_is_free() {
    let mut fixture = Fixture::new();
    fixture.slots.most_pages = 1;
    let pairs: Vec<_> = (0..SLOTS).map(|_| fixture.begin()).collect();
    for pair in &pairs {
        pair.1.endpoint().take_value(9).unwrap();
        fixture.release(pair);
    }
    assert!(fixture.slots.take().is_err());
    let place = pairs[200].1.endpoint().place();
    place.page.word(place.slot, Word::FromExporter).store(place.base + 9, Ordering::Release);
    assert_eq!(at(&fixture.begin().1), at(&pairs[200].1));
}
