use super::*;

fn wanted(pace: &Pace) -> bool {
    pace.since >= pace.needed
}

/// A wait for a message that comes at once to who spins, or not.
fn wait(pace: &mut Pace, comes: bool) -> bool {
    let spins = wanted(pace);
    if spins {
        pace.spun(comes)
    } else {
        pace.slept()
    }
    spins
}

#[test]
fn it_spins_while_messages_come_meanwhile() {
    let mut pace = Pace::default();
    assert!(!wait(&mut pace, true), "nothing is known of the sender yet");
    assert!((0..1000).all(|_| wait(&mut pace, true)));
    assert!(wait(&mut pace, false), "a pause of the sender");
    assert!(wait(&mut pace, false), "it had paid");
    assert!(!wait(&mut pace, true));
    assert!(wait(&mut pace, true));
}

#[test]
fn what_was_in_vain_is_done_less_and_less_often() {
    let mut pace = Pace::default();
    // As on a busy machine, where the sender has no processor while this end spins.
    let spun = (0..10_000).filter(|_| wait(&mut pace, false)).count();
    assert!(spun < 60, "{spun} of 10000 waits were spun for in vain");
    let slept = (0..1000).filter(|_| !wait(&mut pace, true)).count() as u32;
    assert!(slept <= MOST_NEEDED, "{slept} waits passed before it was tried again");
    wait(&mut pace, false);
    assert_eq!(pace.needed, 0, "it has paid since");
}

#[test]
fn bursts_are_spun_for_whatever_lies_between_them() {
    let mut pace = Pace::default();
    for burst in 0..1000 {
        let spun = (0..2 * PAYS).filter(|_| wait(&mut pace, true)).count() as u32;
        assert!(spun >= PAYS, "burst {burst}");
        wait(&mut pace, false);
    }
}

#[test]
fn what_comes_while_the_sender_has_the_processor_is_spun_for_in_vain() {
    let mut pace = Pace::default();
    let mut spun = 0;
    for _ in 0..1000 {
        if wanted(&pace) {
            spun += 1;
            pace.found(3 * OWN_PROCESSOR, true);
        } else {
            pace.slept();
        }
    }
    assert!(spun < 20, "{spun} of 1000");
}

#[test]
fn a_spin_ends_with_its_limit_and_a_sleep_with_what_is_found() {
    let mut pace = Pace::default();
    let mut looks = Vec::new();
    let found = pace.wait_so(true, None, |how| {
        looks.push(how);
        let asleep = looks.iter().filter(|look| **look == Look::Asleep).count();
        Ok::<_, ()>((asleep == 2).then_some(7))
    });
    assert_eq!(found, Ok(7));
    let spun = looks.iter().take_while(|look| **look == Look::Now).count();
    assert!(spun > 0 && looks[spun..] == [Look::Asleep; 2], "{looks:?}");
    let refused = pace.wait_so(true, Some(Instant::now()), |how| {
        if how == Look::Now { Ok(None) } else { Err::<Option<()>, _>(8) }
    });
    assert_eq!(refused, Err(8), "an error ends it");
}
