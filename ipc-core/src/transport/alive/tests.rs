use std::sync::mpsc::channel;

use super::*;

#[test]
fn word_changes_when_its_thread_terminates() {
    let word: &'static AtomicU32 = Box::leak(Box::new(AtomicU32::new(0)));
    assert_eq!(runs(word), None);
    let ((tied, is_tied), (end, ended)) = (channel(), channel::<()>());
    let thread = std::thread::spawn(move || {
        tie_to_this_thread(word);
        tied.send(()).unwrap();
        let _ = ended.recv();
    });
    is_tied.recv().unwrap();
    assert_eq!(runs(word), Some(true));
    drop(end);
    thread.join().unwrap();
    assert_eq!(runs(word), Some(false));
}
