use super::*;

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

#[test]
fn interval_is_a_bounded_part_of_the_time_waited() {
    let doubling = Backoff::doubling(ms(1), ms(32));
    assert_eq!([0, 1, 2, 4, 40].map(|waited| doubling.interval(ms(waited))), [1, 1, 2, 4, 32].map(ms));
    let eighth = Backoff::eighth(ms(1), ms(4));
    assert_eq!([0, 16, 32, 9000].map(|waited| eighth.interval(ms(waited))), [1, 2, 4, 4].map(ms));
    let idle = eighth.idle(ms(10));
    assert_eq!([16, 9000, 60_000].map(|waited| idle.interval(ms(waited))), [2, 9, 10].map(ms));
}

#[test]
fn wait_evaluates_the_condition_before_the_timeout_counts() {
    let mut evaluated = 0;
    let mut holds = |holds| {
        evaluated += 1;
        Ok(holds)
    };
    wait_for_words(Duration::ZERO, || holds(true), || Error::Forked).unwrap();
    let late = wait_for_words(Duration::ZERO, || holds(false), || Error::Forked);
    assert!(matches!(late, Err(Error::Forked)));
    assert_eq!(evaluated, 2);
}
