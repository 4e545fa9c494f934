use super::*;

#[test]
fn long_wait_is_logged_once() {
    let start = Instant::now();
    let mut waiting = Waiting::new(start);
    assert_eq!(waiting.due(start + LONG / 2), None);
    assert_eq!(waiting.due(start + LONG), Some(LONG));
    assert_eq!(waiting.due(start + 3 * LONG), None);
}
