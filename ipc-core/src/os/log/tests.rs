use super::*;

#[test]
fn events_are_logged_once_a_period_with_their_number() {
    let throttle = Throttle::new();
    let start = Instant::now();
    assert_eq!(throttle.count_at(start), Some(1));
    for _ in 0..5 {
        assert_eq!(throttle.count_at(start + PERIOD / 2), None);
    }
    assert_eq!(throttle.count_at(start + PERIOD), Some(6));
    assert_eq!(throttle.count_at(start + 3 * PERIOD), Some(1));
}
