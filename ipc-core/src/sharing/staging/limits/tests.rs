use std::sync::mpsc::channel;
use std::time::Duration;

use super::*;

const SOON: Duration = Duration::from_secs(10);

/// The only test of the process-wide limits in this executable.
#[test]
fn copies_wait_for_room_and_importers_take_turns() {
    let runtime = Runtime::get().unwrap();
    runtime.stagings.set_limits(runtime, StagingLimits { total_bytes: 100, ..StagingLimits::default() });
    let (sender, receiver) = channel();
    let ask = |share, number, bytes| {
        let sender = sender.clone();
        let share = Share::Process(share);
        runtime
            .stagings
            .when_there_is_room(runtime, share, bytes, move |room| sender.send((number, room)).unwrap());
    };
    let next = || receiver.recv_timeout(SOON).unwrap();
    let nothing = || runtime.worker.run(|| {}, SOON) && receiver.try_recv().is_err();
    ask(1, 1, 1000);
    let (number, first) = next();
    assert_eq!(number, 1, "more than the limit, and alone");
    // The first importer asks for much more than the second.
    for (number, bytes) in [(2, 30), (3, 20), (4, 20)] {
        ask(1, number, bytes);
    }
    ask(2, 5, 60);
    ask(2, 6, 40);
    assert!(nothing() && runtime.stagings.somebody_waits());
    drop(first);
    let (number, second) = next();
    assert_eq!(number, 2, "nobody has any, and it came first");
    let (number, fifth) = next();
    assert_eq!(number, 5, "the other importer's turn, though it came later");
    assert!(nothing(), "no room for 20 more");
    drop(fifth);
    let (number, sixth) = next();
    assert_eq!(number, 6, "the importer that has nothing");
    let (number, third) = next();
    assert_eq!(number, 3);
    assert!(nothing(), "there is room for 20 more, but not for the importer that has half of it");
    drop(second);
    let (number, fourth) = next();
    assert_eq!(number, 4);
    assert!(!runtime.stagings.somebody_waits());
    drop((third, fourth, sixth));
    assert!(runtime.stagings.lock().used_by.is_empty());
    runtime.stagings.set_limits(runtime, StagingLimits::default());
}
