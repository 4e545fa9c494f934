use super::*;

#[test]
fn recent_values_are_found_and_the_oldest_is_replaced() {
    let recent = Recent::new();
    let find = |wanted: u32| recent.find(|known| *known == wanted).is_some();
    for number in 0..REMEMBERED as u32 {
        recent.remember(Arc::new(number), |_| false);
    }
    assert!(find(0), "the oldest, which is the newest now");
    recent.remember(Arc::new(100), |_| false);
    assert!(find(0) && find(100) && !find(1));
    recent.remember(Arc::new(200), |known| *known == 100);
    assert!(find(200) && find(0) && find(2) && !find(100), "it has taken the place of its like");
}

#[test]
fn lookup_does_not_wait_for_another_thread() {
    let recent = Recent::new();
    recent.remember(Arc::new(1), |_| false);
    let inner = |_: &u32| recent.find(|_| true).is_none();
    assert!(recent.find(inner).is_some(), "the inner look found nothing and did not wait");
}
