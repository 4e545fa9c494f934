use std::time::Duration;

use super::*;

#[test]
fn lock_waits_until_the_deadline() {
    let mutex = TimedMutex::new(1);
    let mut guard = mutex.try_lock().unwrap();
    assert!(mutex.try_lock().is_none());
    assert!(mutex.lock(Deadline::after(Duration::from_millis(1))).is_none());
    std::thread::scope(|scope| {
        let other = scope.spawn(|| *mutex.lock(Deadline::after(Duration::from_secs(10))).unwrap());
        *guard = 2;
        drop(guard);
        assert_eq!(other.join().unwrap(), 2);
    });
}
