use super::*;

fn would_spin(pace: &Pace) -> bool {
    pace.since >= pace.required
}

/// Simulates a wait for a message that arrives, or does not, while the receiver spins; returns whether it spins.
fn wait(pace: &mut Pace, arrives: bool) -> bool {
    let spins = would_spin(pace);
    if spins {
        pace.spun(arrives)
    } else {
        pace.slept()
    }
    spins
}

#[test]
fn pace_spins_while_messages_arrive() {
    let mut pace = Pace::default();
    assert!(!wait(&mut pace, true), "the policy has no data about the sender yet");
    assert!((0..1000).all(|_| wait(&mut pace, true)));
    assert!(wait(&mut pace, false), "a pause of the sender");
    assert!(wait(&mut pace, false), "spinning was successful before");
    assert!(!wait(&mut pace, true));
    assert!(wait(&mut pace, true));
}

#[test]
fn unsuccessful_spins_become_rare() {
    let mut pace = Pace::default();
    // As on a busy machine, where the sender has no processor while the receiver spins.
    let spun = (0..10_000).filter(|_| wait(&mut pace, false)).count();
    assert!(spun < 60, "{spun} of 10000 waits spun without success");
    let slept = (0..1000).filter(|_| !wait(&mut pace, true)).count() as u32;
    assert!(slept <= MAX_SKIPPED, "{slept} waits passed before the next spin");
    wait(&mut pace, false);
    assert_eq!(pace.required, 0, "spinning was successful since");
}

#[test]
fn bursts_are_spun_for_despite_pauses() {
    let mut pace = Pace::default();
    for burst in 0..1000 {
        let spun = (0..2 * BREAK_EVEN).filter(|_| wait(&mut pace, true)).count() as u32;
        assert!(spun >= BREAK_EVEN, "burst {burst}");
        wait(&mut pace, false);
    }
}

#[test]
fn slow_polls_count_as_unsuccessful_spins() {
    let mut pace = Pace::default();
    let mut spun = 0;
    for _ in 0..1000 {
        if would_spin(&pace) {
            spun += 1;
            pace.found(3 * UNINTERRUPTED_POLL, true);
        } else {
            pace.slept();
        }
    }
    assert!(spun < 20, "{spun} of 1000");
}

#[test]
fn wait_spins_to_its_limit_then_sleeps_until_found() {
    let mut pace = Pace::default();
    let mut polls = Vec::new();
    let found = pace.wait_with(true, None, |mode| {
        polls.push(mode);
        let asleep = polls.iter().filter(|mode| **mode == PollMode::Sleep).count();
        Ok::<_, ()>((asleep == 2).then_some(7))
    });
    assert_eq!(found, Ok(7));
    let spun = polls.iter().take_while(|mode| **mode == PollMode::Now).count();
    assert!(spun > 0 && polls[spun..] == [PollMode::Sleep; 2], "{polls:?}");
    let refused = pace.wait_with(true, Some(Instant::now()), |mode| {
        if mode == PollMode::Now { Ok(None) } else { Err::<Option<()>, _>(8) }
    });
    assert_eq!(refused, Err(8), "an error ends the wait");
}

#[test]
fn single_processor_is_not_taken_for_several() {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    let on_one_processor = std::thread::spawn(|| {
        let permitted = sched_getaffinity(None).unwrap();
        let mut one = CpuSet::new();
        one.set((0..CpuSet::MAX_CPU).find(|cpu| permitted.is_set(*cpu)).unwrap());
        sched_setaffinity(None, &one).unwrap();
        has_several_processors()
    });
    assert!(!on_one_processor.join().unwrap());
}
