use std::sync::atomic::AtomicBool;
use std::thread;

use super::*;

/// Returns the sides of an importer and of the exporter, in one process.
fn importer(table: &ClaimTable, number: u32) -> Claims {
    let file = table.table.0.file().try_clone_to_owned().unwrap();
    let pages = HostPages::open(file, BYTES, "the table").unwrap();
    table.offers().importers |= claim_of(number);
    Claims { table: SharedTable(pages), claim: claim_of(number) }
}

#[test]
fn claimed_ticket_stays_until_all_claims_are_released() {
    let table = ClaimTable::new().unwrap();
    let (one, two) = (importer(&table, 0), importer(&table, 1));
    assert!(!one.claim(7), "it is not offered");
    assert!(table.offer(7) && !table.offer(7) && !table.offer(0));
    assert!(one.claim(7) && one.claim(7) && two.claim(7));
    assert!(!table.take_back(7) && !table.has_released());
    one.release(7);
    assert!(table.has_released() && table.released().is_empty(), "the other importer claims it");
    assert!(!table.has_released() && !table.take_back(7));
    two.release(7);
    assert_eq!(table.released(), [7]);
    assert!(table.released().is_empty() && !one.claim(7));
    two.release(7);
    assert!(!table.has_released(), "it has ended");
}

#[test]
fn unclaimed_ticket_is_taken_back() {
    let table = ClaimTable::new().unwrap();
    let one = importer(&table, 45);
    assert!(table.offer(7) && table.offer(8) && table.offer(9));
    assert!(table.take_back(7) && !one.claim(7) && table.take_back(7));
    assert!(one.claim(8));
    table.withdraw(8);
    assert!(!one.claim(8));
    one.release(8);
    one.release(9);
    assert_eq!(table.released(), [9], "released without a claim");
}

#[test]
fn dismissed_importer_releases_its_claims_alone() {
    let table = ClaimTable::new().unwrap();
    let (one, two) = (importer(&table, 0), importer(&table, 1));
    assert!([3, 4, 5].iter().all(|ticket| table.offer(*ticket)));
    assert!(one.claim(3) && one.claim(4) && two.claim(4));
    assert_eq!(table.dismiss(0), 2);
    assert_eq!(table.released(), [3]);
    two.release(4);
    assert_eq!(table.released(), [4]);
    assert!(two.claim(5));
}

#[test]
fn colliding_tickets_have_entries_until_no_candidate_is_free() {
    let table = ClaimTable::new().unwrap();
    let one = importer(&table, 0);
    let tickets: Vec<u64> = (0..CANDIDATES).map(|round| ENTRIES - 1 + round * ENTRIES).collect();
    assert!(tickets.iter().all(|ticket| table.offer(*ticket)));
    assert!(!table.offer(ENTRIES - 1 + CANDIDATES * ENTRIES));
    assert!(tickets.iter().all(|ticket| one.claim(*ticket)));
    one.release(tickets[3]);
    assert_eq!(table.released(), [tickets[3]]);
    assert!(table.offer(ENTRIES - 1 + CANDIDATES * ENTRIES));
}

/// The importer has read the words of an entry that the exporter then uses for another ticket.
#[test]
fn late_change_of_a_reused_entry_fails() {
    let table = ClaimTable::new().unwrap();
    let one = importer(&table, 0);
    let mut ticket = 5;
    for end in [ClaimTable::take_back, |table: &ClaimTable, ticket| {
        table.withdraw(ticket);
        true
    }] {
        let next = ticket + ENTRIES;
        assert!(table.offer(ticket));
        let reused = |claims| {
            assert!(end(&table, ticket) && table.offer(next));
            Some(claims | one.claim)
        };
        assert!(!table.table.entry(5).change(ticket, reused));
        assert_eq!(
            table.table.find(next).map(|entry| entry.claims.load(Ordering::Acquire) & CLAIMED),
            Some(0)
        );
        assert!(table.take_back(next));
        ticket = next + ENTRIES;
    }
}

#[test]
fn racing_claims_and_ends_exclude_each_other() {
    const ROUNDS: u64 = 20_000;
    let table = ClaimTable::new().unwrap();
    let importers = [importer(&table, 0), importer(&table, 1)];
    // One ticket at a time, in one entry.
    let ticket = |round: u64| 5 + round * ENTRIES;
    let [offered, ended] = [AtomicU64::new(0), AtomicU64::new(0)];
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for claims in &importers {
            let (offered, ended, stop) = (&offered, &ended, &stop);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let round = offered.load(Ordering::Acquire);
                    if claims.claim(ticket(round)) {
                        assert!(ended.load(Ordering::SeqCst) < round, "claimed after its end");
                        claims.release(ticket(round));
                    }
                }
            });
        }
        for round in 1..=ROUNDS {
            assert!(table.offer(ticket(round)));
            offered.store(round, Ordering::Release);
            while !(table.take_back(ticket(round)) || table.released() == [ticket(round)]) {}
            ended.store(round, Ordering::SeqCst);
        }
        stop.store(true, Ordering::Relaxed);
    });
}
