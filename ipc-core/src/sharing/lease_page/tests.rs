use super::*;

fn pair() -> (LeasePlaces, Arc<LeasePage>) {
    let mut places = LeasePlaces::default();
    let file = places.begin().unwrap();
    (places, LeasePage::open(file).unwrap())
}

#[test]
fn exporter_sees_states_of_importer() {
    let (mut places, page) = pair();
    for lease in 0..3 {
        let here = places.take().unwrap();
        places.note(here.slot(), Some(LeaseId(lease)));
        let there = page.word(here.slot()).unwrap();
        assert_eq!(here.state(), LeaseState::InUse);
        assert!(!there.rest(true));
        assert_eq!(here.state(), LeaseState::Idle);
        assert_eq!(there.resume(), Some(false));
        assert!(!here.reclaim());
        assert!(!there.rest(false));
        assert_eq!(here.state(), LeaseState::Draining);
        assert!(!here.reclaim(), "device work may use the memory");
        assert_eq!(there.resume(), Some(false));
    }
}

#[test]
fn reclaimed_lease_is_not_used_again() {
    let (mut places, page) = pair();
    let here = places.take().unwrap();
    let there = page.word(here.slot()).unwrap();
    there.rest(true);
    assert!(here.reclaim() && !here.reclaim());
    assert_eq!(there.resume(), None);
}

#[test]
fn lease_ahead_is_one_until_its_first_use() {
    let (mut places, page) = pair();
    let here = places.take().unwrap();
    let there = page.word(here.slot()).unwrap();
    here.begin_ahead();
    here.watch();
    assert!(here.is_ahead());
    assert_eq!((here.state(), there.resume(), here.is_ahead()), (LeaseState::Idle, Some(true), false));
    there.rest(true);
    assert!(!here.is_ahead());
    here.begin_ahead();
    assert!(here.reclaim() && !here.is_ahead());
    assert_eq!(there.resume(), None);
}

#[test]
fn watched_change_is_reported_once() {
    let (mut places, page) = pair();
    let here = places.take().unwrap();
    let there = page.word(here.slot()).unwrap();
    here.watch();
    assert!(there.rest(true));
    assert_eq!(there.resume(), Some(false));
    there.rest(true);
    here.watch();
    assert_eq!(there.resume(), Some(true));
    there.rest(true);
    here.watch();
    assert!(here.reclaim(), "watched and idle");
}

#[test]
fn drop_of_the_export_stays_noted() {
    let (mut places, page) = pair();
    let here = places.take().unwrap();
    let there = page.word(here.slot()).unwrap();
    assert!(!there.is_dropped());
    here.watch();
    here.note_drop();
    assert!(there.rest(false) && there.is_dropped());
    assert_eq!((there.resume(), there.is_dropped()), (Some(false), true));
    assert!(!there.rest(true) && there.is_dropped());
    assert_eq!(here.state(), LeaseState::Idle);
    assert!(here.reclaim() && there.is_dropped());
    assert_eq!(there.resume(), None);
    places.note(here.slot(), Some(LeaseId(1)));
    places.give_back(LeaseId(1));
    assert!(!places.take().unwrap().is_dropped(), "a word begins without it");
}

#[test]
fn any_value_is_a_state_and_a_reused_word_begins_in_use() {
    let (mut places, page) = pair();
    let here = places.take().unwrap();
    let there = page.word(here.slot()).unwrap();
    for value in [3, 4, 7, 0xffff_ffff, 0xffff_fffc] {
        there.atomic().store(value, Ordering::Release);
        assert_eq!(here.state(), LeaseState::InUse, "{value}");
        assert!(!here.reclaim(), "{value}");
    }
    there.atomic().store(0xffff_fffe, Ordering::Release);
    assert!(here.reclaim());
    places.note(here.slot(), Some(LeaseId(1)));
    places.give_back(LeaseId(1));
    let again = places.take().unwrap();
    assert_eq!((again.slot(), again.state()), (here.slot(), LeaseState::InUse));
}

#[test]
fn lease_beyond_the_page_has_no_word() {
    let (mut places, page) = pair();
    for _ in 0..WORDS {
        assert!(places.take().is_some());
    }
    assert!(places.take().is_none() && page.word(WORDS).is_none());
    places.note(7, None);
    assert_eq!(places.take().unwrap().slot(), 7);
}
